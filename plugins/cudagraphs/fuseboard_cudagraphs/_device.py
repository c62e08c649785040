"""What recording needs of a device, and how CUDA provides it.

Everything else of this plugin runs without a GPU: tests put a device of their own in the place of
:class:`CudaDevice`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fuseboard_cudagraphs import _torch_internals

Run = Callable[[], Sequence[Any]]


class Graph(Protocol):
    """A recording."""

    def replay(self) -> None:
        """Do again what was recorded, on the current stream."""


class Device(Protocol):
    """One device. Its recordings share a memory pool, so that one at a time may run.

    :ivar lock: held while recording, and from filling the buffers of a recording until its results
        have been copied.
    """

    lock: threading.RLock

    def prepare(self) -> None:
        """Make what recording needs; more than once does no harm. Called before all but
        ``capturing``."""

    def capturing(self) -> bool:
        """Whether somebody else is recording this thread's work already."""

    def warm_up(self, run: Run) -> Sequence[Any]:
        """Run as ever, where a later recording would run."""

    def record(self, run: Run) -> tuple[Graph, Sequence[Any]]:
        """Record instead of running; the outputs hold nothing until a replay."""

    def take_turn(self) -> None:
        """Make what follows on the current stream wait for earlier replays on other streams."""


class CudaDevice:
    """A CUDA device. Nothing is made before the first call of a region."""

    def __init__(self, index: int) -> None:
        self.lock = threading.RLock()
        self._index = index
        self._last: Any = None
        self._keeper: Any = None

    def prepare(self) -> None:
        with self.lock:
            if self._keeper is not None:
                return
            with torch.cuda.device(self._index):
                self._stream = torch.cuda.Stream(self._index)
                self._pool = torch.cuda.graph_pool_handle()
                # A pool that no graph uses any more can't be taken up again; an empty graph keeps
                # this one in use (as in torch/_inductor/cudagraph_trees.py of torch 2.13).
                keeper = torch.cuda.CUDAGraph()
                with warnings.catch_warnings(record=True), self._recording(keeper):
                    pass
            self._keeper = keeper

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Run) -> Sequence[Any]:
        """On the stream that records, so that libraries set themselves up for it.

        Its memory comes from the ordinary pool.
        """
        with torch.cuda.device(self._index):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    results = run()
            finally:
                current.wait_stream(self._stream)
        for result in results:
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(current)
        return results

    def record(self, run: Run) -> tuple[Graph, Sequence[Any]]:
        with torch.cuda.device(self._index):
            graph = torch.cuda.CUDAGraph()
            _torch_internals.forget_cublas_workspaces()
            try:
                with self._recording(graph):
                    outputs = run()
            except BaseException:
                self._release_generator()
                raise
            finally:
                _torch_internals.forget_cublas_workspaces()
        return graph, outputs

    def take_turn(self) -> None:
        current = torch.cuda.current_stream(self._index)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def _recording(self, graph: Any) -> Any:
        # thread_local: what other threads do meanwhile (loading data) mustn't end the recording.
        return torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )

    def _release_generator(self) -> None:
        """After a recording that failed, the generator may still think that it is being recorded.

        Every later draw would raise; a copy of its state doesn't have that mark.
        """
        generator = torch.cuda.default_generators[self._index]
        generator.graphsafe_set_state(generator.clone_state())


_devices: dict[int, CudaDevice] = {}
_devices_lock = threading.Lock()


def cuda_device(device: torch.device) -> Device:
    """The process's one object for a CUDA device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _devices_lock:
        return _devices.setdefault(index, CudaDevice(index))
