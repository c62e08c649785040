"""MetaSchedule's evolutionary search over a workload's schedules, within a budget.

Candidates are compiled and timed in this process, one after another: an interrupt ends a search at
once, and its budget is exceeded by one trial at most. MetaSchedule's own builder and runner would
start processes for each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.tirx import AllocBuffer, For, SeqStmt

from fuseboard_tvm import _program
from fuseboard_tvm._loops import allocated
from fuseboard_tvm._spaces import space
from fuseboard_tvm._workloads import Workload

#: Trials without a gain of 1% after which a search ends.
PATIENCE = 64
#: Candidates that are made at a time.
BATCH = 16
#: A candidate within this factor of the best so far is timed more than once.
NEAR = 1.5
FAILED_S = 1e10
INTRINSICS = "tvm.s_tir.tensor_intrin"


@dataclass(frozen=True)
class Found:
    """The best schedule.

    :ivar trace: as JSON values; None where no candidate could be compiled and run.
    """

    trace: Any
    call: Callable[..., Any] | None
    trials: int
    seconds: float


def search(
    workload: Workload, seconds: float, tensors: Sequence[torch.Tensor], target: Any
) -> Found:
    """Try schedules on tensors, the result's last, for about ``seconds``."""
    begun = time.monotonic()
    context, database, entry = _context(workload, target)
    given = [tvm.runtime.from_dlpack(tensor) for tensor in tensors]
    best_s, best, trials, last_gain = FAILED_S, None, 0, 0
    try:
        while candidates := context.generate_measure_candidates():
            results = []
            for candidate in candidates:
                if time.monotonic() - begun > seconds or trials - last_gain > PATIENCE:
                    break
                took_s, call = _try(candidate.sch.mod, given, best_s, target)
                trials += 1
                record = ms.database.TuningRecord(
                    candidate.sch.trace, entry, [took_s], target, candidate.args_info
                )
                database.commit_tuning_record(record)
                results.append(ms.runner.RunnerResult([took_s], None))
                if took_s < best_s:
                    last_gain = trials if took_s < 0.99 * best_s else last_gain
                    best_s, best = took_s, (candidate.sch.trace, call)
            if len(results) < len(candidates):
                break
            context.notify_runner_results(candidates, results)
    finally:
        context.post_tuning()
    spent = time.monotonic() - begun
    if best is None:
        return Found(None, None, trials, spent)
    return Found(_plain(best[0].as_json()), best[1], trials, spent)


def _context(workload: Workload, target: Any) -> tuple[Any, Any, Any]:
    """A search that is ready to begin, with its database and the workload's entry there."""
    module = tvm.IRModule({"main": workload.function})
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=24, init_measured_ratio=0.5, init_min_unmeasured=8, genetic_num_iters=1
    )
    generator = ms.space_generator.ScheduleFn(
        space(workload),
        sch_rules=[],
        postprocs=[],
        mutator_probs={ms.mutator.MutateTileSize(): 0.9},
    )
    with _without_intrinsics():
        context = ms.TuneContext(
            module,
            target=target,
            space_generator=generator,
            search_strategy=strategy,
            rand_state=1,
            num_threads=1,
        )
    database = ms.database.MemoryDatabase()
    context.pre_tuning(
        max_trials=1 << 20,
        num_trials_per_iter=BATCH,
        design_spaces=context.generate_design_space(),
        database=database,
        cost_model=ms.cost_model.RandomModel(),
    )
    return context, database, database.commit_workload(module)


@contextmanager
def _without_intrinsics() -> Iterator[None]:
    """A context imports those of GPUs as well, which takes a minute; these spaces need none."""
    if INTRINSICS in sys.modules:
        yield
        return
    sys.modules[INTRINSICS] = ModuleType(INTRINSICS)
    try:
        yield
    finally:
        del sys.modules[INTRINSICS]


def _try(
    module: Any, given: Sequence[Any], best_s: float, target: Any
) -> tuple[float, Callable[..., Any] | None]:
    """Seconds of a call, and the function; a candidate that fails is never the best."""
    try:
        call = tvm.compile(lowered(module), target=target, tir_pipeline=_program.PIPELINE)["main"]
        call(*given)
        took_s = _timed(call, given)
        if took_s < NEAR * best_s:
            took_s = min(took_s, *(_timed(call, given) for _ in range(3)))
    except (RuntimeError, ValueError, TypeError):  # whatever TVM raises for a schedule
        return FAILED_S, None
    return took_s, call


def _timed(call: Callable[..., Any], given: Sequence[Any]) -> float:
    begun = time.perf_counter()
    call(*given)
    return time.perf_counter() - begun


def scheduled(workload: Workload, trace: Any) -> Any:
    """The function under a trace, as loops.

    :raises ValueError: the trace isn't one of this workload's.
    """
    schedule = s_tir.Schedule(tvm.IRModule({"main": workload.function}))
    try:
        s_tir.schedule.Trace.apply_json_to_schedule(trace, schedule)
    except (RuntimeError, ValueError, TypeError) as error:  # whatever TVM raises for it
        raise ValueError(f"its record can't be applied: {error}") from error
    return lowered(schedule.mod)["main"]


def lowered(module: Any) -> Any:
    """A schedule's blocks as plain loops, as :data:`fuseboard_tvm._program.PIPELINE` takes them."""
    t = s_tir.transform
    passes = [
        t.CanonicalizeLoop(),
        t.LowerInitBlock(),
        t.PlanAndUpdateBufferAllocationLocation(),
        t.ConvertBlocksToOpaque(),
        t.CompactBufferAllocation(),
        t.LowerMatchBuffer(),
        t.LowerOpaqueBlock(),
        tvm.tirx.transform.StmtSimplify(),
    ]
    function = tvm.transform.Sequential(passes)(module)["main"]
    return tvm.IRModule({"main": function.with_body(_in_registers(function.body))})


def _in_registers(statement: Any) -> Any:
    """The same with tiles on the stack, from where LLVM takes them into registers."""
    if isinstance(statement, SeqStmt):
        return SeqStmt([_in_registers(one) for one in statement])
    if isinstance(statement, For):
        body = _in_registers(statement.body)
        loop, extent = statement.loop_var, statement.extent
        return For(loop, statement.min, extent, statement.kind, body, None, statement.annotations)
    if isinstance(statement, AllocBuffer) and statement.buffer.scope() == "local":
        return allocated(statement.buffer)
    return statement


def _plain(value: Any) -> Any:
    """TVM's containers as Python's."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float) or value is None:
        return value
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    if hasattr(value, "items"):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value]
