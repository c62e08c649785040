"""One graph on its way through the stages, and what its report says of its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuseboard.contracts import Claim, Decline, GraphKind, Plan
from fuseboard.fuse.passes import FusionCounter
from fuseboard.lower.codegen import target_name
from fuseboard.partition.pins import Wishes
from fuseboard.partition.regions import Cut
from fuseboard.report.data import GraphReport, NodeReport
from fuseboard.report.nodes import module_path, source_line, value_text
from fuseboard.run.program import Site
from fuseboard.torch_api.internals import InputRoles

#: By backend, in order of priority.
Claims = dict[str, list[Claim | Decline]]


@dataclass(frozen=True)
class Work:
    """One graph on its way through the stages.

    :ivar captured: as AOTAutograd gave it; ``graph`` is fused.
    :ivar kept: the board's own nodes, with reasons.
    :ivar untold: positions of inputs that are inference tensors, which don't tell of changes.
    """

    graph: GraphModule
    captured: GraphModule
    kind: GraphKind
    report: GraphReport
    roles: InputRoles
    counter: FusionCounter
    kept: Mapping[Node, str]
    claims: Claims
    wishes: Wishes
    untold: frozenset[int] = frozenset()

    @property
    def fixed(self) -> frozenset[int]:
        """Positions of the inputs that are weights, unchanged until they tell otherwise."""
        if self.kind == "backward":
            return frozenset()
        return self.roles.static - self.roles.mutated - self.untold


@dataclass(frozen=True)
class Draft:
    """A plan, and the regions that it makes."""

    plan: Plan
    cuts: list[Cut]

    @property
    def name(self) -> str:
        """What a candidate is called: its backends, and whether repeated blocks share code."""
        names = "+".join(dict.fromkeys(cut.backend for cut in self.cuts)) or "eager"
        return f"{names} by blocks" if self.plan.regions else names


def placed(graph: GraphModule, kept: Mapping[Node, str]) -> list[Node]:
    """The nodes that backends may run."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]


def claimed(answers: Sequence[Claim | Decline]) -> frozenset[str]:
    return frozenset(n for claim in answers if isinstance(claim, Claim) for n in claim.nodes)


def describe_node(
    node: Node, backend: str, region: str, reason: str, declined: Mapping[str, str] | None = None
) -> NodeReport:
    """An op's row in a report.

    :param declined: backend name → its reason.
    """
    return NodeReport(
        name=node.name,
        op=target_name(node),
        backend=backend,
        region=region,
        reason=reason,
        source=source_line(node),
        declined=dict(declined or {}),
        inputs=tuple(used.name for used in node.all_input_nodes),
        value=value_text(node.meta.get("val")),
        module=module_path(node),
    )


def describe_nodes(work: Work, plan: Plan, sites: Sequence[Site]) -> None:
    """Tell in the report where each op runs, and why."""
    report, kept = work.report, work.kept
    report.nodes.clear()
    homes = {node: site for site in sites for node in site.cut.nodes}
    declines = {
        backend: {d.node: d.reason for d in answers if isinstance(d, Decline)}
        for backend, answers in work.claims.items()
    }
    for node in work.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node in kept:
            backend, region, reason = "board", "", kept[node]
        else:
            region = homes[node].lowered.region.name
            reason = work.wishes.reason(node.name, plan.reasons[node.name])
            backend = homes[node].lowered.region.backend
            if backend != plan.placements[node.name]:
                reason = f"{plan.placements[node.name]} tripped"
        declined = {
            name: reasons[node.name] for name, reasons in declines.items() if reasons.get(node.name)
        }
        report.nodes.append(describe_node(node, backend, region, reason, declined))
