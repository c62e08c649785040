"""Copies of what code is given, on which it runs until it was seen to write to none of it.

A backend's code may write to its inputs by mistake, and by raw addresses, so that no version tells:
only the memory itself does, compared with what it held before. On the user's own tensors that would
be too late: another thread may have read them, versions have moved, and where the code ends
half-way nobody puts anything back. So the copies are what it is given. What is lazy about copies in
torch (``torch._lazy_clone``) is no help: it copies when an op writes, and engines write to the
address that they were given.

Copies take as much memory as the tensors, while one region runs. Those of a graph's own inputs,
weights above all, serve a whole comparison where there is plenty of memory: new memory takes
several times as long as a comparison. Where memory is short, the CPU's lie in files, whose pages
the system can write back. Another device has no such place: there the code runs on the tensors
themselves, and what it wrote is undone at once from copies in the CPU's memory.
"""

from __future__ import annotations

import bisect
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fuseboard.errors import NotEnoughMemory
from fuseboard.spare_memory import free_bytes
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.relaid import view_like
from fuseboard.torch_api.tensor_classes import is_plain

#: Of the free memory, what copies for one call may take, and those that are kept for several.
SHARE, KEPT_SHARE = 0.5, 0.25
#: So many bytes are copied without a look at how many are free.
FEW_BYTES = 64 * 2**20

#: A copy's address is the tensor's, modulo this: code may look at it, or rely on it.
_ALIGNMENT = 64
#: Words that are summed into one word of a seal, and bytes that are compared at a time where the
#: two lie on different devices.
_BLOCK, _CHUNK = 1024, 16 * 2**20

_CPU = torch.device("cpu")


class Copies:
    """What one call is given, tensors as copies.

    :param values: what it would be given.
    :param sealed: so many of the last ones are left as they are, and compared by sums: the board's
        own, such as prepared weights.
    :param whole: copy all of a tensor's storage, of which ``as_strided`` reaches any part.
    :param kept: copies that serve several calls.
    :ivar values: for the call.
    :ivar bare: positions of tensors that can't be copied and are given as they are.
    :raises NotEnoughMemory: there is no room for copies.
    """

    def __init__(
        self,
        values: Sequence[Any],
        sealed: int = 0,
        whole: bool = False,
        kept: KeptCopies | None = None,
    ) -> None:
        own = len(values) - sealed
        self._kept = None if whole else kept
        self._twins: dict[int, TensorCopy] = {}
        places: dict[int, torch.Tensor] = {}
        for i, value in enumerate(values[:own]):
            if self._kept is not None and (twin := self._kept.of(value)) is not None:
                self._twins[i] = twin
            elif _can_be_copied(value) and (memory := memory_of(value, whole)) is not None:
                places[i] = memory
        room = _room(places.values())
        for i, memory in places.items():
            self._twins[i] = TensorCopy(values[i], memory, room, whole)
        memories = ((i, memory_of(values[i])) for i in range(own, len(values)))
        self._seals = {i: Checksums(memory) for i, memory in memories if memory is not None}
        self.values = [self._twins[i].copy if i in self._twins else v for i, v in enumerate(values)]
        self.bare = [
            i
            for i, value in enumerate(values[:own])
            if isinstance(value, torch.Tensor) and i not in self._twins and value.numel()
        ]

    def written(self) -> list[int]:
        """Positions of what the call wrote to. The originals hold what they did before.

        To be asked after every call, whatever it raised.
        """
        twins = [i for i, twin in self._twins.items() if twin.is_written()]
        for i in twins:
            self._twins[i].put_back()
            if self._kept is not None:
                self._kept.forget(self._twins[i])
        return sorted([*twins, *(i for i, seal in self._seals.items() if seal.is_broken())])

    def back(self, results: Any) -> Any:
        """Results with views of the originals in the place of views of the copies."""
        if type(results) not in (list, tuple):
            return results
        twins = [twin for twin in self._twins.values() if twin.copy is not twin.original]
        twins.sort(key=lambda twin: twin.start)
        starts = [twin.start for twin in twins]

        def one(result: Any) -> Any:
            memory = memory_of(result)
            if memory is None:
                return result
            place = bisect.bisect_right(starts, memory.data_ptr()) - 1
            return twins[place].instead_of(result, memory) if place >= 0 else result

        return type(results)(map(one, results))


class KeptCopies:
    """Copies of a graph's inputs that serve several calls, each made when it is first wanted.

    None is kept where they are a large part of the free memory.

    :param inputs: of the graph; they outlive this.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = inputs
        self._twins: dict[int, TensorCopy] = {}
        found = {id(value): memory_of(value) for value in inputs if _can_be_copied(value)}
        places = {key: memory for key, memory in found.items() if memory is not None}
        self._places = {} if _short(places.values(), KEPT_SHARE) else places

    def of(self, value: Any) -> TensorCopy | None:
        """The copy of one of the inputs, if these are kept."""
        memory = self._places.get(id(value))
        if memory is not None and id(value) not in self._twins:
            self._twins[id(value)] = TensorCopy(value, memory)
        return self._twins.get(id(value))

    def forget(self, twin: TensorCopy) -> None:
        """Don't use a copy again."""
        self._twins.pop(id(twin.original), None)

    def watch(self) -> WriteWatch:
        """Look for writes to the inputs from now on.

        :raises NotEnoughMemory: there is no room for copies of them.
        """
        return WriteWatch(Copies(self._inputs, kept=self))


class WriteWatch:
    """Copies of tensors that calls use themselves, to undo what they write."""

    def __init__(self, copies: Copies) -> None:
        self._twins, self._seals = copies._twins, copies._seals
        self._states = {i: _state(twin.original) for i, twin in self._twins.items()}
        self._aliases = {i: twin.original.data for i, twin in self._twins.items()}

    def undo(self) -> list[int]:
        """Let the tensors be what they were; returns the positions of what was written to."""
        written = [
            i
            for i, twin in self._twins.items()
            if _state(twin.original) != self._states[i] or twin.differs()
        ]
        for i in written:
            original = self._twins[i].original
            if _state(original)[1:] != self._states[i][1:]:  # as by ``resize_``, or ``t_``
                original.data = self._aliases[i]
            self._twins[i].give_back(self._states[i][0])
        return sorted([*written, *(i for i, seal in self._seals.items() if seal.is_broken())])


class TensorCopy:
    """A tensor and its copy, with the same strides, offset and gaps, at a like address.

    :param memory: of the tensor.
    :param room: where the copy lies: None, on the tensor's device; else in a directory's file, or
        on the CPU if the device is another ("" is its memory).
    :ivar copy: the tensor itself where its copy is on another device.
    :ivar start: the address of the copy's first byte.
    """

    def __init__(
        self,
        original: torch.Tensor,
        memory: torch.Tensor,
        room: str | None = None,
        whole: bool = False,
    ) -> None:
        self.original = self.copy = original
        self._memory = memory
        with torch.no_grad():
            if room is not None and original.device.type != "cpu":
                self._own = _flat(_allocated(memory.numel(), _CPU, room or None)).copy_(memory)
            else:
                self.copy, self._own = _copied(original, memory, room or None, whole)
        self.start = self._own.data_ptr()
        self._state = _state(self.copy)

    def is_written(self) -> bool:
        """Whether the copy was written to, with whichever bits, or became another view."""
        return _state(self.copy) != self._state or self.differs()

    def differs(self) -> bool:
        """Whether the two differ in a bit."""
        if self._memory.device == self._own.device:
            return not all(map(torch.equal, _words(self._memory), _words(self._own)))
        pairs = zip(self._memory.split(_CHUNK), self._own.split(_CHUNK), strict=True)
        return not all(torch.equal(one.to(other.device), other) for one, other in pairs)

    def put_back(self) -> None:
        """Undo what was written, where that was to the tensor itself."""
        if self.copy is self.original:
            self.give_back(self._state[0])

    def give_back(self, version: int | None) -> None:
        """Let the tensor hold what the copy does, as if it had never held anything else."""
        self._memory.copy_(self._own)
        if version is not None:
            torch_internals.set_version(self.original, version)

    def instead_of(self, result: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """What is to the tensor what a result is to the copy; the result if that is nothing.

        :param memory: of the result.
        """
        distance = memory.data_ptr() - self.start
        if distance >= self._own.numel() or memory.device != self._own.device:
            return result
        if result is self.copy:
            return self.original
        storage = self.original.untyped_storage()
        offset = self._memory.data_ptr() - storage.data_ptr() + distance
        if result.is_quantized or offset % result.element_size():
            return result
        return view_like(result, storage, offset // result.element_size())


class Checksums:
    """Sums over a tensor's memory, by which writes are noticed without a copy.

    One that leaves the sum of the words of each 8 KiB as it was goes unseen.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._sums = self._read()

    def is_broken(self) -> bool:
        return not all(map(torch.equal, self._sums, self._read()))

    def _read(self) -> list[torch.Tensor]:
        words, rest = _words(self._memory)
        full = len(words) - len(words) % _BLOCK
        return [words[:full].view(-1, _BLOCK).sum(1), words[full:].clone(), rest.clone()]


def memory_of(value: Any, whole: bool = False) -> torch.Tensor | None:
    """The bytes from a tensor's first element to its last, gaps and all, shape ``(n,)``.

    They are the tensor's own, and nothing that is written to them bumps its version. None where
    there are none to be had: no elements, another layout, zeros without memory, a wrapper of
    ``torch.func``'s.

    :param whole: all bytes of the storage.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested:
        return None
    if value.device.type == "meta" or not value.numel() or value._is_zerotensor():
        return None
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    try:
        storage = value.untyped_storage()
    except NotImplementedError:  # a batched tensor, or one that a transform tracks
        return None
    if whole:
        return _flat(storage)
    size = value.element_size()
    start = value.storage_offset() * size
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return _flat(storage[start : start + (last + 1) * size])


def _can_be_copied(value: Any) -> bool:
    """Whether torch makes another tensor of that kind."""
    if not isinstance(value, torch.Tensor) or not value.is_quantized:
        return True
    return value.qscheme() in (torch.per_tensor_affine, torch.per_channel_affine)


# --- memory ---------------------------------------------------------------------------------------


def _copied(
    original: torch.Tensor, memory: torch.Tensor, directory: str | None, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy, and its bytes."""
    if original.is_quantized:  # only an op makes one
        copy = original.clone()
        own = memory_of(copy, whole)
        assert own is not None
        return copy, own
    # As far from the start of its storage as the tensor: sizes may be told by that.
    offset = int(original.storage_offset())
    first = 0 if whole else offset * original.element_size()
    needed = first + memory.numel()
    block = _allocated(needed + _ALIGNMENT, original.device, directory)
    shift = (original.untyped_storage().data_ptr() - block.data_ptr()) % _ALIGNMENT
    storage = block[shift : shift + needed]
    own = _flat(storage[first:]).copy_(memory)
    copy = view_like(original, storage, offset)
    if not is_plain(original):
        copy = copy.as_subclass(type(original))
    return copy.requires_grad_(original.requires_grad), own


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """All of a storage as a tensor of one dimension."""
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage)


def _words(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as words of 8, which compare six times as fast, and the bytes that are left."""
    storage = memory.untyped_storage()
    whole = len(memory) - len(memory) % 8
    return _flat(storage[:whole], torch.int64), _flat(storage[whole:])


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The version, which inference tensors don't have, and what it shows of which memory."""
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.shape, tensor.stride()


def _allocated(size: int, device: torch.device, directory: str | None) -> torch.UntypedStorage:
    """Memory.

    :param directory: of a file that it lies in, which goes with it.
    :raises NotEnoughMemory: there is none.
    """
    try:
        if directory is None:
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        with tempfile.NamedTemporaryFile(dir=directory, prefix="fuseboard-") as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk ends the process
                os.posix_fallocate(file.fileno(), 0, size)
            storage: Any = torch.UntypedStorage.from_file(file.name, True, size)
            return storage  # type: ignore[no-any-return]
    except (OSError, RuntimeError, MemoryError) as error:
        raise NotEnoughMemory(f"copies of its inputs have no room: {error}") from error


def _room(memories: Iterable[torch.Tensor]) -> str | None:
    """Where copies lie: None, where their originals do; else a directory, or "": the CPU's memory.

    :raises NotEnoughMemory: there is no such place.
    """
    short = _short(memories, SHARE)
    if not short:
        return None
    size = sum(short.values())
    if _CPU not in short and not _is_short(_CPU, size, SHARE):
        return ""
    lasting = Path("/var/tmp")  # on a disk, as /tmp often isn't
    directory = str(lasting) if lasting.is_dir() else tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    if size > SHARE * free:
        raise NotEnoughMemory(
            f"copies of its inputs take {size / 2**20:.0f} MiB, more than half of what is free in "
            f"memory, and of the {free / 2**20:.0f} MiB in {directory}"
        )
    return directory


def _short(memories: Iterable[torch.Tensor], share: float) -> dict[torch.device, int]:
    """The devices that have no room for copies of these, with the bytes that they would take.

    :param share: of the free memory that may be taken.
    """
    needed: dict[torch.device, int] = {}
    for memory in memories:
        needed[memory.device] = needed.get(memory.device, 0) + memory.numel()
    return {device: size for device, size in needed.items() if _is_short(device, size, share)}


def _is_short(device: torch.device, size: int, share: float) -> bool:
    free = free_bytes(device) if size > FEW_BYTES else None
    return free is not None and size > share * free
