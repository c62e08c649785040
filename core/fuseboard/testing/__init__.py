"""The conformance suite: what a backend still gets wrong.

For authors of plugins, in their own tests::

    from fuseboard.testing import parametrize_with_checks

    @parametrize_with_checks("my_backend", expected_failures={"attention_masked": "issue 12"})
    def test_conformance(check):
        check()

or ``fuseboard conformance my_backend`` at a shell, or :func:`run_checks`.
"""

from fuseboard.testing.checks import Check, CheckResult, checks_for, run_checks
from fuseboard.testing.pytest_support import parametrize_with_checks

__all__ = ["Check", "CheckResult", "checks_for", "parametrize_with_checks", "run_checks"]
