"""Compiled code's names in traces, there while a profiler runs.

Calls know nothing of profilers. A generated function finds each region by a global of its own; when
a profiler starts, what these globals hold is put into a span, and taken out again when it stops.
Off, there is nothing, not even a check.

How a profiler's start is noticed: each of torch's (``torch.profiler.profile``, the one in
``torch.autograd.profiler``, ``emit_nvtx``, ``emit_itt``) calls ``_run_on_profiler_start`` and
``_run_on_profiler_stop`` of ``torch/autograd/profiler.py``, looked up as globals of that module, to
keep its flag ``_is_profiler_enabled``. They are replaced by functions that call them and then look
at the flag. Nothing else of torch's tells of a start. A profiler that is started from outside of
Python (Kineto on demand) isn't noticed.

Read against torch 2.13, ``torch/autograd/profiler.py`` and ``torch/profiler/profiler.py``, which
uses ``_record_function_with_args_enter`` as it is used here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.autograd import profiler
from torch.torch_version import TorchVersion

log = logging.getLogger("fuseboard")

#: What every span's name begins with.
PREFIX = "fuseboard::"

_SOUND_CUDA = "12.6"
_KEEP_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
_enter: Callable[[str], Any] = vars(torch.autograd)["_record_function_with_args_enter"]
_exit: Callable[[Any], None] = vars(torch.autograd)["_record_function_with_args_exit"]
_HOOKS = ("_run_on_profiler_start", "_run_on_profiler_stop")


def span(name: str) -> AbstractContextManager[Any]:
    """A named stretch of a trace: ``fuseboard::`` and ``name``. For what isn't a call's work."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"{PREFIX}{name}")


class Spanned:
    """Something to call, inside of a span while a profiler runs."""

    __slots__ = ("_name", "call")

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self.call = call
        self._name = f"{PREFIX}{name}"

    def __call__(self, *args: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return self.call(*args)
        # What record_function does, without the dispatcher: 2 us instead of 10 in each region.
        handle = _enter(self._name)
        try:
            return self.call(*args)
        finally:
            _exit(handle)


class _Traceable:
    """The generated functions that live, and whether their globals are in spans now."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run anything in between
        self._functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
        self._on = False
        self._watching = False

    def add(self, function: FunctionType, names: Mapping[str, Callable[[], str]]) -> None:
        # On the function, not beside it: whatever it leads to must be able to die with it.
        function.__fuseboard_spans__ = names  # type: ignore[attr-defined]
        with self._lock:
            self._watch()
            self._functions.add(function)
            self._on = profiler._is_profiler_enabled
            if self._on:
                _put_in(function)

    def follow(self) -> None:
        """Do as the profiler does now."""
        with self._lock:
            self._on = profiler._is_profiler_enabled
            for function in list(self._functions):
                (_put_in if self._on else _take_out)(function)

    def _watch(self) -> None:
        if self._watching:
            return
        self._watching = True
        if not all(callable(getattr(profiler, name, None)) for name in _HOOKS):
            log.info("traces won't show regions: this torch doesn't say when a profiler starts")
            return
        for name in _HOOKS:
            setattr(profiler, name, _followed(getattr(profiler, name), self.follow))


def _followed(hook: Callable[[], None], follow: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(hook)
    def run() -> None:
        hook()
        follow()

    return run


def _put_in(function: Any) -> None:
    held = function.__globals__
    for place, name in function.__fuseboard_spans__.items():
        if not isinstance(held[place], Spanned):
            held[place] = Spanned(held[place], name())


def _take_out(function: Any) -> None:
    held = function.__globals__
    for place in function.__fuseboard_spans__:
        if isinstance(held[place], Spanned):
            held[place] = held[place].call


_traceable = _Traceable()


def show_in_traces(
    function: Callable[..., Any], names: Mapping[str, Callable[[], str]]
) -> Callable[..., Any]:
    """Name what a generated function calls in the traces of profilers, until it is freed.

    :param names: the global of ``function``'s own that holds what is called → what makes its span's
        name, which is asked when a profiler starts.
    """
    assert isinstance(function, FunctionType)
    _traceable.add(function, names)
    return function


def is_recording() -> bool:
    """Whether a profiler records this thread. To stop one whose session another one has ended, and
    to export its trace, crashes the process (torch 2.13).
    """
    enabled: Callable[[], bool] = vars(torch.autograd)["_profiler_enabled"]
    return enabled()


def keep_cupti() -> str:
    """Keep an old CUDA's profiling library loaded; before a profiler starts. What was done, or "".

    CUDA before 12.6 crashes where CUPTI is loaded again after CUDA graphs were recorded. torch sets
    the same (``torch/profiler/profiler.py``, ``start_trace``) where Inductor's own CUDA graphs are
    on, and knows of no others.
    """
    cuda = torch.version.cuda
    if cuda is None or TorchVersion(cuda) >= _SOUND_CUDA:
        return ""
    os.environ.update(_KEEP_CUPTI)
    variables = ", ".join(f"{name}={value}" for name, value in _KEEP_CUPTI.items())
    return (
        f"CUDA {cuda} can't load its profiling library twice beside CUDA graphs: {variables} is set"
    )
