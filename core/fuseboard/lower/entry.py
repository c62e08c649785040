"""What AOTAutograd calls for a graph that it captured, and that graph run op by op."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule

from fuseboard.contracts import Boxed
from fuseboard.lower.eager import boxed_function
from fuseboard.profile.interpret import Disturbed, run


class Entry:
    """The way into one graph's code.

    :param captured: the graph as AOTAutograd gave it; it isn't changed.
    :ivar function: what a call executes; something has to be put there.
    """

    function: Boxed
    _usual: Boxed

    def __init__(self, captured: GraphModule, name: str) -> None:
        self.captured = captured
        self.name = name
        self._instead: Boxed | None = None
        self._lock = threading.Lock()

    def boxed(self) -> Boxed:
        """What AOTAutograd gets: looks up the current function, nothing more."""

        def call(args: list[Any]) -> Sequence[Any]:
            return self.function(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def put(self, function: Boxed) -> None:
        """Let calls go to ``function``."""
        with self._lock:
            self._usual = function
            self.function = self._instead or function

    def put_before(self, function: Boxed | None) -> None:
        """Let calls go to ``function`` whatever is put there, until it is taken back with None."""
        with self._lock:
            self._instead = function
            self.function = function or self._usual

    @functools.cached_property
    def eager(self) -> Boxed:
        """The captured graph, op by op."""
        return boxed_function(self.captured, self.name)

    def disturbed(self, seed: int) -> Boxed:
        """The same with roundings disturbed."""

        def call(args: list[Any]) -> Sequence[Any]:
            inputs = list(args)
            args.clear()
            return run(self.captured, inputs, Disturbed(set(), seed))

        return call


@contextmanager
def all_running(entries: Sequence[Entry], how: Callable[[Entry], Boxed]) -> Iterator[None]:
    """For the block, let calls of each go to what ``how`` gives for it."""
    try:
        for entry in entries:
            entry.put_before(how(entry))
        yield
    finally:
        for entry in entries:
            entry.put_before(None)
