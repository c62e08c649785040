"""Lower a region, or take it from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import BackendInfo, LoweredRegion, Region
from fuseboard.errors import LoweringError, PluginError
from fuseboard.lower.artifact_files import Artifact, Key
from fuseboard.lower.artifacts import Store, store_at
from fuseboard.lower.cache_keys import NotCacheable, content_hash, region_key, size_facts
from fuseboard.lower.isolated import LoweringRequest, LoweringResult
from fuseboard.lower.isolation import Crash, lower_in_child, make_request
from fuseboard.partition.signature import signature
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.run.failure import contained, trip
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.symbols import GuardWatch, guard_again, symbolic_numbers
from fuseboard.totals import differing

#: A backend, and the signature of a region as it was cut.
Token = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """A region that is about to be lowered.

    :ivar region: as the backend is given it; its graph is the backend's own.
    :ivar copied: makes the same with another copy of the graph.
    :ivar weights: what the code may build in, real; None where that isn't known.
    :ivar prepare: makes values of the weights that the region takes instead of them.
    """

    region: Region
    inputs: Sequence[Any]
    copied: Callable[[], Region]
    weights: Sequence[torch.Tensor] | None
    prepare: GraphModule | None


class Deferred(Exception):
    """A region that has to be compiled, and was told to wait.

    :ivar token: what the result is to be found under; equal for regions with equal code.
    :ivar request: for a child process; None where only this process can compile it.
    :ivar known: a region with the same code was deferred before.
    """

    def __init__(self, token: Token, request: LoweringRequest | None, known: bool = False) -> None:
        super().__init__(f"{token} waits to be compiled")
        self.token = token
        self.request = request
        self.known = known


@dataclass(frozen=True)
class _Place:
    """Where an artifact belongs."""

    store: Store
    key: Key


class Cache:
    """The artifacts of one graph's regions.

    :param report: of the graph; failures to load are noted there.
    :param ready: what child processes have made.
    :param defers: what would have to be compiled is deferred, if a child process can do it.
    :param carried: another process has compiled it; what should be in the cache is deferred if it
        isn't.
    :param facts: by region's signature: what is known of its sizes before it is lowered. Filled in,
        or, for what was carried, read: since then more was learned.
    """

    def __init__(
        self,
        session: Session,
        report: GraphReport,
        ready: Mapping[Token, LoweringResult],
        defers: bool,
        carried: bool,
        facts: dict[str, str],
    ) -> None:
        self._session = session
        self._report = report
        self._ready = ready
        self._defers = defers
        self._carried = carried
        self._facts = facts

    def lower(self, task: Task, region_report: RegionReport) -> LoweredRegion | None:
        """What ``fuseboard_load`` or ``fuseboard_lower`` answered.

        :raises RegionError: an artifact couldn't be loaded, and the policy is to raise.
        :raises LoweringError: it would end the process.
        :raises Deferred: it has to be compiled, and that is to wait.
        """
        info = self._info(task.region.backend)
        loads = self._session.implements(info.name, "fuseboard_load")
        isolates = self._session.settings.isolate and info.may_crash
        place = self._place(task, info, region_report) if loads or isolates else None
        if loads and place is not None:
            if (loaded := self._loaded(task, place, region_report)) is not None:
                return loaded
            if not info.compiles_quickly:  # several ranks come to the same at the same time
                limit_s = self._session.settings.hook_limit_s
                with place.store.alone(place.key, limit_s) as waited:
                    if waited:
                        loaded = self._loaded(task, place, region_report, again=True)
                    return loaded or self._compiled(
                        task, info, place, region_report, loads, isolates
                    )
        return self._compiled(task, info, place, region_report, loads, isolates)

    def _loaded(
        self, task: Task, place: _Place, region_report: RegionReport, again: bool = False
    ) -> LoweredRegion | None:
        """What is in the cache; None where nothing is that can be loaded."""
        found = self._find(task, place, region_report, again)
        if found is None:
            return None
        return self._load(task, found.data, region_report, place.store, found.path)

    def _compiled(
        self,
        task: Task,
        info: BackendInfo,
        place: _Place | None,
        region_report: RegionReport,
        loads: bool,
        isolates: bool,
    ) -> LoweredRegion | None:
        token = info.name, task.region.signature
        result = None
        if token in self._ready:
            result = _answered(self._ready[token])
        elif (self._defers or (self._carried and loads)) and not info.compiles_quickly:
            raise Deferred(token, self._request(task) if loads else None)
        elif isolates:
            result = self._try_in_child(task, place)
        if result is not None and result.declined:
            return None
        if loads and result is not None and result.artifact is not None:
            loaded = self._take(task, result, place, region_report)
            if loaded is not None:
                return loaded
            if self._carried and not info.compiles_quickly:
                raise Deferred(token, None)
        watch = GuardWatch(torch_internals.fake_mode_of(task.inputs))
        answer = self._ask(task)
        if answer is None or answer.artifact is None:
            return answer
        symbolic = any(map(symbolic_numbers, task.inputs))
        guards = watch.code() if symbolic else []
        if place is not None:
            self._put(task, place, answer.artifact, guards, region_report)
        return dataclasses.replace(answer, artifact=None)  # it may be large, and is on disk

    def _place(self, task: Task, info: BackendInfo, region_report: RegionReport) -> _Place | None:
        """Where the region's artifact belongs; None where there is no such place."""
        settings = self._session.settings
        if not settings.cache:
            return None
        try:
            key = self._key(task, info)
        except NotCacheable as error:
            region_report.notes.append(f"not cached: {error}")
            return None
        return _Place(store_at(settings), key)

    def _ask(self, task: Task) -> LoweredRegion | None:
        answer: LoweredRegion | None = self._session.call(
            "fuseboard_lower", task.region.backend, region=task.region, inputs=task.inputs
        )
        return answer

    def _request(self, task: Task) -> LoweringRequest | None:
        try:
            return make_request(task.copied(), task.inputs, self._session)
        except LoweringError:  # it has things in it that mean nothing to another process
            return None

    def _key(self, task: Task, info: BackendInfo) -> Key:
        baked: list[str] | None = []
        if info.bakes_constants:
            baked = None
            if task.weights is not None:
                baked = [content_hash(weight) for weight in task.weights]
                if task.prepare is not None:
                    baked.append(signature(task.prepare, "prepare", ()))
        region = task.region
        if not self._carried:
            self._facts[region.signature] = size_facts(region.graph)
        facts = self._facts.get(region.signature)
        return region_key(region, info, self._session.homes(info.name), baked, facts)

    def _info(self, backend: str) -> BackendInfo:
        return next(info for info in self._session.backends if info.name == backend)

    # --- loading --------------------------------------------------------------------------------

    def _find(
        self, task: Task, place: _Place, region_report: RegionReport, again: bool
    ) -> Artifact | None:
        """The artifact, if it is there and fits; else a note on what is near, the first time."""
        values = _values(task)
        found = place.store.find(
            place.key, lambda artifact: guard_again(artifact.head["guards"], values), again
        )
        if found is None and not again and (near := place.store.nearest(place.key)) is not None:
            region_report.notes.append(
                "not in the cache, where an entry for the same graph differs in: "
                + ", ".join(differing(place.key.parts, near))
            )
        return found

    def _load(
        self,
        task: Task,
        artifact: bytes,
        region_report: RegionReport,
        store: Store | None = None,
        path: Path | None = None,
    ) -> LoweredRegion | None:
        """What ``fuseboard_load`` makes of an artifact; None where it can't or won't.

        :param path: where it is stored; it is set aside if it can't be loaded.
        """
        region = task.copied()
        try:
            answer: LoweredRegion | None = self._session.call(
                "fuseboard_load",
                region.backend,
                artifact=artifact,
                region=region,
                inputs=task.inputs,
            )
        except (PluginError, LoweringError) as error:
            if store is not None and path is not None:
                store.set_aside(path, f"{region.backend} couldn't load it")
            contained(self._session, region, "lower", error)
            instead = f"{region.backend}, lowered again"
            trip(
                self._session,
                self._report,
                region.backend,
                "lower",
                region.name,
                error,
                instead,
                region.source,
            )
            return None
        if answer is not None and path is not None:
            region_report.loaded = True
        return answer

    # --- in a process of its own ----------------------------------------------------------------

    def _try_in_child(self, task: Task, place: _Place | None) -> LoweringResult | None:
        """What the backend answered in a child process; None where it was tried before.

        :raises LoweringError: it ended that process, now or earlier, or raised in it.
        """
        before = None if place is None else place.store.tried(place.key)
        if before == "":
            return None
        if before is not None:
            raise LoweringError(
                f"in an earlier child process {before}; it isn't tried again until the backend's "
                "fingerprint changes; `fuseboard cache clear --crashes` forgets it",
                for_good=False,  # what is to be forgotten may not be in the cost database as well
            )
        try:
            result = lower_in_child(task.copied(), task.inputs, self._session)
        except Crash as crash:
            if place is not None and crash.own:
                place.store.put_tried(place.key, str(crash))
            problem = f"in a child process {crash}"
            raise LoweringError(problem, for_good=crash.for_good) from crash
        if result.unread:
            raise LoweringError(
                f"{task.region.backend} can't be tried in a child process, which can't read the "
                f"region: {result.unread}"
            )
        _answered(result)
        if place is not None and result.artifact is None:
            place.store.put_tried(place.key, "")
        return result

    def _take(
        self, task: Task, result: LoweringResult, place: _Place | None, region_report: RegionReport
    ) -> LoweredRegion | None:
        """Load what a child process made, and store it."""
        assert result.artifact is not None
        if result.guards is None or not guard_again(result.guards, _values(task)):
            return None
        loaded = self._load(task, result.artifact, region_report)
        if loaded is None:
            return None
        if place is not None:
            self._put(task, place, result.artifact, result.guards, region_report)
        notes = tuple(dict.fromkeys((*result.notes, *loaded.notes, "compiled in a child process")))
        return dataclasses.replace(loaded, notes=notes)

    # --- storing --------------------------------------------------------------------------------

    def _put(
        self,
        task: Task,
        place: _Place,
        artifact: bytes,
        guards: list[str] | None,
        region_report: RegionReport,
    ) -> None:
        """Store an artifact; a note says why it isn't."""
        if guards is None:
            problem = "lowering it added asserts on numbers that only a call decides"
        else:
            further = {"guards": guards}
            problem = place.store.put(place.key, artifact, further, variant="; ".join(guards))
        if problem:
            region_report.notes.append(f"not cached: {problem}")


def _answered(result: LoweringResult) -> LoweringResult:
    """
    :raises LoweringError: it is an exception.
    """
    if result.error:
        problem = f"in a child process: {result.error}"
        raise LoweringError(problem, for_good=result.for_good)
    return result


def _values(task: Task) -> list[Any]:
    return [node.meta.get("val") for node in task.region.graph.graph.nodes]
