"""One measurement in one fresh process: ``python -m benchmarks.worker REQUEST.json RESULT.json``.

Started by ``benchmarks.processes`` alone. Progress goes to stdout, one line a step; what was
measured goes to RESULT.json, written once at the end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import math
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import sampling, spans, tuning, verification
from benchmarks.arms import ARMS, Arm
from benchmarks.builders import Workload
from benchmarks.models import MODELS
from benchmarks.notes import board_notes, compiler_counts, forget_graphs
from benchmarks.protocol import Protocol

#: Prefix of progress lines: a model may print as well.
PROGRESS = "@step "
#: How many calls are made under a profiler for the time that Dynamo's guards take.
GUARDED_CALLS = 10
#: How many calls a ``first`` process makes before its peak memory is read.
MEMORY_CALLS = 10
#: How many calls a choice may need after everything is compiled.
SETTLING_CALLS = 5
#: Batch sizes of the recompile probe: the second makes the batch dynamic, the others must reuse it.
PROBED_BATCHES = (64, 48, 33, 7)
#: Memory budgets of the ``budget`` phase: all that min-cut would save, and half of it.
BUDGETS = (1.0, 0.5)

Run = Callable[..., Tensor]


class TrainingStep:
    """Forward, backward and perhaps AdamW: gradients stay readable until the next call."""

    def __init__(self, loss: Run, module: nn.Module, optimizer: bool = True) -> None:
        self.loss = loss
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4) if optimizer else None

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.module.zero_grad()
        loss = self.loss(*inputs)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def answers(self, loss: Tensor) -> list[Tensor]:
        """The loss and every gradient of the last call, copied."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return [loss.detach().clone(), *(g.clone() for g in grads)]


def step(text: str) -> None:
    print(f"{PROGRESS}{text}", flush=True)


def timed(run: Run, inputs: Sequence[Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    answer = run(*inputs)
    return time.perf_counter() - start, answer


def first_call(arm: Arm, workload: Workload) -> tuple[Run, float, list[Tensor]]:
    """The arm, seconds from nothing to its first answer, and what it answered (copied)."""
    # Copying weights for training isn't part of compiling, so it happens before the clock starts.
    own = workload
    if workload.training:
        own = dataclasses.replace(workload, module=copy.deepcopy(workload.module))
    start = time.perf_counter()
    compiled = arm.compile(own.module)
    run: Run = compiled
    if own.training:
        run = TrainingStep(compiled, own.module, own.optimizer)
    answer = run(*own.inputs[0])
    seconds = time.perf_counter() - start
    if isinstance(run, TrainingStep):
        return run, seconds, run.answers(answer)
    return run, seconds, [answer.clone()]


def settle(arm: Arm, run: Run, workload: Workload) -> float:
    """Seconds until nothing is left to be measured; a call is made where that needs one."""
    if not arm.is_fuseboard:
        return 0.0
    import fuseboard

    step(f"{arm.name}, settling")
    start = time.perf_counter()
    for _ in range(SETTLING_CALLS):
        if fuseboard.wait(progress=False):
            break
        run(*workload.inputs[0])
    return time.perf_counter() - start


def reference_answers(workload: Workload) -> list[Tensor] | None:
    """What the model answers in float64; None where an op has no float64."""
    module = verification.double(workload.module)
    inputs = verification.as_double(workload.inputs[0])
    try:
        if workload.training:
            run = TrainingStep(module, module, workload.optimizer)
            return run.answers(run(*inputs))
        return [module(*inputs)]
    except (NotImplementedError, RuntimeError) as error:
        step(f"no float64 reference, eager takes its place: {error}")
        return None


def warm_up(run: Run, inputs: list[tuple[Tensor, ...]], protocol: Protocol) -> tuple[float, bool]:
    """Calls until steady. Returns the median of the last calls in seconds, and whether steady."""
    calls: list[float] = []
    until = time.perf_counter() + protocol.warmup_s
    while True:
        calls.append(timed(run, inputs[len(calls) % len(inputs)])[0])
        steady = protocol.is_steady(calls)
        if steady or (len(calls) >= protocol.warmup_calls and time.perf_counter() > until):
            return statistics.median(calls[-protocol.warmup_window :]), steady


def measure_rounds(
    runs: dict[str, Run], inputs: list[tuple[Tensor, ...]], round_s: float, protocol: Protocol
) -> dict[str, list[float]]:
    """Seconds a call for every run, one figure a round; the order within a round is random.

    :param round_s: what a round with one call of each is expected to take.
    """
    burst = max(1, min(protocol.max_burst, math.ceil(protocol.burst_s * len(runs) / round_s)))
    order = random.Random(protocol.seed)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for done in range(protocol.max_rounds):
        elapsed = time.perf_counter() - began
        enough = done >= protocol.rounds and elapsed >= protocol.fill_s
        if enough or (done >= protocol.min_rounds and elapsed >= protocol.budget_s):
            break
        for name in order.sample(list(runs), len(runs)):
            run = runs[name]
            start = time.perf_counter()
            for call in range(burst):
                run(*inputs[(done + call) % len(inputs)])
            seconds[name].append((time.perf_counter() - start) / burst)
    return seconds


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without the garbage collector, whose pauses would fall on whoever runs at the time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def phase_full(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """First calls, verification, warm-up and the interleaved rounds of eager and one arm."""
    step("eager, first call")
    eager, eager_first_s, eager_answers = first_call(ARMS["eager"], workload)
    alone = arm.name == "eager"
    result: dict[str, Any] = {"eager_first_s": eager_first_s}
    runs = {"eager": eager}
    if not alone:
        step(f"{arm.name}, first call")
        runs["arm"], result["first_s"], answers = first_call(arm, workload)
        result["settle_s"] = settle(arm, runs["arm"], workload)
        step("float64 reference")
        reference = reference_answers(workload)
        result["reference"] = "eager" if reference is None else "float64"
        result["problem"] = verification.problem_with(answers, eager_answers, reference)
        del answers, reference
    del eager_answers
    with no_collection():
        step("warm-up")
        warm = {name: warm_up(run, workload.inputs, protocol) for name, run in runs.items()}
        result["steady"] = all(steady for _, steady in warm.values())
        step("rounds")
        round_s = sum(call_s for call_s, _ in warm.values())
        seconds = measure_rounds(runs, workload.inputs, round_s, protocol)
        inputs = workload.inputs
        arms_run = runs["eager" if alone else "arm"]
        result["guards_s"] = spans.guards_s(
            lambda i: arms_run(*inputs[i % len(inputs)]), GUARDED_CALLS
        )
    result["eager_s"] = seconds["eager"]
    result["arm_s"] = seconds["eager" if alone else "arm"]
    return result


def phase_first(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """One arm alone: its first call and the process's peak memory. Eager isn't run."""
    base_bytes = peak_bytes()
    step(f"{arm.name}, first call")
    run, first_s, _ = first_call(arm, workload)
    step("calls")
    for call in range(MEMORY_CALLS):
        run(*workload.inputs[call % len(workload.inputs)])
    return {"first_s": first_s, "peak_bytes": peak_bytes(), "model_peak_bytes": base_bytes}


def phase_compile(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """The parts of a first call, after a trivial compile that pays what any first compile pays.

    ``trivial_s``: imports, CPU feature checks, precompiled headers, helper processes.
    ``lowering_s``: the first call, less one like those that follow, Dynamo's part and AOTAutograd.
    """
    step(f"{arm.name}, a trivial compile")
    tiny = Workload(_Tiny(), [(torch.rand(64),)], workload.training, optimizer=False)
    _, trivial_s, _ = first_call(arm, tiny)
    if arm.is_fuseboard:
        forget_graphs()
    step(f"{arm.name}, first call")
    with spans.watched() as parts:
        run, first_s, _ = first_call(arm, workload)
    step("calls")
    calls = [timed(run, workload.inputs[i % len(workload.inputs)])[0] for i in range(MEMORY_CALLS)]
    call_s = statistics.median(calls)
    return {
        "trivial_s": trivial_s,
        "first_s": first_s,
        "call_s": call_s,
        "lowering_s": first_s - call_s - parts.dynamo_s - parts.aot_s,
        **dataclasses.asdict(parts),
    }


class _Tiny(nn.Module):
    """Pointwise, a reduction, one weight: shares no kernel with a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).cos().sum()


def phase_recompiles(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """How many graphs are compiled when batch sizes follow each other. For models of one input."""
    (template,) = workload.inputs[0]
    run = arm.compile(workload.module)
    graphs: list[int] = []
    for batch in PROBED_BATCHES:
        step(f"{arm.name}, batch {batch}")
        run(template[:1].expand(batch, *template.shape[1:]).contiguous())
        graphs.append(compiler_counts()["graphs"])
    return {"batches": list(PROBED_BATCHES), "graphs_after": graphs}


def phase_budget(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """A training step under memory budgets, and the gradients of the smallest against float64.

    By priority: every budget is measured with the same backends.
    """
    import fuseboard

    step("eager, first call")
    _, _, eager = first_call(ARMS["eager"], workload)
    step("float64 reference")
    reference = reference_answers(workload)
    step(f"{arm.name}, budget {BUDGETS[-1]}")
    with fuseboard.settings(memory_budget=BUDGETS[-1], policy="priority"):
        _, _, answers = first_call(arm, workload)
    problem = verification.problem_with(answers, eager, reference)
    del eager, reference, answers
    step("budgets")
    with fuseboard.settings(policy="priority"):
        points = fuseboard.measure_memory(
            arm.compile(workload.module), workload.inputs[0], BUDGETS, loss=lambda loss: loss
        )
    return {"points": [point.as_dict() for point in points], "problem": problem}


def phase_sampled(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """Blocks of calls with and without a sampling session, in turn."""
    step(f"{arm.name}, first call")
    run, _, _ = first_call(arm, workload)
    settle(arm, run, workload)
    sessions = sampling.Sessions()
    with no_collection():
        step("warm-up")
        call_s, steady = warm_up(run, workload.inputs, protocol)
        step("blocks")
        seconds = sampling.measure_blocks(run, workload.inputs, call_s, protocol, sessions)
    return {"seconds": seconds, "samples": sessions.samples, "steady": steady}


def peak_bytes() -> int:
    """The process's ``ru_maxrss``, in bytes (kibibytes on Linux, bytes on macOS).

    On Linux it starts from the parent's at the time of the start; the parent stays well below a
    process that has imported torch.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def phase_tuned(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """Calls from the first on until the choice is made. Eager runs before."""
    step("eager")
    eager, _, _ = first_call(ARMS["eager"], workload)
    eager_s, _ = warm_up(eager, workload.inputs, protocol)
    result: dict[str, Any] = {"eager_s": eager_s, "eager_peak_bytes": peak_bytes()}
    step(f"{arm.name}, calls until settled")
    result |= tuning.watch_settling(arm.compile(workload.module), workload.inputs)
    return result | {
        "peak_bytes": peak_bytes(),
        "child_peak_bytes": tuning.child_peak_bytes(),
    }


def phase_runner(arm: Arm, workload: Workload, protocol: Protocol) -> dict[str, Any]:
    """Calls of what was compiled, and of the winner without the runner around it."""
    step(f"{arm.name}, first call")
    with tuning.runners() as (made, given):
        run, _, _ = first_call(arm, workload)
    settle(arm, run, workload)
    step("rounds")
    with no_collection():
        return {"seconds": tuning.time_runner(run, workload.inputs, made, given)}


PHASES = {
    "full": phase_full,
    "first": phase_first,
    "compile": phase_compile,
    "recompiles": phase_recompiles,
    "budget": phase_budget,
    "sampled": phase_sampled,
    "tuned": phase_tuned,
    "runner": phase_runner,
}


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one request."""
    torch.set_num_threads(request["threads"])
    torch.set_num_interop_threads(1)
    arm = ARMS[request["arm"]]
    step("model")
    workload = MODELS[request["model"]].build()
    protocol = Protocol(**request["protocol"])
    with torch.set_grad_enabled(workload.training):
        result = PHASES[request["phase"]](arm, workload, protocol)
    result["load"] = os.getloadavg()[0]
    if not arm.is_eager:
        result["dynamo"] = compiler_counts()
    if arm.is_fuseboard:
        result["board"] = board_notes()
    return result


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    try:
        result = serve(request)
    except Exception as error:
        # The first lines say what happened; torch ends its messages with advice.
        lines = [line for line in str(error).splitlines() if line.strip()][:2]
        failure = f"{type(error).__name__}: {' '.join(lines)}"
        Path(result_path).write_text(json.dumps({"failure": failure}))
        raise
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
