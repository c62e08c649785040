"""Two arms against each other: fresh processes in turn, A, B, A, B, each measured beside eager."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import Outcome
from benchmarks.session import Session
from benchmarks.stats import Estimate, paired_ratio

REPEATS = 3


@dataclass
class Pair:
    """How two arms compare on one model.

    :ivar speed: A's speedup over eager by B's: above 1, A is faster. The steadier figure, since
        each process measures eager beside its arm.
    :ivar latency: B's seconds a call by A's, straight: above 1, A is faster.
    :ivar failure: why there is no figure, or "".
    :ivar processes: what each worker measured, in the order in which they ran.
    """

    model: str
    a: str
    b: str
    threads: int
    speed: Estimate | None = None
    latency: Estimate | None = None
    failure: str = ""
    processes: list[dict[str, Any]] = field(default_factory=list)

    def of(self, arm: str) -> list[dict[str, Any]]:
        return [process for process in self.processes if process["arm"] == arm]

    def call_ms(self, arm: str) -> float:
        """Milliseconds a call: the median over rounds, then over processes."""
        medians: list[float] = [statistics.median(p["arm_s"]) for p in self.of(arm)]
        return 1e3 * statistics.median(medians)


def run(
    session: Session, pair: Pair, repeats: int = REPEATS, done: list[Pair] | None = None
) -> Pair:
    """Fills ``pair``. The first process of each arm is cold; the later ones find its caches.

    :param done: gets the pair once it has a figure or has failed.
    """
    for _ in range(repeats):
        for arm in (pair.a, pair.b):
            outcome = session.measure(pair.model, arm, pair.threads, "full")
            if failure := _failure(outcome):
                pair.failure = f"{arm}: {failure}"
                break
            pair.processes.append({"arm": arm, **outcome.values})
        if pair.failure:
            break
    else:
        compare(pair)
    if done is not None:
        done.append(pair)
    return pair


def _failure(outcome: Outcome) -> str:
    """A wrong answer is a failure as well."""
    if outcome.failure:
        return outcome.failure
    problem = outcome.values.get("problem", "")
    return f"wrong result: {problem}" if problem else ""


def compare(pair: Pair) -> None:
    """Works out both ratios from the processes."""
    pair.speed = paired_ratio(_speedups(pair.of(pair.a)), _speedups(pair.of(pair.b)))
    pair.latency = paired_ratio(
        [p["arm_s"] for p in pair.of(pair.b)], [p["arm_s"] for p in pair.of(pair.a)]
    )


def _speedups(processes: Sequence[dict[str, Any]]) -> list[list[float]]:
    return [[e / a for e, a in zip(p["eager_s"], p["arm_s"], strict=True)] for p in processes]
