"""The callable of a region: inputs made fit, the virtual machine, outputs as torch has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from tvm import relax

import fuseboard_tvm
from fuseboard_tvm import _calls, _engine
from fuseboard_tvm._artifact import Stored, why_not_stored
from fuseboard_tvm._graph import Output

Machine = Callable[..., Any]


class Machines(threading.local):
    """A virtual machine for each thread: one holds the registers of a single call.

    TVM's workers belong to the thread that calls them as well, and are told how many to be.
    """

    def __init__(self, executable: Any, threads: int) -> None:
        _engine.start_workers(threads)
        self.main: Machine = relax.VirtualMachine(executable, tvm.cpu())["main"]


class Call:
    """Boxed: takes a list of tensors, empties it, returns a tuple.

    :param artifact: what it can be made of again; None where it can't be stored.
    """

    def __init__(self, stored: Stored, threads: int, artifact: bytes | None) -> None:
        _calls.register()
        self._artifact = artifact
        executable, outputs = stored.executable, stored.outputs
        self._machines = Machines(executable, threads) if executable is not None else None
        self._given = [(one.position, one.order) for one in stored.given]
        self._outputs = outputs
        self._constants = list(stored.constants)
        self._keeps = any(output.given is not None for output in outputs)
        self._plain = all(
            output.computed == number and output.place is None
            for number, output in enumerate(outputs)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._artifact is None:
            raise TypeError(why_not_stored())
        return fuseboard_tvm.loaded, (self._artifact,)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        if self._constants:
            args.extend(self._constants)
        tensors = [_fit(args[position], order) for position, order in self._given]
        kept = list(args) if self._keeps else []
        args.clear()
        computed = self._machines.main(*tensors) if self._machines is not None else ()
        if not tensors:  # without a torch tensor among the arguments, TVM returns its own
            computed = [torch.from_dlpack(one) for one in computed]
        if self._plain:
            return tuple(computed)
        return tuple(_output(output, computed, kept) for output in self._outputs)


def _fit(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Row-major, and aligned as the compiled code takes for granted; a copy where it isn't.

    An unaligned pointer would end the process.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if order is not None:
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.data_ptr() % _calls.ALIGNMENT:
        tensor = tensor.clone()
    return tensor


def _output(output: Output, computed: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
    if output.computed is not None:
        tensor = computed[output.computed]
        place = output.place
        if place is None:
            return tensor
        return tensor.as_strided(place.size, place.stride, place.offset)
    if output.given is not None:
        tensor = given[output.given]
        place = output.place
        if place is None:
            return tensor
        return tensor.as_strided(place.size, place.stride, tensor.storage_offset() + place.offset)
    return output.literal
