"""What fuseboard expects of every backend, with products of any size given to ZenDNN."""

from __future__ import annotations

import pytest
from fuseboard_zentorch._availability import why_unavailable

import fuseboard
from fuseboard.testing import parametrize_with_checks

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)


@parametrize_with_checks("zentorch")
def test_conformance(check):
    """Nothing that it takes comes out in another way than eager's."""
    with fuseboard.settings(plugins={"zentorch": {"min_macs": 0}}):
        check()
