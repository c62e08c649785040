"""Choice by measurement in a job of several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough  # they share two processes that take ten seconds

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.support.rank_choice_program"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "store"), str(folder / "cache")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    for process in processes:
        out, problems = process.communicate(timeout=300)
        assert process.returncode == 0, problems
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


@pytest.mark.thorough
def test_all_take_what_rank_0_measured(ranks):
    """Only rank 0 measures; the other one would have chosen otherwise."""
    assert ranks[0]["agreed"] == [True, ["b"], [2]]
    assert ranks[1]["agreed"] == [True, ["b"], []]


def test_unless_told_to_agree_they_plan_by_priority(ranks):
    for seen in ranks:
        candidates, notes = seen["by priority"]
        assert candidates == []
        assert any("job of several ranks" in note for note in notes)


def test_different_graphs_fail_loudly(ranks):
    for seen in ranks:
        assert "isn't the same on every rank" in seen["different"]
        assert "graph" in seen["different"]
