"""Prepared values, kept per set of weights.

One compiled graph serves several module instances, so what was prepared from weights belongs to
the very tensors it was made from. An entry serves a call if the call's weights have the entry's
addresses, versions and sampled bytes. Weights are held weakly, and an entry is dropped when one of
them is freed: so another tensor at the same address isn't mistaken for it, and values are freed
with the module.

What is noticed: ``optimizer.step``, ``load_state_dict`` with and without ``assign``, ``copy_``
and every other in-place op (versions); a replaced parameter or submodule, ``.data =`` (addresses);
``.data.copy_`` and other writes to a whole tensor that bump no version (samples). Not noticed: a
write through ``.data`` to part of a tensor that misses the samples; call
:func:`refresh` after one. Inference tensors have no versions, so any write to part of one would go
unseen: what was prepared from them serves the call that prepared it, and no other.

Preparing takes time, and pays if enough calls follow before the weights change again, which isn't
known in advance. This is the ski rental problem: rent until the rents add up to the price, then
buy. Calls after a change run without prepared values until what they lost adds up to the time of
preparing, so at most twice the optimum is lost. Where values go stale before they have paid, the
next wait is twice as long, so that weights that keep changing are prepared ever more rarely.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseboard.config.model import Settings
from fuseboard.errors import NotEnoughMemory
from fuseboard.forks import fork_safe_lock
from fuseboard.living import Living
from fuseboard.spare_memory import why_no_room

#: Bytes are read at this many places of a tensor.
SAMPLES = 3
#: How many places are looked at to find ones that aren't zero (zeros survive scaling).
PROBED = 64

#: So many sets of weights may be waited on at a time.
_WAITS = 256
#: What is lost until it is worth preparing again, at most, in times that preparing takes.
_MOST_PATIENCE = 64

#: Multiples of it, without their whole part, fall evenly and on no row, column or diagonal.
_GOLDEN = (5**0.5 - 1) / 2

_WORDS: dict[int, Any] = {
    1: ctypes.c_uint8,
    2: ctypes.c_uint16,
    4: ctypes.c_uint32,
    8: ctypes.c_uint64,
}

Version = Callable[[torch.Tensor], "int | NoVersion"]

version_of: Version = operator.attrgetter("_version")
address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class NoVersion:
    """The version of an inference tensor, which has none: unlike every other."""


def any_version(weight: torch.Tensor) -> int | NoVersion:
    """The version of a tensor that may be an inference tensor."""
    return NoVersion() if weight.is_inference() else weight._version


class Samples:
    """Words in the memory of weights, as they read at first.

    They are read only after the weights' addresses were compared, so the memory is the weights'.
    All at once: a model has hundreds, and one by one each would wait for memory.
    """

    __slots__ = ("_groups",)

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        by_size: dict[int, list[int]] = {}
        for weight in weights:
            for size, address in _places(weight):
                if address % size:  # numpy would copy all that lies between such words
                    by_size.setdefault(1, []).extend(range(address, address + size))
                else:
                    by_size.setdefault(size, []).append(address)
        self._groups = [_group(size, addresses) for size, addresses in by_size.items()]

    def unchanged(self) -> bool:
        """Whether the memory reads as it did."""
        return all(memory.take(places).tobytes() == read for memory, places, read in self._groups)


def _group(size: int, addresses: Sequence[int]) -> tuple[Any, Any, bytes]:
    """An array over all memory from the first word to the last; the words' places, and bytes."""
    import numpy

    first = min(addresses)
    span = _WORDS[size] * ((max(addresses) - first) // size + 1)
    memory = numpy.frombuffer(span.from_address(first), f"u{size}")
    places = numpy.array([(address - first) // size for address in addresses])
    return memory, places, memory.take(places).tobytes()


class WeightSet:
    """What was prepared from one set of weights, and how to recognise that set."""

    __slots__ = ("__weakref__", "addresses", "made_at", "owners", "samples", "values", "versions")

    def __init__(
        self,
        versions: tuple[int | NoVersion, ...] | None,
        addresses: tuple[int, ...],
        samples: Samples,
        values: tuple[Any, ...],
    ) -> None:
        self.versions = versions
        self.addresses = addresses
        self.samples = samples
        self.values = values
        self.owners: list[weakref.ref[torch.Tensor]] = []
        self.made_at = time.monotonic()

    def drop(self) -> None:
        """Never match again, and let the values go. Takes no lock: the collector calls it."""
        self.versions = None
        self.values = ()
        self.owners = []

    @property
    def dropped(self) -> bool:
        return self.versions is None


@dataclass
class _Wait:
    """A set of weights that calls run without, until it is worth preparing."""

    versions: tuple[int | NoVersion, ...]
    lost_s: float = 0.0


class WeightSets:
    """The entries of one compiled graph, least recently used first, bounded in number.

    :ivar last: the entry that served the latest call; the generated code looks at it only.
    :ivar version_of: the quick function, until an inference tensor is met.
    :ivar prepare_s: what preparing takes, in seconds; 0 until it was done.
    :ivar unprepared_s: what an unprepared call takes, in seconds; 0 while it isn't known.
    :ivar share: of that, what a call with prepared values saves.
    :ivar unversioned: the last unprepared call had inference tensors among its weights.
    :param why_no_room: why nothing may be prepared from some weights at present; "" if it may.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[Any]], tuple[Any, ...]],
        limit: int,
        why_no_room: Callable[[Sequence[torch.Tensor]], str] = lambda _: "",
    ) -> None:
        self.last = _EMPTY
        self.version_of: Version = version_of
        self.prepare_s = 0.0
        self.unprepared_s = 0.0
        self.share = 1.0
        self.unversioned = False
        self._prepare = prepare
        self._limit = limit
        self._why_no_room = why_no_room
        self._patience = 1
        self._entries: OrderedDict[tuple[int, ...], WeightSet] = OrderedDict()
        self._waits: OrderedDict[tuple[int, ...], _Wait] = OrderedDict()
        self._lock = fork_safe_lock()
        _all_sets.add(self)

    @classmethod
    def of(
        cls, prepare: Callable[[Sequence[Any]], tuple[Any, ...]], settings: Settings
    ) -> WeightSets:
        """Sets with the limits of the settings."""
        room = functools.partial(why_no_room, settings.prepare_memory)
        return cls(prepare, settings.max_weight_sets, room)

    def find(self, weights: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The values for these weights, prepared now if they are new or stale.

        :raises NotEnoughMemory: there is no room for them.
        """
        values = self._find(weights, may_wait=False)
        assert values is not None
        return values

    def find_if_worth(self, weights: tuple[torch.Tensor, ...]) -> tuple[Any, ...] | None:
        """The same; None where the call had better run without."""
        return self._find(weights, may_wait=True)

    def _find(self, weights: tuple[torch.Tensor, ...], may_wait: bool) -> tuple[Any, ...] | None:
        addresses = tuple(map(address_of, weights))
        versions = tuple(map(self.version_of, weights))
        with self._lock:
            entry = self._entries.get(addresses)
            if entry is not None:
                values = entry.values  # before the check: it may be dropped at any moment
                if entry.versions == versions and entry.samples.unchanged():
                    self._entries.move_to_end(addresses)
                    self.last = entry
                    return values
            if (old := self._entries.pop(addresses, None)) is not None:
                self._learn_patience(old)
                old.drop()
            if may_wait and self._waits_on(addresses, versions):
                return None
            if problem := self._why_no_room(weights):
                if may_wait:
                    return None
                raise NotEnoughMemory(problem)
            self._waits.pop(addresses, None)
            entry = self._make(weights, versions, addresses)
            values = entry.values
            for key, other in list(self._entries.items()):
                if other.dropped:
                    del self._entries[key]
            self._entries[addresses] = entry
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)
            self.last = entry
            return values

    def _waits_on(self, addresses: tuple[int, ...], versions: tuple[int | NoVersion, ...]) -> bool:
        """Whether calls with these weights haven't lost enough yet; notes what this one loses."""
        wait = self._waits.pop(addresses, None)
        if wait is None or wait.versions != versions:
            wait = _Wait(versions)
        wait.lost_s += self.unprepared_s * self.share
        if wait.lost_s >= self.prepare_s * self._patience:
            return False
        self.unversioned = any(isinstance(version, NoVersion) for version in versions)
        self._waits[addresses] = wait
        while len(self._waits) > _WAITS:
            self._waits.popitem(last=False)
        return True

    def _learn_patience(self, stale: WeightSet) -> None:
        """Wait for longer where values go stale before they have paid."""
        if stale.dropped:  # with its weights
            return
        in_use_s = time.monotonic() - stale.made_at
        paid = in_use_s * self.share >= self.prepare_s * (1 - self.share)
        self._patience = 1 if paid else min(2 * self._patience, _MOST_PATIENCE)

    def _make(
        self,
        weights: tuple[torch.Tensor, ...],
        versions: tuple[int | NoVersion, ...],
        addresses: tuple[int, ...],
    ) -> WeightSet:
        entry = WeightSet(versions, addresses, Samples(weights), ())
        # The samples were read first: a write during the preparation makes the entry stale.
        start = time.perf_counter()
        entry.values = self._prepare(weights)
        took_s = time.perf_counter() - start
        self.prepare_s = min(took_s, self.prepare_s or took_s)  # the first time loads libraries
        entry.made_at = time.monotonic()
        drop = _dropper(entry)
        entry.owners = [weakref.ref(weight, drop) for weight in weights]
        return entry

    def forget(self, addresses: set[int]) -> int:
        """Drop the entries that were made from tensors at these addresses."""
        with self._lock:
            stale = [
                entry
                for entry in list(self._entries.values())
                if not entry.dropped and addresses & set(entry.addresses)
            ]
            for entry in stale:
                entry.drop()
        return len(stale)

    def entries(self) -> list[WeightSet]:
        """A copy of what there is now, dropped ones included."""
        return list(self._entries.values())

    def __len__(self) -> int:
        """How many sets of weights have prepared values now."""
        return sum(not entry.dropped for entry in list(self._entries.values()))


_EMPTY = WeightSet(None, (), Samples(()), ())
_all_sets: Living[WeightSets] = Living()


def _dropper(entry: WeightSet) -> Callable[[Any], None]:
    reference = weakref.ref(entry)

    def drop(_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.drop()

    return drop


def _places(weight: torch.Tensor) -> list[tuple[int, int]]:
    """Words in a weight's memory, (size, address) each; at such as aren't zero if there are any."""
    if weight.device.type != "cpu" or weight.numel() == 0:
        return []
    size, start = weight.element_size(), weight.data_ptr()
    offsets = _offsets(weight)
    if size <= 8:
        return [(size, start + size * offset) for offset in _telling(size, start, offsets)]
    # complex128: either part may be written alone (``conj``)
    parts = [start, start + 8]
    return [(8, part + 8 * offset) for part in parts for offset in _telling(8, part, 2 * offsets)]


def _offsets(weight: torch.Tensor) -> Any:
    """Places spread over a tensor: distances from the data pointer, in elements."""
    import numpy

    rest = numpy.unique((numpy.arange(PROBED) * _GOLDEN % 1 * weight.numel()).astype(numpy.int64))
    offsets = numpy.zeros_like(rest)
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        rest, index = numpy.divmod(rest, size)
        offsets += index * stride
    return offsets


def _telling(size: int, start: int, offsets: Any) -> list[int]:
    """Some of the offsets, in words of a size; such as where it isn't zero if there are any."""
    import numpy

    memory: Any = (ctypes.c_char * (size * (int(offsets.max()) + 1))).from_address(start)
    words = numpy.frombuffer(memory, f"u{size}").take(offsets)
    telling = offsets[words != 0] if words.any() else offsets
    step = max(1, len(telling) // SAMPLES)
    return [int(offset) for offset in telling[::step][:SAMPLES]]


def refresh(module: torch.nn.Module) -> int:
    """Forget everything that was prepared from a module's parameters and buffers.

    Needed after a write that bumps no version and touches part of a tensor, such as
    ``module.weight.data[0] = 1``; and before ``torch.utils.swap_tensors``, which refuses tensors
    that are weakly referenced.

    :returns: how many sets of prepared values were dropped.
    """
    tensors = [*module.parameters(), *module.buffers()]
    addresses = {tensor.data_ptr() for tensor in tensors}
    return sum(sets.forget(addresses) for sets in _all_sets)


def prepared_bytes() -> int:
    """What all prepared values of this process take, each memory counted once. It takes no lock."""
    found: dict[tuple[torch.device, int], int] = {}
    for entry in (entry for sets in _all_sets for entry in sets.entries()):
        own = set(entry.addresses)  # a view of a weight takes no memory
        for value in entry.values:
            if not isinstance(value, torch.Tensor):
                continue
            if value.layout is torch.strided:
                storage = value.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            else:  # oneDNN's own, which have no storage to be shared
                address, size = id(value), value.nbytes
            if address not in own:
                found[value.device, address] = size
    return sum(found.values())
