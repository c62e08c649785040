"""A region's callable that records CUDA graphs of itself and replays them.

A recording repeats kernels with the very addresses that they had. So inputs that stay where they
are, weights above all, are read in place, and a recording holds for their addresses; the others
are copied into buffers first. A call looks up the recording for its sizes, its numbers on the host
and the addresses of what is read in place; nothing is assumed that isn't compared.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuseboard_cudagraphs import _torch_internals
from fuseboard_cudagraphs._device import Device, Graph
from fuseboard_cudagraphs._memory import Buffers, Results
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._region import Inputs

#: So often an input that is read in place may come back elsewhere, its old memory freed, before it
#: is copied from then on.
MAX_MOVES = 4
#: So many combinations are remembered for each graph that is kept; most of them only as seen.
REMEMBERED = 8

Boxed = Callable[[list[Any]], Sequence[Any]]


class Recording:
    """One CUDA graph, with what it reads and writes.

    :ivar replays: how often it ran.
    :ivar used: when it last did, in calls of the region.
    :ivar storages: weak references to the memory that it reads in place.
    """

    def __init__(
        self, graph: Graph, buffers: Buffers, results: Results, storages: Sequence[Any]
    ) -> None:
        self._graph = graph
        self._buffers = buffers
        self._results = results
        self.storages = storages
        self.replays = 0
        self.used = 0

    def run(self, inputs: Sequence[Any], device: Device) -> list[Any]:
        """A call's results. The device's lock is held."""
        self.replays += 1
        device.take_turn()
        with torch.no_grad():
            self._buffers.fill(inputs)
            self._graph.replay()
            return self._results.copies(inputs)


class Combination:
    """Calls with the same sizes and numbers on the host: what is known of their inputs.

    :ivar calls: how many were seen.
    :ivar fixed: positions of the inputs that are read in place; None before the first recording.
    :ivar recordings: by the addresses of those.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.fixed: tuple[int, ...] | None = None
        self.recordings: dict[tuple[int, ...], Recording] = {}
        self._seen: dict[int, tuple[int, Any]] = {}
        self._stayed_later: set[int] = set()
        self._looked_again = False
        self._moves: Counter[int] = Counter()
        self._buffers: Buffers | None = None

    def see(self, inputs: Sequence[Any], known: Inputs) -> None:
        """Note where the inputs of a call lie."""
        for i in known.tensors:
            tensor = inputs[i]
            self._seen[i] = tensor.data_ptr(), _torch_internals.weak_storage(tensor)

    def addresses(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Where those inputs lie that are read in place."""
        return tuple([inputs[i].data_ptr() for i in self.fixed or ()])

    def settle(self, inputs: Sequence[Any], known: Inputs) -> None:
        """Decide anew which inputs are read in place, before a recording is made.

        At first: parameters and buffers, and what lies where it lay in an earlier call although
        that memory was never freed (the weights of training graphs, which nobody declares). Later
        some of them move: those that aren't known to be static are copied at once, the others if
        they do so again and again.
        """
        if self.fixed is None:
            self.fixed = tuple(
                i for i in known.tensors if i in known.static or self._stayed(i, inputs[i])
            )
            self.see(inputs, known)
            return
        if self._stayed_later:
            self.fixed = tuple(sorted({*self.fixed, *self._stayed_later}))
            self._stayed_later.clear()
            self.recordings.clear()
            self._buffers = None
            return
        moving = self._moving(self.fixed, self.addresses(inputs), known.static)
        if moving:
            self.fixed = tuple(i for i in self.fixed if i not in moving)
            self.recordings.clear()
            self._buffers = None

    def look_again(self, inputs: Sequence[Any], known: Inputs) -> bool:
        """Whether inputs that are copied lie where they lay when the first recording was made.

        Asked once, in the call after it. The calls before may have been made on copies of what the
        later ones are given: the board's first is, to see whether it writes to its inputs.
        """
        if self._looked_again or self.fixed is None:
            return False
        self._looked_again = True
        copied = (i for i in known.tensors if i not in self.fixed)
        self._stayed_later = {i for i in copied if self._stayed(i, inputs[i])}
        self._seen.clear()
        return bool(self._stayed_later)

    def _stayed(self, position: int, tensor: torch.Tensor) -> bool:
        address, storage = self._seen.get(position, (0, None))
        return storage is not None and address == tensor.data_ptr() and not storage.expired()

    def _moving(
        self, fixed: tuple[int, ...], addresses: tuple[int, ...], static: frozenset[int]
    ) -> set[int]:
        """The positions to copy from now on; forgets the recordings whose inputs were freed."""
        moving: set[int] = set()
        if self.recordings:
            latest = max(self.recordings, key=lambda where: self.recordings[where].used)
            pairs = zip(fixed, latest, addresses, strict=True)
            moving = {i for i, old, new in pairs if old != new and i not in static}
        for where, recording in list(self.recordings.items()):
            gone = [i for i, s in zip(fixed, recording.storages, strict=True) if s.expired()]
            if gone:
                del self.recordings[where]
                self._moves.update(gone)
        return moving | {i for i in fixed if self._moves[i] >= MAX_MOVES}

    def buffers(self, inputs: Sequence[Any], known: Inputs) -> Buffers:
        """Those of every recording of this combination: one at a time runs."""
        if self._buffers is None:
            fixed = self.fixed or ()
            copied = [i for i in known.tensors if i not in fixed]
            self._buffers = Buffers(copied, inputs)
        return self._buffers


class Replayed:
    """The callable.

    :param call: the region as it was lowered.
    :param tell: the board's, for notes and for failures that are contained here.
    """

    def __init__(
        self,
        call: Boxed,
        known: Inputs,
        options: Options,
        device: Device,
        tell: Callable[[str | BaseException], None],
    ) -> None:
        self._call = call
        self._known = known
        self._options = options
        self._device = device
        self._tell = tell
        self._combinations: OrderedDict[Any, Combination] = OrderedDict()
        self._clock = 0
        self._wasted = 0
        self._full = False
        self._off = False
        self._prepared = False

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._off or self._device.capturing() or not (self._prepared or self._prepare()):
            return self._call(args)
        inputs = list(args)
        args.clear()
        results = self._recorded_call(inputs)
        return self._call(inputs) if results is None else results

    def _prepare(self) -> bool:
        """Set the device up at the first call; the region runs without where that fails."""
        try:
            self._device.prepare()
        except Exception as error:  # whatever a driver says
            self._give_up(error)
            return False
        self._prepared = True
        return True

    def _give_up(self, error: Exception) -> None:
        self._off = True
        self._combinations.clear()
        self._tell(error)

    def _recorded_call(self, inputs: list[Any]) -> Sequence[Any] | None:
        """The results of a warm-up or of a replay; None where the call has to run as it is."""
        key = self._known.key(inputs)
        with self._device.lock:
            self._clock += 1
            combination = self._combination(key)
            if combination.calls < self._options.warmup:
                combination.calls += 1
                combination.see(inputs, self._known)
                # The inputs stay alive here until the device has joined its streams again.
                return self._device.warm_up(lambda: self._call(list(inputs)))
            recording = combination.recordings.get(combination.addresses(inputs))
            if recording is None or combination.look_again(inputs, self._known):
                recording = self._record(combination, inputs)
            if recording is None:
                return None
            recording.used = self._clock
            return recording.run(inputs, self._device)

    def _combination(self, key: Any) -> Combination:
        found = self._combinations.get(key)
        if found is None:
            found = self._combinations[key] = Combination()
            if len(self._combinations) > REMEMBERED * self._options.max_graphs:
                self._combinations.popitem(last=False)
        self._combinations.move_to_end(key)
        return found

    def _record(self, combination: Combination, inputs: list[Any]) -> Recording | None:
        """A new recording, or None where there may be none."""
        if self._full:
            return None
        strays = self._known.strays(inputs)
        if strays:
            self._tell(f"CUDA graphs skipped in a call: inputs {strays} weren't on the device")
            return None
        # What may be freed below could still be in use by a replay on another stream.
        self._device.take_turn()
        combination.settle(inputs, self._known)
        if not self._make_room():
            return None
        try:
            recording = self._recording(combination, inputs)
        except Exception as error:  # whatever a kernel does in a recording; the region runs without
            self._give_up(error)
            return None
        combination.recordings[combination.addresses(inputs)] = recording
        return recording

    def _recording(self, combination: Combination, inputs: list[Any]) -> Recording:
        buffers = combination.buffers(inputs, self._known)
        read = buffers.instead_of(inputs)
        with torch.no_grad():
            graph, outputs = self._device.record(lambda: self._call(list(read)))
        storages = [_torch_internals.weak_storage(inputs[i]) for i in combination.fixed or ()]
        return Recording(graph, buffers, Results(outputs, read), storages)

    def _make_room(self) -> bool:
        """Drop the least recently used recording if there are as many as there may be.

        Where one after the other is dropped before it was replayed a second time, the combinations
        come in turn and recording costs more than it saves: it ends, and those that there are stay.
        """
        kept = list(self._all_recordings())
        if len(kept) < self._options.max_graphs:
            return True
        combination, where, oldest = min(kept, key=lambda entry: entry[2].used)
        if oldest.replays < 2:
            self._wasted += 1
        if self._wasted >= self._options.max_graphs:
            self._full = True
            self._tell(
                f"more combinations of sizes, CPU scalars and weights than max_graphs = "
                f"{self._options.max_graphs} come in turn: new ones run without CUDA graphs"
            )
            return False
        del combination.recordings[where]
        return True

    def _all_recordings(self) -> Iterator[tuple[Combination, tuple[int, ...], Recording]]:
        for combination in self._combinations.values():
            for where, recording in combination.recordings.items():
                yield combination, where, recording
