"""Calls whose results are computed again in the backward, and which program is to do that.

``torch.utils.checkpoint(compiled, x)`` calls what was compiled twice: with hooks of saved tensors
in the forward, and once more while autograd works. Both calls have to save the same tensors, so
both are one program's, whatever was decided in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuseboard.forks import fork_safe_lock
from fuseboard.torch_api import modes as torch_modes

Run = Callable[..., Any]


class Recomputations:
    """Counts the calls of one graph that are to be made again."""

    def __init__(self) -> None:
        self._pending = 0
        self._lock = fork_safe_lock()

    def note(self) -> None:
        """A call is made by the program that is to make it again, or is made again."""
        if torch_modes.saved_tensor_hooks_are_set():
            again = torch_modes.is_in_backward()
            with self._lock:
                self._pending = max(self._pending - 1, 0) if again else self._pending + 1

    def after(self, old: Run, new: Run, put: Callable[[Run], None]) -> Run:
        """What answers calls from now on: ``new``, but for those that ``old`` has to make again.

        Calls with hooks are ``old``'s until it owes none.

        :param put: lets calls go to ``new`` alone.
        """
        if not self._pending or new is old:
            return new

        def call(*args: Any) -> Any:
            if not torch_modes.saved_tensor_hooks_are_set():
                return new(*args)
            if not self._pending:
                put(new)
                return new(*args)
            self.note()
            return old(*args)

        return call
