"""Dynamo's real inputs, as long as it waits for the backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from fuseboard.torch_api import internals as torch_internals


class ExampleInputs:
    """The inputs of the call that is being compiled.

    :ivar values: none before and after that, so that nothing keeps them alive.
    """

    def __init__(self) -> None:
        self.values: Sequence[Any] = ()

    def of_graph(self, number: int) -> Sequence[Any]:
        """Those of a captured graph that has so many inputs; none where they aren't Dynamo's."""
        if number != len(self.values) or torch_internals.inputs_were_changed():
            return ()
        return self.values

    def behind(
        self, placeholders: Sequence[Node], positions: Collection[int]
    ) -> dict[Node, torch.Tensor]:
        """The real tensors behind some of a graph's placeholders, as far as known."""
        real = self.of_graph(len(placeholders))
        return {
            placeholders[i]: real[i]
            for i in positions
            if i < len(real) and isinstance(real[i], torch.Tensor)
        }

    def unversioned(self, number: int) -> frozenset[int]:
        """Positions of those that are inference tensors, as far as known."""
        return frozenset(
            i
            for i, value in enumerate(self.of_graph(number))
            if isinstance(value, torch.Tensor) and value.is_inference()
        )
