"""One graph on its way through the stages, and what its report says of its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.capture.original import boxed_original
from fuseboard.contracts import Claim, Decline, GraphKind, Plan, Region
from fuseboard.fuse.passes import FusionCounter
from fuseboard.lower.op_levels import LevelKey
from fuseboard.lower.overriding import Decided
from fuseboard.partition.inner_plans import InnerPlans
from fuseboard.partition.pins import Wishes
from fuseboard.partition.places import Place
from fuseboard.partition.regions import Cut
from fuseboard.partition.writes import Write
from fuseboard.pipeline.narrowing import NarrowedGraph
from fuseboard.report.data import GraphReport
from fuseboard.report.nodes import describe_node
from fuseboard.run.runner import Runner
from fuseboard.run.sites import Lowered, Site
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.internals import InputRoles

#: By backend, in order of priority.
Claims = dict[str, list[Claim | Decline]]

#: Functions that change how ops run. AOTAutograd's graph is called under those of its caller.
_MODES = frozenset(
    {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"}
)


@dataclass(frozen=True)
class StagedGraph:
    """One graph on its way through the stages.

    :ivar captured: as AOTAutograd gave it; ``graph`` is fused.
    :ivar board_nodes: the board's own nodes, with reasons.
    :ivar inner_plans: for the graphs of higher-order nodes.
    :ivar unversioned: positions of inputs that are inference tensors, which have no versions.
    :ivar writes: to inputs, which the board makes itself.
    :ivar narrowed: of what narrower version ``graph`` is; None where it is exact.
    """

    graph: GraphModule
    captured: GraphModule
    kind: GraphKind
    report: GraphReport
    roles: InputRoles
    counter: FusionCounter
    board_nodes: Mapping[Node, str] = field(default_factory=dict)
    claims: Claims = field(default_factory=dict)
    wishes: Wishes = field(default_factory=Wishes)
    inner_plans: InnerPlans = field(default_factory=dict)
    unversioned: frozenset[int] = frozenset()
    writes: Sequence[Write] = ()
    narrowed: NarrowedGraph | None = None

    @property
    def weight_positions(self) -> frozenset[int]:
        """Positions of the inputs that are weights, unchanged until they tell otherwise."""
        if self.kind == "backward":
            return frozenset()
        return self.roles.static - self.roles.mutated - self.unversioned


@dataclass
class Record:
    """What a graph's code was made from, so that another process can make it again.

    :ivar decomposed: graphs of regions that were decomposed for a plugin; those of other
        candidates, too.
    :ivar facts: what was known of each region's sizes before it was lowered, by signature.
    :ivar overridden: the stages and regions that a plugin or function of the settings decided.
    """

    staged: StagedGraph
    runner: Runner
    decomposed: dict[LevelKey, GraphModule | None] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    overridden: set[Decided] = field(default_factory=set)
    plan: Plan | None = None


@dataclass(frozen=True)
class CutPlan:
    """A plan for a graph, and the regions that it makes."""

    staged: StagedGraph
    plan: Plan
    cuts: list[Cut]

    @property
    def name(self) -> str:
        """What a candidate is called: its backends, whether repeated blocks share code, in what."""
        names = "+".join(dict.fromkeys(cut.backend for cut in self.cuts)) or "eager"
        in_blocks = any(cut.place.planned >= 0 and not cut.writes for cut in self.cuts)
        names = f"{names} by blocks" if in_blocks else names
        narrowed = self.staged.narrowed
        return names if narrowed is None else f"{names} {narrowed.name}"


def placeable_nodes(graph: GraphModule, kept: Mapping[Node, str]) -> list[Node]:
    """The nodes that backends may run."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]


def describe_nodes(staged: StagedGraph, plan: Plan, sites: Sequence[Site]) -> None:
    """Tell in the report where each op runs, and why."""
    report, kept = staged.report, staged.board_nodes
    report.nodes.clear()
    homes = {node: site for site in sites for node in site.cut.nodes}
    declines = {
        backend: {d.node: d.reason for d in answers if isinstance(d, Decline)}
        for backend, answers in staged.claims.items()
    }
    for node in staged.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node in kept:
            backend, region, reason = "board", "", kept[node]
        else:
            region = homes[node].lowered.region.name
            reason = staged.wishes.reason(node.name, plan.reasons[node.name])
            backend = homes[node].lowered.region.backend
            if backend != plan.placements[node.name]:
                reason = f"{plan.placements[node.name]} tripped"
        declined = {
            name: reasons[node.name] for name, reasons in declines.items() if reasons.get(node.name)
        }
        report.nodes.append(describe_node(node, backend, region, reason, declined))


def dynamo_site(
    graph: GraphModule, example_inputs: Sequence[Any], staged: StagedGraph, grads: bool
) -> Site | None:
    """Code that runs Dynamo's graph in the place of AOTAutograd's; None where it can't.

    Its inputs and outputs must be the same, and nothing about it a part of how AOTAutograd calls
    what it compiled.

    :param graph: Dynamo's.
    :param example_inputs: of ``graph``.
    :param grads: the grad mode of the calls, on which Dynamo guards.
    """
    placeholders = staged.graph.graph.find_nodes(op="placeholder")
    results = staged.graph.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    if (
        staged.kind != "inference"
        or len(placeholders) != len(example_inputs)
        or not all(isinstance(value, Node) for value in results)
        or not torch_internals.mirrors_dynamo()
        or any(map(_is_special, graph.graph.nodes))
    ):
        return None
    nodes = placeable_nodes(staged.graph, staged.board_nodes)
    cut = Cut(Place(0, "eager"), staged.graph, nodes, placeholders, list(results))  # type: ignore[arg-type]
    region = Region(
        name=f"{staged.report.name}.region0",
        backend="eager",
        kind=staged.kind,
        graph=staged.graph,
        signature="",
        static_inputs=tuple(sorted(staged.weight_positions)),
        whole=True,
    )
    call = boxed_original(graph, grads)
    return Site(
        cut,
        Lowered(region, call, call, tuple(range(len(placeholders)))),
        dynamo_graph_as=staged.captured,
    )


def _is_special(node: Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return getattr(node.target, "__name__", "") in _MODES
