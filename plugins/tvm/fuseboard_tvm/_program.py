"""From values to a compiled module: kernels and calls in one Relax function, then machine code."""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import relax

from fuseboard_tvm import _calls, _engine, _kernels
from fuseboard_tvm._fusion import Group, Kernel, plan, sources
from fuseboard_tvm._graph import Program
from fuseboard_tvm._values import Extern, Item, Value


def build(program: Program, threads: int) -> tuple[Any, list[int]]:
    """A Relax module whose ``main`` takes the inputs at the positions that come with it."""
    groups = plan(program.results)
    roots = _roots(groups, program)
    used = [value for value in program.inputs if value in _read(groups, roots)]
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(f"x{number}", relax.TensorType(value.shape, value.dtype))
        for number, value in enumerate(used)
    ]
    known = _Items(zip(used, parameters, strict=True))
    with builder.function("main", parameters):
        with builder.dataflow():
            for group in groups:
                if isinstance(group, Kernel):
                    _emit_kernel(builder, group, roots, known, threads)
                else:
                    _emit_call(builder, group, known)
            results = [known[value] for value in program.results]
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)
    return builder.get(), [value.position for value in used]


def _roots(groups: list[Group], program: Program) -> set[Value]:
    roots: set[Value] = set(program.inputs)
    pending: list[Value] = list(program.results)
    for group in groups:
        if isinstance(group, Kernel):
            roots.update(group.members)
            pending.extend(group.members)
        else:
            roots.add(group)
            pending.extend(group.inputs)
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            if isinstance(value, Item):
                roots.add(value)
            pending.extend(value.inputs)
    return roots


def _read(groups: list[Group], roots: set[Value]) -> set[Value]:
    found: set[Value] = set()
    for group in groups:
        if isinstance(group, Extern):
            found.update(group.inputs)
        else:
            for member in group.members:
                found |= sources(member, roots)
    return found


def _type(value: Value) -> Any:
    return relax.TensorType(value.shape, value.dtype)


def _emit_kernel(
    builder: Any, kernel: Kernel, roots: set[Value], known: dict[Value, Any], threads: int
) -> None:
    function, reads = _kernels.write(kernel, roots, threads)
    name = builder.add_func(function, "kernel")
    types = [_type(value) for value in kernel.stored]
    arguments = [known[value] for value in reads]
    made = builder.emit(relax.call_tir(name, arguments, types if len(types) > 1 else types[0]))
    if len(types) == 1:
        known[kernel.stored[0]] = made
        return
    for number, value in enumerate(kernel.stored):
        known[value] = builder.emit(relax.TupleGetItem(made, number))


def _emit_call(builder: Any, extern: Extern, known: dict[Value, Any]) -> None:
    """The results are entered for the extern itself: items look there."""
    into = extern.spec["out"]
    text = tvm.ir.StringImm(_calls.text_of(extern.spec))
    arguments = [known[value] for value in extern.inputs]
    types = [relax.TensorType(*result) for result in extern.results if result is not None]
    if into:
        call = relax.call_dps_packed(_calls.CALL_INTO, [text, *arguments], types[0])
        _enter(extern, [builder.emit(call)], known)
        return
    single = len(extern.results) == 1
    kind = types[0] if single else relax.TupleType(types)
    made = builder.emit(relax.op.call_pure_packed(_calls.CALL, text, *arguments, ty_args=kind))
    if single:
        _enter(extern, [made], known)
    else:
        parts = [builder.emit(relax.TupleGetItem(made, place)) for place in range(len(types))]
        _enter(extern, parts, known)


class _Items(dict[Any, Any]):
    """Relax variables by value; an item is looked up by its call and number."""

    def __missing__(self, value: Value) -> Any:
        if isinstance(value, Item):
            return self[(value.inputs[0], value.number)]
        raise KeyError(value)


def _enter(extern: Extern, made: list[Any], known: dict[Any, Any]) -> None:
    numbers = [place for place, result in enumerate(extern.results) if result is not None]
    for place, one in zip(numbers, made, strict=True):
        known[(extern, place)] = one


def _passes() -> Any:
    t = relax.transform
    return tvm.transform.Sequential(
        [
            t.ToNonDataflow(),
            t.RemovePurityChecking(),
            t.CallTIRRewrite(),
            t.StaticPlanBlockMemory(),
            t.LowerAllocTensor(),
            t.KillAfterLastUse(),
            t.LowerRuntimeBuiltin(),
            t.ComputePrimValue(),
            t.VMShapeLower(),
            t.AttachGlobalSymbol(),
        ]
    )


PIPELINE = "fuseboard"


@functools.cache
def register_pipeline() -> None:
    """What turns loops into LLVM's input. Kernels are written as loops, so nothing is scheduled,
    and the passes for that are left out.
    """
    from tvm.tirx import compilation_pipeline

    def factory() -> Any:
        t = tvm.tirx.transform
        passes = [
            t.FlattenBuffer(),
            t.VectorizeLoop(True),
            t.UnrollLoop(),
            t.StmtSimplify(),
            t.AnnotateEntryFunc(),
            t.SplitHostDevice(),
            t.MakePackedAPI(),
            # Checks of arguments are most of a small kernel's code. Relax made these arguments, and
            # what a region is given is looked at before (fuseboard_tvm/_runtime.py).
            t.SkipAssert(),
        ]
        last = compilation_pipeline.finalize_host_passes
        return tvm.transform.Sequential(passes), last, compilation_pipeline.finalize_device_passes

    compilation_pipeline.register_tir_pipeline(PIPELINE, factory)


def compile_module(module: Any, threads: int) -> Any:
    """Machine code for this processor."""
    register_pipeline()
    return tvm.compile(
        module,
        target=_engine.target(threads),
        relax_pipeline=_passes(),
        tir_pipeline=PIPELINE,
    )
