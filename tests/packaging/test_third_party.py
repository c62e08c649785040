"""Someone else's plugin: built from the template, installed with pip beside fuseboard's wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template"

SERVES = """
import json
import torch
import fuseboard

def f(x):
    return torch.tanh(x * 2.0) + torch.exp(-x)

x = torch.randn(37, 199)
compiled = torch.compile(f, backend="fuseboard", options={"backends": ["numpy"]})
with torch.no_grad():
    torch.testing.assert_close(compiled(x), f(x))
print(json.dumps(fuseboard.last_report().as_dict()))
"""


@pytest.mark.thorough
def test_it_serves_torch_compile(environment):
    """Named in ``backends``, it runs the graph, and the report says so."""
    (graph,) = json.loads(environment.python(SERVES))["graphs"]
    (region,) = graph["regions"]
    assert region["backend"] == "numpy"
    assert region["notes"] == ["5 NumPy calls"]
    assert {node["backend"] for node in graph["nodes"]} == {"numpy"}
    assert graph["trips"] == []


@pytest.mark.thorough
def test_it_is_listed_with_its_version(environment):
    """``fuseboard plugins`` shows it like any other, from its own distribution."""
    listed = json.loads(environment.run("fuseboard", "plugins", "--json"))
    (plugin,) = [plugin for plugin in listed if plugin["name"] == "numpy"]
    assert plugin["version"] == "0.1.0"


def run_template_tests(environment, name):
    """Run a test file of the template where nothing but wheels is installed."""
    tests = environment.directory / f"template_{name}"
    tests.write_text((TEMPLATE / "tests" / name).read_text())
    return environment.run("python", "-m", "pytest", "-p", "no:cacheprovider", tests)


@pytest.mark.thorough
def test_its_own_tests_pass(environment):
    """What the template ships as its tests holds beside the wheels."""
    assert " passed" in run_template_tests(environment, "test_plugin.py")


@pytest.mark.slow
def test_it_conforms(environment):
    """The template passes the conformance suite, so what is copied from it starts without a bug."""
    assert " passed" in run_template_tests(environment, "test_conformance.py")


def test_it_uses_public_names_only():
    """The template imports nothing of fuseboard but names that its ``__all__`` lists."""
    import ast

    import fuseboard

    for path in (TEMPLATE / "fuseboard_numpy").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fuseboard":
                assert {alias.name for alias in node.names} <= set(fuseboard.__all__), path
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                assert not any(name.startswith("fuseboard.") for name in names), path
