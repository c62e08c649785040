"""The distributions in contrib/ are what a third party would write."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fuseboard

CONTRIB = Path(__file__).parents[2] / "contrib"
FILES = sorted(CONTRIB.glob("*/**/*.py"))


def names_of_fuseboard(tree: ast.AST):
    """What a file imports from fuseboard, or reaches as its attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "fuseboard")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fuseboard":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "fuseboard":
                yield f"fuseboard.{node.attr}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONTRIB)))
def test_only_public_names_are_used(file):
    """``import fuseboard``, its public names, and the conformance suite."""
    public = {f"fuseboard.{name}" for name in fuseboard.__all__} | {"fuseboard"}
    used = set(names_of_fuseboard(ast.parse(file.read_text())))
    assert {name for name in used - public if not name.startswith("fuseboard.testing.")} == set()


def test_each_has_an_entry_point_and_a_readme():
    """Found by pip and by fuseboard."""
    folders = [path for path in CONTRIB.iterdir() if (path / "pyproject.toml").is_file()]
    assert folders
    for folder in folders:
        assert "[project.entry-points.fuseboard]" in (folder / "pyproject.toml").read_text()
        assert (folder / "README.md").is_file()
