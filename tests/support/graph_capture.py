"""A device that records like a CUDA graph, on the CPU.

What is kept of tensors from outside is their addresses. While it is recorded nothing is to be seen
of results: they hold garbage. A replay computes into the memory that the recording had, and
overwrites the memory of every other recording, since all share a pool.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class FakeDevice:
    """A device with a log.

    :ivar log: ``warm up``, ``record``, ``replay``, in order.
    :ivar broken: recordings fail with this.
    :ivar absent: setting the device up fails with this.
    :ivar inside: somebody else records.
    :ivar scalars_by_value: numbers in tensors are passed by value, as CUDA kernels are given those
        on the CPU.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.broken: Exception | None = None
        self.absent: Exception | None = None
        self.inside = False
        self.scalars_by_value = False
        self.graphs: list[FakeGraph] = []

    def __call__(self, device: torch.device) -> FakeDevice:
        """The plugin asks for the device of a region's tensors."""
        return self

    def count(self, what: str) -> int:
        return self.log.count(what)

    def prepare(self) -> None:
        if self.absent is not None:
            raise self.absent

    def capturing(self) -> bool:
        return self.inside

    def warm_up(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self.log.append("warm up")
        return run()

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[FakeGraph, Sequence[Any]]:
        self.log.append("record")
        recorder = _Recorder()
        state = torch.get_rng_state()
        try:
            with recorder:
                outputs = run()
                if self.broken is not None:
                    raise self.broken
        finally:
            torch.set_rng_state(state)
        graph = FakeGraph(self, recorder.calls)
        self.graphs.append(graph)
        graph.spoil()
        return graph, outputs

    def take_turn(self) -> None:
        """There is one stream."""


class FakeGraph:
    """The calls of a recording, with addresses in the places of tensors from outside.

    :ivar reads: those addresses.
    """

    def __init__(self, device: FakeDevice, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._device = device
        self.reads: set[int] = set()
        self._own: dict[int, torch.Tensor] = {}
        self._calls = []
        for function, args, kwargs, result in calls:
            arguments = pytree.tree_map(self._argument, (args, kwargs))
            results = list(pytree.tree_leaves(result))
            self._calls.append((function, arguments, results))
            for leaf in results:
                if isinstance(leaf, torch.Tensor):
                    self._own[id(leaf)] = leaf
        self._memory = [
            leaf
            for function, _, results in self._calls
            for leaf in results
            if isinstance(leaf, torch.Tensor) and not function.is_view
        ]

    def _argument(self, value: Any) -> Any:
        """A tensor that the recording made is itself, another one the place where it lies."""
        if not isinstance(value, torch.Tensor) or id(value) in self._own:
            return value
        if value.dim() == 0 and self._device.scalars_by_value:
            return value.clone()
        self.reads.add(value.data_ptr())
        return _Place(value)

    def replay(self) -> None:
        """Compute again into the same memory.

        In inference mode: memory that was recorded there is written to from outside as well, as
        kernels do.
        """
        self._device.log.append("replay")
        with torch.inference_mode():
            self._replay()

    def _replay(self) -> None:
        for graph in self._device.graphs:
            graph.spoil()
        current: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            if isinstance(value, _Place):
                return value.tensor()
            return current.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for function, arguments, results in self._calls:
            args, kwargs = pytree.tree_map(now, arguments)
            made = pytree.tree_leaves(function(*args, **kwargs))
            for kept, new in zip(results, made, strict=True):
                if not isinstance(kept, torch.Tensor):
                    continue
                if function.is_view:
                    current[id(kept)] = new
                else:
                    kept.copy_(new)

    def spoil(self) -> None:
        """What another recording may do to the memory of this one."""
        with torch.inference_mode():
            for tensor in self._memory:
                whole = not (tensor.is_floating_point() or tensor.is_complex())
                tensor.fill_(1 if whole else float("nan"))


class _Place:
    """Where a tensor lies. It doesn't keep it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.data_ptr()
        self._dtype = tensor.dtype
        self._size, self._stride = tuple(tensor.shape), tensor.stride()
        pairs = zip(self._size, self._stride, strict=True)
        self._span = 1 + sum(stride * (size - 1) for size, stride in pairs)
        self._empty = tensor.numel() == 0

    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        if self._empty:
            return torch.empty(self._size, dtype=self._dtype)
        memory = (ctypes.c_uint8 * (self._span * self._dtype.itemsize)).from_address(self._address)
        return torch.frombuffer(memory, dtype=self._dtype).as_strided(self._size, self._stride)


class _Recorder(TorchDispatchMode):
    """Every op below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result
