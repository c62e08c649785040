"""One run of a sampler: found on the board, started, polled until it runs, stopped, read.

What a sampler does wrong becomes a :class:`SamplingError` before the work starts, and a line in the
log afterwards: closing a session raises nothing but what interrupts the program.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fuseboard.board.deadline import deadline
from fuseboard.board.registry import board
from fuseboard.config.layers import resolve
from fuseboard.contracts import Sampler, SamplerStatus, SamplingOptions, StackSample
from fuseboard.errors import FuseboardError, SamplingError
from fuseboard.profile.observe.sampling_regions import locate_regions
from fuseboard.profile.observe.sampling_result import SampledProfile

log = logging.getLogger("fuseboard")

HOOK = "fuseboard_sampler"
#: How often, and how many times, a sampler is asked whether it runs: 10 s in all.
POLL_S = 0.02
START_TRIES = 500
#: Likewise for its results, which may have to be worked out first: a minute.
RESULT_S = 0.1
RESULT_TRIES = 600
#: How long one method of a sampler may take.
METHOD_LIMIT_S = 10.0


@dataclass
class SamplerCandidate:
    """A plugin's sampler, not started yet."""

    plugin: str
    sampler: Sampler


def find_samplers(name: str | None = None) -> tuple[list[SamplerCandidate], list[str]]:
    """The samplers of the board, best first, and why others can't be used.

    The one that ``stages.sampler`` names comes before all others.

    :param name: the plugin whose sampler is wanted, whatever the settings name; None for any.
    """
    settings = resolve()
    session = board.session(settings)
    states = board.states(settings)
    problems = [
        f"{state.name}: {state.reason}"
        for state in states
        if name in (None, state.name)
        and (
            (state.state == "unavailable" and session.implements(state.name, HOOK))
            or (state.state in ("blocked", "quarantined") and state.name == name)
        )
    ]
    found: list[SamplerCandidate] = []
    chosen = session.override("sampler") if name is None else ""
    for plugin in session.with_hook(HOOK):
        if name not in (None, plugin) or plugin == chosen:
            continue
        try:
            sampler = session.call(HOOK, plugin)
        except FuseboardError as error:
            problems.append(str(error))
            continue
        if sampler is not None:
            found.append(SamplerCandidate(plugin, sampler))
    found.sort(key=lambda candidate: not candidate.sampler.python_frames)
    if chosen:
        try:
            if answer := session.overriding(HOOK):
                found.insert(0, SamplerCandidate(*answer))
        except FuseboardError as error:
            problems.append(str(error))
    if not found and not problems:
        problems.append(_nothing(name, [s.name for s in states if s.state == "blocked"]))
    return found, problems


def _nothing(name: str | None, blocked: Sequence[str]) -> str:
    """Where no plugin says anything of a sampler. What is blocked was never looked at."""
    wanted = f"no plugin {name!r} with a sampler is installed" if name else "none is installed"
    unseen = f" (the setting 'block' keeps out {', '.join(blocked)})" if blocked else ""
    return f"{wanted}{unseen}: pip install 'fuseboard[pyspy]'"


class SamplingSession:
    """A sampler that runs on this process, until :meth:`close`."""

    def __init__(
        self, candidate: SamplerCandidate, options: SamplingOptions, notes: list[str]
    ) -> None:
        self.run_id = str(uuid.uuid4())
        self.plugin = candidate.plugin
        self._sampler = candidate.sampler
        self._options = options
        self._notes = notes
        self._pid = os.getpid()
        self._started = 0.0

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    def open(cls, options: SamplingOptions, name: str | None = None) -> SamplingSession:
        """Start the first sampler that can be started, and wait until it says that it runs.

        :raises SamplingError: there is none; it says what was missing and how to get it.
        """
        try:
            candidates, problems = find_samplers(name)
        except FuseboardError as error:  # settings that are wrong
            raise SamplingError(f"no sampler can be looked for: {error}") from error
        for candidate in candidates:
            session = cls(candidate, options, [f"not sampled by {p}" for p in problems])
            problem = session._start()
            if not problem:
                return session
            problems.append(f"{candidate.plugin}: {problem}")
            log.info("fuseboard: sampler %s can't be used: %s", candidate.plugin, problem)
        raise SamplingError(f"no sampler can be used. {'; '.join(problems)}")

    def _start(self) -> str:
        """Why it doesn't run; "" where it does."""
        try:
            self._call("start", self._pid, self.run_id, self._options)
            status = self._wait_until_it_runs()
        except Exception as error:
            self._give_up()
            return str(error) or type(error).__name__
        except BaseException:  # Ctrl-C while it starts
            self._give_up()
            raise
        if status.detail:
            self._notes.append(status.detail)
        self._started = time.monotonic()
        log.info(
            "fuseboard: run %s: %s samples process %d at %g Hz%s",
            *(self.run_id, self.plugin, self._pid, self._options.rate_hz),
            f", tags {', '.join(self._options.tags)}" if self._options.tags else "",
        )
        return ""

    def _wait_until_it_runs(self) -> SamplerStatus:
        for _ in range(START_TRIES):
            status = self._status()
            if status.state == "running":
                return status
            if status.state != "starting":
                raise SamplingError(status.detail or f"it is {status.state} before it ever ran")
            time.sleep(POLL_S)
        raise SamplingError(f"it doesn't say that it runs after {POLL_S * START_TRIES:g} s")

    def _status(self) -> SamplerStatus:
        status = self._call("status")
        if not isinstance(status, SamplerStatus):
            raise SamplingError(f"its status is {status!r}, not a SamplerStatus")
        return status

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the sampler within the limit."""

        def late() -> Exception:
            return SamplingError(f"its {method}() took longer than {METHOD_LIMIT_S:g} s")

        function: Callable[..., Any] = getattr(self._sampler, method)
        with deadline(METHOD_LIMIT_S, late):
            return function(*arguments)

    # --- closing --------------------------------------------------------------------------------

    @property
    def is_another_processes(self) -> bool:
        """Whether this is a fork of the process that opened it: the sampler is the parent's."""
        return os.getpid() != self._pid

    def close(self, keep: bool) -> SampledProfile | None:
        """Stop sampling.

        :param keep: read the results; otherwise they are discarded.
        :returns: None where they are, or where the sampler has none: the log says why.
        """
        if self.is_another_processes:
            return None
        duration_s = time.monotonic() - self._started
        profile = None
        try:
            if keep:
                profile = self._finish(duration_s)
            else:
                log.info("fuseboard: run %s: discarded after %.3f s", self.run_id, duration_s)
        except Exception as error:
            log.warning("fuseboard: run %s: no profile from %s: %s", *self._names(), error)
        finally:
            if profile is None:
                self._give_up()
        return profile

    def _names(self) -> tuple[str, str]:
        return self.run_id, self.plugin

    def _give_up(self) -> None:
        """End the sampler, whatever it does; a second stop() means at once."""
        for _ in range(2):
            try:
                self._call("stop")
            except Exception as error:
                log.warning("fuseboard: run %s: %s can't be stopped: %s", *self._names(), error)

    def _finish(self, duration_s: float) -> SampledProfile:
        """Stop it, and ask for results until it has them."""
        before = self._status()
        self._call("stop")
        if before.state == "finished":
            self._notes.append(
                f"sampled for {self._options.max_duration_s:g} s of {duration_s:.1f} s: "
                "max_profile_duration_sec"
            )
        samples = self._wait_for_results()
        after = self._status()
        notes = dict.fromkeys([*self._notes, *filter(None, [after.detail])])
        kept = tuple(sample for sample in samples if not _is_own(sample))
        log.info(
            "fuseboard: run %s: %d samples of %s in %.3f s",
            *(self.run_id, sum(sample.count for sample in kept), self.plugin, duration_s),
        )
        return SampledProfile(
            run_id=self.run_id,
            sampler=self.plugin,
            duration_s=duration_s,
            sample_each=1 / self._options.rate_hz,
            tags=self._options.tags,
            samples=kept,
            notes=tuple(notes),
            regions=locate_regions(frame for sample in kept for frame in sample.stack),
        )

    def _wait_for_results(self) -> list[StackSample]:
        for _ in range(RESULT_TRIES):
            samples = self._call("results")
            if samples is not None:
                if problem := next(_problems(samples), ""):
                    raise SamplingError(problem)
                return list(samples)
            time.sleep(RESULT_S)
        raise SamplingError(f"its results aren't there after {RESULT_S * RESULT_TRIES:g} s")


def _problems(samples: Any) -> Iterator[str]:
    """What a plugin can get wrong in its results."""
    if not isinstance(samples, list):
        yield f"its results are a {type(samples).__name__}, not a list of StackSamples"
        return
    for sample in samples:
        if not isinstance(sample, StackSample):
            yield f"its results hold a {type(sample).__name__}, not StackSamples alone"


def _is_own(sample: StackSample) -> bool:
    """Whether a sample shows this module at work, not the user's code."""
    return any(frame.file == __file__ for frame in sample.stack)
