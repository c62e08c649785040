"""One graph through the stages in order: fuse, partition, lower; then the runner."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import (
    Event,
    EventName,
    GraphKind,
    Plan,
    Stage,
)
from fuseboard.errors import LoweringError, PluginError, RegionError, WrongValues
from fuseboard.fuse.passes import FusionCounter
from fuseboard.lower.lowering import Lowering
from fuseboard.lower.overriding import Decided
from fuseboard.lower.specialise import compiling
from fuseboard.partition.board_nodes import board_nodes
from fuseboard.partition.garbage import collection_paused
from fuseboard.partition.joint import split_joint
from fuseboard.partition.parts import check_parts
from fuseboard.partition.pins import Pins
from fuseboard.partition.regions import cut_regions
from fuseboard.pipeline.planning import Planner, defers
from fuseboard.pipeline.rewriting import Rewriter
from fuseboard.pipeline.work import Draft, Work, claimed, describe_nodes, dynamo_site, placed
from fuseboard.profile.choose.book import Book
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.choose.ranks import Decide, check_same, from_first, several_ranks
from fuseboard.profile.choose.step import give_up
from fuseboard.profile.choose.tuner import Tuner
from fuseboard.report.data import CandidateReport, GraphReport, ledger
from fuseboard.report.nodes import describe_ends, describe_node
from fuseboard.report.structured_trace import emit
from fuseboard.run.entry import Entry
from fuseboard.run.failure import CONTAINING, ask, describe, trip
from fuseboard.run.program import Program
from fuseboard.run.runner import Runner
from fuseboard.run.sites import Site
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import copy_graph

_graph_numbers: dict[str, Iterator[int]] = {}
#: Of calls of the backend, in this process.
call_numbers = itertools.count()


def next_name(kind: str) -> str:
    """A name for the next graph of a kind in this process: ``inference0``."""
    return f"{kind}{next(_graph_numbers.setdefault(kind, itertools.count()))}"


@dataclasses.dataclass
class Record:
    """What a graph's calls go through was made from, for another process to make it again.

    :ivar decomposed: graphs of regions that were decomposed for their backends, by signature; those
        of other candidates, too.
    :ivar overridden: where who decides a stage by the settings did so.
    """

    work: Work
    runner: Runner
    decomposed: dict[str, GraphModule] = dataclasses.field(default_factory=dict)
    overridden: set[Decided] = dataclasses.field(default_factory=set)
    plan: Plan | None = None


class Pipeline:
    """The stages for the graphs of one call of the backend, under one snapshot of settings.

    :param frame: names Dynamo's compile and the user's function in reports.
    :param pins: what the user wants where.
    :param number: of the backend's call, if it has one already.
    """

    def __init__(
        self, session: Session, frame: str, pins: Pins | None = None, number: int | None = None
    ) -> None:
        self.session = session
        self.frame = frame
        self.number = next(call_numbers) if number is None else number
        self.pins = pins or Pins(session)
        self.planner = Planner(session, self.pins, self._tripped)
        self.rewriter = Rewriter(session, lambda: self.example_inputs, self._tripped)
        #: Dynamo's, real, as long as it waits for the backend.
        self.example_inputs: Sequence[Any] = ()
        #: Dynamo's graph, as long as it waits for the backend.
        self.dynamos: GraphModule | None = None
        #: The grad mode of the calls.
        self.grads = torch.is_grad_enabled()
        #: Kind → the report of a graph that is chosen by measurement.
        self.chosen: dict[str, GraphReport] = {}
        #: Where the decision about whole calls is kept.
        self.step_book: Book | None = None
        #: Of the graphs that were compiled, in that order.
        self.runners: list[Runner] = []
        #: Where it is kept whether they compute what Dynamo's graph does, if measuring decides.
        self.capture_book: Book | None = None
        #: Of each graph, in that order, where another process is to have them; else None.
        self.records: list[Record] | None = None
        # What tripped before there was a graph: told in the report of the first.
        self._at_capture = GraphReport(name="capture", kind="inference", frame=frame)

    def contain_at_capture(self, plugin: str, error: Exception) -> None:
        """A failure before there is a graph.

        :raises RegionError: the policy is to raise.
        """
        self._tripped(self._at_capture, plugin, "capture", error, "the next backend's level")

    def contain_refused_graph(self, error: BaseException) -> None:
        """AOTAutograd can't capture the graph, which then runs as Dynamo has it.

        :raises RegionError: the policy is to raise.
        """
        report = self._report("inference")
        ledger.add(report)
        self._tripped(report, "AOTAutograd", "capture", error, "Dynamo's own graph")
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
        with compiling:
            report = self._report("joint")
            ledger.add(report)
            with report.timed("fuse"):
                joint = self._rewrite(joint, "joint", report, self._fusion_counter())
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
                where = self.session.set_where("partition_joint", who)
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

    def compile(self, entry: Entry, kind: GraphKind) -> None:
        """Let a forward, backward or inference graph's calls go to compiled code."""
        with compiling:
            report = self._report(kind)
            try:
                self._compile(entry, kind, report)
            finally:
                ledger.add(report)
                emit(report)

    def _compile(self, entry: Entry, kind: GraphKind, report: GraphReport) -> None:
        work = self._begin(entry.captured, kind, report)
        with report.timed("partition"), collection_paused():
            plans = self.planner.plans(work)
            drafts = [self._cut(work, plan) for plan in plans]
        placed = dict(Counter(cut.backend for cut in drafts[0].cuts))
        self._notify("plan", report, report.seconds["partition"], regions=placed)
        static = work.roles.static if kind != "backward" else frozenset()
        describe_ends(work.graph, static, report)
        visible = work.roles.visible_outputs if kind == "forward" else None
        kept = list(work.kept)
        runner = Runner(work.graph, entry, kind, kept, self.session, report, visible)
        self.runners.append(runner)
        if self.records is not None:
            self.records.append(Record(work, runner))
        with report.timed("lower"):
            if len(drafts) == 1:
                self._lower(work, drafts[0], runner)
            else:
                self._tune(work, drafts, runner)
        total_s = sum(report.seconds.values())
        self._notify("graph", report, total_s, kind=kind, trips=len(report.trips))

    def _begin(self, captured: GraphModule, kind: GraphKind, report: GraphReport) -> Work:
        """Fuse the graph as a whole, and ask who wants what of it."""
        graph = copy_graph(captured)
        counter = self._fusion_counter()
        if kind == "inference":
            with report.timed("fuse"):
                graph = self._rewrite(graph, kind, report, counter)
        with report.timed("partition"), collection_paused():
            kept = board_nodes(graph)
            wanted = self.pins.of(placed(graph, kept))
            claims = self.planner.claims(graph, kind, kept, wanted.excluded, report)
            wishes = wanted.resolve(claims)
            report.notes.extend(wishes.notes)
        roles = torch_internals.input_roles()
        untold = self._untold(len(graph.graph.find_nodes(op="placeholder")))
        if kind == "inference" and roles.static & untold:
            report.notes.append(
                f"nothing is prepared from {len(roles.static & untold)} weights that are inference "
                "tensors: these don't tell when they change"
            )
        return Work(graph, captured, kind, report, roles, counter, kept, claims, wishes, untold)

    def _rewrite(
        self, graph: GraphModule, kind: GraphKind, report: GraphReport, counter: FusionCounter
    ) -> GraphModule:
        graph = self.rewriter.rewrite(graph, kind, report, counter)
        self._notify("fuse", report, 0.0, offered=counter.offered)
        return graph

    def _cut(self, work: Work, plan: Plan) -> Draft:
        merge = self.session.settings.merge_regions
        graph, kept = work.graph, list(work.kept)
        return Draft(plan, cut_regions(graph, plan.placements, kept, plan.regions, merge))

    def _lowering(self, work: Work, report: GraphReport, counter: FusionCounter) -> Lowering:
        placeholders = work.graph.graph.find_nodes(op="placeholder")
        fixed = work.fixed
        record = self.records[-1] if self.records else None
        return Lowering(
            session=self.session,
            report=report,
            kind=work.kind,
            static=frozenset(n for i, n in enumerate(placeholders) if i in fixed),
            claimed={name: claimed(answers) for name, answers in work.claims.items()},
            counter=counter,
            hoisting=self.session.settings.hoist and work.kind == "inference",
            real=self._real_inputs(placeholders, fixed),
            kept=record.decomposed if record is not None else None,
            overridden=record.overridden if record is not None else set(),
        )

    def _lower(self, work: Work, draft: Draft, runner: Runner) -> None:
        """One plan: what fails is contained region by region."""
        report = work.report
        report.notes.extend(draft.plan.notes)
        lowering = self._lowering(work, report, work.counter)
        whole = len(draft.cuts) == 1
        sites = [
            Site(cut, lowering.lower(cut, f"{report.name}.region{i}", whole))
            for i, cut in enumerate(draft.cuts)
        ]
        describe_nodes(work, draft.plan, sites)
        if self.records is not None:
            self.records[-1].plan = draft.plan
        runner.install(Program(runner.board, sites))

    def _tune(self, work: Work, drafts: Sequence[Draft], runner: Runner) -> None:
        """Several plans: measuring decides, or has decided before."""
        session, report = self.session, work.report
        plans: dict[Candidate, Plan] = {}
        wrapped = bool(session.with_hook("fuseboard_wrap"))
        for draft in drafts:
            told = CandidateReport(draft.name)
            report.candidates.append(told)
            candidate = Candidate(draft.cuts, self._strict_lowering(work), told)
            if draft.name == "eager" and self.dynamos is not None and not wrapped:
                candidate.given = dynamo_site(self.dynamos, self.example_inputs, work, self.grads)
                if candidate.given is not None:
                    runner.uncompiled = candidate.given.lowered.call
            plans[candidate] = draft.plan
        waiting = "no candidate has been compared yet"
        report.nodes[:] = [
            describe_node(node, "eager", "", waiting)
            for node in work.graph.graph.nodes
            if node.op == "call_function"
        ]
        record = self.records[-1] if self.records is not None else None

        def installed(winner: Candidate) -> None:
            assert winner.program is not None
            report.regions[:] = winner.regions
            if record is not None:
                record.plan = plans[winner]
            describe_nodes(work, plans[winner], winner.program.sites)

        mode = torch_internals.fake_mode_of([n.meta.get("val") for n in work.graph.graph.nodes])
        book = Book.of(session, work.captured, work.kind, work.fixed, report)
        self.chosen[work.kind] = report
        whole = not wrapped and all(candidate.given is None for candidate in plans)
        if work.kind == "forward" or (work.kind == "inference" and whole):
            self.step_book = dataclasses.replace(book, level="step")
        if work.kind != "backward":
            self.capture_book = dataclasses.replace(book, level="capture")
        decide = self._agreed(work, book) if several_ranks() else None
        tuner = Tuner(runner, list(plans), work.fixed, mode, book, installed, decide)
        tuner.start(defers=defers(session, work.graph))

    def _strict_lowering(self, work: Work) -> Lowering:
        """For one candidate: it numbers its fusions on from the graph's own."""
        counter = dataclasses.replace(work.counter, applied=[])
        own = dataclasses.replace(work.report, regions=[])
        return dataclasses.replace(self._lowering(work, own, counter), strict=True)

    def _agreed(self, work: Work, book: Book) -> Decide:
        """How decisions are made in a job of several ranks: by rank 0.

        :raises RankError: another rank compiles another graph.
        """
        what = f"{work.kind} graph of {self.frame}"
        check_same(book.parts or {}, what)
        return partial(from_first, what=what)

    def _real_inputs(
        self, placeholders: Sequence[Node], fixed: Collection[int]
    ) -> dict[Node, torch.Tensor]:
        """The real tensors behind some placeholders, where each of Dynamo's inputs is one."""
        real = self._inputs_of(len(placeholders))
        return {
            placeholders[i]: real[i]
            for i in fixed
            if i < len(real) and isinstance(real[i], torch.Tensor)
        }

    def _untold(self, number: int) -> frozenset[int]:
        """Positions of the inputs that are inference tensors, as far as known."""
        return frozenset(
            i
            for i, value in enumerate(self._inputs_of(number))
            if isinstance(value, torch.Tensor) and value.is_inference()
        )

    def _inputs_of(self, number: int) -> Sequence[Any]:
        """Dynamo's real inputs, where they are those of a graph of so many; else none."""
        if number != len(self.example_inputs) or torch_internals.inputs_were_changed():
            return ()
        return self.example_inputs

    def _notify(self, name: EventName, report: GraphReport, seconds: float, **details: Any) -> None:
        self.session.notify(Event(name, report.name, seconds, details))

    def _fusion_counter(self) -> FusionCounter:
        settings = self.session.settings
        return FusionCounter(settings.fuse_limit, frozenset(settings.fuse_skip))

    def _tripped(
        self, report: GraphReport, plugin: str, stage: Stage, error: BaseException, instead: str
    ) -> None:
        """Contain a failure that isn't a region's, or raise it if the policy says so."""
        action, who = ask(self.session, report.name, plugin, stage, error)
        if action == "raise":
            raise RegionError(
                f"plugin {plugin!r} failed in stage {stage!r} on graph {report.name!r}: "
                f"{describe(error).rstrip('.')}. Not contained: {who}; {CONTAINING}."
            ) from error
        trip(report, plugin, stage, report.name, error, instead)

    # --- reporting ------------------------------------------------------------------------------

    def _report(self, kind: GraphKind) -> GraphReport:
        backends = tuple(info.name for info in self.session.backends)
        report = GraphReport(next_name(kind), kind, self.frame, self.number, backends)
        report.left_out.update(self.session.left_out())
        report.notes.extend(self.session.notes)
        report.trips.extend(self._at_capture.trips)
        self._at_capture.trips.clear()
        return report
