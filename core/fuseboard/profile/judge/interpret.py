"""Graphs run op by op on real tensors: as eager does, in float64, and with roundings disturbed.

Past 400 lines: the second way follows what the first one did, and the third is the first one with
roundings, so they are read together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node, map_arg

from fuseboard.ops.draws import draws
from fuseboard.ops.effects import only_raises
from fuseboard.ops.liveness import unused_after
from fuseboard.profile.judge import batch_means, lifting, quantised
from fuseboard.torch_api import internals as torch_internals

#: What uninitialised memory is filled with in a run, by what kind of numbers it holds.
FILLS: tuple[dict[str, Any], ...] = (
    {"float": 300.5, "int": 113, "bool": True},
    {"float": -200.25, "int": 11, "bool": False},
)


@dataclass(frozen=True)
class Form:
    """The dtype and the strides of a tensor as eager has it; no strides where it has none."""

    dtype: torch.dtype
    strides: tuple[int, ...] | None


def form_of(value: Any) -> Any:
    """The form of a tensor, a list of forms for several, None for anything else."""
    if isinstance(value, torch.Tensor):
        return Form(value.dtype, value.stride() if value.layout == torch.strided else None)
    if isinstance(value, list | tuple):
        return [form_of(item) for item in value]
    return None


def dtypes_of(form: Any) -> Any:
    """The dtypes in a form."""
    if isinstance(form, list):
        return [dtypes_of(item) for item in form]
    return form.dtype if form is not None else None


class Missing:
    """Stands for a value that couldn't be computed.

    :ivar reason: why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _InnerMissing(Exception):
    """A value within a loop couldn't be computed; the text says why."""


class Evaluation(Protocol):
    """A way to run a graph: what becomes of inputs and constants, of ops, of outputs."""

    def input(self, node: Node, value: Any) -> Any:
        """An input or a constant."""

    def call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """The value of a node that computes."""

    def result(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """An output of the graph."""


def run(graph: GraphModule, inputs: Sequence[Any], evaluation: Evaluation) -> list[Any]:
    """Run a graph's nodes in order; values are let go after their last use.

    :returns: the flat outputs.
    """
    values: dict[Node, Any] = {}
    inputs_left = iter(inputs)
    unused = unused_after(graph.graph)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = evaluation.input(node, next(inputs_left))
        elif node.op == "get_attr":
            values[node] = evaluation.input(node, operator.attrgetter(str(node.target))(graph))
        elif node.op == "call_function":
            values[node] = evaluation.call(node, values)
        for used in unused.get(node, ()):
            del values[used]
    return [
        evaluation.result(item, values) if isinstance(item, Node) else item
        for item in flat_outputs(graph)
    ]


def flat_outputs(graph: GraphModule) -> list[Any]:
    """What the output node returns: nodes, numbers and None."""
    results: Any = graph.graph.output_node().args[0]
    return list(results) if isinstance(results, list | tuple) else [results]


def arguments_of(
    node: Node, value_of: Callable[[Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with values in the places of nodes."""
    args: Any = map_arg(node.args, value_of)
    kwargs: Any = map_arg(node.kwargs, value_of) if node.kwargs else {}
    return args, dict(kwargs)


def inner_graphs(target: Any, args: Sequence[Any]) -> tuple[list[GraphModule], Sequence[Any]]:
    """The graphs of which a higher-order op runs one just as it is, and what that is run on.

    These are ``invoke_subgraph(graph, name, *operands)`` and ``cond(if_so, then, else, operands)``;
    for other ops there are none.
    """
    name = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""
    if name == "invoke_subgraph" and isinstance(args[0], GraphModule):
        return [args[0]], args[2:]
    if name == "cond" and isinstance(args[1], GraphModule):
        return [args[1], args[2]], args[3]
    return [], ()


def with_loop_run(
    target: Any, args: Sequence[Any], run_inner: Callable[[int, GraphModule, Sequence[Any]], Any]
) -> tuple[Any, ...] | None:
    """A loop's arguments with functions in the places of its graphs; None for other ops.

    These are ``while_loop(condition, body, carried, further)`` and
    ``scan(step, carried, slices, further)``.

    :param run_inner: runs a graph of the loop: (its position among the arguments, it, operands).
    """
    name = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""
    count = {"while_loop": 2, "scan": 1}.get(name, 0)
    if not count or not all(isinstance(arg, GraphModule) for arg in args[:count]):
        return None

    def function(position: int) -> Callable[..., Any]:
        return lambda *operands: run_inner(position, args[position], operands)

    return (*map(function, range(count)), *args[count:])


def is_condition(target: Any, position: int) -> bool:
    """Whether the graph of a loop at this position says if it goes on."""
    return bool(target.name() == "while_loop") and position == 0


# --- eager ---------------------------------------------------------------------------------------


class Eager:
    """Each op as it is.

    :ivar forms: the form of each node's value, of inner graphs too.
    :ivar branches: for each ``cond``, which of its graphs was run, call by call; for each
        ``while_loop``, whether it went on.
    :param fill: which of :data:`FILLS` uninitialised memory is filled with.
    """

    def __init__(self, fill: int = 0) -> None:
        self.forms: dict[Node, Any] = {}
        self.branches: dict[Node, list[int]] = {}
        self.fill = fill

    def input(self, node: Node, value: Any) -> Any:
        self.forms[node] = form_of(value)
        return value

    def call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = arguments_of(node, values.__getitem__)
        graphs, operands = inner_graphs(target, args)
        result: Any
        if graphs:
            which = 0 if len(graphs) == 1 or args[0] else 1
            self.branches.setdefault(node, []).append(which)
            result = run(graphs[which], operands, self)
        elif loop := with_loop_run(target, args, partial(self._run_inner, node)):
            result = target(*loop)
        else:
            result = self.computed(node, target, args, kwargs)
        self.forms[node] = form_of(result)
        return result

    def _run_inner(
        self, node: Node, position: int, graph: GraphModule, operands: Sequence[Any]
    ) -> Any:
        """A graph of a loop, on the operands of one round."""
        results = run(graph, operands, self)
        if is_condition(node.target, position):
            self.branches.setdefault(node, []).append(bool(results[0]))
            return results[0]
        return tuple(results)

    def computed(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an op."""
        result = target(*args, **kwargs)
        if lifting.leaves_memory(target):
            filled(result, self.fill)
        return result

    def result(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return values[node]


def filled(tensor: torch.Tensor, fill: int) -> None:
    """Write to memory that nobody wrote to, so that runs have the same there, or surely not."""
    if tensor.dtype == torch.bool:
        tensor.fill_(FILLS[fill]["bool"])
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(FILLS[fill]["float"])
    else:
        tensor.fill_(FILLS[fill]["int"])


# --- float64 -------------------------------------------------------------------------------------


class _Given:
    """An input or a constant, lifted when it is first used: all at once would take much memory."""

    def __init__(self, raw: Any, node: Node) -> None:
        self.raw = raw
        self._in_storage = isinstance(raw, torch.Tensor) and _strided_anew(node)
        self._lifted: Any = None

    @property
    def lifted(self) -> Any:
        if self._lifted is None:
            lift = lifting.lift_storage if self._in_storage else lifting.lift_all
            self._lifted = lift(self.raw)
        return self._lifted


def _strided_anew(node: Node) -> bool:
    """Whether the graph reaches from a value into the memory around it, through ``as_strided``."""
    for user in node.users:
        target: Any = user.target
        if user.args[:1] != (node,) or not isinstance(target, torch._ops.OpOverload):
            continue
        if target._schema.name.startswith("aten::as_strided"):
            return True
        if target._schema.arguments[0].alias_info is not None and _strided_anew(user):
            return True
    return False


class Lifted:
    """Each op in float64, or in the widest dtype that it has.

    A ``cond`` takes the branch that eager took, whatever the condition is in float64, and a
    ``while_loop`` goes round as often.

    :ivar notes: which ops ran in another dtype, and which not at all.
    :ivar rounded: the nodes whose roundings are eager's: those, and those in float64 anyway.
    :param eager: a run of the same graph on the same inputs.
    """

    def __init__(self, eager: Eager) -> None:
        self.forms: Mapping[Node, Any] = eager.forms
        self._branches = {node: iter(taken) for node, taken in eager.branches.items()}
        self.notes: dict[str, None] = {}
        self.rounded = {node for node, form in self.forms.items() if _wide(form)}

    def input(self, node: Node, value: Any) -> Any:
        return _Given(value, node)

    def result(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return _lifted(values[node])

    def call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        for used in node.all_input_nodes:
            if isinstance(values[used], Missing):
                return values[used]
        target: Any = node.target
        form = self.forms[node]
        if lifting.about_bits(target) or draws(node):
            return self._in_own_dtypes(node, values, "")
        args, kwargs = arguments_of(node, lambda used: _lifted(values[used]))
        graphs, operands = inner_graphs(target, args)
        if graphs:
            return run(graphs[next(self._branches[node])], operands, self)
        if loop := with_loop_run(target, args, partial(self._run_inner, node)):
            try:
                return self._laid_out(target(*loop), form)
            except _InnerMissing as missing:
                return Missing(str(missing))
        if isinstance(target, torch._ops.HigherOrderOperator):
            why = "" if only_raises(node) else "what it holds was made for them"
            return self._in_own_dtypes(node, values, why)
        args, kwargs = lifting.lifted_arguments(target, args, kwargs, dtypes_of(form))
        refusals = []
        stands_for = quantised.in_float64(target) or target
        for function in (stands_for, torch_internals.decomposition_of(target)):
            if function is None:
                continue
            try:
                return self._laid_out(function(*args, **kwargs), form)
            except Exception as error:  # an op may refuse a dtype with any exception
                refusals.append(_first_line(error))
        del args, kwargs
        why = f"it refuses float64 ({refusals[0]})"
        return self._in_own_dtypes(node, values, why, halves_too=False)

    def _run_inner(
        self, node: Node, position: int, graph: GraphModule, operands: Sequence[Any]
    ) -> Any:
        """A graph of a loop, on the operands of one round."""
        if is_condition(node.target, position):
            return torch.tensor(bool(next(self._branches[node])))
        results = tuple(run(graph, operands, self))
        for value in results:
            if isinstance(value, Missing):
                raise _InnerMissing(value.reason)
        return results

    def _in_own_dtypes(
        self, node: Node, values: Mapping[Node, Any], why: str, halves_too: bool = True
    ) -> Any:
        """Cast down, run, cast up.

        :param why: for the note; "" needs none.
        :param halves_too: else it is tried with float32 in place of half types first.
        """
        error: Exception | None = None
        for wide in (False,) if halves_too else (True, False):
            try:
                result = self._cast_down(node, values, wide)
            except Exception as raised:  # nothing can be said of what depends on it
                error = raised
                continue
            if why:
                self.rounded.add(node)
                kind = "float32" if wide else "its own dtypes"
                self.notes[f"{name_of(node.target)} ran in {kind}, not in float64: {why}"] = None
            return self._laid_out(result, self.forms[node])
        assert error is not None
        reason = f"{name_of(node.target)} can't be run again: {_first_line(error)}"
        self.notes[reason] = None
        return Missing(reason)

    def _cast_down(self, node: Node, values: Mapping[Node, Any], wide: bool) -> Any:
        def own(used: Node) -> Any:
            value = values[used]
            if isinstance(value, _Given):
                value = value.raw
                if dtypes_of(self.forms[used]) == dtypes_of(form_of(value)):
                    return lifting.halves_widened(value) if wide else value
            return lifting.cast_down(value, self.forms[used], wide)

        target: Any = node.target
        args, kwargs = arguments_of(node, own)
        return target(*args, **kwargs)

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
        if strides == form.strides or len(strides) != len(form.strides):
            return result
        if all(
            own == wanted or size < 2
            for own, wanted, size in zip(strides, form.strides, result.shape, strict=True)
        ):
            return result
        return lifting.restrided(result, form.strides)


def _lifted(value: Any) -> Any:
    return value.lifted if isinstance(value, _Given) else value


def _wide(form: Any) -> bool:
    if isinstance(form, list):
        return any(map(_wide, form))
    return form is not None and form.dtype in (torch.float64, torch.complex128)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def name_of(target: Any) -> str:
    """An op as people write it."""
    name = getattr(target, "name", None)
    return str(name()) if callable(name) else str(target)


# --- disturbed -----------------------------------------------------------------------------------


class Disturbed(Eager):
    """Eager, with the result of each op off by up to a unit in the last place, at random.

    An engine that sums in another order, or has another exponential, rounds otherwise at each op.
    Inside an op that sums there are more roundings: what it reads is disturbed as well. What
    becomes of that over the whole graph shows how much of a difference is to be expected (Monte
    Carlo arithmetic: Parker, "Monte Carlo Arithmetic", UCLA 1997). Integers that are held as floats
    stay as they are, since all engines have them exactly.

    :param rounded: nodes that the reference has with eager's own roundings, so that these don't
        show: those in float64 already, and those that refuse it. What they read is disturbed, too.
    """

    def __init__(self, rounded: set[Node], seed: int) -> None:
        super().__init__()
        self.rounded = rounded
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def computed(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        if lifting.exact(target):
            return super().computed(node, target, args, kwargs)
        if node in self.rounded or not lifting.pointwise(target):
            args = tuple(self.disturbed(value) for value in args)
        result = super().computed(node, target, args, kwargs)
        if batch_means.is_batch_norm(target):
            result = batch_means.with_other_mean(
                target, args, result, self._generator(args[0].device)
            )
        return self.disturbed(result)

    def disturbed(self, value: Any) -> Any:
        """Tensors of floats, also in lists, each a unit in the last place off."""
        if isinstance(value, list | tuple):
            return (
                type(value)(map(self.disturbed, value)) if type(value) in (list, tuple) else value
            )
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_complex():
            return torch.view_as_complex(self.disturbed(torch.view_as_real(value.resolve_conj())))
        if not value.is_floating_point():
            return value
        if value.layout != torch.strided or value.numel() == 0 or value.dtype.itemsize < 2:
            return value
        wide = value if value.dtype.itemsize > 2 else value.float()
        noise = torch.empty_like(wide).uniform_(-1, 1, generator=self._generator(value.device))
        moved = torch.addcmul(wide, wide, noise, value=torch.finfo(value.dtype).eps)
        return torch.where(wide == wide.round(), wide, moved).to(value.dtype)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def disturbed_runs(
    graph: GraphModule, inputs: Sequence[Any], rounded: set[Node], count: int
) -> Iterator[list[Any]]:
    """Outputs of a graph with its roundings disturbed in ``count`` ways."""
    for seed in range(count):
        yield run(graph, inputs, Disturbed(rounded, seed))
