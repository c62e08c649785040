"""What the project claims of its speed, measured in one run: ``python -m benchmarks check``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from benchmarks import compile_time, decode, pairs, sampling, tuning
from benchmarks.exits import LIMIT_S as EXIT_LIMIT_S
from benchmarks.exits import MOMENTS, ExitCost, measure_exits
from benchmarks.findings import Finding, judge_at_least, verdict
from benchmarks.imports import ImportCost, measure_imports
from benchmarks.pairs import Pair
from benchmarks.partitioning import CASES, LIMIT_S, NODES, Partitioned, measure_partitioning
from benchmarks.processes import Caches, empty_caches
from benchmarks.session import Session

THREADS = 1
MEMORY_MODELS = ("minilm-8x64", "bert-base-4x128", "resnet50-b4")
MEMORY_LIMIT = 1.05
COLD_LIMIT = 0.25
COLD_MODELS = ("bert-base-1x128", "gpt2-1x128", "llama24-1x128", "resnet50-b1")
COLD_PRIORITY_LIMIT = 0.6
COLD_DEFAULT_LIMIT = 0.8
BUDGET_MODEL = "train-gpt2-4x256"
BUDGET_LIMIT = 0.75
POINTWISE = ("kernel-arithmetic", "kernel-functions", "kernel-gelu")
IMPORT_LIMIT_MS = 50.0


@dataclass(frozen=True)
class Scale:
    """How often each thing is repeated."""

    pairs: int = pairs.REPEATS
    cold: int = 2
    memory: int = 2
    imports: int = 10
    exits: int = 5
    partitions: int = 3


FULL = Scale()
QUICK = Scale(pairs=1, cold=1, memory=1, imports=4, exits=2, partitions=1)


@dataclass(frozen=True)
class Check:
    """Measures one claim, or several of a kind.

    :ivar workers: how many workers it takes at a scale, for the progress bar.
    """

    name: str
    run: Callable[[Session, Scale], list[Finding]]
    workers: Callable[[Scale], int]


def _speed_check(
    name: str, model: str, a: str, b: str, limit: float, *, by_latency: bool = False
) -> Check:
    """A claim that arm ``a`` has at least ``limit`` times the speed of arm ``b``."""
    claim = f"{model}: {a} at least {limit:g} of {b}'s speed"
    if by_latency:
        claim = f"{model}: a call of {a} takes no longer than one of {b}"

    def run(session: Session, scale: Scale) -> list[Finding]:
        pair = pairs.run(session, Pair(model, a, b, THREADS), scale.pairs)
        return [speed_finding(claim, pair, limit, by_latency=by_latency)]

    return Check(name, run, lambda scale: 2 * scale.pairs)


def speed_finding(claim: str, pair: Pair, limit: float, *, by_latency: bool) -> Finding:
    data = {"pair": pair, "limit": limit}
    if pair.speed is None or pair.latency is None:
        # An arm that fails or is wrong doesn't keep the claim.
        return Finding(claim, pair.failure, "no", data)
    judged, other = (pair.latency, pair.speed) if by_latency else (pair.speed, pair.latency)
    names = ("times a call", "beside eager") if by_latency else ("beside eager", "times a call")
    calls = ", ".join(f"{arm} {pair.call_ms(arm):.3f} ms" for arm in (pair.a, pair.b))
    measured = f"{judged} {names[0]}; {other} {names[1]}; {calls}"
    return Finding(claim, measured, judge_at_least(judged, limit), data)


def _time_check(name: str, models: Sequence[str], a: str, b: str, limit: float) -> Check:
    """A claim that a call of arm ``a`` takes at most ``limit`` times one of arm ``b``."""

    def run(session: Session, scale: Scale) -> list[Finding]:
        found = []
        for model in models:
            pair = pairs.run(session, Pair(model, a, b, THREADS), scale.pairs)
            claim = f"{model}: a call of {a} takes at most {limit:g} of {b}'s time"
            found.append(speed_finding(claim, pair, 1 / limit, by_latency=False))
        return found

    return Check(name, run, lambda scale: 2 * scale.pairs * len(models))


def _cold_check(
    name: str, models: Sequence[str], ours: str, theirs: str, limit: float, share: str
) -> Check:
    """A claim that arm ``ours`` has its first answer in at most ``limit`` of ``theirs``'s time."""

    def run(session: Session, scale: Scale) -> list[Finding]:
        return [_cold(session, scale.cold, model, ours, theirs, limit, share) for model in models]

    return Check(name, run, lambda scale: 4 * scale.cold * len(models))


def _cold(
    session: Session, repeats: int, model: str, ours: str, theirs: str, limit: float, share: str
) -> Finding:
    """First calls with every cache empty; and again where only a machine's headers are left."""
    claim = f"{model}: cold first call of {ours} at most {share} of {theirs}'s"
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for arm in (ours, theirs):
            with empty_caches() as caches:
                for name in (arm, f"{arm}, headers kept"):
                    if failure := _first(session, model, arm, caches, seconds.setdefault(name, [])):
                        return Finding(claim, failure, "no")
                    caches.forget_graphs()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians[ours] / medians[theirs]
    kept = medians[f"{ours}, headers kept"] / medians[f"{theirs}, headers kept"]
    measured = f"{ratio:.3f}, headers kept {kept:.3f}; "
    measured += ", ".join(f"{n} {v:.2f} s" for n, v in medians.items())
    return Finding(claim, measured, verdict(ratio <= limit), {"seconds": seconds})


def _first(session: Session, model: str, arm: str, caches: Caches, seconds: list[float]) -> str:
    """One ``first`` worker; its seconds are appended. Returns the failure or ""."""
    outcome = session.measure(model, arm, THREADS, "first", caches)
    if outcome.failure:
        return f"{arm}: {outcome.failure}"
    seconds.append(outcome.values["first_s"])
    return ""


def _memory(session: Session, scale: Scale) -> list[Finding]:
    return [_memory_of(session, scale, model) for model in MEMORY_MODELS]


def _memory_of(session: Session, scale: Scale, model: str) -> Finding:
    """Peak memory of warm processes; the first process of each arm, which fills caches, is not
    counted."""
    claim = f"{model}: peak memory of fuseboard, warm, at most 1.05 of inductor-freezing's"
    peaks: dict[str, list[int]] = {"fuseboard": [], "inductor-freezing": []}
    for repeat in range(scale.memory + 1):
        for arm, values in peaks.items():
            outcome = session.measure(model, arm, THREADS, "first")
            if outcome.failure:
                return Finding(claim, f"{arm}: {outcome.failure}", "no")
            if repeat:
                values.append(outcome.values["peak_bytes"])
    ours, theirs = (statistics.median(values) for values in peaks.values())
    measured = f"{ours / theirs:.3f}; {ours / 2**20:.0f} MiB, {theirs / 2**20:.0f} MiB"
    return Finding(claim, measured, verdict(ours <= MEMORY_LIMIT * theirs), {"peaks": peaks})


def _graphs(session: Session, scale: Scale) -> list[Finding]:
    """Graph breaks on a model, recompiles when the batch size changes; against plain Inductor."""
    claim = "mlp: fuseboard compiles as often as inductor at batches {}, and breaks no graph"
    values: dict[str, dict[str, Any]] = {}
    for arm in ("fuseboard", "inductor"):
        outcome = session.measure("mlp-b64", arm, THREADS, "recompiles")
        if outcome.failure:
            return [Finding(claim.format("that change"), f"{arm}: {outcome.failure}", "no")]
        values[arm] = outcome.values
    ours, theirs = values["fuseboard"], values["inductor"]
    batches = ", ".join(map(str, ours["batches"]))
    holds = all(a <= b for a, b in zip(ours["graphs_after"], theirs["graphs_after"], strict=True))
    holds &= ours["dynamo"]["graph_breaks"] <= theirs["dynamo"]["graph_breaks"]
    measured = "; ".join(
        f"{arm}: {v['graphs_after']} graphs, {v['dynamo']['graph_breaks']} breaks"
        for arm, v in values.items()
    )
    return [Finding(claim.format(batches), measured, verdict(holds), values)]


def _imports(session: Session, scale: Scale) -> list[Finding]:
    return [import_finding(measure_imports(scale.imports, session.advance))]


def import_finding(cost: ImportCost) -> Finding:
    measured = (
        f"{cost.added} ms in a process with torch; process against process "
        f"{cost.difference} ms; torch itself {cost.torch} ms"
    )
    claim = f"import fuseboard costs at most {IMPORT_LIMIT_MS:g} ms beyond torch's own import"
    return Finding(claim, measured, verdict(cost.added.value <= IMPORT_LIMIT_MS), {"cost": cost})


def _exits(session: Session, scale: Scale) -> list[Finding]:
    return [exit_finding(cost) for cost in measure_exits(scale.exits, session.advance)]


def exit_finding(cost: ExitCost) -> Finding:
    when = {"settled": "after settling", "compiling": "while a child process compiles"}[cost.moment]
    claim = f"a process ends {when} at most {EXIT_LIMIT_S:g} s later than under backend='eager'"
    measured = f"{cost.added} s; eager {cost.eager} s, fuseboard {cost.fuseboard} s"
    return Finding(claim, measured, verdict(cost.added.value <= EXIT_LIMIT_S), {"cost": cost})


def _compile_time(session: Session, scale: Scale) -> list[Finding]:
    return compile_time.findings(session, scale.cold)


def _repeats_speed(session: Session, scale: Scale) -> list[Finding]:
    return compile_time.speed_findings(session, scale.pairs)


def _partitioning(session: Session, scale: Scale) -> list[Finding]:
    cases = measure_partitioning(NODES, scale.partitions, session.advance)
    return [partitioning_finding(case) for case in cases]


def partitioning_finding(case: Partitioned) -> Finding:
    claim = f"{case.case}: {case.ops:,} ops claimed, planned and cut in at most {LIMIT_S:g} s"
    steps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in case.seconds.items())
    measured = f"{case.total_s:.2f} s; {case.regions:,} regions; {steps}"
    return Finding(claim, measured, verdict(case.total_s <= LIMIT_S), {"case": case})


def _budget(session: Session, scale: Scale) -> list[Finding]:
    """A training step under half the memory budget, its gradients held against float64."""
    claim = (
        f"{BUDGET_MODEL}: a memory budget of 0.5 lowers the peak of activations by at least 25%, "
        "same gradients"
    )
    outcome = session.measure(BUDGET_MODEL, "fuseboard", THREADS, "budget")
    if outcome.failure:
        return [Finding(claim, outcome.failure, "no")]
    points = {point["budget"]: point for point in outcome.values["points"]}
    half, all_, eager = (points[budget] for budget in (0.5, 1.0, None))
    keys = ("activation_bytes", "peak_bytes", "saved_bytes", "latency_us")
    ratios = [half[key] / all_[key] for key in keys]
    peaks = ", ".join(
        f"{name} " + ", ".join(f"{point[key] / 2**20:.0f}" for key in keys[:3]) + " MiB"
        for name, point in (("half", half), ("all", all_), ("eager", eager))
    )
    problem = outcome.values["problem"] or "gradients as eager's"
    measured = (
        f"peak {ratios[0]:.3f}, with the gradients {ratios[1]:.3f}, between forward and backward "
        f"{ratios[2]:.3f}, time {ratios[3]:.3f} of what budget 1 takes; {peaks}; {problem}"
    )
    holds = ratios[0] <= BUDGET_LIMIT and not outcome.values["problem"]
    return [Finding(claim, measured, verdict(holds), outcome.values)]


def _sampling(session: Session, scale: Scale) -> list[Finding]:
    return sampling.findings(session, scale.pairs, THREADS)


def _decoding(session: Session, scale: Scale) -> list[Finding]:
    models = decode.installed_models()
    done = decode.measure_decoding(models, decode.CACHES, session.advance)
    return [decode.decoding_finding(one) for one in done]


def _tuning(session: Session, scale: Scale) -> list[Finding]:
    return tuning.findings(session, THREADS)


def _runner(session: Session, scale: Scale) -> list[Finding]:
    return tuning.runner_findings(session, scale.pairs, THREADS)


CHECKS = (
    Check("imports", _imports, lambda scale: scale.imports + 1),
    Check("exit", _exits, lambda scale: len(MOMENTS) * (scale.exits + 1)),
    Check("graphs", _graphs, lambda scale: 2),
    _speed_check("mlp-call", "mlp-b1", "fuseboard", "inductor", 1.0, by_latency=True),
    _speed_check("minilm-speed", "minilm-8x64", "fuseboard", "inductor", 1.0),
    _speed_check("bert-speed", "bert-base-4x128", "fuseboard", "inductor", 1.0),
    _speed_check("resnet-speed", "resnet50-b4", "fuseboard-mkldnn", "inductor-freezing", 0.97),
    _cold_check("resnet-cold", ("resnet50-b4",), "fuseboard-mkldnn", "inductor", COLD_LIMIT, "1/4"),
    _cold_check("cold-default", COLD_MODELS, "fuseboard", "inductor", COLD_DEFAULT_LIMIT, "0.8"),
    _cold_check(
        "cold-priority",
        COLD_MODELS,
        "fuseboard-priority",
        "inductor",
        COLD_PRIORITY_LIMIT,
        "0.6",
    ),
    Check("compile-time", _compile_time, lambda scale: 8 * scale.cold),
    Check("repeats-speed", _repeats_speed, lambda scale: 4 * scale.pairs),
    Check("partitioning", _partitioning, lambda scale: len(CASES) * scale.partitions),
    Check("memory-budget", _budget, lambda scale: 1),
    Check("sampling", _sampling, lambda scale: len(sampling.MODELS) * scale.pairs),
    Check("tuning", _tuning, lambda scale: len(tuning.MODELS)),
    Check("decode", _decoding, lambda scale: decode.processes()),
    Check("runner", _runner, lambda scale: scale.pairs),
    _time_check("tvm-pointwise", POINTWISE, "fuseboard-tvm", "inductor", 1.5),
    _time_check("tvm-block", ("kernel-block",), "fuseboard-tvm", "inductor", 2.5),
    Check("memory", _memory, lambda scale: 2 * len(MEMORY_MODELS) * (scale.memory + 1)),
)


def select_checks(patterns: Iterable[str]) -> list[Check]:
    """Checks in order; names or globs.

    :raises KeyError: a pattern that matches nothing; the message lists what there is.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {check.name for check in CHECKS if fnmatchcase(check.name, pattern)}
        if not found:
            names = ", ".join(check.name for check in CHECKS)
            raise KeyError(f"no check matches {pattern!r}; there are {names}")
        chosen |= found
    return [check for check in CHECKS if check.name in chosen]


def run(session: Session, checks: Iterable[Check], scale: Scale, findings: list[Finding]) -> None:
    """Measures in order. ``findings`` is filled as it goes, so that an interrupt keeps them."""
    for check in checks:
        findings += check.run(session, scale)
