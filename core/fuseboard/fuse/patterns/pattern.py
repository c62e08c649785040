"""One pattern: what is searched for, what replaces it, and both as graphs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch.fx import Graph, Node

from fuseboard.contracts import GraphKind
from fuseboard.errors import PatternError, containable, error_text
from fuseboard.fuse.patterns.form import Form, form_of
from fuseboard.ops.effects import keeps_order
from fuseboard.torch_api.pattern_traces import (
    Table,
    fake_like,
    trace_forward,
    trace_joint,
    written_arguments,
)

#: How many combinations of inputs that want a gradient, and results that have one, are tried.
_MOST_VARIANTS = 32


@dataclass(frozen=True)
class PatternMatch:
    """One place where a pattern occurs.

    :ivar pattern: its name.
    :ivar kind: ``joint`` where the backward is part of the graph.
    :ivar nodes: the calls that make it up, in the graph's order.
    :ivar arguments: what each parameter of ``search`` is: a node or a number.
    :ivar results: the nodes of what ``search`` returns, in order.
    :ivar gradients: parameter → the node of its gradient; empty without a backward.
    """

    pattern: str
    kind: GraphKind
    nodes: tuple[Node, ...]
    arguments: Mapping[str, Any]
    results: tuple[Node, ...]
    gradients: Mapping[str, Node]

    def value(self, name: str) -> Any:
        """The fake tensor of an argument, or its number."""
        argument = self.arguments[name]
        return argument.meta["val"] if isinstance(argument, Node) else argument


@dataclass(frozen=True)
class Variant:
    """Which gradients a form has; none in inference.

    :ivar wanted: of which inputs.
    :ivar arriving: from which results.
    :ivar shared: inputs that later ops read, too. Their gradients come first, and autograd adds
        those of the form one by one.
    """

    wanted: tuple[int, ...] | None = None
    arriving: tuple[int, ...] | None = None
    shared: tuple[int, ...] = ()


FORWARD = Variant()


@dataclass(frozen=True, eq=False)
class Pattern:
    """A pair of functions: where a graph does what ``search`` does, ``replace`` is put.

    Both take the same arguments, tensors and numbers, and return the same results: a tensor or
    several. They are traced down to ATen ops, with fake tensors: they compute nothing. Tensors
    match any value, numbers any number. What ``search`` derives from sizes, dtypes and numbers is
    found as it is for those of a match, since it is traced again for that; ``replace`` is, too.

    :param name: what it does, such as ``rms_norm``; reports call the rewrite so.
    :param search: what is looked for. It may draw random numbers, but write to nothing.
    :param examples: an argument each: tensors whose shapes fit together, and numbers, of type float
        or int. Their sizes don't matter, their number of dimensions and dtypes do as far as other
        ops come of them. Bring several patterns where they do.
    :param replace: what is put there; None for a pattern that is only looked for.
    :param check: whether a match is to be replaced, after all else was found to fit.
    :param training: also look for it with its backward, in joint graphs: each floating input is
        taken to want a gradient, but for those without one in the graph.
    :param must_match: a whole graph in which it isn't found is an error, with the nearest miss.
    """

    name: str
    search: Callable[..., Any]
    examples: Sequence[Any]
    replace: Callable[..., Any] | None = None
    check: Callable[[PatternMatch], bool] | None = None
    training: bool = True
    must_match: bool = False
    _forms: dict[Any, Form] = field(default_factory=dict, repr=False)

    @property
    def where(self) -> str:
        """File and line of ``search``; "" for what isn't written in Python."""
        code = getattr(inspect.unwrap(self.search), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""

    @property
    def parameters(self) -> list[str]:
        """The names of ``search``'s arguments.

        :raises PatternError: there are more examples than it takes.
        """
        try:
            found = inspect.signature(self.search).parameters.values()
        except (TypeError, ValueError):  # some functions that are written in C don't say
            return [f"input_{place}" for place in range(len(self.examples))]
        names = [one.name for one in found if one.kind in _POSITIONAL]
        if len(names) < len(self.examples):
            raise self.error(f"{len(self.examples)} examples for the parameters {names}")
        return names[: len(self.examples)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of graphs that it has a form for."""
        return ("inference", "joint") if self.training else ("inference",)

    def traced_anew(self) -> Pattern:
        """The same without what is known of its forms."""
        return dataclasses.replace(self, _forms={})

    def error(self, problem: str) -> PatternError:
        place = f", {self.where}" if self.where else ""
        return PatternError(f"pattern {self.name!r}{place}: {problem}")

    # --- with examples --------------------------------------------------------------------------

    def form(self, kind: str, table: Table) -> Form:
        """What is looked for at first, in graphs of a kind: numbers as holes.

        :param kind: ``joint``, or ``inference`` for every graph that holds no backward.
        :param table: what the graph was captured with: op → its decomposition.
        :raises PatternError: it can't be traced.
        """
        key = kind, frozenset(table)
        if key not in self._forms:
            self._forms[key] = self._trace_examples(kind, table)
        return self._forms[key]

    def give_form(self, kind: str, form: Form) -> None:
        """Use a form that was traced before, of ops that nothing decomposes."""
        self._forms[kind, frozenset()] = self._with_numbers(form)

    def _with_numbers(self, form: Form) -> Form:
        numbers = {name for name, value in self._named_examples() if _is_scalar(value)}
        for name, hole in form.holes.items():
            if name in numbers:
                hole.meta["number"] = True
        return form

    def _named_examples(self) -> list[tuple[str, Any]]:
        named = list(zip(self.parameters, self.examples, strict=True))
        for name, value in named:
            if not isinstance(value, torch.Tensor) and not _is_scalar(value):
                kind = type(value).__name__
                raise self.error(f"the example of {name!r} is a {kind}; allowed: tensors, numbers")
        return named

    def _trace_examples(self, kind: str, table: Table) -> Form:
        examples = dict(self._named_examples())
        values = fake_like(list(examples.values()))
        variant = FORWARD if kind != "joint" else next(iter(self.variants(values)))
        form = self.trace(self.search, values, variant, table)
        _check_form(self, form)
        scalars = {name: value for name, value in examples.items() if _is_scalar(value)}
        for name, value in scalars.items():
            self._open_hole(form, name, value, values, variant, table)
        return self._with_numbers(form)

    def _open_hole(
        self, form: Form, name: str, value: Any, values: list[Any], variant: Variant, table: Table
    ) -> None:
        """Put a hole where a number stands: there where it changes with the example's.

        :raises PatternError: it stands nowhere as it is.
        """
        other = value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)
        changed = [*values]
        changed[self.parameters.index(name)] = other
        try:
            second: Form | None = self.trace(self.search, changed, variant, table)
        except PatternError:  # an int may stand for what there is no other of, as a dimension
            second = None
        hole = form.holes[name]
        found = False
        theirs = second.calls if second is not None else form.calls
        if [node.target for node in theirs] != [node.target for node in form.calls]:
            raise self.error(f"other ops come of {name} = {other!r} than of {value!r}")

        def opened(one: Any, two: Any) -> Any:
            nonlocal found
            if isinstance(one, list | tuple) and isinstance(two, list | tuple):
                return type(one)(map(opened, one, two)) if len(one) == len(two) else one
            expected = other if second is not None else value
            if _is_scalar(one) and repr(one) == repr(value) and repr(two) == repr(expected):
                found = True
                return hole
            return one

        for node, twin in zip(form.calls, theirs, strict=True):
            node.args = tuple(map(opened, node.args, twin.args))
            node.kwargs = {k: opened(v, twin.kwargs.get(k)) for k, v in node.kwargs.items()}
        if not found:
            raise self.error(
                f"{name} is no op's argument as it is, so no match tells it. Pass what is derived "
                "from it, or leave it to the code of the function"
            )

    # --- at a match -----------------------------------------------------------------------------

    def variants(self, values: Sequence[Any]) -> Iterator[Variant]:
        """Which gradients there may be in a joint graph, all of them first."""
        floats = [n for n, v in enumerate(values) if _is_differentiable(v)]
        results = range(len(self._result_dtypes(values)))
        arriving = [n for n in results if self._result_dtypes(values)[n].is_floating_point]
        count = 0
        for lost in range(len(floats) + len(arriving) + 1):
            for mute in range(min(lost, len(arriving) - 1) + 1 if arriving else 1):
                for wanted in combinations(floats, max(len(floats) - lost + mute, 0)):
                    for given in combinations(arriving, len(arriving) - mute):
                        if not wanted or not given:
                            continue
                        for shared in dict.fromkeys(((), *((n,) for n in wanted), wanted)):
                            if count < _MOST_VARIANTS:
                                count += 1
                                yield Variant(wanted, given, shared)
        yield FORWARD

    def _result_dtypes(self, values: Sequence[Any]) -> list[torch.dtype]:
        key = "dtypes", repr([v.dtype if isinstance(v, torch.Tensor) else type(v) for v in values])
        if key not in self._forms:
            self._forms[key] = self.trace(self.search, values, FORWARD, {})
        return [node.meta["val"].dtype for node in self._forms[key].results]

    def trace(
        self, function: Callable[..., Any], values: Sequence[Any], variant: Variant, table: Table
    ) -> Form:
        """``search`` or ``replace`` for these values, numbers as they are.

        :raises PatternError: it raises, or makes something else of them than tensors.
        """
        which = "search" if function is self.search else "replace"
        tensors = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        fakes = fake_like([values[n] for n in tensors])

        def called(*given: Any) -> Any:
            full = list(values)
            for place, value in zip(tensors, given, strict=True):
                full[place] = value
            return function(*full)

        try:
            if variant.wanted is None or variant.arriving is None:
                traced = trace_forward(called, fakes, table)
                arriving: Sequence[int] = ()
            else:
                arriving = variant.arriving
                wanted = [tensors.index(n) for n in variant.wanted]
                shared = [tensors.index(n) for n in variant.shared]
                traced = trace_joint(called, fakes, wanted, arriving, shared, table)
        except containable() as error:  # whatever the author's code, and torch's for it, raises
            raise self.error(f"{which} can't be traced: {error_text(error)}") from error
        names = self.parameters
        outputs: Any = traced.graph.output_node().args[0]
        results = len(outputs) - len(variant.wanted or ())
        if not all(isinstance(one, Node) for one in outputs[:results]):
            raise self.error(f"{which} returns something else than tensors that it computes")
        holes = [*(names[n] for n in tensors), *(f"arriving_{n}" for n in arriving)]
        holes += [f"arriving_at_{names[n]}" for n in variant.shared]
        form = form_of(traced.graph, holes, results)
        return self._with_all_holes(form)

    def _with_all_holes(self, form: Form) -> Form:
        """With a placeholder for each number, too, in front."""
        missing = [name for name in self.parameters if name not in form.holes]
        first = next(iter(form.graph.nodes))
        for name in missing:
            with form.graph.inserting_before(first):
                form.graph.placeholder(name)
        return form


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def draws_of(graph: Graph | Form) -> list[Node]:
    """The calls that draw random numbers, or have effects."""
    nodes = graph.calls if isinstance(graph, Form) else graph.nodes
    return [node for node in nodes if node.op == "call_function" and keeps_order(node)]


def _check_form(pattern: Pattern, form: Form) -> None:
    """
    :raises PatternError: such a form can't be looked for.
    """
    if not form.calls:
        raise pattern.error("search has no op")
    if any(node.op != "call_function" for node in form.results):
        raise pattern.error("search returns an input as it is")
    for node in form.graph.nodes:
        if node.op == "get_attr":
            raise pattern.error(
                f"search holds a constant tensor, or a graph ({node.target}): make it an input"
            )
        if written_arguments(node):
            raise pattern.error(f"search writes to a tensor ({node.target})")
    for node in draws_of(form):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            raise pattern.error(f"search has effects ({node.target})")
