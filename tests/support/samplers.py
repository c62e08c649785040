"""Samplers for tests: they do as they are told, and note what was asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fuseboard
from fuseboard import SamplerStatus, StackFrame, StackSample
from tests.support.backends import observing

WORK = StackSample((StackFrame("main", "/a/app.py", 3), StackFrame("work", "/a/app.py", 7)), "T")


class FakeSampler:
    """A sampler that runs at once and has one sample, unless it is told otherwise.

    :ivar calls: the methods that were called, in order, without ``status``.
    :param starting: how often it says that it is starting.
    :param processing: how often it has no results yet.
    :param raises: method → what it raises, or a function that it calls.
    :param dies: it has failed by the time that it is stopped.
    """

    def __init__(
        self,
        samples: Any = (WORK,),
        *,
        starting: int = 0,
        processing: int = 0,
        raises: dict[str, BaseException | Callable[[], None]] | None = None,
        dies: bool = False,
        ended: bool = False,
        python_frames: Any = True,
        detail: str = "",
    ) -> None:
        self.samples = list(samples) if isinstance(samples, tuple) else samples
        self.starting = starting
        self.processing = processing
        self.raises = raises or {}
        self.dies = dies
        self.ended = ended
        self.python_frames = python_frames
        self.detail = detail
        self.calls: list[str] = []
        self.asked: tuple[Any, ...] = ()
        self.was_running = False

    def _note(self, method: str) -> None:
        if method != "status":
            self.calls.append(method)
        problem = self.raises.get(method)
        if isinstance(problem, BaseException):
            raise problem
        if problem is not None:
            problem()

    def start(self, pid: int, run_id: str, options: fuseboard.SamplingOptions) -> None:
        self.asked = (pid, run_id, options)
        self._note("start")

    def status(self) -> SamplerStatus:
        self._note("status")
        if self.starting:
            self.starting -= 1
            return SamplerStatus("starting")
        if self.was_running and self.dies:
            return SamplerStatus("failed", "it was killed")
        if "stop" in self.calls or (self.was_running and self.ended):
            return SamplerStatus("finished", self.detail)
        self.was_running = True
        return SamplerStatus("running", self.detail)

    def stop(self) -> None:
        self._note("stop")

    def results(self) -> Any:
        self._note("results")
        if self.dies:
            raise fuseboard.SamplingError("it was killed")
        if self.processing:
            self.processing -= 1
            return None
        return self.samples


@contextmanager
def sampling_with(*samplers: FakeSampler, name: str = "fake") -> Iterator[str]:
    """A plugin on the board for the block whose sessions get these samplers, one after another."""
    waiting = list(samplers)
    with observing(name, sampler=lambda: waiting.pop(0)):
        yield name
