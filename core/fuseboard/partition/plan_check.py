"""Whether a plan keeps the rules, before anything is lowered.

A plan may come from a plugin or from the user's own function; both may be wrong. Each error names
who answered, the nodes, and the modules that they come from.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch.fx import Node

from fuseboard.config.sources import nearest
from fuseboard.contracts import Claim, Decline, Plan
from fuseboard.errors import ContractError
from fuseboard.partition.paths import ModulePaths
from fuseboard.partition.stages import contraction_cycle, stage_nodes

Answers = Mapping[str, Sequence[Claim | Decline]]

#: How many nodes a message names.
_SHOWN = 5


class PlanCheck:
    """The rules for one graph's plan.

    :param nodes: the nodes to be placed, in graph order.
    :param answered_by: the plugin or dotted path.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        claims: Answers,
        pins: Mapping[str, str],
        paths: ModulePaths,
        answered_by: str,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.claims = claims
        self.pins = pins
        self._paths = paths
        self._answered_by = answered_by

    def __call__(self, plan: Plan) -> None:
        """Hold a plan against the graph, the claims and the pins.

        :raises ContractError: the first rule that it breaks.
        """
        self._placements(plan)
        self._regions(plan)
        self._together(plan)

    def _broken(self, problem: str) -> ContractError:
        return ContractError(self._answered_by, "fuseboard_plan", problem)

    def _named(self, names: Sequence[str]) -> str:
        """Nodes with the modules that they come from."""
        names_shown = []
        found = self._paths.of_nodes(list(self.nodes.values()))
        for name in names[:_SHOWN]:
            modules = found[self.nodes[name]]
            names_shown.append(f"{name!r}" + (f" of {modules[-1]}" if modules else ""))
        rest = len(names) - _SHOWN
        return ", ".join(names_shown) + (f" and {rest} more" if rest > 0 else "")

    def _placements(self, plan: Plan) -> None:
        claimed = {
            name: {node for claim in answers if isinstance(claim, Claim) for node in claim.nodes}
            for name, answers in self.claims.items()
        }
        missing = [name for name in self.nodes if name not in plan.placements]
        if missing:
            raise self._broken(f"{len(missing)} nodes have no placement: {self._named(missing)}.")
        for name in self.nodes:
            backend = plan.placements[name]
            if backend not in claimed:
                known, node = ", ".join(claimed), self._named([name])
                raise self._broken(f"node {node} is placed on {backend!r}, not on one of {known}.")
            if name not in claimed[backend]:
                able = ", ".join(b for b, names in claimed.items() if name in names)
                raise self._broken(
                    f"node {self._named([name])} is placed on {backend!r}, which didn't claim it"
                    f"{self._declined(name, backend)}. It is claimed by {able}."
                )
            if not plan.reasons.get(name):
                raise self._broken(f"node {self._named([name])} has a placement and no reason.")
            if self.pins.get(name, backend) != backend:
                raise self._broken(
                    f"node {self._named([name])} is placed on {backend!r} and pinned to "
                    f"{self.pins[name]!r}."
                )

    def _declined(self, name: str, backend: str) -> str:
        for answer in self.claims[backend]:
            if isinstance(answer, Decline) and answer.node == name:
                return f" ({answer.reason})"
        return ""

    def _regions(self, plan: Plan) -> None:
        home: dict[str, int] = {}
        for number, region in enumerate(plan.regions):
            for name in region:
                if name not in self.nodes:
                    near = nearest(name, self.nodes)
                    raise self._broken(f"regions[{number}] has {name!r}, no node to place.{near}")
                if name in home:
                    other = home[name]
                    what = "twice" if other == number else f"and in regions[{other}]"
                    raise self._broken(
                        f"node {self._named([name])} is in regions[{number}] {what}: planned "
                        "regions are disjoint."
                    )
                home[name] = number
                source = self.nodes[name].args[0] if _is_item(self.nodes[name]) else None
                if isinstance(source, Node) and source.name in self.nodes:
                    if source.name not in region:
                        raise self._broken(
                            f"regions[{number}] has {self._named([name])} without "
                            f"{source.name!r}, of which it is an item."
                        )
            backends = {plan.placements[name] for name in region}
            if len(backends) > 1:
                some = [next(n for n in region if plan.placements[n] == b) for b in backends]
                raise self._broken(
                    f"regions[{number}] is on {' and '.join(sorted(backends))}, for instance "
                    f"{self._named(sorted(some))}: a region has one backend."
                )
        self._order(plan)

    def _order(self, plan: Plan) -> None:
        nodes = list(self.nodes.values())
        left = contraction_cycle(nodes, plan.regions) if plan.regions else []
        if not left:
            return
        cycle = _without_followers([self.nodes[name] for name in left], plan.regions)
        concerned = set(cycle)
        numbers = [i for i, region in enumerate(plan.regions) if concerned & set(region)]
        between = [n for n in cycle if not any(n in plan.regions[i] for i in numbers)]
        which = " and ".join(f"regions[{i}]" for i in numbers[:_SHOWN])
        way = f", by way of {self._named(between)}" if between else ""
        members = [name for i in numbers for name in plan.regions[i] if name in concerned]
        raise self._broken(
            f"{which} ({self._named(members)}) would wait for what waits for it{way}: a planned "
            "region must be convex, and no two may wait for each other."
        )

    def _together(self, plan: Plan) -> None:
        """Nodes that a backend takes together only are on it all or none, in one region."""
        for backend, answers in self.claims.items():
            claims = [claim for claim in answers if isinstance(claim, Claim)]
            if not any(claim.together for claim in claims):
                continue
            places = stage_nodes(list(self.nodes.values()), plan.placements, plan.regions)
            home = {node.name: place for node, place in places.items()}
            covered: set[str] = set()
            for claim in claims:
                where = {home[name] for name in claim.nodes if plan.placements[name] == backend}
                complete = all(plan.placements[name] == backend for name in claim.nodes)
                if not claim.together or (complete and len(where) == 1):
                    covered |= claim.nodes
            alone = [n for n in self.nodes if plan.placements[n] == backend and n not in covered]
            if alone:
                raise self._broken(
                    f"node {self._named(alone)} is placed on {backend!r}, which takes it only "
                    "together with others that are placed elsewhere or in another region; "
                    "Plan.regions keeps nodes in one."
                )


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem


def _without_followers(nodes: Sequence[Node], regions: Sequence[Sequence[str]]) -> list[str]:
    """The nodes on cycles, of those that are on one or wait for one: peel off from the end."""
    unit = {name: number for number, names in enumerate(regions) for name in names}
    own: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        follows = _is_item(node) and node.args[0] in own
        own[node] = own[node.args[0]] if follows else unit.get(node.name, -1 - place)  # type: ignore[index]
    readers: dict[int, set[int]] = {number: set() for number in own.values()}
    sources: dict[int, set[int]] = {number: set() for number in own.values()}
    for node in nodes:
        for used in node.all_input_nodes:
            if used in own and own[used] != own[node]:
                readers[own[used]].add(own[node])
                sources[own[node]].add(own[used])
    pending = [number for number, following in readers.items() if not following]
    while pending:
        number = pending.pop()
        for source in sources[number]:
            readers[source].discard(number)
            if not readers[source]:
                pending.append(source)
        readers.pop(number)
    kept = [node.name for node in nodes if own[node] in readers]
    return kept or [node.name for node in nodes]  # a cycle by the order of draws
