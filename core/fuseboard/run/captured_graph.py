"""What AOTAutograd calls for a graph that it captured, and that graph run op by op."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node

from fuseboard.contracts import Boxed
from fuseboard.profile.judge.interpret import Disturbed, Eager, run
from fuseboard.run.eager import boxed_function
from fuseboard.torch_api import modes as torch_modes


class CapturedGraph:
    """A graph that AOTAutograd captured, and the way into what its calls execute.

    :param read: gives the graph as AOTAutograd gave it; it isn't changed. Asked once, and only
        where somebody needs it.
    :ivar function: what a call executes; something has to be put there.
    :ivar compiled_graph: what that was made from: the captured graph, or what rewrites made of it.
    """

    function: Boxed
    _compiled: Boxed

    def __init__(self, read: Callable[[], GraphModule], name: str) -> None:
        self._read = read
        self.name = name
        self._instead: Boxed | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The graph as AOTAutograd gave it."""
        with torch_modes.without_function_modes():
            return self._read()

    @functools.cached_property
    def compiled_graph(self) -> GraphModule:
        return self.graph

    def boxed(self) -> Boxed:
        """What AOTAutograd gets: looks up the current function.

        What is compiled knows nothing of the tangents that inputs have under forward-mode AD.
        """

        def call(args: list[Any]) -> Sequence[Any]:
            if forward_ad._current_level >= 0:
                return self.eager(args)
            return self.function(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def put(self, function: Boxed) -> None:
        """Let calls go to ``function``."""
        with self._lock:
            self._compiled = function
            self.function = self._instead or function

    def put_before(self, function: Boxed | None) -> None:
        """Let calls go to ``function`` whatever is put there, until it is taken back with None."""
        with self._lock:
            self._instead = function
            self.function = function or self._compiled

    @functools.cached_property
    def eager(self) -> Boxed:
        """The captured graph, op by op."""
        return boxed_function(self.graph, self.name)

    def disturbed(self, seed: int) -> Boxed:
        """The captured graph op by op, with roundings disturbed."""

        def call(args: list[Any]) -> Sequence[Any]:
            inputs = list(args)
            args.clear()
            return run(self.graph, inputs, Disturbed(set(), seed))

        return call


class CapturedBackward(CapturedGraph):
    """A backward graph, which may be called from other surroundings.

    The graph is captured for plain gradients and with autocast off, as torch recommends to call
    ``backward()``. Eager's backward is whatever autograd's formulas make of batched gradients
    (``is_grads_batched``), or of an autocast that is on around ``backward()``. In such calls the
    graph runs op by op.

    :param note: called once with each reason why calls run op by op.
    """

    def __init__(
        self, read: Callable[[], GraphModule], name: str, note: Callable[[str], None]
    ) -> None:
        super().__init__(read, name)
        self._note = note
        self._around = threading.local()
        #: Whether autocast changes what the ops compute; None: not known yet.
        self._autocast_matters: bool | None = None

    def boxed(self) -> Boxed:
        """What AOTAutograd gets."""
        batched, autocast = torch_modes.gradients_are_batched, self._autocast_is_on

        def call(args: list[Any]) -> Sequence[Any]:
            if torch_modes.function_mode_count():  # eager's backward is C++, which asks none
                with torch_modes.without_function_modes():
                    return call(args)
            if batched():
                return self._op_by_op(args)
            if autocast():
                return self._under_autocast(args)
            return self.function(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def look_around(self) -> None:
        """See whether autocast is on where a backward is called from.

        AOTAutograd switches it off for the call itself, if the forward is under autocast.
        """
        self._around.autocast = torch_modes.autocast_is_on()

    def _autocast_is_on(self) -> bool:
        around, self._around.autocast = getattr(self._around, "autocast", False), False
        return around or torch_modes.autocast_is_on()

    def _op_by_op(self, args: list[Any]) -> Sequence[Any]:
        self._note("called with batched gradients: runs op by op then, and isn't judged")
        return self.eager(args)

    def _under_autocast(self, args: list[Any]) -> Sequence[Any]:
        if self._autocast_matters is False:
            with torch_modes.without_autocast():
                return self.function(args)
        inputs = list(args)
        args.clear()
        recast = _Recast()
        with torch_modes.autocast_again():
            results = run(self.graph, inputs, recast)
        if self._autocast_matters is None:
            self._autocast_matters = recast.differed
            if recast.differed:
                self._note(
                    "backward() is called under autocast, which casts what it computes in another "
                    "dtype than outside: runs op by op then; call backward() outside of autocast"
                )
        return results


class _Recast(Eager):
    """Each op under autocast; its result in the dtype that it was captured with.

    Autograd casts gradients likewise, to the dtype of what they are gradients of.

    :ivar differed: whether autocast gave a result another dtype.
    """

    differed = False

    def computed(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        return self._recast(super().computed(node, target, args, kwargs), node.meta.get("val"))

    def _recast(self, value: Any, form: Any) -> Any:
        if isinstance(value, torch.Tensor) and isinstance(form, torch.Tensor):
            self.differed |= value.dtype != form.dtype
            return value.to(form.dtype)
        if isinstance(value, list | tuple) and isinstance(form, list | tuple):
            return [self._recast(*pair) for pair in zip(value, form, strict=True)]
        return value


@contextmanager
def all_running(
    graphs: Sequence[CapturedGraph], how: Callable[[CapturedGraph], Boxed]
) -> Iterator[None]:
    """Let calls of each graph go to what ``how`` gives for it, for the block."""
    try:
        for graph in graphs:
            graph.put_before(how(graph))
        yield
    finally:
        for graph in graphs:
            graph.put_before(None)
