"""Whether the graphs that AOTAutograd captured compute what Dynamo's own graph does.

Regions are held against what AOTAutograd captured, so what that gets wrong would pass. It does get
things wrong: it rewrites writes through views (pytorch#198102), and takes some ops apart into
others that compute something else (pytorch#175154). So while a graph is compiled both are run op by
op in eager, forward and backward, on the inputs that it is compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.capture.original import forward_of
from fuseboard.capture.side_runs import ITS_OWN, CannotCompare, Copies, results_of
from fuseboard.contracts import Boxed
from fuseboard.errors import containable
from fuseboard.ops.draws import may_draw
from fuseboard.ops.effects import has_effects
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.profile.judge.replays import (
    generator_states,
    generators_put_back,
    replayable,
    without_anomaly_mode,
)
from fuseboard.profile.judge.rewrites import why_no_room
from fuseboard.profile.judge.rules import reached_by
from fuseboard.profile.judge.same_results import Disturbances, difference
from fuseboard.profile.judge.spread import Spread
from fuseboard.profile.judge.verify import misplaced
from fuseboard.run.captured_graph import CapturedGraph, all_running
from fuseboard.run.failure import describe
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.symbols import in_the_example, why_unknown
from fuseboard.torch_api.tensor_classes import is_plain

Run = Callable[..., Any]
#: By the name of a result.
Spreads = dict[str, Spread]

#: Modules of functions that a graph of Dynamo's calls without effects on anything but tensors.
_PLAIN = frozenset({"_operator", "operator", "math", "builtins", "torch"})


class CaptureCheck:
    """What AOTAutograd made of a graph, to be compared with it.

    :param graph: Dynamo's.
    :param compiled: AOTAutograd's function, which calls these graphs.
    :param graphs: those that AOTAutograd captured.
    :param written: positions of the inputs that a call writes to; None: any.
    :param fast_random: random numbers needn't be eager's.
    :param budget: how far results of what was compiled may be from eager's.
    """

    def __init__(
        self,
        graph: GraphModule,
        compiled: Run,
        graphs: Sequence[CapturedGraph],
        written: frozenset[int] | None,
        fast_random: bool,
        budget: Budget | None = None,
    ) -> None:
        self._graph = graph
        self._run_dynamo_graph = forward_of(graph)
        self._compiled = compiled
        self._captured_graphs = graphs
        self._written = written
        self._fast_random = fast_random
        self._budget = budget

    def difference(self, inputs: Sequence[Any]) -> str:
        """Where AOTAutograd's graphs part from Dynamo's; "" where they don't.

        :param inputs: that the graph is compiled for. They aren't written to.
        :raises CannotCompare: the reason is the text.
        """
        own = self._inputs(inputs)
        self._must_be_comparable()
        self._must_have_room(own)
        any_values = self._why_any_values()
        want, got = self._eager(own), self._captured(own)
        if isinstance(want, BaseException) or isinstance(got, BaseException):
            return _difference_of_errors(want, got)
        if list(want) != list(got):
            return "it has other results"
        disturbed = Disturbances(partial(self._captured, own), got)
        whole = _whole_results(self._graph) | self._drawn().keys()
        for name, value in got.items():
            if want[name] is ITS_OWN:  # where captured results share memory, runners clone one
                continue
            if any_values and isinstance(value, torch.Tensor):
                continue
            spreads = disturbed.spreads(name)
            if problem := difference(value, want[name], spreads, exact=name in whole):
                return f"{name} {problem}"
        problem = _misplacement(want, got)
        if any_values and not problem:
            raise CannotCompare(any_values)
        return problem

    def difference_as_it_runs(self, inputs: Sequence[Any], spreads: Spreads) -> str:
        """Where what runs the calls, whatever it is by now, parts from Dynamo's graph; "" if not.

        It is called once before that: its first call may prepare and check what later ones don't.

        :param spreads: by result, how far apart roundings brought it where both were compared
            before, as :meth:`spreads_as_it_runs` measured it. What is farther apart is looked into.
        :raises CannotCompare: the reason is the text.
        """
        own = self._inputs(inputs)
        want, got = self._as_they_run(own)
        if isinstance(got, BaseException):
            return f"it raises {describe(_not_of_memory(got))}"
        if list(want) != list(got):
            return "it has other results"
        for name, value in want.items():
            known = [spreads[name]] if name in spreads else []
            if self._beyond(value, got[name], iter(known)):
                return self._proven_difference(own, want, got)
        return ""

    def _beyond(self, want: Any, got: Any, disturbed: Iterator[Spread]) -> str:
        """How a result differs by more than it may; "" if it doesn't."""
        problem = difference(want, got, disturbed)
        tensors = isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
        if not problem or self._budget is None or not tensors:
            return problem
        return (
            problem if want.requires_grad != got.requires_grad else self._budget.problem(got, want)
        )

    def _is_as_before(self, inputs: Copies, want: dict[str, Any]) -> bool:
        """Whether Dynamo's graph still gives what it gave: nobody wrote to its inputs since."""
        again = self._eager(inputs)
        if isinstance(again, BaseException) or list(again) != list(want):
            return False
        return not any(difference(again[name], want[name], iter(())) for name in want)

    def spreads_as_it_runs(self, inputs: Sequence[Any]) -> Spreads:
        """How far apart disturbed roundings bring each result that isn't Dynamo's to a few units.

        Empty where the two can't be compared.
        """
        try:
            own = self._inputs(inputs)
            want, got = self._as_they_run(own)
            if isinstance(got, BaseException) or list(want) != list(got) or self._budget:
                return {}
            apart = [name for name in want if difference(want[name], got[name], iter(()))]
            disturbed = self._disturbances(own) if apart else None
        except CannotCompare:
            return {}
        found = {}
        for name in apart:
            assert disturbed is not None
            for spread in disturbed.spreads(name):
                found[name] = spread
        return found

    def _as_they_run(self, inputs: Copies) -> tuple[dict[str, Any], dict[str, Any] | BaseException]:
        """The results of Dynamo's graph, and those of what runs the calls."""
        graphs = [captured.compiled_graph for captured in self._captured_graphs]
        if any(may_draw(node) for graph in graphs for node in graph.graph.nodes):
            raise CannotCompare("it may draw random numbers, as the user's threads do meanwhile")
        self._must_be_comparable()
        if any_values := self._why_any_values():
            raise CannotCompare(any_values)
        self._must_have_room(inputs)
        want = self._eager(inputs)
        if isinstance(want, BaseException):
            raise CannotCompare(f"eager raises {describe(want)}")
        try:
            with generators_put_back(), without_anomaly_mode():
                with torch_internals.first_call_unwatched():
                    results_of(self._compiled, inputs)
                return want, results_of(self._compiled, inputs) | self._drawn()
        except containable() as error:
            return want, error

    def _disturbances(self, inputs: Copies) -> Disturbances:
        captured = self._captured(inputs)
        if isinstance(captured, BaseException):
            raise CannotCompare(f"op by op it raises {describe(captured)}")
        return Disturbances(partial(self._captured, inputs), captured)

    def _proven_difference(self, inputs: Copies, want: dict[str, Any], got: dict[str, Any]) -> str:
        """The first difference that disturbed roundings don't explain."""
        disturbed = self._disturbances(inputs)
        for name, value in want.items():
            if problem := self._beyond(value, got[name], disturbed.spreads(name)):
                if not self._is_as_before(inputs, want):
                    raise CannotCompare("its inputs changed meanwhile, as weights and buffers may")
                return f"{name} {problem}"
        return ""

    def calls_of(self, inputs: Sequence[Any], run: Run | None = None) -> Callable[[], object]:
        """A function that makes a call like the user's, with its backward if there is one.

        :param run: what is called; None calls what was compiled.
        :raises CannotCompare: such calls can't be made.
        """
        self._must_not_write_to_held()
        return partial(results_of, run or self._compiled, self._inputs(inputs))

    def _eager(self, inputs: Copies) -> dict[str, Any] | BaseException:
        try:
            with generators_put_back(), without_anomaly_mode():
                return results_of(self._run_dynamo_graph, inputs) | self._drawn()
        except containable() as error:  # the user's own, or a limit of eager's
            return _not_of_memory(error)

    def _drawn(self) -> dict[str, torch.Tensor]:
        """What a run leaves of the random numbers: draws of no result move those of later calls."""
        return {} if self._fast_random else generator_states()

    def _captured(self, inputs: Copies, seed: int | None = None) -> dict[str, Any] | BaseException:
        """:param seed: disturb roundings by that."""

        def how(captured: CapturedGraph) -> Boxed:
            return captured.eager if seed is None else captured.disturbed(seed)

        try:
            running = all_running(self._captured_graphs, how)
            with generators_put_back(), without_anomaly_mode(), running:
                return results_of(self._compiled, inputs) | self._drawn()
        except containable() as error:
            return _not_of_memory(error)

    def _inputs(self, inputs: Sequence[Any]) -> Copies:
        values = []
        for value in inputs:
            if why := why_unknown(value):
                raise CannotCompare(why)
            values.append(in_the_example(value))
        if any(isinstance(value, list | tuple | dict) for value in values):
            raise CannotCompare("an input is a collection, which it may change")
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not all(map(is_plain, tensors)):
            raise CannotCompare("an input is a tensor subclass")
        if any(value.layout != torch.strided for value in tensors):
            raise CannotCompare("an input has no strides")
        grads = torch.is_grad_enabled()
        if any(value.is_inference() and (grads or value.requires_grad) for value in tensors):
            raise CannotCompare("an input was made in inference mode")
        return Copies(values, self._written)

    def _must_be_comparable(self) -> None:
        if torch_modes.saved_tensor_hooks_are_set():
            raise CannotCompare("hooks of saved tensors are set")
        for _, node in self._nodes():
            if not _is_plain(node):
                raise CannotCompare(f"{node.name} may do anything")
            if "checkpoint" in getattr(node.target, "__name__", ""):
                raise CannotCompare("it has checkpoints, whose code eager runs twice")
        self._must_not_write_to_held()
        self._must_be_repeatable()

    def _must_not_write_to_held(self) -> None:
        for owner, node in self._nodes():
            if self._written != frozenset() and _is_held(node, owner):
                raise CannotCompare(f"it may write to {node.target}, which Dynamo's graph holds")

    def _nodes(self) -> Iterator[tuple[GraphModule, Node]]:
        """Those of Dynamo's graph and of the graphs inside of it, with the graph."""
        return ((one, node) for one in graphs_in(self._graph) for node in one.graph.nodes)

    def _must_be_repeatable(self) -> None:
        for graph in (captured.compiled_graph for captured in self._captured_graphs):
            if any(map(has_effects, graph.graph.nodes)):
                raise CannotCompare("it has effects")
            if why := replayable(graph):
                raise CannotCompare(why)

    def _why_any_values(self) -> str:
        """Why two runs may differ in values, though not in what form these have; "" if not."""
        for graph in (captured.compiled_graph for captured in self._captured_graphs):
            reached = reached_by(graph, {}).values()
            if any(what.memory for what in reached):
                return "uninitialised memory reaches a result"
            if self._fast_random and any(what.random for what in reached):
                return "its random numbers needn't be eager's"
        return ""

    def _must_have_room(self, inputs: Copies) -> None:
        """Eager holds what it does anyway; the results of both runs come on top, and copies."""
        graphs = [captured.compiled_graph for captured in self._captured_graphs]
        if why := why_no_room("running both", graphs, inputs.copied_bytes, runs=2):
            raise CannotCompare(why)


def _is_plain(node: Node) -> bool:
    """Whether a node of Dynamo's graph does nothing but compute, and write to tensors."""
    if node.op == "call_method":
        return node.target not in {"backward", "register_hook"}
    if node.op != "call_function":
        return node.op != "call_module"
    target = node.target
    if isinstance(target, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
        return True  # what these do, AOTAutograd's graph tells
    return (getattr(target, "__module__", None) or "torch").split(".")[0] in _PLAIN


def _misplacement(want: dict[str, Any], got: dict[str, Any]) -> str:
    """What is wrong with the strides of results of the call; those of gradients may be any."""
    for name, value in want.items():
        tensors = isinstance(value, torch.Tensor) and isinstance(got[name], torch.Tensor)
        if not tensors or not name.startswith("output ") or value.shape != got[name].shape:
            continue
        if problem := misplaced(value, got[name]):
            return f"{name} {problem}"
    return ""


def _whole_results(graph: GraphModule) -> frozenset[str]:
    """The results of Dynamo's graph that only integers and booleans reach, by :func:`results_of`.

    Its kernels may well compute with fractions (``interpolate`` of bytes), but what AOTAutograd
    takes them apart into has to round those as they do.
    """
    whole: set[Node] = set()
    for node in graph.graph.nodes:
        values = tree_leaves(node.meta.get("example_value"))
        known = bool(values) and not any(map(_is_fractional, values))
        if known and whole.issuperset(node.all_input_nodes):
            whole.add(node)
    results = tree_leaves(graph.graph.output_node().args[0])
    return frozenset(f"output {number}" for number, node in enumerate(results) if node in whole)


def _is_fractional(value: Any) -> bool:
    """Whether a value is of floats, or may be."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, int | torch.SymInt)


def _is_held(node: Node, owner: GraphModule) -> bool:
    """Whether a node is a tensor that a graph holds."""
    held = getattr(owner, str(node.target), None) if node.op == "get_attr" else None
    return isinstance(held, torch.Tensor)


# --- errors ---------------------------------------------------------------------------------------


def _not_of_memory(error: BaseException) -> BaseException:
    """The error of a run, unless memory ran short, as it may beside the results of the other run.

    :raises CannotCompare: memory ran short.
    """
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if short or "can't allocate memory" in str(error):  # what torch says of the CPU's
        raise CannotCompare(f"memory ran short: {describe(error)}") from error
    return error


def _difference_of_errors(want: Any, got: Any) -> str:
    """What to say where one of the runs raised.

    :raises CannotCompare: both did, as for an index out of range.
    """
    if not isinstance(got, BaseException):
        return f"Dynamo's raises {describe(want)}, it doesn't"
    if isinstance(want, BaseException):
        raise CannotCompare(f"eager raises {describe(want)}") from want
    return f"it raises {describe(got)}"
