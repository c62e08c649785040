"""What is switched off next, and what is known after it.

A search is told how a run under some settings ends, and nothing else: it starts no process itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fuseboard.bisection.plan import some_nodes
from fuseboard.bisection.reproduction import script_of
from fuseboard.bisection.run import Outcome, Step, Trace

#: One backend, nothing measured: the same in each process.
_PLAIN = {"policy": "priority", "settle": "first_call"}
_NOTHING_REWRITTEN = {"fuse_limit": 0}
_PLAN = {"plan": f"{some_nodes.__module__}:{some_nodes.__name__}"}
#: What runs a graph where there is nothing else; without them no graph can be compiled.
_NEEDED = frozenset({"eager", "defaults"})


class RunsOut(Exception):
    """As many runs as were allowed have been made."""


@dataclass(frozen=True)
class Culprit:
    """Who is to blame, as far as it is known.

    :ivar summary: in a sentence.
    :ivar plugin: its name; "" where no plugin is to blame.
    :ivar stage: ``fuse`` or ``lower``, or whichever has the hooks of the plugin; ``torch`` or
        ``script`` where the failure isn't fuseboard's.
    :ivar number: of the rewrite, as ``fuse_skip`` takes it; ``rewrites`` say what that is.
    :ivar ops: the op, or the ops of which all have to be there for the failure.
    :ivar region: that the last one of them was in, with its graph's name.
    :ivar source: the user's line, ``file:line``, where it is known.
    :ivar workaround: settings without what is to blame.
    :ivar is_confirmed: whether the script passes with these; None where that wasn't tried.
    :ivar reproduction: a script with the ops that are to blame and nothing else; "" where it can't
        be written.
    """

    summary: str
    plugin: str = ""
    stage: str = ""
    number: int | None = None
    rewrites: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    region: str = ""
    source: str = ""
    workaround: dict[str, Any] = field(default_factory=dict)
    is_confirmed: bool | None = None
    reproduction: str = ""


class Search:
    """A search for what makes a script fail.

    :param run: makes a run.
    :param max_runs: how many it may make.
    """

    def __init__(self, run: Callable[[Step], Outcome], max_runs: int) -> None:
        self._run = run
        self._left = max_runs
        self._failure = ""
        self._best = Culprit("")

    def find(self) -> Culprit:
        """The narrowest thing that is to blame, found in as many runs as there may be."""
        try:
            return self._find()
        except RunsOut:
            return self._best

    def _find(self) -> Culprit:
        first = self._make(Step("as it is"))
        if not first.failure:
            return Culprit("It passes: there is nothing to find.", stage="script")
        self._failure = first.failure
        self._best = Culprit(f"It fails ({first.message}); who is to blame isn't known.")
        quiet = {**_PLAIN, "backends": ["eager"]}
        label = "eager alone, nothing rewritten"
        nothing = self._make(Step(label, {**quiet, **_NOTHING_REWRITTEN}))
        if self._is_it(nothing):
            return self._outside(nothing.trace or Trace())
        rewritten = self._make(Step("eager alone, rewritten", quiet))
        if self._is_it(rewritten):
            return self._rewrite(quiet, rewritten, "eager")
        for backend in _backends(first.trace, nothing.trace):
            settings = {**_PLAIN, "backends": [backend, "eager"]}
            outcome = self._make(Step(backend, settings))
            if not self._is_it(outcome):
                continue
            self._best = Culprit(f"The backend {backend} makes it fail.", backend)
            plain = {**settings, **_NOTHING_REWRITTEN}
            if self._is_it(self._make(Step(f"{backend}, nothing rewritten", plain))):
                return self._op(backend, plain)
            return self._rewrite(settings, outcome, backend)
        if not self._is_it(self._make(Step("as it is, without the cache", {"cache": False}))):
            return Culprit(
                "It fails by what the cache holds: `fuseboard cache clear` empties it.",
                stage="lower",
                workaround={"cache": False},
                is_confirmed=True,
            )
        return Culprit(
            "No backend makes it fail by itself, each op run by the first one that takes it: it "
            "fails with what is chosen by measurement, or while that is tried.",
            stage="profile",
            workaround={"policy": "priority"},
        )

    # --- one run ---------------------------------------------------------------------------------

    def _make(self, step: Step) -> Outcome:
        if self._left == 0:
            raise RunsOut
        self._left -= 1
        return self._run(step)

    def _is_it(self, outcome: Outcome) -> bool:
        """Whether it failed as the first run did; another failure shows nothing of that one."""
        return outcome.failure == self._failure

    def _least(self, low: int, high: int, fails: Callable[[int], bool]) -> int:
        """The least number with which it fails: not with ``low``, and with ``high``."""
        while high - low > 1:
            middle = (low + high) // 2
            if fails(middle):
                high = middle
            else:
                low = middle
        return high

    # --- fuse ------------------------------------------------------------------------------------

    def _rewrite(self, settings: dict[str, Any], failed: Outcome, backend: str) -> Culprit:
        """Which rewrite it is; some, of Dynamo's graph, have no number."""
        trace = failed.trace or Trace()
        self._best = Culprit(f"A rewrite makes it fail, with {backend}.", stage="fuse")
        count = 1 + max((fusion.number for fusion in trace.fusions), default=-1)
        last = {count: trace}

        def fails(limit: int) -> bool:
            label = f"{backend}, the first {limit} of {count} rewrites"
            outcome = self._make(Step(label, {**settings, "fuse_limit": limit}))
            if self._is_it(outcome) and outcome.trace is not None:
                last[limit] = outcome.trace
            return self._is_it(outcome)

        if count == 0:
            rewriters = [name for name, stages in trace.plugins.items() if "fuse" in stages]
            return self._plugin(settings, [name for name in rewriters if name != backend], "fuse")
        number = self._least(0, count, fails) - 1
        blamed = [one for one in last[number + 1].fusions if one.number == number]
        plugins = sorted({one.plugin for one in blamed})
        found = Culprit(
            f"Rewrite {number} makes it fail, of {' or '.join(plugins)}.",
            plugins[0] if len(plugins) == 1 else "",
            "fuse",
            number,
            tuple(
                f"{one.plugin}: {one.name} of {', '.join(one.nodes)} in {one.region or one.graph}"
                for one in blamed
            ),
            region=(blamed[0].region or blamed[0].graph) if len(blamed) == 1 else "",
            workaround={"backends": settings["backends"], "fuse_skip": [number]},
        )
        self._best = found
        without = {**settings, "fuse_skip": [number]}
        return self._confirmed(found, f"{backend}, without rewrite {number}", without)

    # --- lower -----------------------------------------------------------------------------------

    def _op(self, backend: str, settings: dict[str, Any]) -> Culprit:
        """Which of its ops it is."""
        settings = {**settings, "stages": _PLAN}
        whole = self._make(Step(f"{backend}, all that it claims", settings))
        self._best = Culprit(f"What {backend} compiles makes it fail.", backend, "lower")
        trace = whole.trace
        if not self._is_it(whole) or trace is None or not trace.offered:
            return self._best
        count, last = len(trace.offered), {len(trace.offered): trace}

        def fails(start: int, stop: int) -> bool:
            label = f"{backend}, ops {start} to {stop - 1} of {count}"
            outcome = self._make(Step(label, settings, (start, stop)))
            if self._is_it(outcome) and outcome.trace is not None:
                last[stop] = outcome.trace
                if self._best.ops:  # its last op is known: this has fewer before it
                    self._best = replace(self._best, reproduction=_script(outcome.trace, backend))
            return self._is_it(outcome)

        stop = self._least(0, count, lambda stop: fails(0, stop))
        name, op = trace.offered[stop - 1]
        places = [one for one in last[stop].placed if (one.name, one.backend) == (name, backend)]
        place = places[-1] if places else None
        found = Culprit(
            f"{backend} makes it fail, once it runs {op}.",
            backend,
            "lower",
            ops=(op,),
            region=place.region if place else "",
            source=place.source if place else "",
            workaround={"exclude": {backend: [op]}},
            reproduction=_script(last[stop], backend),
        )
        self._best = found
        if stop > 1 and not fails(stop - 1, stop):
            start = (
                stop - 1 - self._least(0, stop - 1, lambda before: fails(stop - 1 - before, stop))
            )
            ops = tuple(op for _, op in trace.offered[start:stop])
            self._best = replace(self._best, ops=ops)
        without = {"exclude": {backend: [op]}}
        return self._confirmed(self._best, f"as it is, {op} not on {backend}", without)

    def _confirmed(self, found: Culprit, label: str, settings: dict[str, Any]) -> Culprit:
        passes = not self._make(Step(label, settings)).failure
        return replace(found, is_confirmed=passes)

    # --- neither ---------------------------------------------------------------------------------

    def _outside(self, trace: Trace) -> Culprit:
        """It fails with eager alone and nothing rewritten: torch, the script, or other hooks."""
        if self._is_it(self._make(Step("Dynamo's graph alone", compiler="eager"))):
            if self._is_it(self._make(Step("without torch.compile", compiles=False))):
                return Culprit("It fails without torch.compile as well.", stage="script")
            return Culprit(
                'It fails with torch.compile(backend="eager") as well: Dynamo makes it fail.',
                stage="torch",
            )
        if self._is_it(self._make(Step("AOTAutograd's graphs alone", compiler="aot_eager"))):
            return Culprit(
                'It fails with torch.compile(backend="aot_eager") as well: AOTAutograd makes it '
                "fail.",
                stage="torch",
            )
        self._best = Culprit("The board makes it fail, with no backend but eager.", stage="capture")
        settings = {**_PLAIN, "backends": ["eager"], **_NOTHING_REWRITTEN}
        others = [name for name in trace.plugins if name not in _NEEDED]
        return self._plugin(settings, others, "")

    def _plugin(self, settings: dict[str, Any], names: Sequence[str], stage: str) -> Culprit:
        """Which plugin it is, by its other hooks: the one without which it passes."""

        def fails_with(kept: int) -> bool:
            label = f"without {', '.join(names[kept:])}"
            return self._is_it(self._make(Step(label, {**settings, "block": names[kept:]})))

        if not names or fails_with(0):
            return self._best
        name = names[self._least(0, len(names), fails_with) - 1]
        found = Culprit(
            f"The plugin {name} makes it fail.", name, stage, workaround={"block": [name]}
        )
        self._best = found
        return self._confirmed(found, f"as it is, without {name}", {"block": [name]})


def _script(trace: Trace, backend: str) -> str:
    """What the backend got in a run, by itself."""
    if trace.function is None:
        return ""
    options = {**_PLAIN, "backends": [backend], "min_region_us": 0.0, "on_failure": "raise"}
    return script_of(trace.function, f"It fails on {backend}.", options)


def _backends(first: Trace | None, nothing: Trace | None) -> list[str]:
    """Those that may be to blame, the one that ran most first."""
    ran = Counter(one.backend for one in first.placed) if first else Counter[str]()
    known = first.backends if first else ()
    if not known and nothing is not None:
        known = tuple(name for name, stages in nothing.plugins.items() if "lower" in stages)
    ordered = dict.fromkeys([name for name, _ in ran.most_common()] + list(known))
    return [name for name in ordered if name != "eager"]
