"""Lower a region, and load one that was stored."""

from __future__ import annotations

import torch

import fuseboard
from fuseboard_tvm import _artifact, _decompose, _graph, _program, _runtime, _torch_internals


def lower_region(region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """Compile a region for this processor and torch's number of threads.

    :raises LoweringError: an op that a decomposition left isn't in the op layer.
    """
    graph = fuseboard.decompose(region.graph, _decompose.table())
    graph.graph.eliminate_dead_code()
    threads = torch.get_num_threads()
    with _torch_internals.real_tensors():
        program = _graph.read(graph)
        stored = _compiled(program, threads)
        problem = _artifact.why_not_stored()
        artifact = None
        if not problem:  # what is run is the library: LLVM makes machine code once that way
            artifact = _artifact.pack(stored)
            stored = _artifact.unpack(artifact)
        call = _runtime.Call(stored, threads, artifact)
    notes = (problem,) if problem else ()
    return fuseboard.LoweredRegion(call=call, notes=notes, artifact=artifact)


def load_call(artifact: bytes) -> _runtime.Call:
    """The same from what an earlier process compiled."""
    with _torch_internals.real_tensors():
        stored = _artifact.unpack(artifact)
        return _runtime.Call(stored, torch.get_num_threads(), artifact)


def _compiled(program: _graph.Program, threads: int) -> _artifact.Stored:
    executable, given = None, []
    if program.results:
        module, used = _program.build(program, threads)
        executable = _program.compile_module(module, threads)
        given = [program.given[position] for position in used]
    return _artifact.Stored(executable, given, program.outputs, program.constants)
