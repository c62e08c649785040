"""What a region computes on given inputs: in eager, and without roundings.

A graph is run op by op twice: by eager in its own dtypes, and in float64 (see
:mod:`fuseboard.profile.lifting`). An op without a float64 kernel runs in the widest dtype that it
has, and the run goes on in float64 after it; a note says so. The generators of random numbers are
put back to where they were, and the caller's tensors aren't written to: ask
:func:`fuseboard.profile.replays.replayable` first.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from fuseboard.partition.replay import draws, hides_draws
from fuseboard.profile import lifting
from fuseboard.profile.replays import replayable
from fuseboard.profile.rules import Rule, reached_by, rule_of
from fuseboard.profile.spread import Spread, spread_of

__all__ = ["Reference", "Rule", "make_reference", "replayable"]


@dataclass(frozen=True)
class Reference:
    """What a region computes on given inputs: eager's own outputs and those in float64.

    :ivar eager: the outputs of the graph run op by op by eager, in its own dtypes.
    :ivar precise: the same in float64 (complex128); integers and booleans as the float64 run gives
        them; None where the rule is ``unjudged``.
    :ivar rules: how each output is judged.
    :ivar spreads: how far eager is from float64.
    :ivar notes: what people should know, such as ops that have no float64 kernel.
    """

    eager: tuple[Any, ...]
    precise: tuple[Any, ...]
    rules: tuple[Rule, ...]
    spreads: tuple[Spread, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Form:
    """The dtype and the strides of a tensor as eager has it; no strides where it has none."""

    dtype: torch.dtype
    strides: tuple[int, ...] | None


class _Missing:
    """Stands for a value that couldn't be computed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def make_reference(graph: GraphModule, inputs: Sequence[Any]) -> Reference:
    """Run a graph in eager and in float64.

    :param graph: a region as captured; it isn't changed. It must be ``replayable``.
    :param inputs: real tensors and plain numbers, in the order of the placeholders; not written to.
    """
    with _quietly(), _generators_put_back(inputs):
        forms: dict[Node, Any] = {}
        with _generators_put_back(inputs):
            eager = _run(graph, inputs, _Eager(forms))
        lifted = _Lifted(graph, forms)
        precise = _run(graph, inputs, lifted)
    reached = reached_by(graph, {node: _dtypes(form) for node, form in forms.items()})
    results = _flat_outputs(graph)
    rules: list[Rule] = []
    spreads: list[Spread] = []
    notes = list(lifted.notes)
    for number, (node, own) in enumerate(zip(results, eager, strict=True)):
        what = reached[node] if isinstance(node, Node) else None
        rule: Rule = rule_of(own, what) if what is not None else "exact"
        if rule == "unjudged" and what is not None:
            why = "random numbers" if what.random else "uninitialised memory"
            notes.append(f"output {number} isn't judged by value: {why} reach it")
        elif rule != "exact" and (why := _incomparable(own, precise[number])):
            rule = "unjudged"
            notes.append(f"output {number} isn't judged by value: {why}")
        rules.append(rule)
        judged = own is not None and rule in ("close", "mismatches")
        spreads.append(spread_of(own, precise[number]) if judged else Spread())
        if rule == "unjudged":
            precise[number] = None
    return Reference(tuple(eager), tuple(precise), tuple(rules), tuple(spreads), tuple(notes))


def _incomparable(eager: Any, precise: Any) -> str:
    """Why an output of the two runs can't be compared; "" if it can."""
    if isinstance(precise, _Missing):
        return precise.reason
    if isinstance(eager, torch.Tensor):
        if not isinstance(precise, torch.Tensor):
            return f"the float64 run gives a {type(precise).__name__}"
        if eager.shape != precise.shape:
            return f"its shape is {tuple(precise.shape)} in float64, {tuple(eager.shape)} in eager"
    return ""


def _flat_outputs(graph: GraphModule) -> list[Any]:
    results: Any = graph.graph.output_node().args[0]
    return list(results) if isinstance(results, list | tuple) else [results]


# --- running a graph -----------------------------------------------------------------------------


def _run(graph: GraphModule, inputs: Sequence[Any], run: _Eager | _Lifted) -> list[Any]:
    """Run a graph's nodes in order; values are let go after their last use."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    drops = _last_uses(graph)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = run.placeholder(node, next(given))
        elif node.op == "get_attr":
            values[node] = run.constant(node, operator.attrgetter(str(node.target))(graph))
        elif node.op == "call_function":
            values[node] = run.call(node, values)
        for used in drops.get(node, ()):
            del values[used]
    return [
        run.output(node, values) if isinstance(node, Node) else node
        for node in _flat_outputs(graph)
    ]


def _last_uses(graph: GraphModule) -> dict[Node, list[Node]]:
    """For each node, the nodes that nobody needs after it."""
    drops: dict[Node, list[Node]] = {}
    seen: set[Node] = set(graph.graph.output_node().all_input_nodes)
    for node in reversed(graph.graph.nodes):
        if node.op == "output":
            continue
        for used in (node, *node.all_input_nodes):
            if used not in seen:
                seen.add(used)
                drops.setdefault(node, []).append(used)
    return drops


class _Eager:
    """Each op as it is; notes the form of each value."""

    def __init__(self, forms: dict[Node, Any]) -> None:
        self.forms = forms

    def placeholder(self, node: Node, value: Any) -> Any:
        self.forms[node] = _form(value)
        return value

    constant = placeholder

    def call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        target: Any = node.target
        result = target(
            *map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__)
        )
        self.forms[node] = _form(result)
        return result

    def output(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return values[node]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Form(value.dtype, value.stride() if value.layout == torch.strided else None)
    if isinstance(value, list | tuple):
        return [_form(item) for item in value]
    return None


def _dtypes(form: Any) -> Any:
    if isinstance(form, list):
        return [_dtypes(item) for item in form]
    return form.dtype if form is not None else None


class _Lifted:
    """Each op in float64, or in the widest dtype that it has.

    :ivar notes: which ops ran in another dtype, and which not at all.
    """

    def __init__(self, graph: GraphModule, forms: Mapping[Node, Any]) -> None:
        self.graph = graph
        self.forms = forms
        self.notes: dict[str, None] = {}

    def placeholder(self, node: Node, value: Any) -> Any:
        return value  # lifted where it is used: all weights at once would take too much memory

    constant = placeholder

    def output(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return self._lifted(node, values)

    def _lifted(self, node: Node, values: Mapping[Node, Any]) -> Any:
        value = values[node]
        return lifting.lift_all(value) if node.op in ("placeholder", "get_attr") else value

    def call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        missing = next(
            (values[used] for used in node.all_input_nodes if _is_missing(values[used])), None
        )
        if missing is not None:
            return missing
        target = node.target
        own_dtypes = (
            isinstance(target, torch._ops.HigherOrderOperator)
            or lifting.about_bits(target)
            or draws(node)
        )
        if own_dtypes:
            return self._in_own_dtypes(node, values, None)
        form = self.forms[node]
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: self._lifted(used, values))
        args, kwargs = lifting.lifted_arguments(target, args, kwargs, _dtypes(form))
        try:
            result = target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:  # an op may refuse a dtype in any way
            del args, kwargs
            return self._in_own_dtypes(node, values, error)
        return self._laid_out(result, form)

    def _in_own_dtypes(
        self, node: Node, values: Mapping[Node, Any], refused: Exception | None
    ) -> Any:
        """Cast down, run, cast up."""

        def own(used: Node) -> Any:
            if used.op in ("placeholder", "get_attr"):
                return values[used]
            return lifting.lowered_argument(values[used], used, self.forms[used])

        target: Any = node.target
        try:
            args, kwargs = map_arg((node.args, node.kwargs), own)
            result = target(*args, **kwargs)
        except Exception as error:  # nothing can be said of what depends on it
            reason = f"{_name(target)} can't be run again: {_first_line(error)}"
            self.notes[reason] = None
            return _Missing(reason)
        if not (draws(node) or hides_draws(node, self.graph) or lifting.about_bits(target)):
            why = "it holds graphs" if refused is None else "it has no float64 kernel"
            self.notes[f"{_name(target)} ran in its own dtypes instead of float64: {why}"] = None
        return self._laid_out(lifting.lift_all(result), self.forms[node])

    def _laid_out(self, result: Any, form: Any) -> Any:
        """Lifted, with the strides that eager has: views after it are meant for these."""
        if isinstance(result, list | tuple) and isinstance(form, list):
            return [self._laid_out(item, own) for item, own in zip(result, form, strict=True)]
        if not isinstance(result, torch.Tensor) or form is None:
            return result
        result = lifting.lift(result)
        if form.strides is None or result.layout != torch.strided or result.numel() < 2:
            return result
        strides = result.stride()
        if len(strides) != len(form.strides) or all(
            own == wanted or size < 2
            for own, wanted, size in zip(strides, form.strides, result.shape, strict=True)
        ):
            return result
        return lifting.restrided(result, form.strides)


def _is_missing(value: Any) -> bool:
    return isinstance(value, _Missing)


def _name(target: Any) -> str:
    return str(target) if not callable(getattr(target, "name", None)) else str(target.name())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# --- what a run must not be disturbed by, nor disturb --------------------------------------------


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """No gradients, and no autocast, which would change dtypes inside ops."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def _generators_put_back(inputs: Sequence[Any]) -> Iterator[None]:
    """The states of the default generators, of the CPU and of the inputs' devices, as before."""
    devices = sorted(
        {
            value.device.index
            for value in inputs
            if isinstance(value, torch.Tensor) and value.device.type == "cuda"
        }
    )
    with torch.random.fork_rng(devices=devices):
        yield
