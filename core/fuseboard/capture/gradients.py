"""What AOTAutograd's function leaves out of a gradient: its own gradient, and that there is none.

- Its backward isn't differentiable. torch 2.13 lets a second gradient raise where it gets that far,
  but what the backward saved has no history: from ``exp`` only the result is saved, and the second
  gradient through it is dropped without a word. Here the first gradient is computed by Dynamo's own
  graph where it is to be differentiated again (``create_graph=True``), so that it is eager's with
  all that follows; where that can't be done, whoever differentiates it is told.
- It gives zeros to an input that none of the results reaches from which a gradient came. Eager
  gives None, which optimisers and hooks tell from zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.capture.original import forward_of
from fuseboard.ops.draws import may_draw
from fuseboard.run.captured_graph import CapturedGraph
from fuseboard.torch_api import aot_functions
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.compiles import untraced
from fuseboard.torch_api.state import ANSWER_PARTS, StateGuard, read_state

_MODES = tuple(part for part in ANSWER_PARTS if "autocast" in part.name)

Run = Callable[..., Any]

#: So many bytes that calls write to, as a batch norm to its statistics, are copied before each.
_WRITTEN_BYTES = 1 << 20

_Form = tuple[torch.Size, torch.dtype, torch.device]


class Gradients:
    """Makes an autograd function of AOTAutograd's do as autograd does.

    :param graph: Dynamo's, in the modes of the calls.
    :param forward: the way into what AOTAutograd captured of it.
    :param backward: the same of its backward.
    :param fast_random: random numbers needn't be eager's.
    :param note: is told, once, how gradients of gradients come about.
    :ivar why_not: why gradients can't be differentiated; "" as far as it is known.
    :ivar was_refused: one was asked for that can't be.
    """

    def __init__(
        self,
        graph: GraphModule,
        forward: CapturedGraph,
        backward: CapturedGraph,
        fast_random: bool,
        note: Callable[[str], None],
    ) -> None:
        self.was_refused = False
        self._own = forward_of(graph)
        self._count = len(graph.graph.find_nodes(op="placeholder"))
        self._forward_graph = forward.graph
        self._backward = backward.graph
        self._note = note
        self._modes = read_state(_MODES)
        nodes = [node for one in (forward, backward) for node in one.graph.graph.nodes]
        self._draws = any(map(may_draw, nodes))
        self.why_not = ""
        if self._draws and fast_random:
            self.why_not = "it draws random numbers that nobody can draw again"
        #: For each gradient the results that it depends on; None: not known yet, or not at all.
        self._sources: list[frozenset[int]] | None = None
        self._form: aot_functions.FunctionForm | None = None

    def take_over(self, function: Any) -> None:
        """Let a function's forward remember what its backward may need, and its backward use it."""
        try:
            self._form = aot_functions.form_of(function)
        except aot_functions.UnknownForm as why:
            self.why_not = self.why_not or str(why)
        else:
            self.why_not = self.why_not or self._why_not_copied(self._form.written)
        function.forward = staticmethod(partial(self._forward, function.forward))
        function.backward = staticmethod(partial(self._gradients, function.backward))
        if (key := getattr(function, "_compiled_autograd_key", None)) is not None:
            function._compiled_autograd_key = staticmethod(partial(_with_zeros, key))

    def _why_not_copied(self, written: Sequence[int]) -> str:
        """Why inputs that a call writes to aren't copied before it; "" if they are, in each."""
        places = self._forward_graph.graph.find_nodes(op="placeholder")
        values = [places[i].meta["val"] for i in written]
        if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
            return "it writes to inputs whose sizes may change"
        nbytes = sum(value.nbytes for value in values)
        return f"it writes to {nbytes} bytes of its inputs" if nbytes > _WRITTEN_BYTES else ""

    def _forward(self, own: Run, context: Any, *args: Any) -> Any:
        copied = () if self.why_not or self._form is None else self._form.written
        call = _Call(args, self._draws, copied)
        results = own(context, *args)
        if self._form is not None:
            call.forms = {i: _form(results[i]) for i in self._form.with_gradient}
            context.set_materialize_grads(False)
        context.fuseboard_call = call
        return results

    @untraced  # a gradient may be asked for in a frame that Dynamo compiles
    def _gradients(self, own: Run, context: Any, *values: Any) -> Any:
        boxed = len(values) == 1 and isinstance(values[0], list)
        gradients = list(values[0] if boxed else values)
        if boxed:
            values[0].clear()  # each is freed as soon as nobody needs it
        call: _Call = context.fuseboard_call

        def first(given: list[Any]) -> Any:
            return own(context, given) if boxed else own(context, *given)

        if torch.is_grad_enabled():
            return self._differentiable(call, gradients, first)
        missing = call.fill(gradients, self._form)
        results = self._without(missing, first(gradients), call)
        if not aot_functions.keeps_graph():
            call.forget()
        return results

    def unfit(self, args: Sequence[Any]) -> str:
        """Why Dynamo's own graph has to answer a call; "" if it hasn't."""
        return "a gradient of a gradient was asked for" if self.was_refused else ""

    # --- none is not zero -----------------------------------------------------------------------

    def _without(
        self, missing: frozenset[int], results: Sequence[Any], call: _Call
    ) -> Sequence[Any]:
        """None for each gradient that comes from missing ones alone.

        An input's own hooks would be called with it, in eager they aren't called: they get zeros.
        """
        if not missing:
            return results
        if self._sources is None:
            assert self._form is not None
            is_given = [value is not None for value in results]
            found = aot_functions.gradients_by_result(self._backward, self._form, is_given)
            self._sources = found or [frozenset()] * len(results)
        inputs = call.living() or [None] * len(results)
        return tuple(
            None
            if sources and sources <= missing and not getattr(one, "_backward_hooks", None)
            else value
            for sources, value, one in zip(self._sources, results, inputs, strict=True)
        )

    # --- gradients of gradients -----------------------------------------------------------------

    def _differentiable(
        self, call: _Call, gradients: list[Any], first: Callable[[list[Any]], Any]
    ) -> Any:
        """Gradients that can be differentiated, by Dynamo's own graph."""
        inputs = call.inputs()
        if why := self.why_not or self._why_not_with(inputs):
            return self._refusing(why, call, gradients, first)
        assert inputs is not None
        self._note("create_graph=True: gradients are computed by Dynamo's own graph then")
        with ExitStack() as stack:
            if torch_modes.function_mode_count():
                stack.enter_context(torch_modes.without_function_modes())
            # As aliases: one input may be computed from another one, which isn't this graph's.
            leaves = [a.view_as(a) if _has_gradient(a) else a for a in inputs]
            for i in call.copied:  # each run writes to them
                leaves[i] = leaves[i].clone()
            results = self._results(call, leaves)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and _has_gradient(result)
        ]
        wanted = [leaf for leaf in leaves if _has_gradient(leaf)]
        if not pairs:
            return (None,) * len(inputs)
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return tuple(next(found) if _has_gradient(leaf) else None for leaf in leaves)

    def _results(self, call: _Call, inputs: Sequence[Any]) -> list[Any]:
        """Of Dynamo's graph, in the modes of the call; its bases come last."""
        assert self._form is not None
        with ExitStack() as stack:
            stack.enter_context(StateGuard(_MODES))
            if call.drawn is not None:
                stack.enter_context(torch.random.fork_rng(devices=()))
                torch.set_rng_state(call.drawn)
            for part, value in zip(_MODES, self._modes, strict=True):
                if part.read() != value:
                    part.write(value)
            results = [None] * len(self._form.written) + list(self._own(*inputs))
        return [*results, *(results[i]._base for i in self._form.bases)]

    def _why_not_with(self, inputs: Sequence[Any] | None) -> str:
        if inputs is None:
            return (
                "an input is gone, or was written to since, or the backward has run without "
                "retain_graph=True"
            )
        if len(inputs) != self._count:
            return "AOTAutograd's inputs aren't those of Dynamo's graph"
        if self._draws and any(isinstance(a, torch.Tensor) and a.is_cuda for a in inputs):
            return "it draws random numbers on an accelerator"
        return ""

    def _refusing(
        self, why: str, call: _Call, gradients: list[Any], first: Callable[[list[Any]], Any]
    ) -> Any:
        """Gradients whose own gradients raise, whatever these are asked for.

        :raises RuntimeError: that can't be seen to.
        """
        self.was_refused = True
        text = (
            "fuseboard: what was compiled has no second gradient here, which create_graph=True "
            f"asks for: {why}. From the next call on Dynamo's own graph runs, which is eager's"
        )
        inputs = call.living()
        if inputs is None:
            raise RuntimeError(text)
        given = list(gradients)
        missing = call.fill(gradients, self._form)
        with torch.no_grad():
            results = first(gradients)
        results = self._without(missing, results, call)
        return _Refused.apply(  # type: ignore[no-untyped-call]
            text, len(results), *results, *inputs, *given
        )


def _with_zeros(own_key: Run, context: Any) -> Any:
    """Compiled autograd asks before it traces AOTAutograd's graph, which wants zeros for None."""
    context.set_materialize_grads(True)
    return own_key(context)


class _Refused(torch.autograd.Function):
    """Values as they are, which seem to be computed from all that comes after them."""

    @staticmethod
    def forward(context: Any, text: str, count: int, *values: Any) -> Any:
        context.text = text
        return tuple(
            one.view_as(one) if isinstance(one, torch.Tensor) else one for one in values[:count]
        )

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise RuntimeError(context.text)


class _Call:
    """What one call of the forward leaves for its backward.

    Inputs are held as autograd would, until the backward has run; but where hooks of saved tensors
    are set, as by a checkpoint, they say what becomes of tensors, and only leaves are held. Inputs
    that the call writes to are held as they were before it.

    :ivar copied: positions of those inputs.
    :ivar forms: of the results that have a gradient, by position.
    :ivar drawn: the state of the generator before it, if it draws.
    """

    __slots__ = ("_inputs", "_versions", "copied", "drawn", "forms")

    def __init__(self, inputs: Sequence[Any], may_draw: bool, copied: Sequence[int]) -> None:
        self.copied = copied
        if copied:
            inputs = list(inputs)
            for i in copied:
                inputs[i] = inputs[i].clone()
        self._inputs: Sequence[Any] | None = inputs
        if torch_modes.saved_tensor_hooks_are_set():
            self._inputs = [
                weakref.ref(a) if isinstance(a, torch.Tensor) and not a.is_leaf else a
                for a in inputs
            ]
        try:  # in every call, of hundreds of weights: mostly tensors that have versions
            self._versions = [a._version for a in inputs]
        except (AttributeError, RuntimeError):
            self._versions = [_version(a) for a in inputs]
        self.drawn = torch.get_rng_state() if may_draw else None
        self.forms: dict[int, _Form] = {}

    def forget(self) -> None:
        self._inputs = None

    def living(self) -> list[Any] | None:
        """The inputs; None where one is gone."""
        if self._inputs is None:
            return None
        found = [a() if isinstance(a, weakref.ref) else a for a in self._inputs]
        gone = any(b is None and a is not None for a, b in zip(self._inputs, found, strict=True))
        return None if gone else found

    def inputs(self) -> list[Any] | None:
        """The inputs; None where one is gone, or isn't what it was."""
        found = self.living()
        return found if found and list(map(_version, found)) == self._versions else None

    def fill(self, gradients: list[Any], form: aot_functions.FunctionForm | None) -> frozenset[int]:
        """Put zeros where gradients are missing; the positions of these."""
        if form is None:
            return frozenset()
        missing = [i for i in form.with_gradient if gradients[i] is None]
        for i in missing:
            shape, dtype, device = self.forms[i]
            gradients[i] = torch.zeros(shape, dtype=dtype, device=device)
        return frozenset(missing)


def _form(value: torch.Tensor) -> _Form:
    return value.shape, value.dtype, value.device


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
