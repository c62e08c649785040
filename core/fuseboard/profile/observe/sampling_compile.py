"""Profiles of compilations: a sampling session around each one that ``torch.compile`` makes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from fuseboard.errors import SamplingError
from fuseboard.profile.observe.sampling import SamplingProfiler, check_output, write_profile
from fuseboard.profile.observe.sampling_result import SampledProfile
from fuseboard.profile.observe.session import SamplingSession
from fuseboard.torch_api.compiles import Compilation, watched_compilations

log = logging.getLogger("fuseboard")


@dataclass(frozen=True)
class CompileProfile:
    """The profile of one compilation.

    :ivar compile_id: Dynamo's id, such as ``0/1``.
    :ivar frame: the user's function with its file and line.
    :ivar kind: ``dynamo``, or ``lazy_backward`` for a backward that was compiled when it first ran.
    """

    compile_id: str
    frame: str
    kind: str
    duration_s: float
    profile: SampledProfile


class CompileProfiler:
    """Profiles each compilation that is made while its ``with`` block is open.

    ::

        with fuseboard.CompileProfiler(frames="forward", min_duration_sec=1.0) as profiler:
            model(x)
        for compiled in profiler.profiles:
            compiled.profile.save_flame_graph(f"{compiled.compile_id.replace('/', '_')}.html")

    Each compilation that is wanted is a sampling session (:class:`fuseboard.SamplingProfiler`),
    with the same promises: it never fails for the profiler's sake. One that raises leaves no
    profile. A compilation within another is a part of it.

    :param frames: a regular expression, searched for in ``FUNCTION (FILE:LINE)``; None for all.
    :param min_duration_sec: profiles of compilations that took less are dropped.
    :param stop_at_error: raise :class:`SamplingError` at the beginning of the block where there can
        be no session; it is tried for that.
    :ivar profiles: those that were kept, in order.
    """

    def __init__(
        self,
        *,
        frames: str | None = None,
        min_duration_sec: float = 0.0,
        sample_each: float = 0.01,
        max_profile_duration_sec: float = 1800.0,
        sample_tags: Iterable[str] = (),
        stop_at_error: bool = False,
        sampler: str | None = None,
        output: str | Path | None = None,
        enabled: bool = True,
    ) -> None:
        try:
            self.frames = re.compile(frames) if frames is not None else None
        except re.error as error:
            raise SamplingError(
                f"frames = {frames!r}: a regular expression, such as r'Net\\.forward'; {error}"
            ) from error
        if not min_duration_sec >= 0:
            raise SamplingError(f"min_duration_sec = {min_duration_sec!r}: a number from 0")
        self.min_duration_sec = min_duration_sec
        self.stop_at_error = stop_at_error
        self.output = None if output is None else Path(output)
        self.enabled = enabled
        self.profiles: list[CompileProfile] = []
        self._profiler = SamplingProfiler(
            sample_each=sample_each,
            max_profile_duration_sec=max_profile_duration_sec,
            sample_tags=sample_tags,
            sampler=sampler,
        )
        self._stack: ExitStack | None = None
        self._running: tuple[Compilation, SamplingSession, float] | None = None

    def __enter__(self) -> CompileProfiler:
        if not self.enabled:
            return self
        if self._stack is not None:
            raise SamplingError("this CompileProfiler's block is open already")
        if self.output is not None:
            check_output(self.output)
        if self.stop_at_error:
            self._try_once()
        self._stack = ExitStack()
        self._is_watching = self._stack.enter_context(watched_compilations(self._begin, self._end))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stack is None:
            return
        if not self._is_watching():
            log.warning(
                "fuseboard: torch._dynamo.reset() was called while compilations were profiled: "
                "those after it were not; call it before the block"
            )
        self._stack.close()
        self._stack = None
        if self._running is not None:  # its end was lost in a reset
            self._end(failed=True)

    def _try_once(self) -> None:
        """Start and end a session of nothing.

        :raises SamplingError: there can be none.
        """
        self._profiler.stop_at_error = True
        try:
            session = self._profiler.open_session()
        finally:
            self._profiler.stop_at_error = False
        if session is not None:
            self._profiler.close_session(session, keep=False)

    # --- called by torch, inside of the user's compilation ----------------------------------------

    def _begin(self, compilation: Compilation) -> None:
        if self.frames is not None and not self.frames.search(compilation.frame):
            return
        try:
            session = self._profiler.open_session()
        except Exception as error:
            log.warning("fuseboard: a compilation isn't profiled: %s", error)
            return
        if session is not None:
            log.info("fuseboard: run %s: compilation of %s", session.run_id, compilation.frame)
            self._running = (compilation, session, time.monotonic())

    def _end(self, failed: bool) -> None:
        if self._running is None:
            return
        compilation, session, started = self._running
        self._running = None
        duration_s = time.monotonic() - started
        keep = not failed and duration_s >= self.min_duration_sec
        profile = self._profiler.close_session(session, keep)
        if profile is None:
            return
        name = f"{compilation.compile_id} {compilation.frame}".strip()
        profile = replace(profile, tags=(*profile.tags, name))
        self.profiles.append(
            CompileProfile(
                compilation.compile_id, compilation.frame, compilation.kind, duration_s, profile
            )
        )
        if self.output is not None:
            write_profile(profile, self.output)
