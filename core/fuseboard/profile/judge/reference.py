"""What a region computes on given inputs: in eager, and without roundings.

A graph is run op by op twice: by eager in its own dtypes, and in float64 (see
:mod:`fuseboard.profile.judge.lifting`). An op without a float64 kernel runs in the widest dtype
that it has, and the run goes on in float64 after it; a note says so. The generators of random
numbers are put back to where they were, and the caller's tensors aren't written to: ask
:func:`fuseboard.profile.judge.replays.replayable` first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.ops.draws import draws
from fuseboard.profile.judge.interpret import (
    Eager,
    Lifted,
    Missing,
    disturbed_runs,
    dtypes_of,
    flat_outputs,
    run,
)
from fuseboard.profile.judge.replays import replayable
from fuseboard.profile.judge.rules import Reached, Rule, reached_by, rule_of
from fuseboard.profile.judge.spread import Spread, spread_of
from fuseboard.torch_api.warned import without_warnings

__all__ = ["Reference", "Rule", "make_reference", "replayable", "run_eager"]

#: Runs with disturbed roundings, where a result is beyond what eager's own error allows.
DISTURBED_RUNS = 3


@dataclass(frozen=True)
class Reference:
    """What a region computes on given inputs: eager's own outputs and those in float64.

    :ivar eager: the outputs of the graph run op by op by eager, in its own dtypes.
    :ivar precise: the same in float64 (complex128); integers and booleans as the float64 run gives
        them; None where the rule is ``unjudged``.
    :ivar rules: how each output is judged.
    :ivar spreads: how far eager is from float64.
    :ivar notes: what people should know, such as ops that have no float64 kernel.
    :ivar inner: positions of outputs that nothing but other regions reads.
    :ivar disturbed: how far eager is from float64 at most if each of its ops rounds otherwise.
        Computed when it is first asked for, on the same inputs, which it keeps; empty if it can't.
    """

    eager: tuple[Any, ...]
    precise: tuple[Any, ...]
    rules: tuple[Rule, ...]
    spreads: tuple[Spread, ...]
    notes: tuple[str, ...] = ()
    inner: frozenset[int] = frozenset()
    disturbed: Callable[[], tuple[Spread, ...]] = field(default=lambda: (), repr=False)

    def of(self, places: Sequence[int]) -> Reference:
        """What some of the outputs are held against, in the order of ``places``."""

        def disturbed() -> tuple[Spread, ...]:
            found = self.disturbed()
            return tuple(found[i] for i in places) if found else ()

        return replace(
            self,
            eager=tuple(self.eager[i] for i in places),
            precise=tuple(self.precise[i] for i in places),
            rules=tuple(self.rules[i] for i in places),
            spreads=tuple(self.spreads[i] for i in places),
            disturbed=disturbed,
        )


def make_reference(graph: GraphModule, inputs: Sequence[Any]) -> Reference:
    """Run a graph in eager and in float64.

    :param graph: a region as captured; it isn't changed. It must be ``replayable``.
    :param inputs: real tensors and plain numbers, in the order of the placeholders; not written to.
    """
    inputs = list(inputs)
    first = Eager()
    with _undisturbed(graph, inputs):
        eager = without_warnings(lambda: run(graph, inputs, first))
    lifted = Lifted(first)
    with _undisturbed(graph, inputs):
        precise = without_warnings(lambda: run(graph, inputs, lifted))
    reached = reached_by(graph, {node: dtypes_of(form) for node, form in first.forms.items()})
    reasons = _why_unjudged(graph, inputs, reached, eager)
    rules: list[Rule] = []
    notes = list(lifted.notes)
    for number, node in enumerate(flat_outputs(graph)):
        rule = rule_of(eager[number], reached.get(node))
        reason = reasons[number] or _incomparable(rule, eager[number], precise[number])
        if reason:
            notes.append(f"output {number} isn't judged by value: {reason}")
            rule = "unjudged"
        rules.append(rule)
    precise = [
        _comparable(value) if rule in ("close", "mismatches") else None
        for value, rule in zip(precise, rules, strict=True)
    ]
    spreads = [
        replace(spread_of(own, exact), exact=node in reached and not reached[node].rounded)
        for own, exact, node in zip(eager, precise, flat_outputs(graph), strict=True)
    ]
    return Reference(
        eager=tuple(eager),
        precise=tuple(precise),
        rules=tuple(rules),
        spreads=tuple(spreads),
        notes=tuple(notes),
        disturbed=_Disturbed(graph, inputs, precise, lifted.rounded),
    )


def _comparable(value: Any) -> Any:
    """8-bit floats, which the float64 run keeps, as numbers: torch computes with none of them."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 1:
        return value.to(torch.float64)
    return value


def run_eager(graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Run a graph op by op, as eager does; what is said of :func:`make_reference` holds here."""
    return run_undisturbed(graph, inputs, Eager())


def run_undisturbed(graph: GraphModule, inputs: Sequence[Any], how: Eager) -> list[Any]:
    """Run a graph op by op, with no gradients, autocast, or effect on the random numbers."""
    with _undisturbed(graph, inputs):
        return without_warnings(lambda: run(graph, list(inputs), how))


def _why_unjudged(
    graph: GraphModule, inputs: Sequence[Any], reached: dict[Node, Reached], eager: Sequence[Any]
) -> list[str]:
    """For each output why its values mean nothing; "" where they do.

    Where uninitialised memory may reach an output, eager is run again with something else in that
    memory: an output that is the same has been overwritten.
    """
    found = []
    again: list[Any] | None = None
    for number, node in enumerate(flat_outputs(graph)):
        what = reached.get(node, Reached())
        reason = "random numbers reach it" if what.random else ""
        if what.memory and not what.random and eager[number] is not None:
            if again is None:
                with _undisturbed(graph, inputs):
                    again = run(graph, inputs, Eager(fill=1))
            if not _equal(eager[number], again[number]):
                reason = "uninitialised memory reaches it"
        found.append(reason)
    return found


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    same = (one == other) | ((one != one) & (other != other))
    return one.shape == other.shape and bool(same.all())


def _incomparable(rule: Rule, eager: Any, precise: Any) -> str:
    """Why an output of the two runs can't be compared; "" if it can or needn't be."""
    if rule == "exact":
        return ""
    if isinstance(precise, Missing):
        return precise.reason
    if isinstance(eager, torch.Tensor):
        if not isinstance(precise, torch.Tensor):
            return f"the float64 run gives a {type(precise).__name__}"
        if eager.shape != precise.shape:
            return f"its shape is {tuple(precise.shape)} in float64, {tuple(eager.shape)} in eager"
    return ""


class _Disturbed:
    """The spreads of runs with disturbed roundings, made once, when asked for."""

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        precise: Sequence[Any],
        rounded: set[Node],
    ) -> None:
        self._arguments = (graph, inputs, rounded, DISTURBED_RUNS)
        self._versions = _versions(inputs)
        self._precise = precise
        self._spreads: tuple[Spread, ...] | None = None

    def __call__(self) -> tuple[Spread, ...]:
        if self._spreads is None and _versions(self._arguments[1]) != self._versions:
            self._spreads = ()  # the inputs were written to meanwhile
        if self._spreads is None:
            try:
                self._spreads = without_warnings(self._measured)
            except Exception:  # an op that ran doesn't run again: eager's own error must do
                self._spreads = ()
        return self._spreads

    def _measured(self) -> tuple[Spread, ...]:
        found = [Spread()] * len(self._precise)
        graph, inputs, *_ = self._arguments
        with _undisturbed(graph, inputs):
            for outputs in disturbed_runs(*self._arguments):
                pairs = zip(outputs, self._precise, strict=True)
                new = [spread_of(own, exact, relative=True) for own, exact in pairs]
                found = [one.joined(other) for one, other in zip(found, new, strict=True)]
        return tuple(found)


def _versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor was written to; those of inference mode don't count that."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@contextlib.contextmanager
def _undisturbed(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """No gradients, and no autocast, which would change dtypes inside ops.

    The states of the default generators, the CPU's and those of the inputs' devices, are put back
    if the graph may draw. (Else they are left alone: another thread may be drawing.)
    """
    with contextlib.ExitStack() as stack:
        if _may_draw(graph):
            indices = {
                value.device.index
                for value in inputs
                if isinstance(value, torch.Tensor) and value.device.type == "cuda"
            }
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices)))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


#: Namespaces of ops that draw random numbers only if they are tagged so.
_DRAW_AS_TAGGED = ("aten", "prims", "fuseboard")


def _may_draw(graph: GraphModule) -> bool:
    """Whether a graph draws random numbers; what the user's ops and inner graphs do isn't known."""
    for node in graph.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) or draws(node):
            return True
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in _DRAW_AS_TAGGED:
            return True
    return False
