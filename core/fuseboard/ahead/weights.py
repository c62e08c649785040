"""Weights in the format of safetensors, to be mapped into memory.

https://github.com/huggingface/safetensors: the length of a JSON head, the head, then the tensors'
bytes without holes. Written and read here: the library of that name reads whole files, not a part
of one, and copies. Each storage is written once, so that tied weights stay tied. A storage that one
contiguous weight fills has its name, dtype and shape; any other is bytes.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import torch

from fuseboard.torch_api import internals as torch_internals

#: Where tensors begin, in bytes: a cache line, which engines ask for.
ALIGNED = 64

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class WeightForm:
    """A weight as a part of a storage; strides and offset in elements.

    :ivar storage: the name of what is in the file.
    """

    name: str
    storage: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def write(weights: Mapping[str, torch.Tensor], file: BinaryIO) -> list[dict[str, Any]]:
    """Write weights. Returns the form of each, as JSON has it.

    :param file: at a place that is a multiple of :data:`ALIGNED`.
    """
    storages: dict[int, tuple[str, torch.Tensor]] = {}
    forms = []
    for name, weight in weights.items():
        weight = weight.detach()
        address = torch_internals.storage_address(weight)
        storage, _ = storages.setdefault(address, (name, weight))
        forms.append(
            WeightForm(
                name,
                storage,
                str(weight.dtype).removeprefix("torch."),
                tuple(weight.shape),
                tuple(weight.stride()),
                int(weight.storage_offset()),
            )
        )
    head: dict[str, Any] = {}
    end = 0
    for name, weight in storages.values():
        size = weight.untyped_storage().nbytes()
        whole = weight.is_contiguous() and weight.nbytes == size and weight.dtype in _NAMES
        head[name] = {
            "dtype": _NAMES[weight.dtype] if whole else "U8",
            "shape": list(weight.shape) if whole else [size],
            "data_offsets": [end, end + size],
        }
        end += size
        if padding := -end % ALIGNED:  # there may be no holes
            head[f"padding.{end}"] = {
                "dtype": "U8",
                "shape": [padding],
                "data_offsets": [end, end + padding],
            }
            end += padding
    text = json.dumps(head).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, weight in storages.values():
        size = weight.untyped_storage().nbytes()
        if size:
            address = weight.untyped_storage().data_ptr()
            file.write((ctypes.c_char * size).from_address(address))
        file.write(bytes(-size % ALIGNED))
    return [asdict(form) for form in forms]


def read(memory: memoryview, forms: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The weights in some memory, which they keep alive and write to.

    :param memory: what :func:`write` wrote.
    """
    length = int.from_bytes(memory[:8], "little")
    head = json.loads(bytes(memory[8 : 8 + length]))
    data = memory[8 + length :]
    storages: dict[str, torch.UntypedStorage] = {}
    weights = {}
    for form in (WeightForm(**one) for one in forms):
        if form.storage not in storages:
            first, end = head[form.storage]["data_offsets"]
            part = (
                torch.frombuffer(data[first:end], dtype=torch.uint8)
                if end > first
                else torch.empty(0, dtype=torch.uint8)
            )
            storages[form.storage] = part.untyped_storage()
        empty = torch.empty(0, dtype=getattr(torch, form.dtype))
        weights[form.name] = empty.set_(
            storages[form.storage], form.offset, tuple(form.shape), tuple(form.strides)
        )
    return weights
