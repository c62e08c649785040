"""A call's inputs for another process: files in shared memory, which that process maps.

Inputs that share memory here share it there. What the other process writes to them stays its own:
it maps the files privately, so that a page is copied when it is first written to.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuseboard.torch_api.relaid import base_of


@dataclass(frozen=True)
class SentTensor:
    """How a tensor lies in its storage, and what autograd knows of it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool
    is_inference: bool
    is_conj: bool
    is_neg: bool


@dataclass(frozen=True)
class SentInput:
    """A tensor among the inputs.

    :ivar tensor: the number of what was sent for it.
    :ivar view: shape, strides and offset of a view of that; None where it is that itself.
    """

    tensor: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(frozen=True)
class SentInputs:
    """The inputs of a call. Storage ``i`` is in the file ``i`` of a directory.

    :ivar values: tensors, and plain numbers.
    :ivar tensors: those that aren't views of each other.
    :ivar sizes: of the storages, in bytes.
    """

    values: tuple[SentInput | int, ...]
    tensors: tuple[SentTensor, ...]
    sizes: tuple[int, ...]


def write_inputs(inputs: Sequence[torch.Tensor | int], directory: Path) -> SentInputs:
    """Write the storages of the tensors among some inputs, all on the CPU, to files.

    :raises OSError: there is no room for them.
    """
    storages: dict[int, int] = {}
    sizes: list[int] = []
    sent: dict[int, int] = {}
    tensors: list[SentTensor] = []
    values: list[SentInput | int] = []
    given = [value for value in inputs if isinstance(value, torch.Tensor)]
    users = Counter(value.untyped_storage().data_ptr() for value in given)
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            values.append(value)
            continue
        # AOTAutograd looks for the base of those alone that share memory.
        base = base_of(value) if users[value.untyped_storage().data_ptr()] > 1 else None
        root = value if base is None else base
        if (number := sent.setdefault(id(root), len(tensors))) == len(tensors):
            storage = root.untyped_storage()
            # Empty storages have no address; each is one of its own.
            place = storages.setdefault(storage.data_ptr() or -1 - len(sizes), len(sizes))
            if place == len(sizes):
                sizes.append(storage.nbytes())
                _write(storage, directory / str(place))
            tensors.append(_described(root, place))
        values.append(SentInput(number, None if base is None else _layout(value)))
    return SentInputs(tuple(values), tuple(tensors), tuple(sizes))


def _layout(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(value.shape), value.stride(), int(value.storage_offset())


def _write(storage: torch.UntypedStorage, path: Path) -> None:
    size = storage.nbytes()
    if size == 0:
        return
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            # A file that finds no room when it is written to ends the process by SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    _bytes_of(torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)).copy_(
        _bytes_of(storage)
    )


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _described(value: torch.Tensor, storage: int) -> SentTensor:
    return SentTensor(
        storage,
        value.dtype,
        *_layout(value),
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
        value.is_inference(),
        value.is_conj(),
        value.is_neg(),
    )


def read_inputs(sent: SentInputs, directory: Path) -> list[torch.Tensor | int]:
    """The inputs that :func:`write_inputs` wrote, on memory that is this process's own."""
    storages = [
        torch.UntypedStorage.from_file(str(directory / str(i)), shared=False, nbytes=size)
        if size
        else torch.UntypedStorage(0)
        for i, size in enumerate(sent.sizes)
    ]
    tensors = [_made(one, storages[one.storage]) for one in sent.tensors]
    return [_read(one, tensors) if isinstance(one, SentInput) else one for one in sent.values]


def _read(one: SentInput, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    tensor = tensors[one.tensor]
    return tensor if one.view is None else tensor.as_strided(*one.view)


def _made(one: SentTensor, storage: Any) -> Any:
    with torch.inference_mode(one.is_inference):
        value = torch.empty(0, dtype=one.dtype)
        value.set_(storage, one.offset, one.shape, one.strides)
        value = value.conj() if one.is_conj else value
        value = torch._neg_view(value) if one.is_neg else value
        if one.is_inference:
            return value
        if one.is_parameter:
            return torch.nn.Parameter(value, requires_grad=one.requires_grad)
        return value.requires_grad_(one.requires_grad)
