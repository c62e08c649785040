"""Where the time of a cold compile goes, and Dynamo's in a call, the same way for every arm.

Read against torch 2.13: ``torch/_dynamo/convert_frame.py``, ``torch/_dynamo/output_graph.py`` and
``torch/_functorch/aot_autograd.py`` time themselves by ``dynamo_timed``; AOTAutograd calls the
joint split and each compiler of a backend inside ``track_graph_compiling``
(``torch/_functorch/_aot_autograd/graph_compile.py``; a backward that is compiled at its first call:
``runtime_wrappers.py``), whoever the backend is. ``torch/csrc/dynamo/eval_frame_cpp.cpp`` tells a
profiler when it looks up the code of a call, which is the check of guards. Needs torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import compilation_time_metrics
from torch._functorch._aot_autograd import graph_compile, runtime_wrappers

_FRAME = "_compile.compile_inner"
_BACKEND = "OutputGraph.call_user_compiler"
_AOT = "create_aot_dispatcher_function"
#: The event of a profiler in which guards are checked.
_GUARDS = "TorchDynamo Cache Lookup"
#: What the joint split is called where the compilers are called by the kind of their graph.
_JOINT = "joint"


def guards_s(call: Callable[[int], object], calls: int) -> float:
    """Seconds a call in which Dynamo checks guards; 0 where nothing is compiled.

    :param call: makes a call, given its number.
    """
    call(0)  # a profiler's first events take longer
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for number in range(calls):
            call(number)
    events = [event for event in profiled.events() if event.name == _GUARDS]
    return 1e-6 * sum(event.time_range.elapsed_us() for event in events) / calls


@dataclass
class Parts:
    """Seconds.

    :ivar dynamo_s: from bytecode to Dynamo's graph, guards included.
    :ivar aot_s: AOTAutograd: tracing, functionalisation, the joint split; no compiler.
    :ivar split_s: the joint split, which is part of ``aot_s``.
    :ivar compilers_s: inside the backend's compilers, by the kind of graph.
    """

    dynamo_s: float = 0.0
    aot_s: float = 0.0
    split_s: float = 0.0
    compilers_s: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def watched() -> Iterator[Parts]:
    """The parts of whatever is compiled meanwhile; filled in when the context ends.

    :raises RuntimeError: nothing was compiled, or torch has moved what is read here.
    """
    parts = Parts()
    at_once: dict[str, float] = {}
    later: dict[str, float] = {}
    before = {name: _total(name) for name in (_FRAME, _BACKEND, _AOT)}
    with (
        patch.object(graph_compile, "track_graph_compiling", _timing(graph_compile, at_once)),
        patch.object(runtime_wrappers, "track_graph_compiling", _timing(runtime_wrappers, later)),
    ):
        yield parts
    frame_s, backend_s, aot_s = (_total(name) - start for name, start in before.items())
    parts.split_s = at_once.pop(_JOINT, 0.0)
    if not aot_s or not at_once:
        raise RuntimeError(f"no compile was seen: {frame_s=}, {backend_s=}, {aot_s=}, {at_once=}")
    parts.dynamo_s = frame_s - backend_s
    parts.aot_s = aot_s - sum(at_once.values())
    for kind in at_once | later:
        parts.compilers_s[kind] = at_once.get(kind, 0.0) + later.get(kind, 0.0)


def _total(name: str) -> float:
    return sum(compilation_time_metrics.get(name, ()))


def _timing(module: Any, seconds: dict[str, float]) -> Callable[..., Any]:
    original = module.track_graph_compiling

    @contextlib.contextmanager
    def track(config: Any, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with original(config, kind):
                yield
        finally:
            seconds[kind] = seconds.get(kind, 0.0) + time.perf_counter() - start

    return track
