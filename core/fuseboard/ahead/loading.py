"""Load a package: check it, make its program again, compile nothing."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any, Literal

import torch

from fuseboard.ahead import origin, weights
from fuseboard.ahead.file import PackageFile
from fuseboard.ahead.program import CompiledPackage, Interface, PackagedModel, PackedProgram
from fuseboard.board import board
from fuseboard.contracts import Boxed
from fuseboard.errors import LoweringError, PackageError, containable
from fuseboard.pipeline.graph_call import GraphCall
from fuseboard.run.captured_graph import CapturedGraph
from fuseboard.run.failure import describe
from fuseboard.torch_api import exports
from fuseboard.torch_api.dynamo_graphs import tracing_apart
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.views import eager_strides
from fuseboard.workshop.carried import Graphs, run_carried


def load(
    path: str | Path, *, trust: bool = False, fallback: Literal["compile"] | None = None
) -> PackagedModel | CompiledPackage:
    """The model in a package; nothing is traced or compiled.

    The file is mapped, and has to stay as it is for as long as the model lives.

    :param trust: load a file that others than this user may have written. A package holds pickled
        objects, and may hold libraries: they run with the rights of this process.
    :param fallback: ``"compile"``: where the program doesn't fit this torch, machine or set of
        plugins, compile the exported model by ``torch.compile(backend="fuseboard")`` instead.
    :raises PackageError: it is damaged, isn't trusted, or doesn't fit; the text says what differs.
    """
    if fallback not in (None, "compile"):
        raise ValueError(f"fallback={fallback!r}: allowed are None and 'compile'")
    file = PackageFile(Path(path).absolute(), trust)
    try:
        return _model(file)
    except PackageError as error:
        if fallback is None:
            raise PackageError(
                error.kind,
                f"{error}. Package the model again here, or load it with fallback='compile', which "
                "compiles the exported model",
            ) from error
    return _compiled(file)


def make_model(path: Path) -> PackagedModel:
    """The model in a package of this process's own.

    :raises PackageError: it can't be made.
    """
    return _model(PackageFile(path, trust=True))


def _model(file: PackageFile) -> PackagedModel:
    """
    :raises PackageError: it can't be made here.
    """
    manifest, name = file.manifest, repr(str(file.path))
    if problem := origin.why_other_machine(manifest["machine"]):
        raise PackageError("machine", f"{name} was made elsewhere; here is {problem}")
    if problem := origin.why_no_plugins(manifest["plugins"]):
        raise PackageError("plugins", f"{name} needs what isn't here: {problem}")
    _import(file)
    interface = _interface(file)
    with StateGuard(), torch.inference_mode(False), torch.no_grad(), eager_strides():
        held = weights.read(
            file.member("weights.safetensors"), file.returned("weights.safetensors")
        )
        try:
            program: PackedProgram = pickle.loads(file.member("program.pkl"))
            session = board.session(program.settings)
            if problem := origin.why_other_plugins(session, manifest["plugins"]):
                raise PackageError("plugins", f"{name}: {problem} than where it was made")
            run = _run(program, interface, held)
        except PackageError:
            raise
        except containable() as error:  # of plugins, or of objects that are made from bytes
            raise PackageError("program", f"{name} can't be loaded: {describe(error)}") from error
    return PackagedModel(interface, run, held, program.condition, manifest)


def _import(file: PackageFile) -> None:
    for module in file.manifest["op_modules"]:
        try:
            importlib.import_module(module)
        except containable() as error:
            raise PackageError(
                "plugins",
                f"{str(file.path)!r} has ops of the module {module!r}, which can't be imported: "
                f"{describe(error)}",
            ) from error


def _interface(file: PackageFile) -> Interface:
    try:
        with exports.quiet():
            return pickle.loads(file.member("interface.pkl"))  # type: ignore[no-any-return]
    except containable() as error:
        raise PackageError(
            "program", f"{str(file.path)!r}: its signature can't be read: {describe(error)}"
        ) from error


def _run(program: PackedProgram, interface: Interface, held: dict[str, torch.Tensor]) -> Boxed:
    """What runs the graph.

    :raises LoweringError, Deferred, NotCarried: a region can't be made from its artifact.
    """
    session, carried = board.session(program.settings), program.graph
    graphs = Graphs(program.condition)
    read = graphs.reader(carried.captured)
    captured = CapturedGraph(read, "captured_inference")
    if carried.fused is not None:
        captured.compiled_graph = graphs.read(carried.fused)
    call = GraphCall(session, captured.compiled_graph, f"package of {carried.report.frame}")
    call.captured_graphs.append(captured)
    trips = len(carried.report.trips)
    inputs: list[Any] = [*interface.symbols, *held.values()]
    with tracing_apart(()):
        count = len(captured.compiled_graph.graph.find_nodes(op="placeholder"))
        padded = [*inputs, *[None] * (count - len(inputs))]
        run_carried(call, carried, padded, graphs, program.artifacts)
    (runner,) = call.pipeline.runners
    if len(runner.report.trips) > trips:
        trip = runner.report.trips[trips]
        raise LoweringError(f"{trip.plugin} couldn't load its part: {trip.error}")
    return captured.boxed()


def _compiled(file: PackageFile) -> CompiledPackage:
    if why := file.manifest.get("no_fallback"):
        raise PackageError(
            "program",
            f"{str(file.path)!r} can't be compiled either: it has no exported model: {why}",
        )
    _import(file)
    interface = _interface(file)
    with torch.inference_mode(False):
        held = weights.read(
            file.member("weights.safetensors"), file.returned("weights.safetensors")
        )
        try:
            model = exports.from_bytes(bytes(file.member("exported.pt2")), held)
        except containable() as error:
            raise PackageError(
                "program",
                f"{str(file.path)!r} can't be compiled either: this torch can't read the exported "
                f"model: {describe(error)}",
            ) from error
    compiled = torch.compile(model, backend="fuseboard")
    return CompiledPackage(interface.signature, compiled, file.manifest)
