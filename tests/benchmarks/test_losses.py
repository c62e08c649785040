"""What the loss of a large vocabulary costs, worked out from steps of three arms."""

from __future__ import annotations

from benchmarks import losses
from benchmarks.losses import Loss, losses_table


def measured(peak, seconds):
    one = Loss("inductor", 100)
    one.peak_bytes = {"eager": 500, "without": 400, "with": peak}
    one.seconds = {"eager": [3.0], "without": [2.0, 9.0, 1.0], "with": seconds}
    return one


def test_what_is_saved_is_told_in_logits():
    """The peak falls by three fifths of twice their size, for a twentieth of the time at most."""
    one = measured(280, [2.1, 2.1, 2.1])
    assert one.saved == 0.6
    assert one.time == 1.05
    assert one.holds()
    assert not measured(281, [2.1]).holds()
    assert not measured(280, [2.2]).holds()
    assert losses_table([one]).row_count == 3


def test_the_program_is_one():
    """It compiles."""
    compile(losses._PROGRAM, "program", "exec")
