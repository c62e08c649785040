"""Rewrites by patterns: what a plugin answers ``fuseboard_fuse`` with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.contracts import CheckedWhenRegistered, Fusion, GraphKind
from fuseboard.fuse.patterns.files import PatternFiles
from fuseboard.fuse.patterns.form import TRANSPARENT
from fuseboard.fuse.patterns.matching import Miss, Misses
from fuseboard.fuse.patterns.pattern import Pattern, PatternMatch
from fuseboard.fuse.patterns.search import Found, Search
from fuseboard.ops.effects import keeps_order
from fuseboard.torch_api.pattern_traces import Table


class Patterns(CheckedWhenRegistered):
    """Patterns of one plugin, in the order in which they are looked for.

    Keep it as an attribute of the plugin: the board then checks it when the plugin is registered,
    and a pattern that can't be traced is told of before anything is compiled.

    :param directory: where traced patterns are kept, so that none is traced at the start of a
        program; ``fuseboard patterns --write`` writes them.
    :raises ValueError: two patterns have one name.
    """

    def __init__(self, patterns: Sequence[Pattern], directory: Path | None = None) -> None:
        self.patterns = tuple(patterns)
        names = [pattern.name for pattern in patterns]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two patterns are called {name!r}")
        self.files = PatternFiles(directory) if directory is not None else None

    def check(self) -> None:
        """Trace what no file has.

        :raises PatternError: a pattern can't be traced.
        """
        for pattern in self.patterns:
            self._load(pattern)
            for kind in pattern.kinds:
                pattern.form(kind, {})

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        given = [f for one in self.patterns for f in (one.search, one.replace, one.check)]
        return tuple(function for function in given if function is not None)

    def _load(self, pattern: Pattern) -> None:
        if self.files is not None:
            self.files.load(pattern)

    # --- what a plugin asks ---------------------------------------------------------------------

    def fusions(
        self,
        graph: GraphModule,
        kind: GraphKind,
        decompositions: Table | None = None,
    ) -> list[Fusion]:
        """A rewrite for each place where a pattern with a replacement occurs; none overlap.

        :param decompositions: what the graph was brought down by: op → function. Of a whole graph
            the board tells, in ``graph.meta["decompositions"]``; of a region your own table.
        :raises PatternError: a pattern that must match doesn't.
        """
        moved: dict[Node, Node] = {}
        found = [
            one
            for pattern, one in self._search(graph, kind, decompositions)
            if pattern.replace is not None
        ]
        return [
            Fusion(
                one.match.pattern,
                tuple(node.name for node in one.match.nodes),
                partial(_replace, graph, one, moved),
            )
            for one in found
        ]

    def find(
        self,
        graph: GraphModule,
        kind: GraphKind,
        decompositions: Table | None = None,
        names: Collection[str] | None = None,
    ) -> list[PatternMatch]:
        """Each place where a pattern occurs; none overlaps another. Arguments as of fusions.

        :param names: of the patterns that are looked for; None for all.
        """
        return [one.match for _, one in self._search(graph, kind, decompositions, names)]

    def nearest(
        self, name: str, graph: GraphModule, kind: GraphKind, decompositions: Table | None = None
    ) -> Miss | None:
        """Where a pattern nearly occurs, and why it doesn't; None where it does.

        :raises KeyError: there is no such pattern.
        """
        pattern = {one.name: one for one in self.patterns}[name]
        misses = Misses()
        table = _table(graph, decompositions)
        self._load(pattern)
        if any(True for _ in Search(graph, kind, table).find(pattern, misses)):
            return None
        return misses.nearest

    def _search(
        self,
        graph: GraphModule,
        kind: GraphKind,
        decompositions: Table | None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[Pattern, Found]]:
        search = Search(graph, kind, _table(graph, decompositions))
        for pattern in self.patterns:
            if names is not None and pattern.name not in names:
                continue
            self._load(pattern)
            misses, count = Misses(), 0
            for found in search.find(pattern, misses):
                count += 1
                yield pattern, found
            if pattern.must_match and not count:
                nearest = f". Nearest: {misses.nearest}" if misses.nearest else ""
                raise pattern.error(f"it must match, and isn't in the {kind} graph{nearest}")


def _table(graph: GraphModule, given: Table | None) -> Table:
    table: Mapping[Any, Any] = graph.meta.get("decompositions", {}) if given is None else given
    return table


# --- putting it there -----------------------------------------------------------------------------


def _replace(graph: GraphModule, found: Found, moved: dict[Node, Node]) -> None:
    """Write the replacement, each node as early as its inputs are there.

    :param moved: node → what stands for it since an earlier rewrite; this one's are added.
    """
    new = found.replacement
    assert new is not None
    copies = {
        node: _standing(found.holes.get(str(node.target)), moved)
        for node in new.graph.nodes
        if node.op == "placeholder"
    }
    old_draws = iter([node for node in found.match.nodes if keeps_order(node)])
    behind = _behind(new.graph.nodes)
    results, grads = found.match.results, list(found.match.gradients.values())
    for node in new.calls:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        known = _known_size(graph, node)
        if known is not None:
            copies[node] = known
            continue
        before = next(old_draws) if keeps_order(node) else None
        made = _written(graph, node, args, kwargs, before)
        like = grads[0] if node in behind and grads else results[0]
        made.meta = {key: value for key, value in like.meta.items() if key not in _OF_VALUES}
        made.meta["val"] = node.meta["val"]
        copies[node] = made
    for old, own in found.replaced:
        if own.op != "placeholder":
            copies[own].meta["val"] = old.meta["val"]
        old.replace_all_uses_with(copies[own])
        moved[old] = copies[own]
    _erase(found.match.nodes)


def _erase(nodes: Sequence[Node]) -> None:
    """Take nodes out that nobody reads, and what only gives them again; draws as well."""
    for node in reversed(nodes):
        for user in list(node.users):
            if user.target in TRANSPARENT or user.target is operator.getitem:
                _erase([user])
        if not node.users:
            node.graph.erase_node(node)


#: What nodes' metadata say of their values, not of their places.
_OF_VALUES = frozenset({"val", "tensor_meta", "example_value", "original_aten", "from_node"})


def _standing(value: Any, moved: dict[Node, Node]) -> Any:
    while isinstance(value, Node) and value in moved:
        value = moved[value]
    return value


def _behind(nodes: Any) -> set[Node]:
    """The nodes of a replacement that a gradient which arrives leads to."""
    found: set[Node] = set()
    for node in nodes:
        arriving = node.op == "placeholder" and str(node.target).startswith("arriving_")
        if arriving or any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _known_size(graph: GraphModule, node: Node) -> Node | None:
    """The graph's input that is a symbolic number, where a call computes that."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    inputs: list[Node] = graph.graph.find_nodes(op="placeholder")
    known = ((one, one.meta.get("val")) for one in inputs)
    same = (o for o, v in known if isinstance(v, torch.SymInt) and v.node.expr == value.node.expr)
    return next(same, None)


def _written(graph: GraphModule, node: Node, args: Any, kwargs: Any, before: Node | None) -> Node:
    """A call, right before a node, or as early as its arguments are there."""
    used: list[Node] = []
    map_arg((args, kwargs), used.append)
    if before is None:
        last = max(used, default=None)
        if last is None or last.op == "placeholder":
            before = next(one for one in graph.graph.nodes if one.op != "placeholder")
        else:
            before = last.next
    with graph.graph.inserting_before(before):
        return graph.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
