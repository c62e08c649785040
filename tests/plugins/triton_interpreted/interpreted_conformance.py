"""The conformance suite for backends, in Triton's interpreter."""

from __future__ import annotations

from fuseboard.testing import parametrize_with_checks


@parametrize_with_checks("triton")
def test_conformance(check):
    """The backend behaves as eager does, and keeps the board's contract."""
    check()
