"""The runner: what a compiled graph's calls go through, and what happens when one fails.

The first call goes through a *checked* function: each region's outputs are held against its
contract and its values, a failing region is replaced, and outputs that wrongly share storage are
cloned from then on. After a call without a failure the plain function takes over. Past 400 lines:
whatever changes what calls run is in one class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.beside import is_beside
from fuseboard.board import Session
from fuseboard.contracts import Boxed, GraphKind, Region, Stage
from fuseboard.errors import NotEnoughMemory, WrongValues, containable
from fuseboard.forks import fork_safe_lock
from fuseboard.living import Living
from fuseboard.ops.effects import has_effects
from fuseboard.partition.board_nodes import shared_outputs
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.profile.judge.reference import replayable
from fuseboard.profile.judge.verify import shares_storage
from fuseboard.report.data import GraphReport
from fuseboard.report.instead import choose_eager, graph_runs_in_eager, regions_run_in_eager
from fuseboard.report.words import first
from fuseboard.run.captured_graph import CapturedGraph
from fuseboard.run.checked import RegionChecks
from fuseboard.run.eager import boxed_function
from fuseboard.run.failure import contained, describe, record_trip, region_error
from fuseboard.run.program import UNPREPARED, GraphContext, Program
from fuseboard.run.proof import at_first, each, held_to
from fuseboard.run.sites import Lowered, Site
from fuseboard.run.sizes import bucket_of
from fuseboard.run.weights import WeightSets, any_version
from fuseboard.torch_api.profiler import Spanned

#: Errors that the next call may not have.
_PASSING = (MemoryError, NotEnoughMemory, torch.OutOfMemoryError)


class Runner:
    """Runs one graph.

    :param graph: the graph as it was cut, without changes by any backend.
    :param captured: what AOTAutograd calls. The graph as captured runs in eager after a failure.
    :param visible: how many leading outputs the caller sees.
    :param budget: how far the graph's results may be from the captured one's in float64.
    :ivar program: what ``uninterrupted`` was generated from.
    :ivar uninterrupted: what a call executes unless it is interrupted.
    :ivar uncompiled: the graph in eager, as it runs best; for calls right after weights changed.
    :ivar cloned: positions of outputs that wrongly shared storage, and are cloned.
    :ivar is_pinned: the user wants something in it on another backend than eager.
    :ivar on_trip: called with the problem where the chosen program failed in a call, so that later
        processes choose another one.
    :ivar chooser: the tuner, until the graph has settled. Nothing else keeps it alive while it
        waits for what is compiled elsewhere.
    """

    def __init__(
        self,
        graph: GraphModule,
        captured: CapturedGraph,
        kind: GraphKind,
        board_nodes: Sequence[Node],
        session: Session,
        report: GraphReport,
        visible: int | None,
        budget: Budget | None = None,
    ) -> None:
        self.session = session
        self.report = report
        self.lock = fork_safe_lock()
        results: tuple[Any, ...] = tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        placeholders = graph.graph.find_nodes(op="placeholder")
        bucket, self._bucket_of = bucket_of([node.meta.get("val") for node in placeholders])
        self.context = GraphContext(
            graph, kind, board_nodes, results, session, report, bucket, budget=budget
        )
        self.captured = captured
        self.cloned: frozenset[int] = frozenset()
        self._visible = len(results) if visible is None else visible
        self._may_share = shared_outputs(results)
        self._every = session.settings.verify_every
        self._instead: Boxed | None = None
        self._told_of_change = self._has_given_up = False
        self.is_pinned = False
        self.on_trip: Callable[[str], None] | None = None
        self.chooser: object = None
        #: How many further calls of a program that may have an error are held against float64.
        self.unproven = 0
        self._uncompiled: Boxed | None = None
        self._run(self._run_uncompiled)
        living.add(self)

    @property
    def uncompiled(self) -> Boxed:
        """What runs the graph in eager: the captured one, unless another way was found faster."""
        return self._uncompiled or self.captured.eager

    @uncompiled.setter
    def uncompiled(self, function: Boxed) -> None:
        self._uncompiled = function

    @property
    def budget(self) -> Budget | None:
        """How far its results may be from float64 as it runs; None where they are exact."""
        program = getattr(self, "program", None)
        return None if program is None or self._has_given_up else program.context.budget

    def _run_uncompiled(self, args: list[Any]) -> Sequence[Any]:
        """Until a program is installed. The code for eager is made when a call needs it."""
        return self.uncompiled(args)

    def install(self, program: Program, checks: RegionChecks | None = None) -> None:
        """Run a program from the next call on, which is a checked one unless that is off.

        :param checks: what is known of its code already.
        """
        with self.lock:
            self.program, self._has_given_up = program, False
            if self.session.settings.verify == "off":
                self._go_on()
            else:
                checks = checks or RegionChecks(again=self._every is not None)
                self._run(program.checked(self, self.cloned, checks))

    def interrupt(self, call: Boxed | None) -> None:
        """Let calls go to ``call`` instead, until it is taken back with None."""
        with self.lock:
            self._instead = call
            self._run(self.uninterrupted)

    def _run(self, function: Boxed) -> None:
        self.uninterrupted: Boxed = function
        self.captured.put(self._instead or function)

    def new_sizes(self, program: Program, args: list[Any]) -> Sequence[Any]:
        """The first call of a new bucket of sizes is a checked one.

        Beside the user's calls the results are compared with those of Dynamo's graph instead.
        """
        again = self._every is not None
        checks = RegionChecks(again=again)
        if is_beside():
            checks = RegionChecks(False, strides=False, inputs="unseen", again=again)
        return program.checked(self, self.cloned, checks)(args)

    def run_unprepared(self, sets: WeightSets, inputs: list[Any]) -> Sequence[Any]:
        """Run a call in eager: preparing its weights isn't worth it yet."""
        if not self._told_of_change:
            self._told_of_change = True
            takes = f"the {sets.prepare_s:.2g} s that preparing them again takes"
            self.report.notes.append(
                f"weights are inference tensors, which tell no change: eager runs, to save {takes}"
                if sets.unversioned
                else f"weights change between calls: eager runs until it has lost {takes}"
            )
        start = time.perf_counter()
        results: Sequence[Any] = Spanned(self.uncompiled, f"{self.report.name} [eager]")(inputs)
        sets.unprepared_s = time.perf_counter() - start
        return results

    def eager_results(self, inputs: list[Any]) -> Sequence[Any]:
        """What the caller would get from eager; () where eager can't be run beside a call."""
        if replayable(self.captured.graph):
            return ()
        return self.uncompiled(list(inputs))[: self._visible]

    def prove(self, calls: int) -> None:
        """Hold so many of the next calls against float64, if the program may have an error."""
        with self.lock:
            self.unproven = calls
            self._go_on()

    @property
    def is_proving(self) -> bool:
        """Whether the next calls' results are held against float64, which takes its time."""
        return bool(self.unproven) and self.budget is not None

    def _go_on(self) -> None:
        """After a checked call without a failure."""
        following = plain = self.program.plain(self, self.cloned)
        if self._every is not None:
            checked = self._held_to_budget(
                self.program.checked(self, self.cloned, RegionChecks(inputs="watched", again=True))
            )
            following = checked if self._every == 1 else each(self._every, checked, plain)
        if self.is_proving:
            held = self._held_to_budget(plain)
            self._run(at_first(self.unproven, held, lambda: self._proven(following)))
        else:
            self._run(following)

    def _proven(self, following: Boxed) -> Boxed:
        """Let calls go to a function: enough have been held against float64."""
        with self.lock:
            if self.unproven:
                self.unproven = 0
                self._run(following)
        return self.uninterrupted

    def _held_to_budget(self, call: Boxed) -> Boxed:
        budget = self.program.context.budget
        if budget is None:
            return call
        return held_to(budget, call, self.captured.graph, self._exceeded)

    def _exceeded(self, problem: str, inputs: list[Any]) -> Sequence[Any]:
        """Results were farther from float64 than they may be: the graph as captured runs for good.

        :returns: what that computes.
        """
        tripped = None
        with self.lock:
            if self.program.context.budget is not None and not self._has_given_up:
                sites = dict.fromkeys(site.lowered.author for site in self.program.sites)
                instead = "the graph as captured, in eager"
                tripped = record_trip(
                    self.report,
                    ", ".join(sites),
                    "profile",
                    self.report.name,
                    problem,
                    instead,
                    exceeded=True,
                )
                self.give_up(f"{instead}, runs: in a call, {problem}", problem)
        if tripped is not None:
            self._keep_trip(problem)
            self.session.notify(tripped)
        return self.captured.eager(inputs)

    # --- when something is wrong ----------------------------------------------------------------

    def finish(
        self, program: Program, results: tuple[Any, ...], inputs: list[Any]
    ) -> tuple[Any, ...]:
        """End of a checked call: clone what shares storage, go over to the plain code."""
        wrong = shares_storage(results, inputs, self._may_share, self._visible)
        with self.lock:
            if wrong:
                self.cloned |= frozenset(wrong)
                self.report.notes.append(
                    f"outputs {wrong} are cloned: the compiled code returned storage that eager's "
                    "results don't share"
                )
            self.context.buckets.add(self._bucket_of(inputs))
            if program is self.program:  # else another thread has put one in its place
                self._go_on()
        return tuple(r.clone() if i in wrong else r for i, r in enumerate(results))

    def recover(
        self,
        lowered: Sequence[Lowered],
        error: BaseException,
        number: int,
        inputs: list[Any],
        random_state: torch.Tensor | None = None,
    ) -> Sequence[Any]:
        """After a region raised: eager's answer, or eager's exception.

        An exception that eager raises as well is the user's own and passes through unchanged.
        A call that may have had effects isn't repeated; its failure is raised.

        :param lowered: what the function that failed was built from; another thread may have
            replaced some of it since.
        :param number: the site that was running; -1 for what comes before the first;
            ``UNPREPARED``.
        """
        if number == UNPREPARED:
            raise error  # by eager: the user's own
        if number < 0 and self._admits_inference_tensors():
            return self.captured.function(inputs)
        if any(
            map(has_effects, (n for s in self.program.sites[: number + 1] for n in s.cut.nodes))
        ):
            raise self.blame(lowered, error, number, "effects of this call can't be repeated")
        if random_state is not None:
            torch.set_rng_state(random_state)
        try:
            results = self.captured.eager(list(inputs))
        except containable() as users_own:
            raise users_own from None
        if isinstance(error, NotEnoughMemory) and number < 0:
            for code in lowered:
                if code.prepare is not None:
                    self._contain(code, error, "eager")
            return results
        if number < 0:
            number = self._failed_prepare(lowered, inputs)
        if not 0 <= number < len(lowered):
            raise error
        region = lowered[number].blamed
        if region.backend == "eager":
            self._run_as_captured(region, error)
        else:
            self._contain(lowered[number], error, "eager")
        return results

    def _run_as_captured(self, region: Region, error: BaseException) -> None:
        """After a region on eager failed, though the whole graph runs in eager.

        Either its results are right but not laid out as torch's fake values, which other regions
        were compiled for; or it raised on what other regions gave it.

        :raises RegionError: the policy is to raise.
        """
        contained(self.session, region, "run", error)
        with self.lock:
            instead = "the whole graph in eager, as captured"
            tripped = record_trip(
                self.report, region.backend, "run", region.name, error, instead, region.source
            )
            self.give_up(f"the whole graph runs in eager, since {region.name} tripped", error)
        self.session.notify(tripped)

    def give_up(self, why: str, error: BaseException | str | None = None) -> None:
        """Run the graph as captured in eager from now on.

        :param error: of the candidate that was chosen.
        """
        with self.lock:
            self._has_given_up, self.unproven = True, 0
            self._run(self.captured.eager)
            graph_runs_in_eager(self.report, why)
            choose_eager(self.report, why, describe(error) if error else "")

    def blame(
        self,
        lowered: Sequence[Lowered],
        error: BaseException,
        number: int,
        why: str = "the call's saved tensors are gone",
    ) -> BaseException:
        """After a region raised in a call that can't be repeated.

        What takes its place runs from the next call on.
        """
        if not 0 <= number < len(lowered) or isinstance(error, torch.OutOfMemoryError):
            return error
        region = lowered[number].blamed
        if region.backend == "eager":
            return error
        self._contain(lowered[number], error, "nothing in this call, eager from the next one on")
        return region_error(region, "run", error, why)

    def _contain(self, lowered: Lowered, error: BaseException, instead: str) -> None:
        """Run what failed, and all that shares its code, in eager from now on.

        :raises RegionError: the policy is to raise.
        """
        region = lowered.blamed
        stage: Stage = "profile" if isinstance(error, WrongValues) else "run"
        contained(self.session, region, stage, error)
        with self.lock:
            sites = self.program.sites
            failed = self._sites_of(lowered)
            if not failed:
                return  # another thread met the same failure and was quicker
            tripped = record_trip(
                self.report, region.backend, stage, region.name, error, instead, region.source
            )
            for site in failed:
                own = replace(site.lowered.region, backend="eager")
                call = boxed_function(own.graph, f"{own.name}.eager")
                site.lowered = Lowered(own, call, call, tuple(range(len(site.cut.inputs))))
                site.tripped = lowered.author
            names = {site.lowered.region.name for site in failed}
            regions_run_in_eager(self.report, names, f"{region.backend} tripped in a call")
            self.report_tripped(error)
            if self.program.context.budget is None:
                self.install(Program(self.context, sites))
            else:  # in eager, the graph in narrower numbers is no faster than the captured one
                self.give_up(f"{region.backend} tripped in a call: eager runs", error)
        if not isinstance(error, _PASSING):
            self._keep_trip(describe(error))
        self.session.notify(tripped)

    def _keep_trip(self, problem: str) -> None:
        """Tell later processes, outside of the lock: a disk, or another machine, may be slow."""
        if self.on_trip is not None:
            self.on_trip(problem)

    def report_tripped(self, error: BaseException | None = None) -> None:
        """Report which regions of the chosen program run in eager since they failed in a call.

        :param error: the latest failure.
        """
        sites = self.program.sites
        gone = [site for site in sites if site.tripped]
        if not gone:
            return
        backends = ", ".join(dict.fromkeys(site.tripped for site in gone))
        if all(site.lowered.author == "eager" for site in sites):
            instead = f"eager runs in place of {backends}, which was chosen and tripped in a call"
            choose_eager(self.report, instead, describe(error) if error else "")
        else:
            names = first([site.lowered.region.name.rpartition(".")[2] for site in gone])
            self.report.instead = f"eager runs {names} since {backends} tripped there in a call"

    def _sites_of(self, lowered: Lowered) -> list[Site]:
        """Where the program calls some code, none if another thread has replaced it."""
        return [site for site in self.program.sites if site.lowered.code is lowered.code]

    def _admits_inference_tensors(self) -> bool:
        """Whether the weights' check failed for inference tensors, and was built again for them."""
        sets = self.program.sets
        if sets is None or sets.version_of is any_version:
            return False
        with self.lock:
            sets.version_of = any_version
            self.install(self.program)
        return True

    def _failed_prepare(self, lowered: Sequence[Lowered], inputs: list[Any]) -> int:
        """The number of the site whose prepare graph raises on these inputs; -1 if none does."""
        values = dict(
            zip(self.program.context.graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
        )
        for number, (site, code) in enumerate(zip(self.program.sites, lowered, strict=True)):
            if code.prepare is not None:
                try:
                    with torch.no_grad():
                        code.prepare([values[site.cut.inputs[i]] for i in code.uses])
                except containable():  # it is what is being looked for; known already
                    return number
        return -1


#: Of the graphs that somebody may call.
living: Living[Runner] = Living()
