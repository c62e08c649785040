"""What a choice by measurement costs its user: while it is made, and in each call afterwards."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.findings import Finding, verdict
from benchmarks.processes import empty_caches
from benchmarks.protocol import Protocol
from benchmarks.session import Session
from benchmarks.stats import Estimate, break_even_calls, paired_ratio

MODELS = ("minilm-8x64", "bert-base-1x128", "resnet50-b1", "mobilenet-v2-b1")
BESIDE_LIMIT = 2.0
#: Given up after so long.
SETTLE_S = 400.0
SETTLED_CALLS = 30

RUNNER_MODEL = "minilm-1x16"
RUNNER_KINDS = ("winner", "winner again", "runner")
RUNNER_ROUNDS = 300

Run = Callable[..., Any]


# --- in a worker ----------------------------------------------------------------------------------


def watch_settling(run: Run, inputs: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Call until everything is decided, then some more.

    :returns: seconds of the ``first`` call, of the calls ``beside`` the worker, of those in which
        candidates are compared (``comparing``), and of the ``settled`` ones; and how long it took.
    """
    from fuseboard.report.data import ledger

    def profiled_s() -> float:
        return sum(graph.seconds.get("profile", 0.0) for graph in ledger.graphs())

    seconds: dict[str, list[float]] = {"beside": [], "comparing": [], "settled": []}
    began = time.perf_counter()
    run(*inputs[0])
    seconds["first"] = [settle_s := time.perf_counter() - began]
    while len(seconds["settled"]) < SETTLED_CALLS:
        settled = all(graph.settled for graph in ledger.graphs())
        compared_s = profiled_s()
        start = time.perf_counter()
        run(*inputs[len(seconds["beside"]) % len(inputs)])
        call_s = time.perf_counter() - start
        if profiled_s() > compared_s:
            seconds["comparing"].append(call_s)
        else:
            seconds["settled" if settled else "beside"].append(call_s)
        if not settled:
            settle_s = time.perf_counter() - began
            if settle_s > SETTLE_S:
                raise TimeoutError(f"not settled after {SETTLE_S:g} s")
    return {"seconds": seconds, "settle_s": settle_s}


def child_peak_bytes() -> int:
    """The most that a child process held; Linux counts in kibibytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


@contextmanager
def runners() -> Iterator[tuple[list[Any], list[list[Any]]]]:
    """The runners that are made in the block, and what their last calls were given."""
    from fuseboard.run.captured_graph import CapturedGraph
    from fuseboard.run.runner import Runner

    made: list[Any] = []
    given: list[list[Any]] = []
    begin, boxed = Runner.__init__, CapturedGraph.boxed

    def noted(self: Any, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    def watched(self: Any) -> Any:
        inner = boxed(self)

        def call(args: list[Any]) -> Any:
            given[:] = [list(args)]
            return inner(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    Runner.__init__ = noted  # type: ignore[method-assign]
    CapturedGraph.boxed = watched  # type: ignore[method-assign]
    try:
        yield made, given
    finally:
        Runner.__init__ = begin  # type: ignore[method-assign]
        CapturedGraph.boxed = boxed  # type: ignore[method-assign]


def directly(runner: Any, args: list[Any]) -> Callable[[], Any]:
    """The winner called without the runner: its regions one after the other, weights prepared."""
    program = runner.program
    prepared = () if program.sets is None else program.sets.last.values
    slots = {n: i for i, n in enumerate(runner.context.graph.graph.find_nodes(op="placeholder"))}
    steps = []
    first = 0
    for site in program.sites:
        lowered = site.lowered
        reads = [slots[site.cut.inputs[i]] for i in lowered.keeps]
        own = list(prepared[first : first + lowered.values])
        first += lowered.values
        writes = [slots.setdefault(node, len(slots)) for node in site.cut.outputs]
        steps.append((lowered.call, reads, own, writes))
    room = [None] * (len(slots) - len(args))

    wanted = [slots[node] for node in runner.context.results]

    def run() -> list[Any]:
        values = [*args, *room]
        for call, reads, own, writes in steps:
            results = call([*(values[i] for i in reads), *own])
            for slot, result in zip(writes, results, strict=True):
                values[slot] = result
        return [values[slot] for slot in wanted]

    return run


def time_runner(run: Run, inputs: Sequence[tuple[Any, ...]], made: list[Any], given: Any) -> Any:
    """Seconds of each kind of call, round by round, in random order."""
    run(*inputs[0])
    (runner,) = made
    args = given[0]
    winner = directly(runner, args)
    calls = dict(
        zip(
            RUNNER_KINDS,
            (winner, winner, lambda: runner.captured.function(list(args))),
            strict=True,
        )
    )
    order = random.Random(Protocol.seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in RUNNER_KINDS}
    for kind in RUNNER_KINDS * 5:
        calls[kind]()
    for _ in range(RUNNER_ROUNDS):
        for kind in order.sample(RUNNER_KINDS, len(RUNNER_KINDS)):
            start = time.perf_counter()
            calls[kind]()
            seconds[kind].append(time.perf_counter() - start)
    return seconds


# --- what comes of it -----------------------------------------------------------------------------


def findings(session: Session, threads: int) -> list[Finding]:
    """For each model what the calls take until the choice is made."""
    found = []
    for model in MODELS:
        claim = (
            f"{model}: calls beside the worker take at most {BESIDE_LIMIT:g} of the settled ones"
        )
        with empty_caches() as caches:
            outcome = session.measure(model, "fuseboard", threads, "tuned", caches)
        failed = Finding(claim, outcome.failure, "no")
        found.append(failed if outcome.failure else tuning_finding(claim, outcome.values))
    return found


def tuning_finding(claim: str, values: dict[str, Any]) -> Finding:
    """The verdict; beside it how long it took, when it has paid for itself, and memory."""
    seconds = values["seconds"]
    settled_s, beside_s = (
        statistics.median(seconds[kind]) if seconds[kind] else None
        for kind in ("settled", "beside")
    )
    calls = sum(len(seconds[kind]) for kind in ("first", "beside", "comparing"))
    # As if all until the choice was made were one long first call.
    even = break_even_calls(
        values["settle_s"], calls * values["eager_s"], settled_s, values["eager_s"]
    )
    paid = "never pays" if even is None else f"pays after {calls + even:,} calls"
    worst = max(seconds["comparing"], default=0.0)
    memory = ", ".join(
        f"{name} {values[key] / 2**20:.0f} MiB"
        for name, key in (
            ("eager", "eager_peak_bytes"),
            ("tuning", "peak_bytes"),
            ("its child", "child_peak_bytes"),
        )
    )
    told = (
        f"settled after {values['settle_s']:.0f} s and {calls} calls, of which "
        f"{len(seconds['comparing'])} compare, at most {worst:.1f} s; {paid}; peaks: {memory}"
    )
    if beside_s is None:
        return Finding(claim, f"no call was made beside the worker; {told}", "yes", values)
    ratio = beside_s / settled_s
    measured = f"{ratio:.2f} ({1e3 * beside_s:.2f} and {1e3 * settled_s:.2f} ms); {told}"
    return Finding(claim, measured, verdict(ratio <= BESIDE_LIMIT), values)


def runner_findings(session: Session, repeats: int, threads: int) -> list[Finding]:
    claim = f"{RUNNER_MODEL}: the runner's own time can't be told from that of its winner again"
    processes = []
    for _ in range(repeats):
        outcome = session.measure(RUNNER_MODEL, "fuseboard", threads, "runner")
        if outcome.failure:
            return [Finding(claim, outcome.failure, "no")]
        processes.append(outcome.values["seconds"])
    return [runner_finding(claim, processes)]


def runner_finding(claim: str, processes: Sequence[dict[str, list[float]]]) -> Finding:
    ratios = {kind: _by_winner(processes, kind) for kind in RUNNER_KINDS[1:]}
    winner_us = 1e6 * statistics.median(s for p in processes for s in p["winner"])
    measured = ", ".join(f"{kind} {ratio}" for kind, ratio in ratios.items())
    data = {"ratios": ratios, "processes": list(processes)}
    measured = f"{measured} of the winner's {winner_us:.0f} us"
    holds = ratios["runner"].low <= max(ratios["winner again"].high, 1.0)
    return Finding(claim, measured, verdict(holds), data)


def _by_winner(processes: Sequence[dict[str, list[float]]], kind: str) -> Estimate:
    """Time of a kind by the winner's, round by round."""
    rounds = [
        [one / winner for one, winner in zip(p[kind], p["winner"], strict=True)] for p in processes
    ]
    return paired_ratio(rounds, [[1.0] for _ in processes])
