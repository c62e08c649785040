"""A call as it was made, for work beside later calls: its inputs, and what results depend on."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuseboard.run.kept_inputs import FEW_BYTES, held, strided_copy, why_too_large
from fuseboard.spare_memory import free_bytes
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.relaid import Relaid
from fuseboard.torch_api.state import ANSWER_PARTS, StateGuard, read_state

_CPU = torch.device("cpu")


class CannotKeep(Exception):
    """No work can be done on this call later; the text says why."""


class KeptCall:
    """Weights by weak reference, all other inputs as copies.

    :param inputs: tensors on the CPU, and numbers.
    :param weights: positions of those that are parameters or buffers.
    :param as_strided: the graph may reach any part of an input's storage.
    :raises CannotKeep: the copies would take too much memory.
    """

    def __init__(self, inputs: Sequence[Any], weights: Collection[int], as_strided: bool) -> None:
        self.weights = frozenset(weights)
        self.state = read_state(ANSWER_PARTS)
        self.grads = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        storages_of = {torch_internals.storage_address(v): v.untyped_storage() for v in tensors}
        #: Of all inputs, each storage once.
        self.nbytes = sum(storage.nbytes() for storage in storages_of.values())
        users = Counter(map(torch_internals.storage_address, tensors))
        copied = [
            value
            for i, value in enumerate(inputs)
            if i not in weights and isinstance(value, torch.Tensor)
        ]
        whole = {
            address: value.untyped_storage()
            for value in copied
            if users[address := torch_internals.storage_address(value)] > 1 or as_strided
        }
        size = sum(storage.nbytes() for storage in whole.values())
        size += sum(
            value.nbytes for value in copied if torch_internals.storage_address(value) not in whole
        )
        if why := why_too_large(size, _CPU):
            raise CannotKeep(why)
        storages: dict[int, torch.UntypedStorage] = {}
        relaid = Relaid()
        self._values: list[Callable[[], Any]] = [
            weakref.ref(value) if i in weights else held(self._copy(value, whole, storages, relaid))
            for i, value in enumerate(inputs)
        ]

    def _copy(
        self,
        value: Any,
        whole: dict[int, torch.UntypedStorage],
        storages: dict[int, torch.UntypedStorage],
        relaid: Relaid,
    ) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        address = torch_internals.storage_address(value)
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if address not in whole:
                copy = strided_copy(value)
            else:
                if address not in storages:
                    storages[address] = whole[address].clone()
                copy = relaid.on(value, storages[address])
        if value.is_inference():
            return copy
        copy.requires_grad_(value.requires_grad)
        return copy

    def inputs(self) -> list[Any] | None:
        """The inputs; None where a weight is gone."""
        values = [value() for value in self._values]
        return None if any(value is None for value in values) else values

    def has_the_weights_of(self, other: KeptCall) -> bool:
        """Whether the weights of both are the same objects, in the same order."""
        return self._weight_ids() == other._weight_ids()

    def _weight_ids(self) -> list[int]:
        return [id(value()) for i, value in enumerate(self._values) if i in self.weights]

    def named_state(self) -> dict[str, Any]:
        """What results depend on, by name."""
        return {part.name: value for part, value in zip(ANSWER_PARTS, self.state, strict=True)}

    def described(self) -> str:
        """The modes of the call that keys don't hold otherwise."""
        pairs = zip(ANSWER_PARTS, self.state, strict=True)
        modes = [f"{part.name}: {value}" for part, value in pairs if part.is_of_thread]
        return "; ".join([f"grad mode {self.grads}", f"inference {self.inference}", *modes])

    def why_no_copies(self, share: float) -> str:
        """Why all inputs shouldn't be copied for another process; "" if they may.

        :param share: of the free memory, which copies may take.
        """
        free = free_bytes(_CPU)
        if self.nbytes <= FEW_BYTES or free is None or self.nbytes <= share * free:
            return ""
        return (
            f"copies of inputs and weights for another process take {self.nbytes / 2**20:.0f} MiB, "
            f"more than the share {share:g} of the {free / 2**20:.0f} MiB that are free "
            "(prepare_memory)"
        )

    def forget(self) -> None:
        self._values = [_gone]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The modes of the call, for the block, in another thread.

        :raises CannotKeep: a switch of the process has another value now.
        """
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grads),
            StateGuard(ANSWER_PARTS),
        ):
            for part, value in zip(ANSWER_PARTS, self.state, strict=True):
                if part.read() == value:
                    continue
                if not part.is_of_thread:
                    raise CannotKeep(f"{part.name} was changed since it was compiled")
                part.write(value)
            yield


def _gone() -> None:
    return None
