"""The checks as pytest parameters. pytest is imported on use: at run time nothing needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fuseboard.config.sources import nearest
from fuseboard.testing.checks import Check, CheckResult, checks_for


@dataclass(frozen=True)
class ReportedCheck(Check):
    """A check that reports to pytest: declined ones are skipped, expected failures are strict.

    :ivar expected: why it is expected to fail; "" if it isn't.
    """

    expected: str = ""

    def __call__(self) -> CheckResult:
        pytest = _pytest()
        result = self.run()
        if self.expected:
            if result.failed:
                pytest.xfail(f"{self.expected}: {result.message}")
            pytest.fail(
                f"{self.name} is expected to fail ({self.expected}), and its verdict is "
                f"{result.verdict!r}: take it out of expected_failures",
                pytrace=False,
            )
        if result.verdict == "wrong":
            raise AssertionError(f"{self.backend}: {result.text}") from result.error
        if result.error is not None:
            raise result.error
        if result.verdict == "declined":
            pytest.skip(f"declined by {self.backend}: {result.message}")
        return result


def parametrize_with_checks(
    backend: str, *, expected_failures: Mapping[str, str] | None = None, only: str = ""
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a test so that it runs once for each check, with the check's name as its id.

    The test takes one argument, ``check``, and calls it. A check of which the backend takes
    nothing is skipped.

    :param expected_failures: check → why it fails today. Strict: one that doesn't fail is an error.
    :param only: the checks whose name contains this.
    :raises ValueError: a check that is expected to fail doesn't exist, or no reason is given.
    :raises ImportError: pytest isn't installed.
    """
    # torch makes its structured trace, hundreds of records a compile, where this logger has a
    # handler. pytest gives one of its own to each logger that doesn't propagate.
    logging.getLogger("torch.__trace").propagate = True
    expected = dict(expected_failures or {})
    checks = checks_for(backend, only)
    names = [check.name for check in checks_for(backend)]
    for name, reason in expected.items():
        if name not in names:
            raise ValueError(
                f"expected_failures: there is no check {name!r}.{nearest(name, names)} "
                f"`fuseboard conformance {backend}` lists them"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"expected_failures[{name!r}] = {reason!r}: say why it fails")
    reported = [
        ReportedCheck(check.backend, check.program, expected.get(check.name, ""))
        for check in checks
    ]
    return _pytest().mark.parametrize(  # type: ignore[no-any-return]
        "check", reported, ids=[check.name for check in reported]
    )


def _pytest() -> Any:
    try:
        import pytest
    except ImportError as error:
        raise ImportError(
            "parametrize_with_checks needs pytest, which fuseboard requires for development only: "
            "pip install pytest. fuseboard.testing.run_checks needs nothing"
        ) from error
    return pytest
