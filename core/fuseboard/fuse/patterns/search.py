"""Where patterns occur in one graph, and whether what replaces them may stand there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import GraphKind
from fuseboard.errors import PatternError
from fuseboard.fuse.patterns.form import Form, calls_any
from fuseboard.fuse.patterns.matching import Binding, Matcher, Misses, form_difference, readers
from fuseboard.fuse.patterns.pattern import (
    FORWARD,
    Pattern,
    PatternMatch,
    Variant,
    draws_of,
)
from fuseboard.ops.effects import keeps_order
from fuseboard.ops.views import exposed_nodes, view_chain
from fuseboard.torch_api.pattern_traces import Table, written_arguments

#: In how many ways a form with examples may fit one place, before it is traced for what is there.
_MOST_WAYS = 4


@dataclass(frozen=True)
class Found:
    """A match, and what is to stand in its place.

    :ivar replacement: None for a pattern that is only looked for.
    :ivar holes: hole of the replacement → what it is in the graph.
    :ivar replaced: for each result and gradient that is computed, the node of the graph and that of
        the replacement.
    """

    match: PatternMatch
    replacement: Form | None = None
    holes: dict[str, Any] = field(default_factory=dict)
    replaced: tuple[tuple[Node, Node], ...] = ()


class Search:
    """Looks for patterns in one graph; what one has found isn't looked at by the next.

    :param table: what the graph was captured with: op → its decomposition.
    """

    def __init__(self, graph: GraphModule, kind: GraphKind, table: Table) -> None:
        self._graph = graph
        self._kind = kind
        self._table = table
        self._taken: set[Node] = set()
        self._traced: dict[Any, Form | PatternError] = {}

    def find(self, pattern: Pattern, misses: Misses) -> Iterator[Found]:
        """Each place, in the graph's order.

        :raises PatternError: the pattern can't be traced.
        """
        joint = self._kind == "joint" and pattern.training
        form = pattern.form("joint" if joint else "inference", {})
        if calls_any(form, self._table):
            form = pattern.form("joint" if joint else "inference", self._table)
        # Its backward is looked for with the form for the gradients that there are.
        loose = Matcher(Form(form.graph, form.results), False, misses)
        for node in loose.places(self._graph.graph):
            if node in self._taken:
                continue
            for ways in islice(loose.at(node), _MOST_WAYS):
                found = self._for_what_is_there(pattern, node, ways, form, joint, misses)
                if found is not None:
                    self._taken.update(found.match.nodes)
                    yield found
                    break

    def _for_what_is_there(
        self, pattern: Pattern, node: Node, ways: Binding, form: Form, joint: bool, misses: Misses
    ) -> Found | None:
        """The match with the form that the pattern has for these tensors and numbers."""
        arguments = {name: ways.get(form.holes[name]) for name in pattern.parameters}
        unused = [name for name, value in arguments.items() if value is None]
        if unused:
            raise pattern.error(f"search doesn't use {', '.join(unused)}")
        values = list(map(_value, arguments.values()))
        for variant in pattern.variants(values) if joint else (FORWARD,):
            exact = self._trace(pattern, pattern.search, values, variant)
            if isinstance(exact, PatternError):
                misses.note(ways, None, str(exact))
                continue
            for bound in Matcher(exact, True, misses).at(node):
                match = self._match(pattern, arguments, exact, bound, variant)
                if self._taken.isdisjoint(match.nodes):
                    found = self._checked(pattern, match, exact, bound, values, variant, misses)
                    if found is not None:
                        return found
        return None

    def _match(
        self,
        pattern: Pattern,
        arguments: dict[str, Any],
        form: Form,
        bound: Binding,
        variant: Variant,
    ) -> PatternMatch:
        holes = {name: bound[hole] for name, hole in form.holes.items() if hole in bound}
        names = pattern.parameters
        inside = {found for own, found in bound.items() if own.op == "call_function"}
        wanted = [names[place] for place in variant.wanted or ()]
        gradients = dict(zip(wanted, form.gradients, strict=True))
        return PatternMatch(
            pattern=pattern.name,
            kind=self._kind,
            nodes=tuple(sorted(inside, key=self._position.__getitem__)),
            arguments={name: holes.get(name, value) for name, value in arguments.items()},
            results=tuple(bound[one] for one in form.results),
            gradients={
                name: bound[one]
                for name, one in gradients.items()
                if one is not None and one in bound
            },
        )

    def _trace(
        self, pattern: Pattern, function: Any, values: Sequence[Any], variant: Variant
    ) -> Form | PatternError:
        """The form for these values, traced once for all that are like them."""
        key = pattern, function is pattern.search, variant, tuple(map(_likeness, values))
        if key not in self._traced:
            try:
                self._traced[key] = pattern.trace(function, values, variant, self._table)
            except PatternError as error:
                self._traced[key] = error
        return self._traced[key]

    # --- whether the replacement may stand there ------------------------------------------------

    def _checked(
        self,
        pattern: Pattern,
        match: PatternMatch,
        form: Form,
        bound: Binding,
        values: Sequence[Any],
        variant: Variant,
        misses: Misses,
    ) -> Found | None:
        found = Found(match)
        problem = ""
        if pattern.replace is not None:
            replacement = self._trace(pattern, pattern.replace, values, variant)
            if isinstance(replacement, PatternError):
                raise replacement
            problem = _shape_problem(form, replacement)
            if not problem:
                pairs = [(o, n) for o, n in _pairs(form, replacement) if o.op == "call_function"]
                holes = {name: bound.get(hole) for name, hole in form.holes.items()}
                replaced = tuple((bound[old], own) for old, own in pairs)
                found = Found(match, replacement, {**holes, **match.arguments}, replaced)
                problem = self._place_problem(found, [old for old, _ in pairs])
        if not problem and pattern.check is not None and not pattern.check(match):
            problem = "its check refuses the match"
        if problem:
            misses.note(bound, None, problem)
            return None
        return found

    def _place_problem(self, found: Found, ends: Sequence[Node]) -> str:
        """Why the replacement can't stand for a match; "" where it can.

        :param ends: the nodes of the form that ``found.replaced`` are of.
        """
        assert found.replacement is not None
        for node in found.replacement.graph.nodes:
            needed = node.op == "placeholder" and node.users
            if needed and found.holes.get(str(node.target)) is None:
                return f"the replacement reads {node.target}, which the graph doesn't tell"
        for (old, own), end in zip(found.replaced, ends, strict=True):
            if problem := _result_problem(old, own):
                return problem
            if _root(own) != _root(end) and old in self._exposed:
                return f"the caller would get {old.name} in other memory: an input's, or its own"
        return self._order_problem(found)

    def _order_problem(self, found: Found) -> str:
        """Why the replacement can't stand where its inputs are there and nobody has read it yet."""
        assert found.replacement is not None
        first = min(self._position[node] for node in found.match.nodes)
        last = max(self._position[node] for node in found.match.nodes)
        for old, own in found.replaced:
            ready = self._ready(own, found)
            for reader in readers(old):
                if self._position[reader] < ready and reader not in found.match.nodes:
                    return f"{reader.name} reads {old.name} before all inputs are there"
            first = min(first, ready)
        inputs = [one for one in found.holes.values() if isinstance(one, Node)]
        memory = {root for one in (*inputs, *found.match.nodes) for root in view_chain(one)}
        draws = draws_of(found.replacement)
        old_draws = [node for node in found.match.nodes if keeps_order(node)]
        if [node.target for node in draws] != [node.target for node in old_draws]:
            return "the replacement draws other random numbers"
        for node in self._ordered:
            place = self._position[node]
            if first <= place <= last:
                written = written_arguments(node)
                if memory & {one for value in written for one in view_chain(value)}:
                    return f"{node.name} writes to what it reads, or to its memory, in between"
        for old, own in zip(old_draws, draws, strict=True):
            if self._ready(own, found) > self._position[old]:
                return f"{old.name} draws random numbers before all inputs are there"
        return ""

    def _ready(self, node: Node, found: Found) -> int:
        """The position from which on all that a node of the replacement needs is there."""
        pending, seen, latest = [node], {node}, -1
        while pending:
            one = pending.pop()
            if one.op == "placeholder":
                value = found.holes.get(str(one.target))
                latest = max(latest, self._position.get(value, -1)) if value is not None else latest
            for used in one.all_input_nodes:
                if used not in seen:
                    seen.add(used)
                    pending.append(used)
        return latest

    @cached_property
    def _position(self) -> dict[Any, int]:
        return {node: place for place, node in enumerate(self._graph.graph.nodes)}

    @cached_property
    def _exposed(self) -> set[Node]:
        return exposed_nodes(self._graph)

    @cached_property
    def _ordered(self) -> list[Node]:
        """The graph's nodes that write to tensors."""
        return [node for node in self._graph.graph.nodes if written_arguments(node)]


def _pairs(form: Form, new: Form) -> Iterator[tuple[Node, Node]]:
    """Results and gradients of a form beside those of what replaces it."""
    yield from zip(form.results, new.results, strict=True)
    for old, own in zip(form.gradients, new.gradients, strict=True):
        if old is not None and own is not None:
            yield old, own


def _shape_problem(form: Form, new: Form) -> str:
    """Why a form can't replace another one, wherever that stands; "" where it can."""
    if len(new.results) != len(form.results):
        return f"the replacement has {len(new.results)} results, not {len(form.results)}"
    for node in new.graph.nodes:
        if node.op == "get_attr":
            return f"the replacement holds a constant tensor, or a graph ({node.target})"
        if written_arguments(node):
            return f"the replacement writes to a tensor ({node.target})"
    if [one is None for one in form.gradients] != [one is None for one in new.gradients]:
        return "the replacement has gradients of other inputs"
    for old, own in _pairs(form, new):
        # A gradient that is passed on as it arrives has no node that could be replaced.
        if old.op == "placeholder" and (own.op != "placeholder" or own.target != old.target):
            return f"search passes {old.target} on, and the replacement doesn't"
    return ""


def _root(node: Node) -> str:
    """The hole whose memory a result of a form is; "" for memory of its own."""
    *_, root = view_chain(node)
    return str(root.target) if root.op == "placeholder" else ""


def _value(argument: Any) -> Any:
    """The fake tensor of an argument, or its number, the same for one that is symbolic."""
    if not isinstance(argument, Node):
        return argument
    return argument.meta["val"]


def _likeness(value: Any) -> Any:
    """What two values have to share for one trace to be that of both."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, str(list(value.size())), str(list(value.stride()))
    return repr(value)


def _result_problem(old: Node, own: Node) -> str:
    wanted, made = old.meta.get("val"), own.meta.get("val")
    if not isinstance(wanted, torch.Tensor) or not isinstance(made, torch.Tensor):
        return f"{old.name} is no tensor"
    problem = form_difference(wanted, made)
    return f"what the replacement puts for {old.name} {problem}" if problem else ""
