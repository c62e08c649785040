"""The built wheel works by itself, away from the checkout."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/fuseboard_*"))


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_plugin_directory_is_packaged(pyproject):
    """A directory in plugins/ has its entry point and is in the wheel and in editable installs."""
    hatch = pyproject["tool"]["hatch"]["build"]
    assert PLUGINS
    assert hatch["dev-mode-dirs"] == ["core", *(f"plugins/{name}" for name in PLUGINS)]
    packages = ["core/fuseboard", *(f"plugins/{name}/fuseboard_{name}" for name in PLUGINS)]
    assert hatch["targets"]["wheel"]["packages"] == packages
    entry_points = pyproject["project"]["entry-points"]["fuseboard"]
    second = {"inductor-freezing": "fuseboard_inductor.freezing"}  # another backend of inductor's
    assert entry_points == {name: f"fuseboard_{name}" for name in PLUGINS} | second


def test_import_contracts_name_every_plugin(pyproject):
    """No plugin escapes the rules of import-linter."""
    packages = {f"fuseboard_{name}" for name in PLUGINS}
    linter = pyproject["tool"]["importlinter"]
    assert set(linter["root_packages"]) == packages | {"fuseboard"}
    by_name = {contract["name"]: contract for contract in linter["contracts"]}
    assert set(by_name["Core knows no plugin"]["forbidden_modules"]) == packages
    assert set(by_name["Plugins know nothing of each other"]["modules"]) == packages
    public = by_name["Plugins use fuseboard's public names only"]
    assert set(public["source_modules"]) == packages


def test_wheel_holds_the_packages_and_nothing_else(fuseboard_wheel):
    """Each package is in the wheel with its type marker; tests and tools are not."""
    packages = {"fuseboard", *(f"fuseboard_{name}" for name in PLUGINS)}
    names = zipfile.ZipFile(fuseboard_wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    source = {
        path.relative_to(root).as_posix()
        for root in (ROOT / "core", *(ROOT / "plugins" / name for name in PLUGINS))
        for path in root.rglob("*.py")
    }
    template = ROOT / "examples" / "plugin_template"
    source |= {
        f"fuseboard/plugin_template/{path.relative_to(template).as_posix()}"
        for path in template.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == source
    assert not [name for name in names if "__pycache__" in name]
    for licence in ("LICENSE", "NOTICE", "core/fuseboard/explanations/assets/dagre.LICENSE.txt"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)


def test_sdist_lists_only_what_exists(pyproject):
    """A file that was moved would silently be left out of the source distribution."""
    listed = pyproject["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    assert [name for name in listed if not (ROOT / name).exists()] == []


SERVES_WITHOUT_IMPORT = """
import sys
import torch

def f(x, w):
    return torch.nn.functional.relu(x @ w) + 1

assert not any(name.startswith("fuseboard") for name in sys.modules)
x, w = torch.randn(37, 19), torch.randn(19, 8)
compiled = torch.compile(f, backend="fuseboard", options={"backends": ["mkldnn", "eager"]})
with torch.no_grad():
    torch.testing.assert_close(compiled(x, w), f(x, w))
w.requires_grad_()
(grad,) = torch.autograd.grad(compiled(x, w).sum(), w)
torch.testing.assert_close(grad, torch.autograd.grad(f(x, w).sum(), w)[0])

import fuseboard
print(fuseboard.__file__)
"""


@pytest.mark.thorough
def test_torch_compile_finds_it_without_an_import(environment):
    """``torch.compile(backend="fuseboard")`` works in a program that never names the package."""
    printed = environment.python(SERVES_WITHOUT_IMPORT).strip()
    assert Path(printed).is_relative_to(environment.directory)


ENTRY_POINTS = """
import json
from importlib.metadata import distribution

points = distribution("fuseboard").entry_points
loaded = {f"{point.group}:{point.name}": point.load() for point in points}
print(json.dumps(sorted(loaded)))
"""


@pytest.mark.thorough
def test_every_entry_point_resolves(environment, pyproject):
    """Each name in the wheel's metadata can be imported, and none was lost on the way."""
    project = pyproject["project"]
    expected = {f"console_scripts:{name}" for name in project["scripts"]}
    for group, points in project["entry-points"].items():
        expected |= {f"{group}:{name}" for name in points}
    assert set(json.loads(environment.python(ENTRY_POINTS))) == expected


IMPORTS = """
import json
import sys
import torch

before = set(sys.modules)
import fuseboard
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.thorough
def test_import_is_cheap(environment):
    """Importing fuseboard after torch loads its own ``__init__`` and next to nothing more."""
    added = json.loads(environment.python(IMPORTS))
    assert [name for name in added if name.startswith("fuseboard")] == ["fuseboard"]
    heavy = {"pydantic", "pydantic_settings", "rich", "typer", "pluggy", "torch", "numpy"}
    assert {name.split(".")[0] for name in added} & heavy == set()


def test_wheel_holds_what_the_page_is_made_of(fuseboard_wheel):
    """Templates, scripts and styles are package data; a page needs each of them."""
    names = zipfile.ZipFile(fuseboard_wheel).namelist()
    assets = ROOT / "core" / "fuseboard" / "explanations" / "assets"
    expected = {f"fuseboard/explanations/assets/{path.name}" for path in assets.iterdir()}
    assert {
        "fuseboard/explanations/assets/page.html",
        "fuseboard/explanations/assets/dagre.min.js",
    } <= expected
    assert expected <= set(names)


PAGE = """
import fuseboard
print(fuseboard.Explanation().to_html(title="from the wheel"))
"""


@pytest.mark.thorough
def test_a_page_is_written_from_the_wheel(environment):
    """Nothing is read from the checkout."""
    assert "<h1>from the wheel</h1>" in environment.python(PAGE)


@pytest.mark.thorough
def test_command_is_installed(environment):
    """``fuseboard plugins`` runs from the wheel and shows the first-party plugins."""
    listed = json.loads(environment.run("fuseboard", "plugins", "--json"))
    assert set(PLUGINS) <= {plugin["name"] for plugin in listed}
