"""Budgets of accuracy on inputs that weren't seen: a small sample, and what counts as kept."""

from __future__ import annotations

import pytest

from benchmarks import budget
from benchmarks.budget import Budgeted, Kept, budget_table, measure_model
from benchmarks.budget_models import UNSEEN, mlp, planted_mlp

pytestmark = pytest.mark.usefixtures("policy_measured")


@pytest.mark.parametrize("backends", [("eager",), ("mkldnn", "eager")])
def test_integers_keep_a_budget(backends):
    """What is narrowed as a whole stays within on inputs that nobody looked at."""
    found = measure_model("mlp", mlp(64, 3), "int8", 5e-2, backends)
    assert found.ran == f"{backends[0]} in int8"
    assert len(found.errors) == UNSEEN
    assert min(found.errors) > 1e-3
    assert found.holds
    assert not found.trips


def test_a_planted_channel_is_not_rounded_away():
    """The layer that reads it stays exact, and the others are narrowed."""
    found = measure_model("mlp", planted_mlp(64, 4), "int8", 5e-2, ("eager",))
    assert found.ran == "eager partly in int8"
    assert found.places == [3, 4]
    assert found.holds
    assert not found.trips


def test_a_tolerance_of_zero_changes_no_bit():
    assert budget.is_exact(planted_mlp(64, 4))


@pytest.mark.parametrize(
    ("error", "holds"), [(0.0149, True), (0.0151, False), (float("nan"), False)]
)
@pytest.mark.whole
def test_one_error_beyond_is_too_many(error, holds):
    """1.5 of the budget, and what is no number isn't within."""
    one = Kept("mlp", "int8", 1e-2, "mkldnn in int8", [3, 4], 5e-3, [1e-3, error])
    assert one.holds == holds
    assert budget_table([Budgeted("mlp", [one], exact=True)]).row_count == 2
