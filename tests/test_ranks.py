"""Ranks of a distributed job agree, notice where they differ, and never wait without an end."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import torch.distributed as dist

from fuseboard.ranks.job import job_of, several_ranks
from tests.support.rank_job import seen_by, start

pytestmark = [
    pytest.mark.slow,  # they share two processes
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch's gloo backend"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks saw in each scenario of tests/support/rank_program.py."""
    return seen_by("tests.support.rank_program", 2, tmp_path_factory.mktemp("job"))


def test_the_rank_that_comes_first_decides_for_all(ranks):
    """Time after time; the other one doesn't measure."""
    expected = ["decided by 0, 1", "decided by 0, 2"]
    assert ranks[0]["deciding"] == [expected, [0, 0]]
    assert ranks[1]["deciding"] == [expected, []]


def test_a_failure_to_decide_reaches_the_others(ranks):
    """They don't wait for an answer that can't come."""
    assert ranks[0]["failing"] == "itself: no candidate is left"
    assert ranks[1]["failing"] == (
        "RankError: another rank failed to decide on failing: ValueError: no candidate is left"
    )


def test_a_graph_of_one_rank_is_decided_there(ranks):
    """As in a pipeline, where rank 0 has another part of the model."""
    assert ranks[1]["of_one_rank"] == 1


def test_no_rank_waits_for_one_that_cannot_come_before_it(ranks):
    """Equal stages of a pipeline have the same graphs, and come to them in other orders."""
    assert [rank["in_stages"] for rank in ranks] == [[0, 1]] * 2


def test_another_process_group_starts_anew(ranks):
    """What was decided in the first isn't taken for the second."""
    assert [rank["twice"] for rank in ranks] == [["first", "second"]] * 2


def test_within_calls_all_take_what_rank_0_measured(ranks):
    """It comes first. The other one would have chosen otherwise.

    ``ranks = "priority"`` says why none measures.
    """
    assert ranks[0]["in_calls"] == [[True, ["b"], [2]], True]
    assert ranks[1]["in_calls"] == [[True, ["b"], []], True]


def test_other_settings_are_an_error_that_names_them(ranks):
    """On the rank that comes second; the leader goes on until it waits for that one."""
    assert (
        "rank 1 and rank 0 differ in settings: margin (0.2 on rank 0, 0.1 on rank 1)"
        in (ranks[1]["other_settings"])
    )


def test_beside_calls_all_swap_at_the_same_call(ranks):
    """Values are eager's before and after; nobody waits for a graph that one rank has alone."""
    first, second = (rank["beside"] for rank in ranks)
    assert first["graphs"] == second["graphs"]
    assert first["at"] == second["at"]
    for seen in (first, second):
        assert seen["settled"]
        [(instead, backends, settled)] = seen["graphs"]
        assert (instead, settled) == ("", True)
        assert "mkldnn" in backends
    assert first["at"]


def test_without_a_job_there_are_no_ranks():
    assert not dist.is_initialized()
    assert not several_ranks()
    assert job_of(1.0) is None


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_seen_by_the_others(victim, tmp_path):
    """Their calls raise, as does ``fuseboard.wait()``, and they end: the store is a file's here."""
    program = "tests.support.killed_rank_program"
    ranks = [start(program, rank, 3, tmp_path, f"{victim}") for rank in range(3)]
    try:
        for number, rank in enumerate(ranks):
            out, problems = rank.communicate(timeout=400)
            if number == victim:
                assert rank.returncode == -signal.SIGKILL
                continue
            assert rank.returncode == 0, problems
            for error in json.loads(out.splitlines()[-1]):
                assert f"rank {victim} has given no sign of life for 4 s" in error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
