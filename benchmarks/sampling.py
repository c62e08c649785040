"""What a sampling session costs: blocks of calls with and without one, in turn, in one process.

The parent imports this without torch; :func:`measure_blocks` runs in a worker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.findings import Finding, Verdict
from benchmarks.protocol import Protocol
from benchmarks.session import Session
from benchmarks.stats import Estimate, paired_ratio

MODELS = ("mlp-b1", "minilm-8x64")
ARM = "fuseboard"
#: The claim: at 100 samples a second calls take at most so many times as long.
LIMIT = 1.03
SAMPLE_EACH_S = 0.01
#: Seconds of calls in a block: a hundred samples, and long beside the turn of the next one.
BLOCK_S = 1.0
#: What blocks run under. The second is the control: as far from 1 as it is, so is the rest.
KINDS = ("off", "off again", "sampled", "sampled, blocking", "sampled, native")


def measure_blocks(
    run: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    call_s: float,
    protocol: Protocol,
    session: Callable[[str], AbstractContextManager[Any]],
) -> dict[str, list[float]]:
    """Seconds a call, one figure a round for each kind; the order within a round is random.

    :param session: by kind, what a block of it runs under; entering and leaving isn't timed.
    """
    burst = max(1, round(protocol.burst_s / call_s))
    order = random.Random(protocol.seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began = time.perf_counter()
    for done in range(protocol.rounds):
        if done >= protocol.min_rounds and time.perf_counter() - began >= 2 * protocol.budget_s:
            break
        for kind in order.sample(KINDS, len(KINDS)):
            with session(kind):
                calls, start, elapsed = 0, time.perf_counter(), 0.0
                while not calls or elapsed < BLOCK_S:
                    for _ in range(burst):
                        run(*inputs[calls % len(inputs)])
                        calls += 1
                    elapsed = time.perf_counter() - start
                seconds[kind].append(elapsed / calls)
    return seconds


class Sessions:
    """py-spy around the blocks that want it, and how many samples it took. Used in a worker.

    :ivar samples: kind → samples of each of its blocks.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[int]] = {}

    def __call__(self, kind: str) -> AbstractContextManager[Any]:
        """What a block of a kind runs under.

        :raises SamplingError: py-spy can't run here; it says why.
        """
        if not kind.startswith("sampled"):
            return nullcontext()
        return _Counted(kind, self.samples)


class _Counted:
    """A session that notes how many samples it took: a sampler that fell asleep costs nothing."""

    def __init__(self, kind: str, samples: dict[str, list[int]]) -> None:
        import fuseboard

        self._samples = samples.setdefault(kind, [])
        options = {name: True for name in ("blocking", "native") if name in kind}
        self._settings = fuseboard.settings(plugins={"pyspy": options})
        self._profiler = fuseboard.SamplingProfiler(
            sampler="pyspy", sample_each=SAMPLE_EACH_S, stop_at_error=True
        )

    def __enter__(self) -> None:
        with self._settings:
            self._profiler.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        result = self._profiler.result
        self._samples.append(0 if result is None else result.total)


def findings(session: Session, repeats: int, threads: int) -> list[Finding]:
    """For each model the slowdown in processes one after another, beside the control's."""
    return [_finding(session, repeats, threads, model) for model in MODELS]


def _finding(session: Session, repeats: int, threads: int, model: str) -> Finding:
    claim = f"{model}: a call under py-spy at 100 Hz takes at most {LIMIT:g} of one without"
    processes: list[dict[str, Any]] = []
    for _ in range(repeats):
        outcome = session.measure(model, ARM, threads, "sampled")
        if outcome.failure:
            return Finding(claim, outcome.failure, "no")
        processes.append(outcome.values)
    return sampling_finding(claim, processes)


def sampling_finding(claim: str, processes: Sequence[dict[str, Any]]) -> Finding:
    """The verdict; and beside the slowdown the control's, and that of the costlier options."""
    ratios = {kind: slowdown(processes, kind) for kind in KINDS[1:]}
    taken = [count for process in processes for count in process["samples"]["sampled"]]
    data = {"ratios": ratios, "processes": list(processes)}
    figures = ", ".join(f"{kind} {ratio}" for kind, ratio in ratios.items())
    measured = f"{figures}; {sum(taken) / len(taken):.0f} samples a block of {BLOCK_S:g} s"
    if min(taken) == 0:
        return Finding(claim, f"a block without samples; {measured}", "no", data)
    return Finding(claim, measured, _judge(ratios["sampled"]), data)


def slowdown(processes: Sequence[dict[str, Any]], kind: str) -> Estimate:
    """Time of a kind by the time without a session, round by round."""
    rounds = [
        [
            with_ / without
            for with_, without in zip(p["seconds"][kind], p["seconds"]["off"], strict=True)
        ]
        for p in processes
    ]
    return paired_ratio(rounds, [[1.0] for _ in processes])


def _judge(estimate: Estimate) -> Verdict:
    if estimate.value <= LIMIT:
        return "yes"
    return "within the interval" if estimate.low <= LIMIT else "no"
