"""What fuseboard expects of every backend: its own programs, compared with eager in all respects.

A check of which the backend takes nothing is skipped.
"""

from __future__ import annotations

from fuseboard.testing import parametrize_with_checks


@parametrize_with_checks("mychip")
def test_conformance(check):
    """Nothing that the backend takes comes out in another way than eager's."""
    check()
