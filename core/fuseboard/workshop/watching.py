"""Dynamo's own graph as it answers calls while nothing is decided, and what is seen of them.

What is seen decides what may answer later calls: whether some are to be made again in a backward,
and whether gradients are differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseboard.torch_api import modes as torch_modes
from fuseboard.workshop.checkpoints import Recomputations
from fuseboard.workshop.slices import slices

Run = Callable[..., Any]


class Watching:
    """Answers calls by Dynamo's own graph.

    :param own: Dynamo's graph.
    :param training: its results may have gradients.
    :ivar is_twice: whether a gradient was computed that is to be differentiated.
    """

    def __init__(self, own: Run, training: bool) -> None:
        self.is_twice = False
        self._own = own
        self._training = training
        self._recomputations = Recomputations()

    def call(self, *args: Any) -> Any:
        """Answer a call beside which work may be done."""
        began = slices.enter()
        try:
            return self.first_call(*args)
        finally:
            slices.leave(began)

    def first_call(self, *args: Any) -> Any:
        """Answer a call beside which nothing is done yet."""
        if not self._training:
            return self._own(*args)
        self._recomputations.note()
        results = self._own(*args)
        if not self.is_twice:  # which not all that is compiled has second gradients for
            torch_modes.before_any_backward(results, self._look_how_often)
        return results

    def _look_how_often(self) -> None:
        self.is_twice |= torch.is_grad_enabled()

    def before(self, program: Run, put: Callable[[Run], None]) -> Run:
        """What answers calls once a program was decided on: that, but for calls made again.

        :param put: lets calls go to the program alone.
        """
        return self._recomputations.after(self._own, program, put)
