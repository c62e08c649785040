"""The end of a process beside eager's. Nothing is timed here."""

import pytest

from benchmarks.claims import exit_finding
from benchmarks.exits import MOMENTS, ExitCost
from benchmarks.stats import Estimate


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("added_s", "holds"), [(0.5, "yes"), (0.51, "no"), (-0.1, "yes")])
def test_the_claim_is_judged_by_the_median_beside_eager(moment, added_s, holds):
    """Not by what it took in all."""
    one = Estimate(9.0, 8.0, 10.0)
    finding = exit_finding(ExitCost(moment, Estimate(added_s, added_s, 1.0), one, one))
    assert finding.holds == holds
    assert "eager 9" in finding.measured
