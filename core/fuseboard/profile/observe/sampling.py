"""Sampling sessions: an external profiler runs beside some work, and only there.

One session a process at a time. Where none can be had, the work runs unprofiled.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from fuseboard.contracts import SamplingOptions
from fuseboard.errors import SamplingError
from fuseboard.profile.observe.sampling_result import SampledProfile
from fuseboard.profile.observe.session import SamplingSession
from fuseboard.torch_api.compiles import untraced

log = logging.getLogger("fuseboard")

P = ParamSpec("P")
R = TypeVar("R")

#: Held while a session is open.
_lock = threading.Lock()
#: The open ``with`` blocks of this thread or task: the profiler, and its session if it has one.
_blocks: ContextVar[tuple[tuple[SamplingProfiler, SamplingSession | None], ...]] = ContextVar(
    "blocks", default=()
)
#: Warnings that were given: each is given once a process.
_told: set[str] = set()

#: What samplers can do: 1 to 1000 samples a second.
FASTEST_S, SLOWEST_S = 0.001, 1.0


class SamplingProfiler:
    """Profiles work with a sampler: as a call, a decorator or a context manager.

    ::

        profiler = fuseboard.SamplingProfiler(sample_each=0.01)
        result = profiler.profile(work, 1, two=2)
        profiler.result.save_flame_graph("work.html")

        @fuseboard.SamplingProfiler(output="profiles/")
        def work(): ...

        with fuseboard.SamplingProfiler() as profiler:
            work()

    The work's exception passes through unchanged; its profile is discarded. Where no session can be
    had (no sampler is installed, it may not trace, it hangs or dies, another session runs), the
    work runs unprofiled, and a warning in the log says once what was missing and how to get it.

    :param sample_each: seconds between two samples; 0.01 are 100 a second.
    :param max_profile_duration_sec: sampling ends after so long; the work goes on.
    :param sample_tags: words of yours that the profile keeps.
    :param stop_at_error: raise :class:`SamplingError` before the work starts, instead of running
        it unprofiled.
    :param sampler: the plugin whose sampler is used, such as ``"perf"``; None for the best one.
    :param output: a folder for each finished profile, as ``RUN_ID.speedscope.json``,
        ``RUN_ID.folded.txt`` and ``RUN_ID.html``.
    :param enabled: False does nothing: ``profile`` calls the work, a decorator returns it.
    :ivar result: the profile of the last session that finished; None where the last one had none.
    :raises SamplingError: a parameter is out of range, or ``output`` can't be written to.
    """

    def __init__(
        self,
        *,
        sample_each: float = 0.01,
        max_profile_duration_sec: float = 600.0,
        sample_tags: Iterable[str] = (),
        stop_at_error: bool = False,
        sampler: str | None = None,
        output: str | Path | None = None,
        enabled: bool = True,
    ) -> None:
        self.sample_each = _checked_interval(sample_each)
        self.max_profile_duration_sec = _checked_duration(max_profile_duration_sec)
        self.sample_tags = _checked_tags(sample_tags)
        self.stop_at_error = stop_at_error
        self.sampler = sampler
        self.output = None if output is None else Path(output)
        self.enabled = enabled
        self.result: SampledProfile | None = None
        self._given_up = ""

    # --- three ways to use it -------------------------------------------------------------------

    def profile(self, work_function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the work under a session, and return what it returns.

        :raises SamplingError: ``output`` can't be written to; or, with ``stop_at_error``, there is
            no session. The work has not started then.
        """
        if not self.enabled:
            return work_function(*args, **kwargs)
        with self:
            return work_function(*args, **kwargs)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call of it is a session."""
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{function.__qualname__} returns before its work is done, so that there would be "
                "nothing to sample; use `with profiler:` inside of it"
            )
        if not self.enabled:
            return function

        @functools.wraps(function)
        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return profiled

    @untraced
    def __enter__(self) -> SamplingProfiler:
        session = self.open_session() if self.enabled else None
        _blocks.set((*_blocks.get(), (self, session)))
        return self

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        blocks = _blocks.get()
        place = max(i for i, (profiler, _) in enumerate(blocks) if profiler is self)
        _blocks.set((*blocks[:place], *blocks[place + 1 :]))
        session = blocks[place][1]
        if session is not None:
            self.close_session(session, keep=error is None)

    # --- sessions -------------------------------------------------------------------------------

    def open_session(self) -> SamplingSession | None:
        """Start sampling; None where that can't be done. Each one is given to ``close_session``.

        :raises SamplingError: as :meth:`profile`.
        """
        self.result = None
        if self.output is not None:
            check_output(self.output)
        if self._given_up:
            self._go_without(self._given_up)
            return None
        if not _lock.acquire(blocking=False):
            self._go_without(
                "another sampling session runs in this process, and there can be one only"
            )
            return None
        session = None
        try:
            session = SamplingSession.open(self.options, self.sampler)
        except SamplingError as error:
            self._given_up = str(error)
        finally:
            if session is None:
                _lock.release()
        if session is None:
            self._go_without(self._given_up)
        return session

    @property
    def options(self) -> SamplingOptions:
        """What a sampler is asked for."""
        rate_hz = 1 / self.sample_each
        return SamplingOptions(rate_hz, self.max_profile_duration_sec, self.sample_tags)

    def close_session(self, session: SamplingSession, keep: bool) -> SampledProfile | None:
        """Stop sampling; keep the profile in ``result`` or discard it. Raises no error."""
        profile = None
        try:
            profile = session.close(keep)
        finally:
            if not session.is_another_processes:
                _lock.release()
        self.result = profile
        if profile is not None and self.output is not None:
            write_profile(profile, self.output)
        return profile

    def _go_without(self, problem: str) -> None:
        """No session: raise, or say so once."""
        if self.stop_at_error:
            raise SamplingError(problem)
        if problem not in _told:
            _told.add(problem)
            log.warning("fuseboard: the work runs unprofiled: %s", problem)


def write_profile(profile: SampledProfile, folder: Path) -> None:
    """All forms of a profile; a disk that is full by now is told of: the work is done."""
    start = folder / profile.run_id
    try:
        profile.save_speedscope(f"{start}.speedscope.json")
        profile.save_folded(f"{start}.folded.txt")
        profile.save_flame_graph(f"{start}.html")
    except OSError as error:
        log.warning("fuseboard: run %s: the profile isn't written: %s", profile.run_id, error)
    else:
        log.info("fuseboard: run %s: written to %s.*", profile.run_id, start)


def check_output(folder: Path) -> None:
    """Make a folder, and see whether files can be written to it.

    :raises SamplingError: they can't.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise SamplingError(
            f"output = {str(folder)!r}: profiles can't be written there ({reason}); name a folder "
            "that can be made or written to"
        ) from error


def _checked_interval(seconds: float) -> float:
    if not FASTEST_S <= seconds <= SLOWEST_S:
        raise SamplingError(
            f"sample_each = {seconds!r}: the seconds between two samples, from {FASTEST_S:g} to "
            f"{SLOWEST_S:g}; 0.01 are 100 samples a second"
        )
    return float(seconds)


def _checked_duration(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise SamplingError(
            f"max_profile_duration_sec = {seconds!r}: a finite number of seconds above 0"
        )
    return float(seconds)


def _checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    given = tuple(tags)
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in given):
        raise SamplingError(f"sample_tags = {tags!r}: a list of strings, such as ['nightly']")
    return given


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the session that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
