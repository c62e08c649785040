"""Tuned kernels in place of torch's: which are searched for, which are used, and their records."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

import fuseboard
from fuseboard_tvm import _calls, _engine, _program, _search, _spaces
from fuseboard_tvm._values import Extern, Value
from fuseboard_tvm._workloads import EPSILON, Tuned, Workload, workload_of

#: A kernel is used only if it is faster than torch's by this factor.
MARGIN = 1.03
ROUNDS = 15
#: Seconds that the calls of one round take at least.
ROUND_S = 0.002


@dataclass(frozen=True)
class Record:
    """What a search found, for later processes.

    :ivar trace: MetaSchedule's, as JSON values; None where torch's own kernel stays.
    :ivar tuned_us: microseconds of a call of the best kernel that there was.
    :ivar torch_us: those of torch's.
    :ivar problem: why torch's own kernel stays; "" if it doesn't.
    """

    trace: Any
    tuned_us: float
    torch_us: float
    trials: int
    seconds: float
    problem: str = ""


def tuned_kernels(
    results: Iterable[Value],
    seconds: float,
    records: fuseboard.TuningRecords | None,
    threads: int,
) -> tuple[dict[Extern, Tuned], list[str]]:
    """Kernels for the calls of a region that are faster than torch's, and notes for the report.

    Calls with a record cost no search; the others share ``seconds`` evenly. Where TVM can't search,
    they run by torch.
    """
    calls: dict[str, list[tuple[Extern, Workload]]] = {}
    for extern in _externs(results):
        if (workload := workload_of(extern)) is not None:
            calls.setdefault(workload.key, []).append((extern, workload))
    end = time.monotonic() + seconds
    kernels: dict[Extern, Tuned] = {}
    notes = []
    known = {key: _known(records, key, threads) for key in calls}
    waiting = sum(record is None for record in known.values())
    reason = _engine.why_no_tuning()
    for key, same in calls.items():
        record, how = known[key], "from an earlier search"
        title = same[0][1].title
        if record is None and reason:
            notes.append(f"{title} isn't tuned: {reason}")
            continue
        if record is None:
            share = (end - time.monotonic()) / waiting
            waiting -= 1
            record = _searched(*same[0], share, threads) if share > 0 else None
            if record is None:
                notes.append(f"{title} isn't tuned: tune_seconds = {seconds:g} didn't reach it")
                continue
            how = f"{record.trials} trials in {record.seconds:.1f} s"
            if records is not None:
                records.put(_name(key, threads), json.dumps(dataclasses.asdict(record)).encode())
        told = f"{title}: {record.tuned_us:.0f} us tuned, {record.torch_us:.0f} us by torch, {how}"
        notes.append(f"{told}; {record.problem}" if record.problem else told)
        if record.trace is not None:
            for extern, workload in same:
                try:
                    function = _search.scheduled(workload, record.trace)
                except ValueError as error:  # a record that was damaged, or is another's
                    notes.append(f"{title} isn't tuned: {error}")
                    break
                kernels[extern] = Tuned(workload, function)
    return kernels, notes


def _externs(results: Iterable[Value]) -> list[Extern]:
    """The calls that results depend on, in an order that depends on the graph alone."""
    seen: dict[Value, None] = {}
    pending = list(results)
    while pending:
        value = pending.pop()
        if value not in seen:
            seen[value] = None
            pending.extend(value.inputs)
    return [value for value in seen if isinstance(value, Extern)]


# --- records -------------------------------------------------------------------------------------


def _name(key: str, threads: int) -> str:
    """A record's key: what makes another schedule the fastest, or a trace mean something else."""
    target = _engine.target(threads).export()
    return f"{_engine.TVM.version} {_spaces.VERSION} {target['mcpu']} {threads} {key}"


def _known(records: fuseboard.TuningRecords | None, key: str, threads: int) -> Record | None:
    value = None if records is None else records.get(_name(key, threads))
    if value is None:
        return None
    try:
        record = Record(**json.loads(value))
    except (ValueError, TypeError):  # of another version, or damaged: searched for again
        return None
    numbers = record.tuned_us, record.torch_us, record.trials, record.seconds
    return record if all(isinstance(one, int | float) for one in numbers) else None


# --- one call ------------------------------------------------------------------------------------


def _searched(extern: Extern, workload: Workload, seconds: float, threads: int) -> Record | None:
    """Search, then hold the best against torch's kernel: values and time."""
    _program.register_pipeline()
    _engine.start_workers(threads)
    tensors = _tensors(extern)
    places = zip(workload.operands, workload.shapes, strict=True)
    given = [tensors[place].view(shape) for place, shape in places]
    result = extern.results[0]
    assert result is not None
    out = torch.empty(result[0], dtype=tensors[0].dtype, device="cpu")
    found = _search.search(workload, seconds, [*given, out], _engine.target(threads))
    if found.call is None:
        return None
    call, handles = found.call, [tvm.runtime.from_dlpack(tensor) for tensor in (*given, out)]
    call(*handles)
    right = _is_right(extern, workload, tensors, out)
    tuned_us, torch_us, ratio = _compared(lambda: call(*handles), _torch_call(extern, tensors, out))
    problem = ""
    if not right:
        problem = "its values are wrong, so torch's stays"
    elif ratio < MARGIN:
        problem = "torch's stays"
    trace = None if problem else found.trace
    return Record(trace, tuned_us, torch_us, found.trials, found.seconds, problem)


def _tensors(extern: Extern) -> list[torch.Tensor]:
    """Made-up values for what a call reads."""
    source = torch.Generator().manual_seed(0)
    return [
        torch.randn(one.shape, dtype=getattr(torch, one.dtype), generator=source, device="cpu")
        for one in extern.inputs
    ]


def _is_right(
    extern: Extern, workload: Workload, tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> bool:
    """Whether each element is within what rounding can do to a sum, in whatever order it is taken.

    That is terms x eps x the sum of absolute values (N. Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1); two more for a bias.
    """
    exact, size = (
        _calls.result(extern.spec, [change(one.double()) for one in tensors])
        for change in (torch.clone, torch.abs)
    )
    allowed = (workload.terms + 2) * EPSILON[workload.dtype] * size
    return bool(((out.double() - exact).abs() <= allowed).all())


def _torch_call(
    extern: Extern, tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> Callable[[], Any]:
    """What would run without tuning."""
    text = _calls.text_of(extern.spec)
    handles = [tvm.runtime.from_dlpack(tensor) for tensor in tensors]
    if not extern.spec["out"]:
        return lambda: _calls.run(text, *handles)
    into = tvm.runtime.from_dlpack(out)
    return lambda: _calls.run_into(text, *handles, into)


def _compared(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float, float]:
    """Microseconds of each, in turn, and the median of the other's by the one's."""
    one(), other()
    begun = time.perf_counter()
    one()
    calls = max(1, int(ROUND_S / max(time.perf_counter() - begun, 1e-7)))
    pairs = [(_took_us(one, calls), _took_us(other, calls)) for _ in range(ROUNDS)]
    first, second = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    return statistics.median(first), statistics.median(second), ratio


def _took_us(call: Callable[[], Any], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6
