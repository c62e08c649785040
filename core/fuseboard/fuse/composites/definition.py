"""What defines a composite: ops that are one, and patterns that write one out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import Composite
from fuseboard.fuse.patterns.matching import same_number
from fuseboard.fuse.patterns.pattern import Pattern, PatternMatch

#: Where traced patterns are kept.
TRACED = Path(__file__).with_name("traced")

#: Makes a composite of a node that calls an op, or None where it isn't one.
Reader = Callable[[Node], Composite | None]


@dataclass(frozen=True)
class Way:
    """One way to write a composite out.

    :ivar composite: its name.
    :ivar search: a function of its arguments, by their names, that returns its results.
    :ivar results: the names of what ``search`` returns, in order.
    :ivar fixed: arguments that this way of writing it leaves no choice of.
    :ivar check: whether a match is one.
    :ivar widened: a match as what else belongs to it; None where it is a whole.
    """

    composite: str
    form: str
    search: Callable[..., Any]
    examples: tuple[Any, ...]
    results: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[PatternMatch], bool] | None = None
    widened: Callable[[Way, PatternMatch], Composite | None] | None = None

    @property
    def name(self) -> str:
        return f"{self.composite}: {self.form}"

    def as_pattern(self) -> Pattern:
        return Pattern(self.name, self.search, self.examples, check=self.check, training=False)

    def read(self, match: PatternMatch) -> Composite | None:
        """A match as a composite; None where its nodes can't be taken together."""
        if self.widened is not None:
            return self.widened(self, match)
        results = dict(zip(self.results, match.results, strict=True))
        arguments = {**match.arguments, **self.fixed}
        return composite(self.composite, self.form, match.nodes, arguments, results)


def composite(
    name: str,
    form: str,
    calls: Iterable[Node],
    arguments: Mapping[str, Any],
    results: Mapping[str, Node],
) -> Composite | None:
    """Nodes as a composite; None where one call couldn't stand for them.

    :param results: name → node, read or not.
    """
    nodes = tuple(sorted(set(calls)))
    inside = set(nodes)
    read = {
        key: node for key, node in results.items() if any(user not in inside for user in node.users)
    }
    hidden = inside - set(read.values())
    if not read or any(user not in inside for node in hidden for user in node.users):
        return None
    given = [value for value in arguments.values() if isinstance(value, Node)]
    last = max(given)
    # All arguments are there before anybody reads a result, and what lies between writes nothing.
    # An argument that is itself computed from a result, such as the argmax of log-softmax, isn't.
    if last >= nodes[-1] or not inside.isdisjoint(given):
        return None
    if any(user not in inside and user <= last for node in read.values() for user in node.users):
        return None
    if _writes_between(nodes[0], nodes[-1]):
        return None
    return Composite(name, form, nodes, dict(arguments), read)


def _writes_between(first: Node, last: Node) -> bool:
    node = first
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


# --- reading nodes --------------------------------------------------------------------------------


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def items(node: Node) -> dict[int, Node]:
    """The results of a node of several, by position."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def named_items(node: Node, *names: str) -> dict[str, Node] | None:
    """The results of a node of several by name; None where others are read."""
    found = items(node)
    if any(place >= len(names) and item.users for place, item in found.items()):
        return None
    return {names[place]: item for place, item in found.items() if place < len(names)}


def of_items(
    name: str, node: Node, arguments: Mapping[str, Any], results: tuple[str, ...]
) -> Composite | None:
    """An op of several results as a composite."""
    found = named_items(node, *results)
    if found is None:
        return None
    nodes = [node, *items(node).values()]
    return composite(name, str(node.target), nodes, arguments, found)


def meta(node: Any) -> Any:
    return node.meta["val"]


def same_shape(one: Any, other: Any) -> bool:
    """Whether two nodes' sizes are known to be the same, without a guard."""
    sizes, others = (meta(node).shape for node in (one, other))
    return len(sizes) == len(others) and all(map(same_number, sizes, others))


def is_last(dim: int, node: Any) -> bool:
    """Whether a dimension, counted from either end, is the last one."""
    rank: int = meta(node).dim()
    return rank > 0 and dim % rank == rank - 1


def is_row(node: Any, like: Any) -> bool:
    """Whether a node is (N,), where the last dimension of another one has N elements."""
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    sizes, others = meta(node).shape, meta(like).shape
    return len(sizes) == 1 and len(others) > 0 and same_number(sizes[0], others[-1])
