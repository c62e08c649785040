"""Ranks of a distributed job agree, notice where they differ, and never wait without an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fuseboard.profile.choose.ranks import check_ranks_agree, decide_on_first_rank

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch's gloo backend"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What each rank saw in a scenario of tests/support/rank_program.py, with 2 or 3 ranks."""
    told = {}

    def seen(scenario: str, size: int = 2) -> list[dict[str, Any]]:
        if size not in told:
            told[size] = run(size, tmp_path_factory.mktemp("job") / "store")
        return [rank[scenario] for rank in told[size]]

    return seen


def run(size: int, store: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.rank_program"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=120)
            assert rank.returncode == 0, error
            told.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    return told


@pytest.mark.thorough
def test_every_rank_takes_what_rank_0_decided(job):
    """Also twice under one name, and where names come in another order on another rank."""
    expected = {
        "taken": ["decided by 0", "decided by 0"],
        "crossed": {"left": ["left", 0], "right": ["right", 0]},
    }
    assert [rank["seen"] for rank in job("agreeing")] == [expected, expected]


@pytest.mark.thorough
def test_rank_0_alone_decides(job):
    """The others don't measure; they wait for it."""
    first, second = job("deciding")
    assert first["seen"] == {"decided": {"winner": 0}, "calls": [0]}
    assert second["seen"] == {"decided": {"winner": 0}, "calls": []}


@pytest.mark.thorough
def test_a_failure_on_rank_0_reaches_the_others_at_once(job):
    """They don't wait for an answer that can't come."""
    first, second = job("failing")
    assert first["seen"] == "itself: no candidate is left"
    assert second["error"] == (
        "rank 0 failed to decide a winner of failing: ValueError: no candidate is left"
    )
    assert second["waited_s"] < 30


@pytest.mark.thorough
def test_equal_graphs_pass(job):
    """Nothing is raised on any rank."""
    assert [rank["seen"] for rank in job("same")] == ["same", "same"]


@pytest.mark.thorough
def test_different_graphs_fail_on_every_rank(job):
    """The error names the rank and the part, on rank 0 as well."""
    for rank in job("different", size=3):
        assert rank["error"].startswith(
            "the graph of different isn't the same on every rank: rank 1 and rank 0 differ in "
            "graph ('of 0' on rank 0, 'of 1' on rank 1). Ranks have to compile the same graphs"
        )


@pytest.mark.thorough
def test_a_rank_that_never_comes_is_named(job):
    """The wait ends, and the error says whom it was for."""
    first, second, third = job("absent", size=3)
    for rank in (first, third):  # rank 0 tells rank 2 whom it waited for
        assert rank["error"].startswith("rank 0 waited 3 s for rank 1 to come to the graph of")
    assert second["seen"] == "elsewhere"


@pytest.mark.thorough
def test_rank_0_that_never_decides_is_named(job):
    """Likewise for those that wait for its decision."""
    _, second = job("late")
    assert second["error"].startswith("rank 1 waited 0.5 s for rank 0 to come to a winner of late")


def test_another_process_group_starts_anew(job):
    """What was decided in the first isn't taken for the second."""
    assert [rank["seen"] for rank in job("twice")] == [["first 0", "second 0"]] * 2


@pytest.mark.thorough
def test_a_group_agrees_by_itself(job):
    """Its first rank decides; who isn't in it keeps its own."""
    assert [rank["seen"] for rank in job("of_a_group", size=3)] == [0, 1, 1]


def test_without_a_job_nothing_happens():
    """A value is its own answer; what raises goes through."""
    assert not dist.is_initialized()
    assert decide_on_first_rank(lambda: "own", "a winner") == "own"
    check_ranks_agree({"graph": "abc"}, "the graph")
    with pytest.raises(ZeroDivisionError):
        decide_on_first_rank(lambda: 1 // 0, "a winner")
