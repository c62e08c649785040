"""Where a form occurs in a graph; where it nearly does, how far, and what stands against it.

torch has two matchers. ``torch.fx``'s ``SubgraphMatcher`` binds no value twice, has no holes for
numbers, tries one order of operands, and says nothing of what fails. Inductor's has holes and names
what fails, but not how far it came; it imports Inductor, tries one order as well, and wants the
number of readers of each node to be that of the pattern. So the search is written here; the traces
are torch's (:mod:`fuseboard.torch_api.pattern_traces`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fuseboard.fuse.patterns.form import (
    TRANSPARENT,
    Form,
    node_as_text,
    seen_through,
    target_as_text,
)
from fuseboard.torch_api.pattern_traces import arguments

aten = torch.ops.aten

#: Node of a form → what it is in the graph: a node, or a number.
Binding = dict[Node, Any]

#: Ops that give the same bits for their first two operands in the other order.
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

#: Ops whose dimension is one of their result.
_NEW_DIMENSION = frozenset({aten.unsqueeze.default, aten.stack.default})

#: How many nodes are compared from one place, over all orders of operands.
_MOST_STEPS = 20_000


@dataclass(frozen=True)
class Miss:
    """Why a pattern doesn't fit where it nearly does.

    :ivar matched: (op of the pattern, node of the graph) for each that fits.
    :ivar wanted: the op of the pattern at which it stopped; "" where all fit, as they stand.
    :ivar reason: what stands against it.
    """

    matched: tuple[tuple[str, str], ...]
    wanted: str
    reason: str

    def __str__(self) -> str:
        stops = f"{self.wanted} isn't there, " if self.wanted else ""
        lines = [f"{stops}{self.reason}"]
        if self.matched:
            lines[0] += ". What is there:"
        lines += [f"{wanted} is {have};" for wanted, have in self.matched]
        return "\n".join(lines)


class Misses:
    """Keeps the nearest of the misses."""

    def __init__(self) -> None:
        self.nearest: Miss | None = None

    def note(self, bound: Binding, wanted: Node | None, reason: str) -> None:
        # What fits but for a condition is nearer than what doesn't fit.
        count = sum(node.op == "call_function" for node in bound)
        if self.nearest is not None:
            nearest = (len(self.nearest.matched), not self.nearest.wanted)
            if nearest >= (count, wanted is None):
                return
        matched = tuple(
            (node_as_text(own), node_as_text(found))
            for own, found in bound.items()
            if own.op == "call_function"
        )
        self.nearest = Miss(matched, "" if wanted is None else node_as_text(wanted), reason)


class Matcher:
    """Looks for a form in a graph.

    :param exact: numbers and dtypes must be those of the form; else they may be any, since it was
        traced with examples.
    """

    def __init__(self, form: Form, exact: bool, misses: Misses) -> None:
        self._form = form
        self._exact = exact
        self._misses = misses
        self._steps = 0

    def places(self, graph: Graph) -> Iterable[Node]:
        """The nodes that the form's first result may be."""
        target = self._form.outputs[0].target
        found = graph.find_nodes(op="call_function", target=target)
        if not found:
            name = target_as_text(target)
            self._misses.note({}, self._form.outputs[0], f"no node calls {name}")
        return found

    def at(self, node: Node) -> Iterator[Binding]:
        """Each way in which the form ends in a node of a graph."""
        self._steps = 0
        first, *others = self._form.outputs
        for bound in self._solve([(first, node, first, "")], {}):
            for whole in self._with_others(others, bound):
                # The form with examples may be that of the forward alone, which the backward reads.
                if not self._exact or self._is_closed(whole):
                    yield whole

    def _with_others(self, outputs: list[Node], bound: Binding) -> Iterator[Binding]:
        """With the other results, which lie on ways that lead on from what is known."""
        pending = [one for one in outputs if one not in bound]
        if not pending:
            yield bound
            return
        candidates = _reached(pending[0], bound)
        if not candidates:
            reason = f"nothing that was found is read by {target_as_text(pending[0].target)}"
            self._misses.note(bound, pending[0], reason)
        for candidate in candidates:
            for more in self._solve([(pending[0], candidate, pending[0], "")], dict(bound)):
                yield from self._with_others(pending[1:], more)

    def _solve(self, goals: list[_Goal], bound: Binding) -> Iterator[Binding]:
        """Fulfil goals, the last first; ``bound`` is changed."""
        while goals:
            wanted, found, reader, place = goals.pop()
            self._steps += 1
            if self._steps > _MOST_STEPS:
                self._misses.note(bound, reader, "there are too many ways to look at it")
                return
            found = seen_through(found)
            if isinstance(wanted, Node) and wanted.op == "call_function" and wanted not in bound:
                problem = self._call_problem(wanted, found)
                if problem:
                    self._misses.note(bound, wanted, problem)
                    return
                if _is_size(wanted):
                    continue
                bound[wanted] = found
                *others, last = _operands(wanted, found)
                for order in others:
                    yield from self._solve([*goals, *order], dict(bound))
                goals.extend(last)
            elif problem := self._value_problem(wanted, found, reader, bound):
                self._misses.note(bound, reader, f"{place} {problem}")
                return
        yield bound

    def _call_problem(self, wanted: Node, found: Any) -> str:
        """Why something isn't the call that is wanted, its operands aside; "" where it is."""
        if _is_size(wanted):
            same = same_number(wanted.meta["val"], _number(found))
            return "" if same else f"{found} is another size"
        if not isinstance(found, Node):
            return f"{found!r} stands there"
        if found.op != "call_function":
            kind = "an input" if found.op == "placeholder" else "a constant"
            return f"{found.name} is {kind}"
        if found.target != wanted.target:
            return f"{found.name} calls {target_as_text(found.target)}"
        return ""

    def _value_problem(self, wanted: Any, found: Any, reader: Node, bound: Binding) -> str:
        """Why an argument isn't what is wanted; "" where it is, which is then noted."""
        if isinstance(wanted, Node):
            if wanted in bound:
                return "" if _is_same(bound[wanted], found) else _other(found, bound[wanted])
            if "number" in wanted.meta:
                if not isinstance(found, Node) and _is_number(found):
                    bound[wanted] = found
                    return ""
                return f"is {found}, a number was wanted, not a symbolic one"
            if not isinstance(found, Node) or not isinstance(found.meta.get("val"), torch.Tensor):
                return f"is {found}, a tensor was wanted"
            bound[wanted] = found
            return ""
        # Which of an op's results an item is isn't a size.
        loose = not self._exact and reader.target is not operator.getitem
        if loose and _is_loose(wanted) and _is_loose(found):
            return ""
        return "" if _same_literal(wanted, found) else _other(found, wanted)

    def _is_closed(self, bound: Binding) -> bool:
        """Whether nobody else reads what the form doesn't return."""
        inside = {found for own, found in bound.items() if own.op == "call_function"}
        returned = {bound[own] for own in self._form.outputs}
        for own, found in bound.items():
            if own.op == "placeholder" and isinstance(found, Node) and found in inside - returned:
                self._misses.note(
                    bound, None, f"{own.target} would be {found.name}, of the pattern"
                )
                return False
        for node in inside - returned:
            for reader in readers(node):
                if reader in inside or _is_dead_item(reader):
                    continue
                own = next(own for own, found in bound.items() if found is node)
                reason = (
                    f"{node.name} ({node_as_text(own)} of the pattern, which it doesn't return) is "
                    f"read by {reader.name} as well"
                )
                self._misses.note(bound, None, reason)
                return False
        return True


#: What is wanted, what there is, the form's call that reads it, and as which argument.
_Goal = tuple[Any, Any, Node, str]


def _operands(wanted: Node, found: Node) -> Iterator[list[_Goal]]:
    """The goals that a call leads to, once for each order of operands that it may have."""
    own, theirs = arguments(wanted), arguments(found)
    if len(own) != len(theirs):  # of a function of Python's, with another number of arguments
        yield [(len(own), len(theirs), wanted, "the number of arguments")]
        return
    pairs = [
        (*_dimensions(name, (value, other), found), name)
        for (name, value), (_, other) in zip(own, theirs, strict=True)
    ]
    yield _flat(wanted, pairs)
    if wanted.target in _COMMUTATIVE and not _is_same(theirs[0][1], theirs[1][1]):
        (a, x, first), (b, y, second), *rest = pairs
        if dict(own).get("alpha", 1) == 1:
            yield _flat(wanted, [(a, y, first), (b, x, second), *rest])


def _dimensions(name: str, values: tuple[Any, Any], found: Node) -> tuple[Any, Any]:
    """Two arguments of one name, dimensions of the first operand counted from the front."""
    first = found.args[0] if found.args else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    rank = getattr(first.meta.get("val"), "ndim", 0) if isinstance(first, Node) else 0
    if name not in ("dim", "dims", "dim0", "dim1") or not rank or found.target in _NEW_DIMENSION:
        return values

    def counted(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return list(map(counted, value))
        return value % rank if type(value) is int else value

    one, other = map(counted, values)
    return (one, other) if one == other else values


def _flat(wanted: Node, pairs: Iterable[tuple[Any, Any, str]]) -> list[_Goal]:
    """Goals for arguments, one by one those of lists that hold nodes; the first comes last."""
    goals: list[_Goal] = []
    for value, other, name in pairs:
        place = f"argument {name!r} of {target_as_text(wanted.target)}"
        lists = isinstance(value, list | tuple) and isinstance(other, list | tuple)
        if lists and len(value) == len(other) and any(isinstance(one, Node) for one in value):
            items = zip(value, other, strict=True)
            goals += [
                (own, have, wanted, f"{place}, item {n}") for n, (own, have) in enumerate(items)
            ]
        else:
            goals.append((value, other, wanted, place))
    return goals[::-1]


def _reached(wanted: Node, bound: Binding) -> list[Node]:
    """The graph's nodes to which a way from what is bound leads, as one in the form does."""
    ways: list[list[Node]] = [[wanted]]
    seen = {wanted}
    while ways:
        way = ways.pop(0)
        start = bound.get(way[0])
        if isinstance(start, Node):
            frontier = [start]
            for step in way[1:]:
                next_nodes = (reader for node in frontier for reader in readers(node))
                frontier = list(dict.fromkeys(n for n in next_nodes if n.target == step.target))
            return frontier
        for used in way[0].all_input_nodes:
            if used not in seen:
                seen.add(used)
                ways.append([used, *way])
    return []


def readers(node: Node) -> Iterator[Node]:
    """Who reads a value, also through what only gives it again."""
    for user in node.users:
        if user.op == "call_function" and user.target in TRANSPARENT:
            yield from readers(user)
        else:
            yield user


def _is_dead_item(node: Node) -> bool:
    return node.target is operator.getitem and not node.users


# --- values ---------------------------------------------------------------------------------------


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other or same_number(_number(one), _number(other))
    return _same_literal(one, other)


def _is_size(node: Node) -> bool:
    """Whether a node computes a symbolic number."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _number(value: Any) -> Any:
    """A number, also where it is a node's; anything else as it is."""
    if isinstance(value, Node) and not isinstance(value.meta.get("val"), torch.Tensor):
        return value.meta.get("val")
    return value


def _is_number(value: Any) -> bool:
    kinds = int | float | torch.SymInt | torch.SymFloat
    return isinstance(value, kinds) and not isinstance(value, bool)


def same_number(one: Any, other: Any) -> bool:
    """Without a guard on symbolic ones. 1 isn't 1.0, and -0.0 isn't 0.0."""
    if not (_is_number(one) and _is_number(other)):
        return False
    if hasattr(one, "node") or hasattr(other, "node"):
        expressions = [one.node.expr if hasattr(one, "node") else one for one in (one, other)]
        return bool(expressions[0] == expressions[1])
    return repr(one) == repr(other)


def _is_loose(value: Any) -> bool:
    """Whether something may be otherwise for other inputs: numbers, dtypes, devices."""
    if isinstance(value, list | tuple):
        return all(map(_is_loose, value))
    return _is_number(_number(value)) or isinstance(value, torch.device | torch.dtype)


def _same_literal(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, list | tuple):
        same = isinstance(found, list | tuple) and len(wanted) == len(found)
        return same and all(map(_same_literal, wanted, found))
    wanted, found = _number(wanted), _number(found)
    if _is_number(wanted):
        return same_number(wanted, found)
    return type(wanted) is type(found) and bool(wanted == found)


def _other(found: Any, wanted: Any) -> str:
    what = "dtype " if isinstance(wanted, torch.dtype) else ""
    return f"is {what}{found}, {wanted} was wanted"


def form_difference(wanted: torch.Tensor, found: torch.Tensor) -> str:
    """In which way a tensor isn't of the form of another one; "" where it is."""
    if wanted.dtype != found.dtype:
        return f"has dtype {found.dtype}, {wanted.dtype} was wanted"
    if wanted.device != found.device:
        return f"is on {found.device}, {wanted.device} was wanted"
    pairs = list(zip(wanted.shape, found.shape, strict=False))
    if wanted.dim() != found.dim() or not all(same_number(*pair) for pair in pairs):
        return f"has sizes {list(found.shape)}, {list(wanted.shape)} were wanted"
    steps = zip(wanted.stride(), found.stride(), wanted.shape, strict=True)
    # That of a dimension of one element is never used.
    if not all(same_number(m, n) or same_number(size, 1) for m, n, size in steps):
        return f"has strides {list(found.stride())}, {list(wanted.stride())} were wanted"
    return ""
