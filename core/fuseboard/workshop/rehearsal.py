"""Compile a graph in the workshop, and call it until its candidates are decided between."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fuseboard.board import board, register
from fuseboard.capture.side_runs import CannotCompare
from fuseboard.errors import containable
from fuseboard.lower.guards import keeping_sizes
from fuseboard.report.data import GraphReport, ledger
from fuseboard.run.failure import describe
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.bundles import bundling
from fuseboard.torch_api.custom_ops import MAIN
from fuseboard.torch_api.dynamo_graphs import graph_from_bytes
from fuseboard.torch_api.op_definitions import define
from fuseboard.torch_api.state import ANSWER_PARTS
from fuseboard.workshop.carried import NotCarried, pack
from fuseboard.workshop.compiling import CompiledApart, compile_apart
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.tensors import read_inputs

#: Calls after which a graph is left as it is: forward and backward are decided one after the other,
#: and then whether both together beat Dynamo's graph.
_CALLS = 8


def answer(request: Request, directory: Path) -> Answer:
    """Try the candidates for a graph on a call's real inputs."""
    sys.path[:] = request.paths  # which the program may have added to since this process began
    for module in request.op_modules:  # whose code isn't to run in the call's surroundings
        try:
            if module == MAIN:
                _run_main(request.main_file or "")
            else:
                importlib.import_module(module)
        except containable() as error:
            why = f"another process can't import {module}, which defines an op: {describe(error)}"
            return Answer(problem=why, only_here=True)
    try:
        _define(request.op_definitions)
    except containable() as error:
        why = f"another process can't define an op of the program's: {describe(error)}"
        return Answer(problem=why, only_here=True)
    with _surroundings(request):
        for module, name in request.modules:
            _register(module, name)
        session = board.session(request.settings)
        try:
            graph = graph_from_bytes(request.graph, request.static)
        except Exception as error:  # whatever the objects in a graph raise
            why = f"another process can't read the graph: {describe(error)}"
            return Answer(problem=why, only_here=True)
        (directory / "started").touch()
        inputs = read_inputs(request.inputs, directory)
        with ledger.collect() as reports, keeping_sizes():
            with bundling() as bundled:
                apart = compile_apart(
                    session,
                    graph,
                    inputs,
                    request.sizes,
                    request.frame,
                    request.pins,
                    bundled,
                )
            if apart.problem:
                return Answer(problem=apart.problem)
            return _rehearse(apart, inputs, reports)


#: What the program's script defines: ops go with the ``torch.library.Library`` that has them.
_mains: dict[str, dict[str, Any]] = {}


def _run_main(file: str) -> None:
    """Have what the program's script defines, which begins only under its own name."""
    if file not in _mains:
        _mains[file] = runpy.run_path(file, run_name="__mp_main__")


_defined: set[bytes] = set()


def _define(ops: bytes) -> None:
    if ops and ops not in _defined:
        define(ops)
        _defined.add(ops)


_registered: set[str] = set()


def _register(module: str, name: str) -> None:
    if name not in _registered:
        register(importlib.import_module(module), name)
        _registered.add(name)


@contextmanager
def _surroundings(request: Request) -> Iterator[None]:
    """What the results of the call depend on; in this process nothing else does."""
    for part in ANSWER_PARTS:
        if part.name in request.state and part.read() != request.state[part.name]:
            part.write(request.state[part.name])
    grads, inference = request.modes
    with torch.inference_mode(inference), torch.set_grad_enabled(grads):
        yield


def _rehearse(
    apart: CompiledApart, inputs: Sequence[Any], reports: Sequence[GraphReport]
) -> Answer:
    compiled = apart.compiled
    if compiled.is_dynamo_graph:
        return Answer(dynamo_wins=True, reports=tuple(reports))
    try:
        make_call = compiled.capture_check().calls_of(inputs)
    except CannotCompare as why:
        return Answer(problem=f"its calls can't be made again: {why}", only_here=True)
    for number in range(_CALLS):
        unwatched = torch_internals.first_call_unwatched() if number == 0 else nullcontext()
        try:
            with unwatched:
                make_call()
        except (
            containable()
        ) as error:  # what is compiled has been held against eager: the user's own
            return Answer(problem=f"the call raises {describe(error)}", again=True)
        if compiled.is_decided():
            break
    if compiled.dynamo_wins():
        return Answer(dynamo_wins=True, reports=tuple(reports))
    try:
        spreads = compiled.capture_check().spreads_as_it_runs(inputs)
        program = pack(compiled, spreads, apart.condition)
        return Answer(reports=tuple(reports), program=program)
    except NotCarried as why:
        return Answer(problem=f"what was chosen can't be sent: {why}", only_here=True)
