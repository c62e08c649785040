"""Someone else's plugin: as ``fuseboard new-plugin`` writes it, installed with pip beside
fuseboard's wheel.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseboard.cli.new_plugin import plugin_files

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template"

SERVES = """
import json
import torch
import fuseboard

def f(x):
    return torch.tanh(x * 2.0) + torch.exp(-x)

x = torch.randn(37, 199)
compiled = torch.compile(f, backend="fuseboard", options={"backends": ["my-npu"]})
with torch.no_grad():
    torch.testing.assert_close(compiled(x), f(x))
print(json.dumps(fuseboard.last_report().as_dict()))
"""


@pytest.mark.thorough
def test_it_serves_torch_compile(environment):
    """Named in ``backends``, it runs the graph, and the report says so."""
    (graph,) = json.loads(environment.python(SERVES))["graphs"]
    (region,) = graph["regions"]
    assert region["backend"] == "my-npu"
    assert region["notes"] == ["5 NumPy calls"]
    assert {node["backend"] for node in graph["nodes"]} == {"my-npu"}
    assert graph["trips"] == []


@pytest.mark.thorough
def test_it_is_listed_with_its_version(environment):
    """``fuseboard plugins`` shows it like any other, from its own distribution."""
    listed = json.loads(environment.run("fuseboard", "plugins", "--json"))
    (plugin,) = [plugin for plugin in listed if plugin["name"] == "my-npu"]
    assert plugin["version"] == "0.1.0"


def run_own_tests(environment, new_plugin, name):
    """Run a test file of the new plugin where nothing but wheels is installed."""
    tests = new_plugin / "tests" / name
    return environment.run("python", "-P", "-m", "pytest", "-p", "no:cacheprovider", tests)


@pytest.mark.thorough
def test_its_own_tests_pass(environment, new_plugin):
    """The tests that are written with it hold beside the wheels."""
    assert " passed" in run_own_tests(environment, new_plugin, "test_plugin.py")


@pytest.mark.slow
def test_it_conforms(environment, new_plugin):
    """It passes the conformance suite as written, so what is made of it starts without a bug."""
    assert " passed" in run_own_tests(environment, new_plugin, "test_conformance.py")


@pytest.mark.thorough
def test_its_table_of_ops(environment):
    """``conformance --table`` tells for a README what runs, and why the rest doesn't."""
    table = environment.run("fuseboard", "conformance", "my-npu", "--table", "--only", "pointwise")
    lines = table.splitlines()
    assert lines[:2] == ["| op | runs in checks | what is known |", "|---|---|---|"]
    (exp,) = [line for line in lines if line.startswith("| `aten.exp.default`")]
    assert "| as in eager; elsewhere declined: dtype torch." in exp
    assert any("NumPy has no function that is exactly" in line for line in lines)


@pytest.mark.thorough
def test_a_wheel_has_the_template_too(environment):
    """``fuseboard new-plugin`` writes the same files from an installed wheel as from a checkout."""
    environment.run("fuseboard", "new-plugin", "my-tpu")
    written = environment.directory / "fuseboard-my-tpu"
    files = {path: (written / path).read_text() for path in plugin_files("my-tpu")}
    assert files == plugin_files("my-tpu")
    assert 'my-tpu = "fuseboard_my_tpu"' in files[Path("pyproject.toml")]
    assert not [path for path, text in files.items() if "mychip" in f"{path}{text}"]
    assert {path.relative_to(written) for path in written.rglob("*") if path.is_file()} == set(
        files
    )


def test_it_uses_public_names_only():
    """The template imports nothing of fuseboard but names that its ``__all__`` lists."""
    import ast

    import fuseboard

    for path in (TEMPLATE / "fuseboard_mychip").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fuseboard":
                assert {alias.name for alias in node.names} <= set(fuseboard.__all__), path
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                assert not any(name.startswith("fuseboard.") for name in names), path
