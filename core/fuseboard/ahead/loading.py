"""Load a package: check it, make its program again, compile nothing.

Nothing is imported that a call doesn't need: no tracer, no compiler, no plugin but those whose code
is in the package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fuseboard.ahead import origin, weights
from fuseboard.ahead.file import PackageFile
from fuseboard.ahead.program import CompiledPackage, Interface, PackagedModel, PackedProgram
from fuseboard.errors import PackageError, containable, error_text
from fuseboard.run import portable
from fuseboard.torch_api.state import StateGuard

log = logging.getLogger("fuseboard")


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
        log.warning("fuseboard: %s; the exported model is compiled instead", error)
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
    with StateGuard(), torch.inference_mode(False), torch.no_grad():
        if problem := origin.why_other_plugins(manifest["plugins"]):
            raise PackageError("plugins", f"{name} needs what isn't here: {problem}")
        _import_ops(file)
        interface: Interface = _unpickled(file, "interface.pkl")
        held = _weights(file)
        program: PackedProgram = _unpickled(file, "program.pkl")
        eager: Callable[[], Any] = partial(_unpickled, file, "eager.pkl")
        try:
            return PackagedModel(interface, program, held, manifest, eager)
        except containable() as error:  # of plugins, which prepare weights
            raise PackageError("program", f"{name} can't be loaded: {error_text(error)}") from error


def _import_ops(file: PackageFile) -> None:
    for module in file.manifest["op_modules"]:
        try:
            origin.imported(module)
        except PackageError as error:
            raise PackageError(
                "plugins", f"{str(file.path)!r} has ops of the module {module!r}, which {error}"
            ) from error


def _unpickled(file: PackageFile, member: str) -> Any:
    try:
        return portable.from_bytes(file.member(member))
    except containable() as error:  # whatever the code of the objects in it raises
        raise PackageError(
            "program", f"{str(file.path)!r}: {member} can't be read here: {error_text(error)}"
        ) from error


def _weights(file: PackageFile) -> dict[str, torch.Tensor]:
    name = "weights.safetensors"
    return weights.read(file.member(name), file.returned(name))


def _compiled(file: PackageFile) -> CompiledPackage:
    from fuseboard.torch_api import exports

    if why := file.manifest.get("no_fallback"):
        raise PackageError(
            "program",
            f"{str(file.path)!r} can't be compiled either: it has no exported model: {why}",
        )
    _import_ops(file)
    interface: Interface = _unpickled(file, "interface.pkl")
    with torch.inference_mode(False):
        try:
            model = exports.from_bytes(bytes(file.member("exported.pt2")), _weights(file))
        except containable() as error:
            raise PackageError(
                "program",
                f"{str(file.path)!r} can't be compiled either: this torch can't read the exported "
                f"model: {error_text(error)}",
            ) from error
    compiled = torch.compile(model, backend="fuseboard")
    return CompiledPackage(interface.signature, compiled, file.manifest)
