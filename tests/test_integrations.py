"""The examples of libraries that train and serve models: each holds its results against eager's."""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from fuseboard.report.data import ledger
from tests.support.backends import all_trips

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "integrations"


def needed(path: Path) -> set[str]:
    """The packages that an example imports, the standard library's aside."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or "")
    tops = {name.partition(".")[0] for name in named} - set(sys.stdlib_module_names)
    # The Trainer can be imported without accelerate, but not made.
    return tops | ({"accelerate"} if "Trainer" in path.read_text() else set())


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_computes_what_eager_does(name, caplog, monkeypatch):
    """Something was compiled, nothing tripped, and fuseboard prints no warning."""
    for package in sorted(needed(EXAMPLES / f"{name}.py")):
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [name])
    torch._dynamo.reset()
    ledger.clear()
    importlib.import_module(f"examples.integrations.{name}").main()
    assert ledger.graphs()
    assert not all_trips()
    said = [record for record in caplog.records if record.name.startswith("fuseboard")]
    assert not [record for record in said if record.levelno >= logging.WARNING]


def test_each_example_is_in_the_guide():
    """The page on integrations names each example, so that a reader finds what to copy."""
    guide = (ROOT / "docs" / "integrations.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`examples/integrations/{path.name}`" in guide
