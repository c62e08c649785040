"""What a program notices of compiling, worked out from the times of its calls."""

from __future__ import annotations

from benchmarks import settling
from benchmarks.results import settling_table
from benchmarks.settling import Run, Settling


def run(first_s=1.0, waiting=(), settled=0.01, settled_s=3.5):
    return Run(first_s, [*waiting, *[settled] * 30], settled_s, "mkldnn", 100)


def test_figures_of_a_program_that_notices_nothing():
    """Later calls are settled ones, or eager's."""
    one = Settling("m", run(settled=0.02), run(waiting=[0.02] * 40), run(waiting=[0.02] * 3))
    assert one.first(one.cold) == 1.0
    assert one.longest(one.cold) == 2.0
    assert round(one.stretch(one.cold), 6) == 2.0
    assert round(one.stretch_of_eagers(one.cold), 6) == 1.0
    assert one.misses() == ["cold: stretch"]


def test_what_is_missed_is_named():
    """A late first answer, a stall, a graph that doesn't settle."""
    slow = run(first_s=2.0, waiting=[0.01] * 30 + [0.5] + [0.01] * 30, settled_s=None)
    one = Settling("m", run(), slow, run())
    assert one.misses() == [
        "cold: first answer",
        "cold: longest call",
        "cold: stretch",
        "cold: settled",
    ]
    assert settling_table([one]).row_count == 3


def test_a_warm_start_is_decided_soon_after_its_first_answer():
    late = run(first_s=1.0, settled_s=4.5)
    assert Settling("m", run(), late, run()).misses() == []
    assert Settling("m", run(), run(), late).misses() == ["warm: settled"]


def test_the_program_is_one():
    """It compiles, and its models are there."""
    compile(settling._PROGRAM, "program", "exec")
    from benchmarks.models import MODELS

    assert set(settling.MODELS) <= set(MODELS)
