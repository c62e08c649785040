"""A candidate: one way to run a whole graph, before and after it is lowered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fuseboard.lower.caching import Deferred, Token
from fuseboard.lower.isolated import LoweringResult
from fuseboard.lower.lowering import Lowering
from fuseboard.partition.regions import Cut
from fuseboard.profile.costs.database import CandidateCost
from fuseboard.report.data import CandidateReport, RegionReport
from fuseboard.report.nodes import source_line
from fuseboard.run.program import GraphContext, Program
from fuseboard.run.sites import Site
from fuseboard.run.weights import WeightSets
from fuseboard.torch_api.nodes import target_name


@dataclass(eq=False)
class Candidate:
    """A plan's regions, and the program that was made of them.

    :ivar context: of its programs.
    :ivar lowering: strict; its report is this candidate's own.
    :ivar row: its row in the graph's report.
    :ivar waiting: what is to be compiled before it can be lowered.
    :ivar postponed: it is to be lowered in this process, by a later call.
    :ivar program: None until it is lowered, and again once it has lost.
    :ivar proven: its outputs were right, in this process or an earlier one.
    :ivar undecided: it is out in this process for a reason that needn't hold in later ones.
    :ivar dynamo_site: Dynamo's graph as its code, where nothing has to be lowered.
    """

    cuts: list[Cut]
    context: GraphContext
    lowering: Lowering
    row: CandidateReport
    waiting: set[Token] = field(default_factory=set)
    ready: dict[Token, LoweringResult] = field(default_factory=dict)
    postponed: bool = False
    program: Program | None = None
    proven: bool = False
    undecided: bool = False
    dynamo_site: Site | None = None

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def regions(self) -> list[RegionReport]:
        return self.lowering.report.regions

    @property
    def dropped(self) -> bool:
        """It can't be chosen any more."""
        lost = self.row.state in ("failed", "inexact", "slower") or bool(self.row.problem)
        return lost and self.program is None

    @property
    def authors(self) -> list[str]:
        """The authors of its code, without eager."""
        sites = self.program.sites if self.program is not None else []
        found = [site.lowered.author for site in sites] or [cut.backend for cut in self.cuts]
        return [name for name in found if name != "eager"]

    @property
    def holds_weights(self) -> bool:
        """Whether it has values that were prepared from weights."""
        sets = self.program.sets if self.program is not None else None
        return sets is not None and len(sets) > 0

    def lower(self, defers: bool) -> list[Deferred]:
        """Lower the regions; what has to be compiled elsewhere first, where something has to.

        Raises what the backends raise, or :class:`RegionError` of a wrapper.
        """
        if self.dynamo_site is not None:
            self.regions[:] = [report_of_site(self.dynamo_site)]
            self.program = Program(self.context, [self.dynamo_site])
            return []
        start = time.perf_counter()
        self.lowering.defers, self.lowering.ready = defers, self.ready
        self.regions.clear()
        sites: list[Site] = []
        deferred: list[Deferred] = []
        for number, cut in enumerate(self.cuts):
            name = f"{self.context.report.name}.region{number}"
            try:
                sites.append(Site(cut, self.lowering.lower(cut, name, len(self.cuts) == 1)))
            except Deferred as later:
                if later.known:
                    continue
                if later.request is None:
                    self.postponed = True
                else:
                    self.waiting.add(later.token)
                    deferred.append(later)
        if self.postponed and defers:
            self.waiting.clear()
            deferred.clear()
        elif not self.waiting:
            self.program, self.postponed = Program(self.context, sites), False
        self.row.compile_s = (self.row.compile_s or 0.0) + time.perf_counter() - start
        return deferred

    def recall(self, cost: CandidateCost, lost: bool, settled: bool) -> None:
        """Take over what an earlier process measured.

        :param lost: it was tried and not chosen, or needn't be tried since all is settled.
        """
        row = self.row
        row.latency_us, row.low_us, row.high_us = cost.latency_us, cost.low_us, cost.high_us
        row.peak_bytes, row.error = cost.peak_bytes, cost.error
        if lost and (cost.latency_us or settled):
            self.drop("failed" if cost.problem else "slower", cost.problem)

    def drop(self, state: str, problem: str = "") -> None:
        """Let go of what was lowered."""
        if self.row.problem and not problem:  # it failed in a call since it was chosen
            state, problem = "failed", self.row.problem
        self.row.state, self.row.problem = state, problem
        self.row.notes[:] = dict.fromkeys(note for one in self.regions for note in one.notes)
        self.program = self.dynamo_site = None
        self.postponed = False
        self.ready.clear()
        self.waiting.clear()


def note_gain_of_preparing(
    sets: WeightSets | None, rows: Sequence[CandidateReport], margin: float
) -> None:
    """Tell a winner's sets of weights what a call takes without them, and what it saves with them.

    :param rows: of all candidates, with the winner ``chosen``.
    :param margin: the least share of eager's time by which something wins.
    """
    winner = next((row for row in rows if row.state == "chosen"), None)
    if sets is None or winner is None or not winner.latency_us:
        return
    eagers_us = next((row.latency_us for row in rows if row.name == "eager"), None)
    if eagers_us:
        sets.share = max(1 - winner.latency_us / eagers_us, margin)
        sets.unprepared_s = 1e-6 * eagers_us


def report_of_site(site: Site) -> RegionReport:
    """The report of a region that wasn't lowered by a backend."""
    region, nodes = site.lowered.region, site.cut.nodes
    return RegionReport(
        name=region.name,
        backend=region.backend,
        ops=dict(Counter(map(target_name, nodes))),
        sources=tuple(dict.fromkeys(filter(None, map(source_line, nodes)))),
        notes=["Dynamo's own graph"],
        whole=region.whole,
        signature=region.signature,
    )
