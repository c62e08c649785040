"""What a program notices of compiling: its first answer, its slowest call, when all is decided.

Three processes for each model, one after the other: under ``backend="eager"``, which is Dynamo's
trace and eager's call; under fuseboard with empty caches; and again with what that left there. A
loop times every call until nothing is left to decide.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.processes import ROOT, empty_caches, worker_environment

MODELS = ("bert-base-1x128", "mobilenet-v2-b1", "llama-1x128", "train-bert4", "train-resnet18")
#: Of a first answer: times Dynamo's trace and one eager call. Of a later call: times a settled one,
#: or so many seconds more. Of a stretch of calls: times its time settled. With a warm cache all is
#: decided so many seconds after the first answer.
FIRST, LATER, LATER_S, STRETCH, CALLS, WARM_S = 1.3, 3.0, 0.03, 1.5, 20, 3.0
LIMIT_S = 240.0

_PROGRAM = """
import json, resource, sys, time
import torch
from benchmarks.models import MODELS
name, backend, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
workload = MODELS[name].build()
module, pool = workload.module, workload.inputs
steps = workload.training
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5) if steps else None

def step(run, inputs):
    if not steps:
        return run(*inputs)
    optimizer.zero_grad()
    run(*inputs).backward()
    optimizer.step()

with torch.set_grad_enabled(steps):
    step(module, pool[0])
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend)
    begin = time.perf_counter()
    step(run, pool[0])
    first = time.perf_counter() - begin
    calls, settled_s, number = [], None, 0
    if backend == "fuseboard":
        import fuseboard
    while True:
        start = time.perf_counter()
        step(run, pool[number % len(pool)])
        calls.append(time.perf_counter() - start)
        number += 1
        elapsed = time.perf_counter() - begin
        if settled_s is None and (backend != "fuseboard" or fuseboard.settled()):
            settled_s, left = elapsed, number + 30
        if (settled_s is not None and number >= left) or elapsed > limit_s:
            break
winner = ""
if backend == "fuseboard":
    graphs = [graph for graph in fuseboard.last_report().graphs if graph.kind != "joint"]
    chosen = [[one.name for one in g.candidates if one.state == "chosen"] for g in graphs]
    winner = "; ".join(
        graph.instead.partition(":")[0] or next(iter(names), "not decided")
        for graph, names in zip(graphs, chosen)
    )
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
found = {"first_s": first, "calls_s": calls, "settled_s": settled_s}
print(json.dumps({**found, "winner": winner, "peak_mib": peak}))
print(time.monotonic(), flush=True)
"""


@dataclass
class Run:
    """One process.

    :ivar calls_s: each later call, in order; the last 30 are settled.
    :ivar settled_s: since the first call began; None where it didn't within the limit.
    """

    first_s: float
    calls_s: list[float] = field(repr=False)
    settled_s: float | None
    winner: str
    peak_mib: int

    @property
    def settled_call_s(self) -> float:
        return median(self.calls_s[-30:])

    @property
    def longest_s(self) -> float:
        return max(self.calls_s[:-30], default=0.0)

    @property
    def worst_stretch_s(self) -> float:
        """Seconds a call, in the worst stretch of calls before all was settled."""
        waiting = self.calls_s[:-30]
        ends = range(min(CALLS, len(waiting)), len(waiting) + 1)
        return max((sum(waiting[max(end - CALLS, 0) : end]) / CALLS for end in ends), default=0.0)


@dataclass
class Settling:
    """The processes of one model.

    :ivar eager: under Dynamo alone.
    """

    model: str
    eager: Run
    cold: Run
    warm: Run

    def first(self, run: Run) -> float:
        """How many times Dynamo's trace and one eager call the first answer takes."""
        return run.first_s / self.eager.first_s

    def longest(self, run: Run) -> float:
        """The longest later call before all was settled, in settled calls."""
        return run.longest_s / run.settled_call_s

    def stretch(self, run: Run) -> float:
        """What a call takes in the worst stretch of calls before that, in settled calls.

        Where settled calls are much faster than eager's, which answer until then, this is large
        whatever compiling takes: see :meth:`stretch_of_eagers`.
        """
        return run.worst_stretch_s / run.settled_call_s

    def stretch_of_eagers(self, run: Run) -> float:
        """The same in calls under ``backend="eager"``."""
        return run.worst_stretch_s / self.eager.settled_call_s

    def misses(self) -> list[str]:
        """What isn't reached."""
        found = []
        for name, run in (("cold", self.cold), ("warm", self.warm)):
            if self.first(run) > FIRST:
                found.append(f"{name}: first answer")
            usual = run.settled_call_s
            if run.longest_s > max(LATER * usual, usual + LATER_S):
                found.append(f"{name}: longest call")
            if self.stretch(run) > STRETCH:
                found.append(f"{name}: stretch")
            if run.settled_s is None or (name == "warm" and run.settled_s > run.first_s + WARM_S):
                found.append(f"{name}: settled")
        return found


def measure_settling(
    models: Sequence[str], threads: int, report: Callable[[str], None]
) -> Iterator[Settling]:
    """Three processes for each model, which is done when it is yielded."""
    for model in models:
        with empty_caches() as caches:
            environment = worker_environment(threads, caches)
            runs = []
            for backend, how in (("eager", ""), ("fuseboard", "cold"), ("fuseboard", "warm")):
                report(f"settle · {model} · {backend} {how}")
                runs.append(_run(model, backend, environment))
        yield Settling(model, *runs)


def _run(model: str, backend: str, environment: dict[str, str]) -> Run:
    command = [sys.executable, "-c", _PROGRAM, model, backend, f"{LIMIT_S:g}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-2])
    return Run(**values)
