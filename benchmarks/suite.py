"""Every model with every arm: the default run. One record per model, arm and thread count."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.arms import BASELINE, CONTROL, Arm
from benchmarks.models import Model
from benchmarks.processes import Outcome
from benchmarks.session import Session
from benchmarks.stats import Estimate, break_even_calls, geometric_mean, median_with_interval

#: ``not measured``: the model or eager failed, which says nothing about the arm; it isn't counted.
Status = Literal["ok", "failed", "wrong", "fell back", "not measured"]
#: Where fuseboard puts ops that nobody compiles: ``board`` does what is only bookkeeping.
_NO_COMPILER = {"eager", "board"}
#: Workers that a case takes: a cold one that measures, a warm one for first call and memory.
WORKERS_PER_CASE = 2


@dataclass(frozen=True)
class Case:
    model: Model
    arm: Arm
    threads: int


@dataclass
class Record:
    """What one case came to. None where it wasn't measured.

    :ivar speedup: median over rounds of eager's time by the arm's, with interval.
    :ivar speedup_of_medians: eager's median time by the arm's.
    :ivar counted: what enters the geometric mean: 1.0 for a failure or a wrong result.
    :ivar cold_first_s: from nothing compiled or cached to the first answer.
    :ivar warm_first_s: the same in a new process with the caches of the cold one.
    :ivar guards_ms: of a call, Dynamo's check of its guards, as torch's profiler sees it; within
        ``arm_ms``.
    :ivar settle_s: from the first answer to the last choice between backends; 0 where none is made.
    :ivar peak_bytes: of that warm process, in which eager didn't run.
    :ivar break_even_calls: None where the arm never catches up with eager.
    :ivar ops: fuseboard's arms: ops by the backend that runs them, ``board`` being itself.
    :ivar samples: seconds a call, one figure a round.
    """

    model: str
    arm: str
    threads: int
    status: Status
    speedup: Estimate | None = None
    speedup_of_medians: float | None = None
    counted: float | None = None
    eager_ms: float | None = None
    arm_ms: float | None = None
    guards_ms: float | None = None
    eager_first_s: float | None = None
    cold_first_s: float | None = None
    warm_first_s: float | None = None
    settle_s: float | None = None
    break_even_calls: int | None = None
    peak_bytes: int | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    ops: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)


def plan(models: Iterable[Model], arms: Sequence[Arm], thread_counts: Iterable[int]) -> list[Case]:
    """What is to run. Arms that mean nothing in training are left out there."""
    return [
        Case(model, arm, threads)
        for threads in thread_counts
        for model in models
        for arm in arms
        if arm.training or model.kind != "training"
    ]


def run(session: Session, cases: Iterable[Case], records: list[Record]) -> None:
    """Measures the cases in order. ``records`` is filled as it goes, so an interrupt keeps them."""
    for case in cases:
        name, arm, threads = case.model.name, case.arm.name, case.threads
        full = session.measure(name, arm, threads, "full")
        warm = session.measure(name, arm, threads, "first")
        records.append(record_of(case, full, warm))


def record_of(case: Case, full: Outcome, warm: Outcome) -> Record:
    """Judges what two workers brought back."""
    record = Record(case.model.name, case.arm.name, case.threads, "ok")
    if full.failure:
        record.status = "failed" if full.blames_arm else "not measured"
        record.counted = 1.0 if full.blames_arm else None
        record.notes.append(full.failure)
        return record
    _fill_times(record, case, full.values)
    _fill_compiler(record, full.values)
    if warm.failure:
        record.notes.append(f"warm process: {warm.failure}")
    else:
        record.warm_first_s = warm.values["first_s"]
        record.peak_bytes = warm.values["peak_bytes"]
    if problem := full.values.get("problem"):
        record.status, record.counted = "wrong", 1.0
        record.notes.append(problem)
    return record


def _fill_times(record: Record, case: Case, values: dict[str, Any]) -> None:
    eager_s, arm_s = values["eager_s"], values["arm_s"]
    eager_median_s, arm_median_s = statistics.median(eager_s), statistics.median(arm_s)
    record.samples = {"eager_s": eager_s, "arm_s": arm_s}
    record.eager_ms, record.arm_ms = 1e3 * eager_median_s, 1e3 * arm_median_s
    record.guards_ms = 1e3 * values["guards_s"]
    record.eager_first_s = values["eager_first_s"]
    if case.arm.name == BASELINE:
        record.counted = record.speedup_of_medians = 1.0
        record.cold_first_s = record.eager_first_s
        return
    record.speedup = median_with_interval([e / a for e, a in zip(eager_s, arm_s, strict=True)])
    record.speedup_of_medians = eager_median_s / arm_median_s
    record.counted = record.speedup.value
    record.cold_first_s = values["first_s"]
    record.settle_s = values.get("settle_s")
    if not case.arm.is_eager:
        record.break_even_calls = break_even_calls(
            record.cold_first_s, record.eager_first_s, arm_median_s, eager_median_s
        )
    if not values["steady"]:
        record.notes.append("unsteady after warm-up")


def _fill_compiler(record: Record, values: dict[str, Any]) -> None:
    if "dynamo" in values:
        record.graphs = values["dynamo"]["graphs"]
        record.graph_breaks = values["dynamo"]["graph_breaks"]
    board = values.get("board")
    if board is None:
        return
    record.notes += [f"trip: {trip}" for trip in board["trips"]]
    record.ops = board["ops"]
    if record.arm != "fuseboard-eager" and set(board["ops"]) <= _NO_COMPILER:
        record.status = "fell back"
        record.notes.append("no op ran on a compiler")
        # A fallback counts as 1.0, but not where it was measured to be slower than that.
        record.counted = min(1.0, record.counted or 1.0)


@dataclass(frozen=True)
class Summary:
    """One arm over all models at one thread count.

    :ivar speedup: geometric mean over eager, failures counted as 1.0.
    :ivar against_best: the same against the rival that is best over all models, ``best``.
    :ivar against_oracle: the same against the best rival of each model, eager included.
    :ivar failures: the models that failed, were wrong or fell back, with how.
    """

    arm: str
    threads: int
    models: int
    speedup: float
    best: str
    against_best: float
    against_oracle: float
    failures: tuple[str, ...]


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Geometric means. An arm is compared with rivals on the models that both were counted on.

    Rivals are eager and the arms that aren't fuseboard's; an arm isn't its own rival.
    """
    summaries = []
    for arm, threads in dict.fromkeys((r.arm, r.threads) for r in records):
        own = {r.model: r for r in records if (r.arm, r.threads) == (arm, threads)}
        counted = {model: r.counted for model, r in own.items() if r.counted is not None}
        if not counted:
            continue
        rivals = _rivals(records, arm, threads, counted)
        best = max(rivals, key=lambda rival: geometric_mean(list(rivals[rival].values())))
        oracle = [
            value / max(r[model] for r in rivals.values()) for model, value in counted.items()
        ]
        summaries.append(
            Summary(
                arm=arm,
                threads=threads,
                models=len(counted),
                speedup=geometric_mean(list(counted.values())),
                best=best,
                against_best=geometric_mean([v / rivals[best][m] for m, v in counted.items()]),
                against_oracle=geometric_mean(oracle),
                failures=tuple(f"{m} {r.status}" for m, r in own.items() if r.status != "ok"),
            )
        )
    return summaries


def _rivals(
    records: Sequence[Record], arm: str, threads: int, models: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Rival → model → speedup over eager; 1.0 where the rival has none, as for a failure."""
    rivals = {BASELINE: dict.fromkeys(models, 1.0)}
    for record in records:
        if record.threads != threads or record.arm in (arm, BASELINE, CONTROL):
            continue
        if record.arm.startswith("fuseboard") or record.model not in rivals[BASELINE]:
            continue
        known = rivals.setdefault(record.arm, dict.fromkeys(rivals[BASELINE], 1.0))
        known[record.model] = 1.0 if record.counted is None else record.counted
    return rivals
