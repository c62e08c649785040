"""Runs of a graph beside a call that is compiled: on which inputs, and what they give and leave.

A call of the user's mustn't notice them: inputs that a run writes to are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuseboard.run.kept_inputs import strided_copy
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.relaid import Relaid
from fuseboard.torch_api.warned import without_warnings

Run = Callable[..., Any]

#: Whose memory a result is in, unless that of an input or of an earlier result.
ITS_OWN = "its own"


class CannotCompare(Exception):
    """A graph can't be run beside the call that is compiled; the text says why."""


class Copies:
    """Inputs for runs beside a call: those that are written to, or share memory with these; copied.

    :ivar anew: positions of the copied ones.
    :raises CannotCompare: an input can't be replaced by a copy.
    """

    def __init__(self, values: Sequence[Any], written: frozenset[int] | None) -> None:
        self._values = values
        tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        places = [i for i in tensors if written is None or i in written]
        addresses = {torch_internals.storage_address(values[i]) for i in places}
        self.anew = {i for i in tensors if torch_internals.storage_address(values[i]) in addresses}
        if torch.is_grad_enabled() and any(
            values[i].requires_grad and not values[i].is_leaf for i in self.anew
        ):
            raise CannotCompare("an input that is written to has a gradient that others computed")

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies; a view is copied with all of its storage."""
        storages = [self._values[i].untyped_storage() for i in self.anew]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def made(self) -> list[Any]:
        """New inputs that alias each other as the original ones do."""
        storages: dict[int, torch.UntypedStorage] = {}
        relaid = Relaid()
        made: dict[int, Any] = {}  # one object given twice stays one
        return [
            made.setdefault(id(value), self._made(i, value, storages, relaid))
            if isinstance(value, torch.Tensor)
            else value
            for i, value in enumerate(self._values)
        ]

    def _made(
        self, number: int, value: torch.Tensor, storages: dict[int, Any], relaid: Relaid
    ) -> torch.Tensor:
        if number not in self.anew and not torch.is_grad_enabled():
            return value  # what is prepared from weights belongs to these very tensors
        copy = value.detach()
        if number in self.anew:
            address = torch_internals.storage_address(value)
            if address not in storages:
                storages[address] = value.untyped_storage().clone()
            copy = relaid.on(value, storages[address])
        return copy.requires_grad_(value.requires_grad)


def results_of(run: Run, inputs: Copies) -> dict[str, Any]:
    """What a call gives and leaves, by names for people: results, what it wrote to, gradients."""
    given = inputs.made()
    results = without_warnings(lambda: tree_leaves(run(*given)))
    found = {f"output {i}": value for i, value in enumerate(results)}
    found |= {f"input {i} after the call": given[i] for i in sorted(inputs.anew)}
    found = {name: _kept(value) for name, value in found.items()}
    found |= _memory(results, given)
    if torch.is_grad_enabled():
        found |= without_warnings(lambda: _gradients(results, given))
        torch.clear_autocast_cache()  # it would keep a cast of each leaf until autocast ends
    return found


def _memory(results: Sequence[Any], inputs: Sequence[Any]) -> dict[str, str]:
    """Whose memory each result is in: an input's, an earlier result's, or its own."""
    owners: dict[int, str] = {}
    found = {}
    for i, value in enumerate(inputs):
        if _has_memory(value):
            owners.setdefault(torch_internals.storage_address(value), f"input {i}'s")
    for i, value in enumerate(results):
        if _has_memory(value):
            address = torch_internals.storage_address(value)
            found[f"the memory of output {i}"] = owners.get(address, ITS_OWN)
            owners.setdefault(address, f"output {i}'s")
    return found


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0


def _kept(value: Any) -> Any:
    """A result as it is now; a backward may write to it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_quantized:
        return None
    return strided_copy(value).requires_grad_(value.requires_grad)


def _gradients(results: Sequence[Any], inputs: Sequence[Any]) -> dict[str, Any]:
    ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad and r.grad_fn]
    wanted = {
        i: value
        for i, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    }
    if not ends or not wanted:
        return {}
    given = list(map(_uneven, ends))
    with torch_modes.without_autocast():
        grads = torch.autograd.grad(ends, list(wanted.values()), given, allow_unused=True)
    return {f"the gradient of input {i}": g for i, g in zip(wanted, grads, strict=True)}


def _uneven(result: torch.Tensor) -> torch.Tensor:
    """A gradient for a result that doesn't hide what moves from one element to another."""
    steps = torch.arange(result.numel(), dtype=torch.float64, device=result.device)
    return (1 + 0.5 * steps.sin()).to(result.dtype).reshape(result.shape)
