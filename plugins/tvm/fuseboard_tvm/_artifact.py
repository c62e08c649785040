"""A compiled region as bytes: its library, and what is done around a call of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tvm

from fuseboard_tvm._graph import Given, Output, Place


@dataclass(frozen=True)
class Stored:
    """What a call needs, apart from the number of threads.

    :ivar executable: None where nothing is computed, as in a region of views.
    """

    executable: Any
    given: Sequence[Given]
    outputs: Sequence[Output]
    constants: Sequence[torch.Tensor]


def why_not_stored() -> str:
    """Why no library can be written; "" if it can. TVM links it with a C++ compiler."""
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return ""
    return "not kept for later processes: TVM needs a C++ compiler (g++) to write a library"


def pack(stored: Stored) -> bytes:
    """Header, constants and library, each after its length."""
    outputs = [asdict(output) for output in stored.outputs]
    header = {"given": [asdict(one) for one in stored.given], "outputs": outputs}
    constants = io.BytesIO()
    torch.save(list(stored.constants), constants)
    library = b"" if stored.executable is None else _library(stored.executable)
    parts = (json.dumps(header).encode(), constants.getvalue(), library)
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _library(executable: Any) -> bytes:
    with _own_folder() as folder:
        path = folder / "region.so"
        executable.export_library(str(path))
        return path.read_bytes()


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A temporary folder for the block; a ``TemporaryDirectory`` goes at a forked child's end."""
    process, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="fuseboard_tvm_"))
    try:
        yield folder
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


def unpack(artifact: bytes) -> Stored:
    """The opposite of :func:`pack`."""
    parts = []
    rest = memoryview(artifact)
    while rest:
        size = int.from_bytes(rest[:8], "little")
        parts.append(bytes(rest[8 : 8 + size]))
        rest = rest[8 + size :]
    header, constants, library = json.loads(parts[0]), parts[1], parts[2]
    given = [Given(one["position"], _tuple(one["order"])) for one in header["given"]]
    outputs = [
        Output(**{**one, "place": None if one["place"] is None else _place(one["place"])})
        for one in header["outputs"]
    ]
    tensors = torch.load(io.BytesIO(constants), weights_only=True)
    return Stored(_loaded(library) if library else None, given, outputs, tensors)


def _loaded(library: bytes) -> Any:
    """A library stays loaded, so its file may go once it is."""
    with _own_folder() as folder:
        path = folder / "region.so"
        path.write_bytes(library)
        return tvm.runtime.load_module(str(path))


def _tuple(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _place(value: dict[str, Any]) -> Place:
    return Place(tuple(value["size"]), tuple(value["stride"]), value["offset"])
