"""One graph through the stages in order: fuse, partition, lower; then the runner.

Past 400 lines: whatever stops a graph on its way is contained here, in words for its report.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import (
    Event,
    EventName,
    GraphKind,
    Plan,
    Stage,
)
from fuseboard.errors import LoweringError, PluginError, WrongValues
from fuseboard.fuse.passes import FusionCounter
from fuseboard.lower.lowering import Lowering
from fuseboard.ops.effects import is_collective
from fuseboard.partition.board_nodes import board_nodes
from fuseboard.partition.claims import claimed_names
from fuseboard.partition.garbage import collection_paused
from fuseboard.partition.joint import split_joint
from fuseboard.partition.parts import check_parts
from fuseboard.partition.pins import Pins
from fuseboard.partition.regions import cut_regions
from fuseboard.partition.signature import signature
from fuseboard.partition.writes import WHY, find_writes, left_to_eager
from fuseboard.pipeline.example_inputs import ExampleInputs
from fuseboard.pipeline.narrowing import Narrower
from fuseboard.pipeline.planning import Planner, defers
from fuseboard.pipeline.rewriting import Rewriter
from fuseboard.pipeline.staged_graph import (
    CutPlan,
    Record,
    StagedGraph,
    describe_nodes,
    dynamo_site,
    placeable_nodes,
)
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.choose.tuner import Tuner
from fuseboard.profile.choose.whole_calls import give_up
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.ranks.decisions import Decide, Decisions
from fuseboard.ranks.job import job_of
from fuseboard.report.choices import tolerance_text
from fuseboard.report.data import CandidateReport, GraphReport, ledger
from fuseboard.report.names import call_numbers, next_name
from fuseboard.report.nodes import describe_ends, describe_node
from fuseboard.report.structured_trace import emit
from fuseboard.run.captured_graph import CapturedGraph
from fuseboard.run.failure import contain, describe, trip
from fuseboard.run.program import Program
from fuseboard.run.proof import FURTHER_CALLS
from fuseboard.run.runner import Runner
from fuseboard.run.sites import Site
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.compiling import compile_lock
from fuseboard.torch_api.copies import copy_graph

#: Why no backend runs a collective. So all ranks come to collectives in the order in which the
#: graph has them, also where a backend fails on one of the ranks and eager runs its region there.
_OF_RANKS = "it is a collective, which ranks have to come to in the same order"


class Pipeline:
    """The stages for the graphs of one call of the backend, under one snapshot of settings.

    :param frame: names Dynamo's compile and the user's function in reports.
    :param pins: what the user wants where.
    :param number: of the backend's call, if it has one already.
    :ivar has_raised: an exception came from the stages, rather than from AOTAutograd.
    """

    def __init__(
        self, session: Session, frame: str, pins: Pins | None = None, number: int | None = None
    ) -> None:
        self.session = session
        self.frame = frame
        self.has_raised = False
        self.number = next(call_numbers) if number is None else number
        self.pins = pins or Pins(session)
        self.planner = Planner(session, self.pins, self._tripped)
        self.narrower = Narrower(
            session, self.pins, lambda: self.example_inputs.values, self._tripped
        )
        self.rewriter = Rewriter(session, lambda: self.example_inputs.values, self._tripped)
        self.example_inputs = ExampleInputs()
        #: Dynamo's graph, as long as it waits for the backend.
        self.dynamo_graph: GraphModule | None = None
        #: The grad mode of the calls.
        self.grads = torch.is_grad_enabled()
        #: Kind → the report of a graph that is chosen by measurement.
        self.chosen: dict[str, GraphReport] = {}
        #: Where the decision about whole calls is kept.
        self.whole_call_decision: StoredDecision | None = None
        #: Runners of the graphs that were compiled, in that order.
        self.runners: list[Runner] = []
        #: Where it is kept whether they compute what Dynamo's graph does, if measuring decides.
        self.capture_decision: StoredDecision | None = None
        #: A record of each graph, in that order, where another process is to get them; else None.
        self.records: list[Record] | None = None
        #: Whether the records hold what was compiled, too.
        #: Plugins whose rewrites of Dynamo's graph were applied. The report of a joint graph has
        #: them, or that of an inference graph, as AOTAutograd makes one or the other.
        self._dynamo_rewriters: dict[str, None] = {}
        # Failures, notes and fusions from before there was a graph: for the first graph's report.
        self._at_capture = GraphReport(name="capture", kind="inference", frame=frame)

    @property
    def budget(self) -> Budget | None:
        """The largest of those of the programs that run; None where all of them are exact."""
        found = [one for runner in self.runners if (one := runner.budget) is not None]
        return max(found, key=lambda budget: budget.tolerance, default=None)

    def contain_at_capture(self, plugin: str, error: Exception) -> None:
        """A failure before there is a graph.

        :raises RegionError: the policy is to raise.
        """
        self._tripped(self._at_capture, plugin, "capture", error, "the other backends' level")

    def rewrite_dynamo_graph(self, graph: GraphModule) -> GraphModule:
        """Dynamo's graph as AOTAutograd is to capture it: the same one if nothing is rewritten."""
        report = self._at_capture
        with compile_lock:
            rewritten = self.rewriter.rewrite_dynamo_graph(
                graph, report, self._fusion_counter(report)
            )
        self._dynamo_rewriters = dict.fromkeys(one.plugin for one in report.fusions if one.applied)
        return rewritten

    def contain_rewritten_graph(self, problem: str) -> None:
        """AOTAutograd can't capture Dynamo's graph as it was rewritten, or it is another one.

        :raises RegionError: the policy is to raise.
        """
        why = "compiled again, without rewrites of Dynamo's graph"
        if self.runners:
            report = self.runners[0].report
        else:
            report = self._report("inference")
            ledger.add(report)
        for plugin in self._dynamo_rewriters:
            error = WrongValues(plugin, "fuseboard_fuse_dynamo", problem)
            self._tripped(report, plugin, "fuse", error, "Dynamo's graph without its rewrites")
        for runner in self.runners:
            give_up(runner, why, problem)

    def contain_refused_graph(
        self,
        error: BaseException,
        refused_by: str = "AOTAutograd",
        instead: str = "Dynamo's own graph",
    ) -> None:
        """The graph can't be captured as what it is, through a fault of somebody's.

        :raises RegionError: the policy is to raise.
        """
        report = self._report("inference")
        ledger.add(report)
        self._tripped(report, refused_by, "capture", error, instead)
        emit(report)

    def leave_as_it_is(self, why: str) -> None:
        """Nothing is tried: the graph runs as Dynamo has it, which is no failure."""
        report = self._report("inference")
        ledger.add(report)
        self._leave(report, why)

    def leave_refused_graph(self, error: BaseException) -> None:
        """AOTAutograd can't have the graph, which is left as it is: no plugin has failed.

        :raises RegionError: the policy is to raise.
        """
        report = self._report("inference")
        ledger.add(report)
        self._contain(report, "AOTAutograd", "capture", error)
        self._leave(report, f"AOTAutograd can't capture it: {describe(error)}")

    def _leave(self, report: GraphReport, why: str) -> None:
        report.notes.append(f"Dynamo's own graph runs: {why}")
        emit(report)

    def contain_other_graph(self, problem: str) -> None:
        """AOTAutograd captured something else than the graph, which then runs as Dynamo has it.

        :raises RegionError: the policy is to raise.
        """
        error = WrongValues("AOTAutograd", "capture", problem)
        report = self.runners[0].report
        self._tripped(report, "AOTAutograd", "capture", error, "Dynamo's own graph")
        for runner in self.runners:
            give_up(runner, "Dynamo's own graph runs: AOTAutograd captured another", problem)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The stages run in the block, one compile at a time."""
        with compile_lock:
            try:
                yield
            except BaseException:
                self.has_raised = True
                raise

    def partition_joint(
        self,
        joint: GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **keywords: Any,
    ) -> tuple[GraphModule, GraphModule]:
        """AOTAutograd's ``partition_fn``: fuse the joint graph, then split it."""
        with self._running():
            report = self._report("joint")
            ledger.add(report)
            with report.timed("fuse"):
                joint = self._rewrite(joint, "joint", report, self._fusion_counter(report))
            with report.timed("partition"):
                return self._split(
                    report,
                    {
                        "joint": joint,
                        "inputs": inputs,
                        "num_fwd_outputs": num_fwd_outputs,
                        "static_inputs": tuple(static_lifetime_input_indices or ()),
                        "memory_budget": self.session.settings.memory_budget,
                        "policy": self.session.settings.joint_policy,
                        "knapsack": self.session.settings.knapsack,
                        "keywords": keywords,
                    },
                )

    def _split(
        self, report: GraphReport, arguments: dict[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        """The hook's answer for a joint graph; the default's where the hook fails."""
        own = {**arguments, "joint": copy_graph(arguments["joint"])}
        try:
            who, parts = self.session.first("fuseboard_partition_joint", **own)
            if who != "defaults":
                where = self.session.override_origin("partition_joint", who)
                forward, backward = parts
                outputs = arguments["num_fwd_outputs"]
                check_parts(forward, backward, arguments["joint"], outputs, who, where)
            return parts  # type: ignore[no-any-return]
        except (PluginError, LoweringError) as error:
            plugin = getattr(error, "plugin", "")
            if plugin == "defaults":
                raise
            self._tripped(report, plugin, "partition", error, "the default split")
            return split_joint(**arguments)

    def compile(self, captured: CapturedGraph, kind: GraphKind) -> None:
        """Let a forward, backward or inference graph's calls go to compiled code."""
        with self._running():
            report = self._report(kind)
            try:
                self._compile(captured, kind, report)
            finally:
                ledger.add(report)
                emit(report)

    def _compile(self, captured: CapturedGraph, kind: GraphKind, report: GraphReport) -> None:
        staged = self._begin(captured.graph, kind, report)
        narrower = self._narrowed(staged)
        with report.timed("partition"), collection_paused():
            cut_plans = [
                self._cut(one, plan)
                for one in (staged, *narrower)
                for plan in self.planner.plans(one)
            ]
        placed = dict(Counter(cut.backend for cut in cut_plans[0].cuts))
        self._notify("plan", report, report.seconds["partition"], regions=placed)
        static = staged.roles.static if kind != "backward" else frozenset()
        describe_ends(staged.graph, static, report)
        visible = staged.roles.visible_outputs if kind == "forward" else None
        kept = list(staged.board_nodes)
        runner = Runner(staged.graph, captured, kind, kept, self.session, report, visible)
        if self.records is None:  # else what this process calls are the same inputs again
            runner.unproven = FURTHER_CALLS
        eager = self.session.backends[-1].name
        runner.is_pinned = any(backend != eager for backend in staged.wishes.pins.values())
        self.runners.append(runner)
        if self.records is not None:
            self.records.append(Record(staged, runner))
        with report.timed("lower"):
            if len(cut_plans) == 1:
                if any(is_collective(node.target) for node in staged.graph.graph.nodes):
                    self._agreed(staged, self._stored(staged))  # else ranks may plan otherwise
                self._lower(staged, cut_plans[0], runner)
            else:
                self._tune(staged, cut_plans, runner)
        total_s = sum(report.seconds.values())
        self._notify("graph", report, total_s, kind=kind, trips=len(report.trips))

    def _begin(self, captured: GraphModule, kind: GraphKind, report: GraphReport) -> StagedGraph:
        """Rewrite the graph as a whole, and ask the backends for claims."""
        graph = copy_graph(captured)
        counter = self._fusion_counter(report)
        if kind == "inference":
            with report.timed("fuse"):
                graph = self._rewrite(graph, kind, report, counter)
        roles = torch_internals.input_roles()
        unversioned = self.example_inputs.unversioned(len(graph.graph.find_nodes(op="placeholder")))
        if kind == "inference" and roles.static & unversioned:
            report.notes.append(
                f"nothing is prepared from {len(roles.static & unversioned)} weights that are "
                "inference tensors: these don't tell when they change"
            )
        staged = StagedGraph(graph, captured, kind, report, roles, counter, unversioned=unversioned)
        staged = self._claimed(staged)
        report.notes.extend(staged.wishes.notes)
        return staged

    def _claimed(self, staged: StagedGraph) -> StagedGraph:
        """A graph with the backends' claims."""
        graph, kind, report = staged.graph, staged.kind, staged.report
        with report.timed("partition"), collection_paused():
            kept = board_nodes(graph)
            writes = find_writes(graph, staged.roles.copied_back) if kind == "inference" else []
            wanted = self.pins.of(placeable_nodes(graph, kept))
            left = {name: WHY for write in writes for name in write.names}
            left |= {
                node.name: _OF_RANKS for node in graph.graph.nodes if is_collective(node.target)
            }
            excluded = left_to_eager(wanted.excluded, left, self.session.backends)
            claims, inner = self.planner.claims(graph, kind, kept, excluded, report)
        written = [name for write in writes for name in write.names]
        eager = self.session.backends[-1].name
        return dataclasses.replace(
            staged,
            board_nodes=kept,
            claims=claims,
            wishes=wanted.resolve(claims).with_boards(written, eager, WHY),
            inner_plans=inner,
            writes=writes,
        )

    def _narrowed(self, staged: StagedGraph) -> list[StagedGraph]:
        """The graph in narrower numbers, where these are allowed and can be held against it."""
        report, settings = staged.report, self.session.settings
        if not self.narrower.is_wanted(staged.kind) or not self.planner.are_measured(staged):
            return []
        report.tolerance = tolerance_text(settings.tolerance, settings.tolerance_metric)
        with report.timed("fuse"):
            whole = list(self.narrower.versions(staged.graph, staged.kind, report, staged.counter))
        with report.timed("profile"):
            known = self._stored(staged).exact_places()
            versions = list(
                self.narrower.with_parts(whole, staged.graph, staged.captured, report, known)
            )
        return [
            self._claimed(dataclasses.replace(staged, graph=one.graph, narrowed=one))
            for one in versions
        ]

    def _rewrite(
        self, graph: GraphModule, kind: GraphKind, report: GraphReport, counter: FusionCounter
    ) -> GraphModule:
        graph = self.rewriter.rewrite(graph, kind, report, counter)
        self._notify("fuse", report, 0.0, offered=counter.offered)
        return graph

    def _cut(self, staged: StagedGraph, plan: Plan) -> CutPlan:
        graph, kept = staged.graph, list(staged.board_nodes)
        cuts = cut_regions(graph, plan.placements, kept, plan.regions, staged.writes)
        return CutPlan(staged, plan, cuts)

    def _lowering(
        self, staged: StagedGraph, report: GraphReport, counter: FusionCounter
    ) -> Lowering:
        placeholders = staged.graph.graph.find_nodes(op="placeholder")
        weight_positions = staged.weight_positions
        record = self.records[-1] if self.records else None
        return Lowering(
            session=self.session,
            report=report,
            kind=staged.kind,
            static=frozenset(n for i, n in enumerate(placeholders) if i in weight_positions),
            claimed={name: claimed_names(answers) for name, answers in staged.claims.items()},
            inner_plans=staged.inner_plans,
            counter=counter,
            hoisting=self.session.settings.hoist and staged.kind == "inference",
            real=self.example_inputs.behind(placeholders, weight_positions),
            decomposed=record.decomposed if record is not None else None,
            facts=record.facts if record is not None else {},
            overridden=record.overridden if record is not None else set(),
        )

    def _lower(self, staged: StagedGraph, cut_plan: CutPlan, runner: Runner) -> None:
        """One plan: what fails is contained region by region."""
        report = staged.report
        report.notes.extend(cut_plan.plan.notes)
        lowering = self._lowering(staged, report, staged.counter)
        whole = len(cut_plan.cuts) == 1
        sites = [
            Site(cut, lowering.lower(cut, f"{report.name}.region{i}", whole))
            for i, cut in enumerate(cut_plan.cuts)
        ]
        describe_nodes(staged, cut_plan.plan, sites)
        if self.records is not None:
            self.records[-1].plan = cut_plan.plan
        runner.install(Program(runner.context, sites))

    def _tune(self, staged: StagedGraph, cut_plans: Sequence[CutPlan], runner: Runner) -> None:
        """Several plans: measuring decides, or has decided before."""
        session, report = self.session, staged.report
        plans: dict[Candidate, CutPlan] = {}
        wrapped = bool(session.with_hook("fuseboard_wrap"))
        names: Counter[str] = Counter()
        for cut_plan in cut_plans:
            version, name = cut_plan.staged, cut_plan.name
            names[name] += 1  # of two on the same backends one may have but what is pinned on one
            row = CandidateReport(f"{name} ({names[name]})" if names[name] > 1 else name)
            context = runner.context
            if (narrowed := version.narrowed) is not None:
                row.tolerance = narrowed.budget.tolerance
                row.error, row.exact = narrowed.error, narrowed.exact
                context = context.of_version(version.graph, version.board_nodes, narrowed.budget)
            report.candidates.append(row)
            candidate = Candidate(cut_plan.cuts, context, self._strict_lowering(version), row)
            if cut_plan.name == "eager" and self.dynamo_graph is not None and not wrapped:
                candidate.dynamo_site = dynamo_site(
                    self.dynamo_graph, self.example_inputs.values, staged, self.grads
                )
                if candidate.dynamo_site is not None:
                    runner.uncompiled = candidate.dynamo_site.lowered.call
            if narrowed is not None and narrowed.error is not None:
                if problem := narrowed.budget.excess_at_choice(narrowed.error):
                    candidate.drop("inexact", problem)  # it needn't be lowered to be found so
            plans[candidate] = cut_plan
        waiting = "no candidate has been compared yet"
        report.nodes[:] = [
            describe_node(node, "eager", "", waiting)
            for node in staged.graph.graph.nodes
            if node.op == "call_function"
        ]
        record = self.records[-1] if self.records is not None else None

        def installed(winner: Candidate) -> None:
            assert winner.program is not None
            report.regions[:] = winner.regions
            chosen = plans[winner]
            if record is not None:
                record.staged, record.plan = chosen.staged, chosen.plan
            describe_nodes(chosen.staged, chosen.plan, winner.program.sites)

        mode = torch_internals.fake_mode_of([n.meta.get("val") for n in staged.graph.graph.nodes])
        stored = self._stored(staged)
        self.chosen[staged.kind] = report
        whole = not wrapped and all(candidate.dynamo_site is None for candidate in plans)
        if staged.kind == "forward" or (staged.kind == "inference" and whole):
            self.whole_call_decision = dataclasses.replace(stored, level="step")
        if staged.kind != "backward":
            self.capture_decision = dataclasses.replace(stored, level="capture")
        decide = self._agreed(staged, stored)
        tuner = Tuner(runner, list(plans), staged.weight_positions, mode, stored, installed, decide)
        tuner.start(defers=defers(session, staged.graph))

    def _stored(self, staged: StagedGraph) -> StoredDecision:
        positions = sorted(staged.weight_positions)
        placeholders = staged.captured.graph.find_nodes(op="placeholder")
        weights = self.example_inputs.behind(placeholders, positions)
        return StoredDecision.of(
            self.session, staged.captured, staged.kind, positions, staged.report, weights.values()
        )

    def _strict_lowering(self, staged: StagedGraph) -> Lowering:
        """The lowering of one candidate; its fusions are numbered on from the graph's own."""
        counter = dataclasses.replace(staged.counter, applied=[])
        own = dataclasses.replace(staged.report, regions=[])
        return dataclasses.replace(self._lowering(staged, own, counter), strict=True)

    def _agreed(self, staged: StagedGraph, stored: StoredDecision) -> Decide | None:
        """How decisions are made in a job of several ranks; None where there is no other rank.

        :raises RankError: another rank compiles the same graph otherwise.
        """
        settings = self.session.settings
        job = job_of(settings.rank_limit_s) if settings.ranks == "agree" else None
        if job is None:
            return None
        same = signature(staged.captured, "", (staged.kind,), any_index=True)
        parts = {**(stored.parts or {}), "graph": same}
        what = f"the {staged.kind} graph of {self.frame}"
        return Decisions(job, parts, what).decide

    def _notify(self, name: EventName, report: GraphReport, seconds: float, **details: Any) -> None:
        self.session.notify(Event(name, report.name, seconds, details))

    def _fusion_counter(self, report: GraphReport) -> FusionCounter:
        """It goes on from the fusions of Dynamo's graph, which the first graph's report has."""
        settings, offered = self.session.settings, len(report.fusions)
        return FusionCounter(settings.fuse_limit, frozenset(settings.fuse_skip), offered)

    def _tripped(
        self, report: GraphReport, plugin: str, stage: Stage, error: BaseException, instead: str
    ) -> None:
        """Contain a failure that isn't a region's, or raise it if the policy says so."""
        self._contain(report, plugin, stage, error)
        trip(self.session, report, plugin, stage, report.name, error, instead)

    def _contain(
        self, report: GraphReport, plugin: str, stage: Stage, error: BaseException
    ) -> None:
        if isinstance(error, PluginError) and (
            where := self.session.override_origin(stage, plugin)
        ):
            error.add(f"It decides the {stage} by {where}.")
        what = f"plugin {plugin!r} failed in stage {stage!r} on graph {report.name!r}"
        contain(self.session, report.name, plugin, stage, error, what)

    def _report(self, kind: GraphKind) -> GraphReport:
        backends = tuple(info.name for info in self.session.backends)
        report = GraphReport(next_name(kind), kind, self.frame, self.number, backends)
        report.left_out.update(self.session.left_out())
        report.notes.extend(self.session.notes)
        for name in ("trips", "notes", "fusions"):
            found = getattr(self._at_capture, name)
            getattr(report, name).extend(found)
            found.clear()
        return report
