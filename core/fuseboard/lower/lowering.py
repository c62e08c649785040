"""Lower cut regions to callables: decompose, fuse, hoist, lower; on failure, the next backend.

Past 400 lines: the steps share what they know of one region, and any of them may fail.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import Boxed, Event, Fusion, GraphKind, LoweredRegion, Region
from fuseboard.errors import LoweringError, RegionError, containable
from fuseboard.fuse.constants import hoist
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.lower.caching import Cache, Deferred, Task, Token
from fuseboard.lower.guards import watching_guards
from fuseboard.lower.inner_graphs import lower_around
from fuseboard.lower.isolated import LoweringResult
from fuseboard.lower.op_levels import LevelKey, OpLevels
from fuseboard.lower.overriding import Decided, Overriding, given_to
from fuseboard.lower.wrapping import wrap_region
from fuseboard.partition.inner_plans import InnerPlan, InnerPlans
from fuseboard.partition.regions import Cut
from fuseboard.partition.signature import signature
from fuseboard.profile.judge.replays import only_torchs_ops
from fuseboard.report.data import FusionReport, GraphReport, RegionReport
from fuseboard.report.nodes import source_line
from fuseboard.run.checked import CheckedPrepare
from fuseboard.run.eager import boxed_function
from fuseboard.run.failure import contained, region_error, trip
from fuseboard.run.program import GraphContext
from fuseboard.run.sites import Lowered
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.nodes import target_name


@dataclass(frozen=True)
class _Fused:
    """A region's graph after rewrites.

    :ivar made: names of the nodes that they made.
    :ivar by_settings: who made them instead of the region's backend.
    """

    graph: GraphModule
    made: set[str]
    fusions: list[FusionReport]
    by_settings: str = ""


@dataclass(frozen=True)
class _Prepared:
    """A region decomposed, fused and hoisted: what its backend is given.

    :ivar region: with the graph that is the backend's own.
    """

    region: Region
    fused: _Fused
    keeps: tuple[int, ...]
    prepare: GraphModule | None = None
    uses: tuple[int, ...] = ()
    values: int = 0


@dataclass
class Lowering:
    """Lowers the regions of one graph.

    :ivar static: the graph's placeholders that are parameters or buffers and aren't mutated.
    :ivar claimed: backend → names of the nodes that it claimed.
    :ivar inner_plans: for the graphs of higher-order nodes.
    :ivar real: the tensors behind ``static`` in the call that is being compiled, as far as known.
    :ivar strict: a failure is raised, and isn't contained.
    :ivar defers: what takes long raises :class:`Deferred` instead.
    :ivar ready: what was deferred, and is compiled now.
    :ivar carried: graphs of regions that another process has decomposed. Where it is given, nothing
        is traced here, nor compiled that should be in the cache, nor held against what that process
        has held it against.
    :ivar decomposed: where to keep graphs that are decomposed for another process.
    :ivar facts: by signature: what is known of a region's sizes before it is lowered, for keys;
        where ``carried`` is given, what was known in the other process.
    :ivar overridden: where who decides a stage by the settings did so. Where ``carried`` is given
        that one is asked there alone.
    :ivar wraps: whether plugins may put something around what is lowered.
    """

    session: Session
    report: GraphReport
    kind: GraphKind
    static: Collection[Node]
    claimed: Mapping[str, frozenset[str]]
    counter: FusionCounter
    hoisting: bool
    inner_plans: InnerPlans = field(default_factory=dict)
    real: Mapping[Node, torch.Tensor] = field(default_factory=dict)
    strict: bool = False
    defers: bool = False
    ready: Mapping[Token, LoweringResult] = field(default_factory=dict)
    carried: Mapping[LevelKey, GraphModule | None] | None = None
    decomposed: dict[LevelKey, GraphModule | None] | None = None
    facts: dict[str, str] = field(default_factory=dict)
    overridden: set[Decided] = field(default_factory=set)
    wraps: bool = True

    def __post_init__(self) -> None:
        self._levels = OpLevels(self.session, self.carried, self.decomposed)
        self._overriding = Overriding(self.session, self.report, self.overridden, self._levels)
        self._known: dict[str, Lowered] = {}
        self._prepared: dict[str, _Prepared] = {}
        #: by signature: what the backend answered, and the region as it was lowered
        self._bare: dict[str, tuple[LoweredRegion, Region]] = {}

    def lower(self, cut: Cut, name: str, whole: bool) -> Lowered:
        """One region; isomorphic ones are lowered once.

        :raises RegionError: a backend failed and the policy is to raise.
        """
        region = self._region(cut, name, whole)
        report = RegionReport(
            name=name,
            backend=cut.backend,
            ops=dict(Counter(target_name(node) for node in cut.nodes)),
            sources=tuple(dict.fromkeys(filter(None, map(source_line, cut.nodes)))),
            whole=whole,
            signature=region.signature,
        )
        self.report.regions.append(report)
        known = self._known.get(region.signature)
        if known is not None and not self._bakes(known):
            return self._again(known, region, report)
        if self.defers and region.signature in self._prepared:
            raise Deferred((cut.backend, region.signature), None, known=True)
        start = time.perf_counter()
        lowered = self._lower_somewhere(cut, region, report)
        report.lower_s = time.perf_counter() - start
        self._known[region.signature] = lowered
        self.session.notify(
            Event(
                "lower",
                self.report.name,
                report.lower_s,
                {"region": name, "backend": report.backend},
            )
        )
        return lowered

    def _bakes(self, known: Lowered) -> bool:
        """Whether code is good for the weights only that it was made from."""
        makers = (known.region.backend, known.by_settings)
        return any(self.session.bakes_constants(name) for name in makers)

    def _again(self, known: Lowered, region: Region, report: RegionReport) -> Lowered:
        """The code of an isomorphic region, in wrappers of this region's own."""
        report.backend = known.region.backend
        report.same_as = known.region.name
        report.hoisted = known.values
        region = given_to(region, report.backend, self.session)
        bare, shown = self._bare[region.signature]
        shown = dataclasses.replace(shown, name=region.name, source=region.source)
        return dataclasses.replace(
            known, region=region, call=self._wrapped(bare, shown, region, report)
        )

    def _region(self, cut: Cut, name: str, whole: bool) -> Region:
        assert cut.graph is not None
        static = tuple(i for i, node in enumerate(cut.inputs) if node in self.static)
        random = self.session.settings.random
        further = (
            self.kind,
            static,
            random,
            self.hoisting,
            *self._plans_for(cut.backend, cut.graph),
        )
        return Region(
            name=name,
            backend=cut.backend,
            kind=self.kind,
            graph=cut.graph,
            signature=signature(cut.graph, cut.backend, further),
            static_inputs=static,
            whole=whole,
            random=random,
            source=next(filter(None, map(source_line, cut.nodes)), ""),
        )

    def _lower_somewhere(self, cut: Cut, region: Region, report: RegionReport) -> Lowered:
        """Lower on the planned backend; after a failure on a later one, in the end on eager."""
        candidates = self._candidates(cut)
        found = [self.real.get(cut.inputs[i]) for i in region.static_inputs]
        real = [weight for weight in found if weight is not None]
        weights = real if len(real) == len(found) else None
        for position, backend in enumerate(candidates):
            attempt = given_to(region, backend, self.session)
            try:
                lowered = self._lower_on(attempt, report, weights)
            except (RegionError, Deferred):  # a wrapper's, the policy is to raise; or for later
                raise
            except containable() as error:  # a plugin may raise anything; the policy decides
                if self.strict:
                    raise
                following = candidates[position + 1 :]
                action = contained(self.session, attempt, "lower", error)
                if not following:
                    why = "eager is what all else falls back to"
                    raise region_error(attempt, "lower", error, why) from error
                if action == "eager":
                    del candidates[position + 1 : -1]
                instead = candidates[position + 1]
                trip(
                    self.session,
                    self.report,
                    backend,
                    "lower",
                    region.name,
                    error,
                    instead,
                    region.source,
                )
                continue
            report.backend = backend
            return lowered
        raise AssertionError("eager is always the last candidate")

    def _candidates(self, cut: Cut) -> list[str]:
        names = {node.name for node in cut.nodes}
        order = [info.name for info in self.session.backends]
        later = order[order.index(cut.backend) + 1 :]
        able = [name for name in later if names <= self.claimed[name] and name != order[-1]]
        return list(dict.fromkeys([cut.backend, *able, order[-1]]))

    def _lower_on(
        self, region: Region, report: RegionReport, weights: Sequence[torch.Tensor] | None
    ) -> Lowered:
        if plans := self._plans_for(region.backend, region.graph):
            return self._lower_around(region, report, weights, plans)
        with watching_guards(self.session, region.backend, region.graph, report.notes):
            return self._lower_graph(region, report, weights)

    def _lower_graph(
        self,
        region: Region,
        report: RegionReport,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> Lowered:
        session, backend = self.session, region.backend
        prepared = self._prepared.pop(region.signature, None) or self._prepare(region)
        fused = prepared.fused
        report.fusions, report.hoisted = fused.fusions, prepared.values
        final, graph = prepared.region, prepared.region.graph
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        wrapped = bool(session.with_hook("fuseboard_wrap"))
        shown = dataclasses.replace(final, graph=copy_graph(graph)) if wrapped else final
        task = Task(
            region=final,
            inputs=inputs,
            copied=lambda: dataclasses.replace(final, graph=copy_graph(graph)),
            weights=weights,
            prepare=prepared.prepare,
        )
        carried = self.carried is not None
        cache = Cache(session, self.report, self.ready, self.defers, carried, self.facts)
        by_settings = fused.by_settings
        try:
            answer = self._overriding.lower(task)
            if answer is not None:
                by_settings = session.override("lower")
                report.notes.append(f"lowered by {by_settings}, as stages.lower says")
            else:
                with torch_internals.isolated_tracing(torch_internals.fake_mode_of(inputs)):
                    answer = cache.lower(task, report)
        except Deferred:
            self._prepared[region.signature] = prepared
            raise
        if answer is None:
            if not session.implements(backend, "fuseboard_lower"):
                raise LoweringError(f"{backend} claims nodes and has no hook fuseboard_lower")
            raise LoweringError(f"{backend} declined the region when it was to be lowered")
        report.notes.extend(answer.notes)
        self._bare[region.signature] = answer, shown
        call = self._wrapped(answer, shown, region, report)
        lowered = Lowered(
            region,
            call,
            answer.call,
            prepared.keeps,
            values=prepared.values,
            lower_part=partial(_lower_part, self._for_parts(), region),
            by_settings=by_settings,
        )
        if prepared.prepare is None:
            return lowered
        prepare = boxed_function(prepared.prepare, f"{region.name}.prepare")
        unproven = session.settings.verify != "off" and self.carried is None
        if unproven and not only_torchs_ops(prepared.prepare):
            prepare = CheckedPrepare(prepare, fused.by_settings or backend)
        return dataclasses.replace(lowered, prepare=prepare, uses=prepared.uses)

    def _plans_for(self, backend: str, graph: GraphModule) -> tuple[InnerPlan, ...]:
        """The plans for the graphs of a region's higher-order op; none for most regions."""
        known = self.inner_plans.get(backend)
        nodes = graph.graph.nodes if known else ()
        return next((known[node.name] for node in nodes if known and node.name in known), ())

    def _lower_around(
        self,
        region: Region,
        report: RegionReport,
        weights: Sequence[torch.Tensor] | None,
        plans: Sequence[InnerPlan],
    ) -> Lowered:
        """A higher-order op whose graphs are cut: these are lowered as any other graph is."""
        aside = dataclasses.replace(self.report, regions=[])
        real = dict(zip(region.static_inputs, weights or (), strict=False))

        def lower_cuts(
            plan: InnerPlan, static: Mapping[Node, int], cuts: Sequence[Cut]
        ) -> list[Lowered]:
            lowering = dataclasses.replace(
                self,
                report=aside,
                static=static.keys(),
                claimed={info.name: frozenset() for info in self.session.backends},
                inner_plans=plan.inner,
                real={node: real[number] for node, number in static.items() if number in real},
                wraps=False,
            )
            first = len(aside.regions)
            return [
                lowering.lower(cut, f"{region.name}.inner{first + number}", whole=False)
                for number, cut in enumerate(cuts)
            ]

        context = GraphContext(region.graph, self.kind, (), (), self.session, aside)
        lowered = lower_around(region, plans, lower_cuts, context)
        for one in aside.regions:
            report.fusions.extend(one.fusions)
            report.notes.append(f"{one.name}: {one.backend} runs {', '.join(one.ops)}")
            report.notes.extend(one.notes)
        report.hoisted = lowered.values
        answer = LoweredRegion(lowered.call)
        self._bare[region.signature] = answer, region
        return dataclasses.replace(lowered, call=self._wrapped(answer, region, region, report))

    def _wrapped(
        self, answer: LoweredRegion, shown: Region, region: Region, report: RegionReport
    ) -> Boxed:
        """The region's call, within whatever wraps it."""
        if not self.wraps:
            return answer.call

        def lower_part(graph: GraphModule, static: Sequence[int]) -> Boxed:
            parts = dataclasses.replace(self._for_parts(), wraps=False)
            return _lower_part(parts, region, graph, static)

        return wrap_region(
            answer, shown, region, self.session, self.report, report, lower_part
        ).call

    def _for_parts(self) -> Lowering:
        """The same, holding on to no weights and telling nobody."""
        aside = GraphReport(self.report.name, self.report.kind)
        return dataclasses.replace(
            self,
            report=aside,
            real={},
            ready={},
            strict=True,
            defers=False,
            hoisting=False,
            carried=None,
            decomposed=None,
            facts={},
            overridden=set(),
        )

    def _prepare(self, region: Region) -> _Prepared:
        """Decompose, fuse and hoist, on a copy of the region's graph."""
        fused = self._fuse(self._levels.at_level_of(region.backend, region), region)
        graph = fused.graph
        count = len(graph.graph.find_nodes(op="placeholder"))
        hoisted = hoist(graph, region.static_inputs, fused.made) if self.hoisting else None
        if hoisted is None:
            final = dataclasses.replace(region, graph=graph)
            return _Prepared(final, fused, tuple(range(count)))
        kept = [i for i, old in enumerate(hoisted.keeps) if old in region.static_inputs]
        first = len(hoisted.keeps)
        static = (*kept, *range(first, first + hoisted.values))
        final = dataclasses.replace(region, graph=graph, static_inputs=static)
        return _Prepared(
            final, fused, tuple(hoisted.keeps), hoisted.prepare, hoisted.uses, hoisted.values
        )

    def _fuse(self, graph: GraphModule, region: Region) -> _Fused:
        """The graph after the rewrites of the backend, or of who decides the stage instead."""
        fused = self._overriding.fuse(region, graph, self._apply)
        if fused is not None:
            who = self.session.override("fuse")
            changed = any(one.applied for one in fused.fusions)
            return dataclasses.replace(fused, by_settings=who if changed else "")
        fusions = self.session.call(
            "fuseboard_fuse",
            region.backend,
            graph=graph,
            kind=self.kind,
            region=dataclasses.replace(region, graph=graph),
            options=region.options,
        )
        return self._apply(fusions or [], graph, region.backend)

    def _apply(self, fusions: Sequence[Fusion], graph: GraphModule, who: str) -> _Fused:
        before = {node.name for node in graph.graph.nodes}
        done: list[FusionReport] = []
        if fusions:
            limit_s = self.session.settings.hook_limit_s
            done = apply_fusions(graph, fusions, who, self.counter, limit_s)
        return _Fused(graph, {node.name for node in graph.graph.nodes} - before, done)


def _lower_part(
    lowering: Lowering, region: Region, graph: GraphModule, static: Sequence[int] = ()
) -> Boxed:
    """A part of a region, compiled as the region was."""
    name, static = f"{region.name}.part", tuple(static)
    further = (region.kind, static, region.random, False)
    own = dataclasses.replace(
        region,
        name=name,
        graph=graph,
        signature=signature(graph, region.backend, further),
        static_inputs=static,
        whole=False,
    )
    return lowering._lower_on(own, RegionReport(name, region.backend, {}), None).call
