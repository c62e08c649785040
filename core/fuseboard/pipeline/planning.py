"""Which backend runs what: claims, and the plans over them that a graph's candidates come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import BackendInfo, Claim, Decline, GraphKind, Plan, Repeats
from fuseboard.errors import LoweringError, PluginError
from fuseboard.lower.guards import watching_guards
from fuseboard.ops.effects import has_effects
from fuseboard.partition.claims import (
    arbitrate,
    claimed_names,
    claims_within,
    mark_refused,
    readers_of_unfit,
)
from fuseboard.partition.inner_plans import InnerPlan, InnerPlans, regions_with
from fuseboard.partition.pins import Pins
from fuseboard.partition.plan import make_plan
from fuseboard.partition.plan_check import PlanCheck
from fuseboard.partition.stages import contraction_cycle
from fuseboard.partition.support import Support
from fuseboard.partition.writes import regions_with_writes
from fuseboard.pipeline.inner_planning import InnerPlanner, with_inner
from fuseboard.pipeline.staged_graph import Claims, StagedGraph, placeable_nodes
from fuseboard.profile.judge.replays import replayable
from fuseboard.ranks.job import several_ranks
from fuseboard.report.data import GraphReport
from fuseboard.run.failure import Tripped
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.nodes import target_name
from fuseboard.torch_api.symbols import is_symbolic


class Planner:
    """Asks the backends for claims, and the plan hook for plans.

    :param tripped: called with failures; raises where the policy is to raise.
    """

    def __init__(self, session: Session, pins: Pins, tripped: Tripped) -> None:
        self.session = session
        self.pins = pins
        self._tripped = tripped

    def claims(
        self,
        graph: GraphModule,
        kind: GraphKind,
        kept: Mapping[Node, str],
        excluded: Mapping[str, Mapping[str, str]],
        report: GraphReport,
        backends: Sequence[BackendInfo] | None = None,
    ) -> tuple[Claims, InnerPlans]:
        """Each backend's answers, less what the board or the user declines on its behalf.

        And plans for the graphs of higher-order nodes, which the board claims for a backend that
        runs what is in them.

        :param backends: those to ask; None: all.
        """
        nodes = {node.name: node for node in placeable_nodes(graph, kept)}
        own = {node.name: reason for node, reason in kept.items()}
        views = [node for node in kept if isinstance(node.meta.get("val"), torch.Tensor)]
        support = Support([*nodes.values(), *views])
        claims: Claims = {}
        plans: dict[str, dict[str, tuple[InnerPlan, ...]]] = {}
        inner = self._inner_planner(kind, report)
        for info in self.session.backends if backends is None else backends:
            answers: list[Claim | Decline] = []
            unfit = support.refusals(info)
            copied = {node.name for node in views} - unfit.keys()
            refused = {name: why for name, why in unfit.items() if name in nodes}
            refused |= excluded.get(info.name, {})
            if kind != "inference" and not info.training:
                answers = [Decline(name, f"{info.name} takes no training graphs") for name in nodes]
            else:
                try:
                    shown = copy_graph(graph)
                    mark_refused(shown, own | refused, copied)
                    with watching_guards(self.session, info.name, shown, report.notes):
                        answers = (
                            self.session.call(
                                "fuseboard_claim",
                                info.name,
                                graph=shown,
                                kind=kind,
                                options=self.session.options(info.name),
                            )
                            or []
                        )
                    refused = readers_of_unfit(shown, own.keys()) | refused
                except (PluginError, LoweringError) as error:
                    self._tripped(report, info.name, "claim", error, "the other backends")
            claims[info.name] = arbitrate(answers, refused, nodes)
            if info is self.session.backends[-1] or (kind != "inference" and not info.training):
                continue
            not_these = claimed_names(claims[info.name]) | excluded.get(info.name, {}).keys()
            if found := inner.plans(info, nodes, not_these):
                plans[info.name] = found
                claims[info.name] = with_inner(claims[info.name], found, nodes)
        return claims, plans

    def _inner_planner(self, kind: GraphKind, report: GraphReport) -> InnerPlanner:
        def ask(
            graph: GraphModule, kept: Mapping[Node, str], backends: Sequence[BackendInfo]
        ) -> tuple[Claims, InnerPlans]:
            excluded = self.pins.of(placeable_nodes(graph, kept)).excluded
            return self.claims(graph, kind, kept, excluded, report, backends)

        settings = self.session.settings
        return InnerPlanner(
            eager=self.session.backends[-1],
            kind=kind,
            min_region_us=settings.min_region_us,
            ask=ask,
        )

    def plans(self, staged: StagedGraph) -> list[Plan]:
        """The plans to choose between: one where nothing is to be measured.

        In order of preference, what is simpler first: eager, each backend by itself, then the plan
        over all of them.
        """
        session, settings = self.session, self.session.settings
        *others, eager = session.backends
        why_not = self._not_measured(staged)
        if settings.policy == "measured" and why_not:
            staged.report.notes.append(f"planned by priority, not by measurement: {why_not}")
        guessed = [i for i in others if settings.backends is not None or not i.by_measurement]
        who, plan = self._plan(staged, [*guessed, eager], settings.repeats)
        if settings.policy != "measured" or why_not or who != "defaults":
            return [plan]  # a planner that the user installed decides by itself
        plans = []
        if not session.eager_is_fallback_only or not others:
            plans.append(self._plan(staged, [eager], "never")[1])
        beside = defers(session, staged.graph)
        for info in others:
            repeats = settings.repeats
            if repeats == "auto" and beside and not info.compiles_quickly:
                repeats = "never"  # the whole graph runs at least as fast, and nobody waits
            plans.append(self._plan(staged, [info, eager], repeats)[1])
        return _unlike([*plans, plan])

    def are_measured(self, staged: StagedGraph) -> bool:
        """Whether candidates for a graph are compared by running them."""
        return self.session.settings.policy == "measured" and not self._not_measured(staged)

    def _not_measured(self, staged: StagedGraph) -> str:
        """Why they can't be; "" if they can."""
        effects = next(filter(has_effects, staged.graph.graph.nodes), None)
        if effects is not None:
            return f"{target_name(effects)} has effects and is run once a call"
        why = replayable(staged.graph)
        if not why and self.session.settings.ranks == "priority" and several_ranks():
            return "a job of several ranks; ranks = 'agree' lets rank 0 measure for all of them"
        return why

    def _plan(
        self, staged: StagedGraph, backends: Sequence[BackendInfo], repeats: Repeats
    ) -> tuple[str, Plan]:
        """Who planned for these backends, and the plan, checked; the default's if it breaks a rule.

        Backends that something is pinned to take part in any case, with that alone.
        """
        settings = self.session.settings
        pinned: dict[str, set[str]] = {}
        for name, backend in staged.wishes.pins.items():
            pinned.setdefault(backend, set()).add(name)
        order = [i for i in self.session.backends if i in backends or i.name in pinned]
        claims = {
            info.name: staged.claims[info.name]
            if info in backends
            else claims_within(staged.claims[info.name], pinned[info.name])
            for info in order
        }
        graph, kept, report = staged.graph, staged.board_nodes, staged.report
        arguments: dict[str, Any] = {
            "graph": graph,
            "kind": staged.kind,
            "claims": claims,
            "backends": order,
            "pins": staged.wishes.pins,
            "min_region_us": settings.min_region_us,
            "repeats": repeats,
        }
        who = "fuseboard_plan"
        try:
            who, plan = self.session.first(
                "fuseboard_plan",
                **{**arguments, "graph": copy_graph(graph), "policy": settings.policy},
            )
            pins = staged.wishes.pins
            PlanCheck(placeable_nodes(graph, kept), claims, pins, self.pins.paths, who)(plan)
            return who, _with_own_regions(plan, staged)
        except (PluginError, LoweringError) as error:
            plugin = getattr(error, "plugin", "") or who
            self._tripped(report, plugin, "plan", error, "the default plan")
            return plugin, _with_own_regions(make_plan(**arguments), staged)


def _with_own_regions(plan: Plan, staged: StagedGraph) -> Plan:
    """The plan with a region for each higher-order node whose graphs are planned, and each write.

    A write would wait for itself where a planned region lies on both sides of it; such a plan has
    none, and the write makes a copy.
    """
    if not staged.inner_plans and not staged.writes:
        return plan
    nodes = {node.name: node for node in placeable_nodes(staged.graph, staged.board_nodes)}
    regions = regions_with(plan.regions, staged.inner_plans, plan.placements, nodes)
    with_writes = regions_with_writes(regions, staged.writes)
    if len(with_writes) > len(regions) and not contraction_cycle([*nodes.values()], with_writes):
        regions = with_writes
    return dataclasses.replace(plan, regions=regions)


def defers(session: Session, graph: GraphModule) -> bool:
    """Whether what takes long is compiled beside the first calls.

    Guards that are added to symbolic sizes later would be lost; and ranks would compare what has
    been compiled in different calls.
    """
    background = session.settings.settle != "first_call" and not several_ranks()
    return background and not is_symbolic(graph)


def _unlike(plans: Iterable[Plan]) -> list[Plan]:
    """The first of each group of equal plans."""
    unlike: dict[Any, Plan] = {}
    for plan in plans:
        unlike.setdefault((tuple(plan.placements.items()), plan.regions), plan)
    return list(unlike.values())
