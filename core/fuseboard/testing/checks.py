"""What a check does: one program through one backend, and a verdict."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.contracts import BackendInfo, Claim, Decline, Plan, Region, Verdict
from fuseboard.errors import ContractError, containable
from fuseboard.profile.judge.verify import verify
from fuseboard.report.data import GraphReport, ledger
from fuseboard.testing.compare import first_difference
from fuseboard.testing.program import Program, observe
from fuseboard.testing.programs import PROGRAMS

VerdictName = Literal["pass", "declined", "wrong", "error"]


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    :ivar verdict: ``pass``; ``declined``, where the answers are right and the backend took no part
        in them; ``wrong``, where something differs from eager or breaks the board's contract;
        ``error``, where the backend raised.
    :ivar taken: op → how many of them the backend ran.
    :ivar declined: op → the backend's reason for leaving one to others.
    :ivar message: what is wrong, or why nothing was taken.
    :ivar error: what was raised, if anything was.
    :ivar source: where the program is written, ``file:line``.
    :ivar inputs: of a check that failed: what each call was given. Weights are drawn with the first
        call's seed, and ``fuseboard.testing.program.observe`` makes the calls.
    """

    check: str
    verdict: VerdictName
    taken: dict[str, int] = field(default_factory=dict)
    message: str = ""
    seconds: float = 0.0
    error: BaseException | None = field(default=None, repr=False, compare=False)
    source: str = ""
    inputs: tuple[str, ...] = ()
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.verdict in ("wrong", "error")

    @property
    def text(self) -> str:
        """The message, and how to see it again where the check failed; on one line."""
        if not self.failed:
            return self.message
        return "; ".join([self.message, f"program at {self.source}", *self.inputs])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {key: value for key, value in vars(self).items() if key != "error"}


@dataclass(frozen=True)
class Check:
    """One program for one backend; calling it runs it."""

    backend: str
    program: Program

    @property
    def name(self) -> str:
        return self.program.name

    def __call__(self) -> CheckResult:
        """Run the check.

        :raises AssertionError: something differs from eager, or breaks the board's contract.
        :raises Exception: whatever the backend raised.
        """
        result = self.run()
        if result.verdict == "wrong":
            raise AssertionError(f"{self.name} on {self.backend}: {result.text}") from result.error
        if result.error is not None:
            raise result.error
        return result

    def run(self) -> CheckResult:
        """The verdict; what the backend raises is part of it.

        :raises SettingsError: there is no such backend, or it can't be used here.
        """
        info = _info(self.backend)
        if self.program.training and not info.training:
            message = f"{info.name} takes no training"
            return CheckResult(self.name, "declined", message=message, source=self.program.source)
        start = time.perf_counter()
        torch._dynamo.reset()
        reports: list[GraphReport] = []
        try:
            with ledger.collect() as reports:
                problem, error = _compare(self.program, self.backend), None
        except containable() as raised:  # a backend may raise anything; it becomes the verdict
            problem, error = _message(raised), raised
        finally:
            torch._dynamo.reset()
        taken, declined = _taken(reports, self.backend), _declined(reports, self.backend)
        verdict: VerdictName = "pass" if taken else "declined"
        if problem:
            verdict = "wrong" if error is None or _broke_contract(error) else "error"
        elif not taken:
            reasons = dict.fromkeys(declined.values())
            problem = "; ".join(reasons) or "none of its ops were claimed"
        seconds = time.perf_counter() - start
        inputs = tuple(self.program.inputs()) if verdict in ("wrong", "error") else ()
        return CheckResult(
            self.name,
            verdict,
            taken,
            problem,
            seconds,
            error,
            self.program.source,
            inputs,
            declined,
        )


def checks_for(backend: str, only: str = "") -> list[Check]:
    """The checks for a backend, by its name.

    :param only: those whose name contains this.
    """
    return [Check(backend, program) for program in PROGRAMS if only in program.name]


def run_checks(
    backend: str, only: str = "", done: Callable[[CheckResult], None] | None = None
) -> list[CheckResult]:
    """Run the checks for a backend that is installed or registered.

    :param only: those whose name contains this.
    :param done: is told each result as soon as it is there.
    :raises SettingsError: there is no such backend, or it can't be used here.
    """
    _info(backend)
    results = []
    for check in checks_for(backend, only):
        results.append(check.run())
        if done is not None:
            done(results[-1])
    return results


# --- running --------------------------------------------------------------------------------------


def offer(
    graph: GraphModule, claims: dict[str, list[Claim | Decline]], backends: Sequence[BackendInfo]
) -> Plan:
    """A plan for the checks: whatever the first backend claims, it gets.

    The usual plan leaves what is too small to be worth it to eager; that is all that is checked
    here.
    """
    claimed = {
        info.name: {n for c in claims[info.name] if isinstance(c, Claim) for n in c.nodes}
        for info in reversed(backends)
    }
    placements = {node: name for name, nodes in claimed.items() for node in nodes}
    return Plan(placements, dict.fromkeys(placements, "the conformance suite offers all"))


def promises(
    region: Region, expected: Sequence[Any], result: Sequence[Any], inputs: Sequence[Any]
) -> Verdict:
    """Judge all but the values: these are held against eager's by the checks themselves."""
    return verify(region, expected, result, inputs, None)


def _options(backend: str) -> dict[str, Any]:
    return {
        "backends": list(dict.fromkeys([backend, "eager"])),
        "on_failure": "raise",
        "verify": "always",
        "stages": {
            "plan": f"{__name__}:{offer.__name__}",
            "verify": f"{__name__}:{promises.__name__}",
        },
    }


def _info(backend: str) -> BackendInfo:
    session = board.session(resolve(_options(backend)))
    return next(info for info in session.backends if info.name == backend)


def _compare(program: Program, backend: str) -> str:
    """What differs from eager, "" if nothing does."""
    eager = observe(program, lambda target: target)
    exact = observe(program, lambda target: target, double=True) if program.reference else eager
    options = _options(backend)

    def compiled(target: Any) -> Callable[..., Any]:
        # None leaves it to Dynamo: static at first, dynamic once a size has changed.
        dynamic = True if program.dynamic else None
        return torch.compile(target, backend="fuseboard", dynamic=dynamic, options=options)

    return first_difference(observe(program, compiled), eager, exact)


# --- what came of it ------------------------------------------------------------------------------


def _taken(reports: Sequence[GraphReport], backend: str) -> dict[str, int]:
    nodes = (node for report in reports for node in report.nodes)
    return dict(Counter(node.op for node in nodes if node.backend == backend))


def _declined(reports: Sequence[GraphReport], backend: str) -> dict[str, str]:
    """Op → why the backend declined it, the first reason of each."""
    nodes = (node for report in reports for node in report.nodes)
    declined: dict[str, str] = {}
    for node in nodes:
        if reason := node.declined.get(backend):
            declined.setdefault(node.op, reason)
    return declined


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came from, outermost first."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and one not in found:
            found.append(one)
            # Dynamo keeps what a backend raised in an attribute.
            pending += [one.__context__, one.__cause__, getattr(one, "inner_exception", None)]
    return found


def _broke_contract(error: BaseException) -> bool:
    return any(isinstance(one, ContractError) for one in _chain(error))


def _message(error: BaseException) -> str:
    """What a backend raised, on one line."""
    own = next((one for one in _chain(error) if isinstance(one, ContractError)), error)
    return " ".join("".join(traceback.format_exception_only(own)).split())[:500]
