"""The conformance suite for backends, in Triton's interpreter."""

from __future__ import annotations

from fuseboard.testing import parametrize_with_checks

FAILURES = {
    "training_dropout": "a gradient of nine numbers that cancel, summed in another order: 2e-7 off",
}


@parametrize_with_checks("triton", expected_failures=FAILURES)
def test_conformance(check):
    """The backend behaves as eager does, and keeps the board's contract."""
    check()
