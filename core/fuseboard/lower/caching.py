"""Lower a region, or take it from the cache."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard import torch_internals
from fuseboard.board import Session
from fuseboard.contracts import BackendInfo, LoweredRegion, Region
from fuseboard.errors import LoweringError, PluginError
from fuseboard.lower.artifacts import Artifact, Key, Store, store_at
from fuseboard.lower.cache_keys import NotCacheable, content_hash, region_key
from fuseboard.lower.failure import decide, region_error, trip
from fuseboard.partition.signature import signature
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.torch_symbols import GuardWatch, guard_again, symbolic_numbers

log = logging.getLogger("fuseboard")


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


class Cache:
    """The artifacts of one graph's regions.

    :param report: of the graph; failures to load are told there.
    """

    def __init__(self, session: Session, report: GraphReport) -> None:
        self._session = session
        self._report = report

    def lower(self, task: Task, told: RegionReport) -> LoweredRegion | None:
        """What ``fuseboard_load`` or ``fuseboard_lower`` answered.

        :raises RegionError: an artifact couldn't be loaded, and the policy is to raise.
        """
        backend = task.region.backend
        store = self._store() if self._session.implements(backend, "fuseboard_load") else None
        if store is None:
            return self._ask(task)
        try:
            key = self._key(task)
        except NotCacheable as error:
            told.notes.append(f"not cached: {error}")
            return self._ask(task)
        loaded = self._load(task, key, store, told)
        if loaded is not None:
            return loaded
        watch = GuardWatch(torch_internals.fake_mode_of(task.inputs))
        answer = self._ask(task)
        if answer is None or answer.artifact is None:
            return answer
        problem = self._put(task, key, store, answer, watch)
        if problem:
            told.notes.append(f"not cached: {problem}")
        return dataclasses.replace(answer, artifact=None)  # it may be large, and is on disk

    def _store(self) -> Store | None:
        settings = self._session.settings
        return store_at(settings.cache_dir, settings.cache_size_mb) if settings.cache else None

    def _ask(self, task: Task) -> LoweredRegion | None:
        answer: LoweredRegion | None = self._session.call(
            "fuseboard_lower", task.region.backend, region=task.region, inputs=task.inputs
        )
        return answer

    def _key(self, task: Task) -> Key:
        info = self._info(task.region.backend)
        baked: list[str] | None = []
        if info.bakes_constants:
            baked = None
            if task.weights is not None:
                baked = [content_hash(weight) for weight in task.weights]
                if task.prepare is not None:
                    baked.append(signature(task.prepare, "prepare", ()))
        return region_key(task.region, info, self._session.home(info.name), baked)

    def _info(self, backend: str) -> BackendInfo:
        return next(info for info in self._session.backends if info.name == backend)

    # --- loading --------------------------------------------------------------------------------

    def _load(self, task: Task, key: Key, store: Store, told: RegionReport) -> LoweredRegion | None:
        """The region from the cache; None where it isn't there or doesn't load."""
        values = [node.meta.get("val") for node in task.region.graph.graph.nodes]

        def fits(artifact: Artifact) -> bool:
            return guard_again(artifact.head["guards"], values)

        found = store.find(key, fits)
        if found is None:
            differs = store.nearest(key)
            if differs:
                told.notes.append(
                    "not in the cache, where an entry for the same graph differs in: "
                    + ", ".join(differs)
                )
            return None
        region = task.copied()
        try:
            answer: LoweredRegion | None = self._session.call(
                "fuseboard_load",
                region.backend,
                artifact=found.data,
                region=region,
                inputs=task.inputs,
            )
        except (PluginError, LoweringError) as error:
            store.set_aside(found.path, f"{region.backend} couldn't load it")
            if decide(self._session, region.name, region.backend, "lower", error) == "raise":
                raise region_error(region, "lower", error) from error
            instead = f"{region.backend}, lowered again"
            trip(self._report, region.backend, "lower", region.name, error, instead, region.source)
            return None
        if answer is not None:
            told.loaded = True
        return answer

    # --- storing --------------------------------------------------------------------------------

    def _put(
        self, task: Task, key: Key, store: Store, answer: LoweredRegion, watch: GuardWatch
    ) -> str:
        """Store an artifact. Returns why it isn't stored, or ""."""
        assert answer.artifact is not None
        symbolic = any(map(symbolic_numbers, task.inputs))
        guards = watch.code() if symbolic else []
        if guards is None:
            return "lowering it added asserts on numbers that only a call decides"
        further: Mapping[str, Any] = {"guards": guards}
        return store.put(key, answer.artifact, further, variant="; ".join(guards))
