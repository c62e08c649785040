"""``fuseboard passes``: who rewrites graphs, in order, and what each did."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fuseboard.cli.main import app
from fuseboard.report.data import ledger

SCRIPT = """
import torch

def f(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v

def main():
    return f, tuple(torch.randn(1, 4, 64, 8) for _ in range(3))
"""


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path, monkeypatch):
    """A wide terminal, no settings of the checkout, and a script."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")
    ledger.clear()


def passes(*arguments, **environment):
    result = CliRunner().invoke(app, ["passes", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_is_in_order():
    """Dynamo's graph comes first, and needs no backend; who decides the stage says why."""
    rows = json.loads(passes("--json"))["passes"]
    assert {"name": "attention", "level": "Dynamo's graph", "why": ""} in rows
    assert rows[-1]["name"] == "narrow"
    path = "tests.support.stages:halves_graph"
    rows = json.loads(passes("--json", FUSEBOARD_STAGES__FUSE=path))["passes"]
    decides = next(row for row in rows if row["name"] == path)
    assert "set in environment FUSEBOARD_STAGES__FUSE" in decides["why"]
    first = next(row for row in rows if row["level"] != "Dynamo's graph")
    assert first is decides
    assert "attention" not in passes(FUSEBOARD_BLOCK="attention")


def test_what_each_did():
    """With the numbers that fuse_skip takes."""
    (graph,) = json.loads(passes("script.py:main", "--json"))["graphs"]
    (rewrite,) = graph["rewrites"]
    assert (rewrite["plugin"], rewrite["name"], rewrite["number"]) == ("attention", "attention", 0)
    assert rewrite["applied"]
    text = passes("script.py:main")
    assert "attention: attention, once (number 0)" in text
    text = passes("script.py:main", FUSEBOARD_FUSE_SKIP="0")
    assert "once (number 0, 1 switched off)" in text
    assert "nothing was rewritten" in passes("script.py:main", FUSEBOARD_BLOCK="attention,simplify")


def test_a_trip_is_shown():
    """By the name of who tripped."""
    path = "tests.support.stages:fuse_raises"
    text = passes("script.py:main", FUSEBOARD_STAGES__FUSE=path)
    assert f"{path} tripped: it raised ZeroDivisionError: no rewrite found" in text


def test_what_must_match():
    """A name that no rewrite has is an error, one that is switched off as well."""
    assert "attention" in passes("script.py:main", "--must-match", "attention")
    for more, environment in (
        (("--must-match", "rotary"), {}),
        ((), {"FUSEBOARD_FUSE_LIMIT": "0"}),
    ):
        arguments = ["passes", "script.py:main", "--must-match", "attention", *more]
        result = CliRunner().invoke(app, arguments, env=environment)
        assert result.exit_code == 1
        missing, there = ("attention", "none") if environment else ("rotary", "attention")
        assert f"not found: {missing}; what was rewritten: {there}\n" in result.output
    result = CliRunner().invoke(app, ["passes", "--must-match", "attention"])
    assert result.exit_code == 2
