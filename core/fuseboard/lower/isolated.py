"""The child process of :mod:`fuseboard.lower.isolation`: lower one region, and write what came out.

``python -m fuseboard.lower.isolated DIRECTORY`` reads ``request`` there, makes the file ``started``
when the plugin is about to be asked, and moves ``result`` into place at the end. It ends with its
parent, whose end closes its standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class LoweringRequest:
    """A region to lower.

    :ivar module: of a plugin that was registered at run time; "" where an entry point names it.
    :ivar region: the fields of the region but its graph, options and records.
    :ivar graph: as :func:`fuseboard.torch_api.graphs.graph_to_bytes` made it.
    :ivar options: settings, as ``torch.compile(options=)`` takes them.
    :ivar state: of torch: its threads, and its switches.
    """

    module: str
    region: dict[str, Any]
    graph: bytes
    options: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class LoweringResult:
    """What the plugin answered.

    :ivar error: what it raised, as text.
    :ivar for_good: as of a :class:`fuseboard.LoweringError`.
    :ivar late: it was stopped at the limit.
    :ivar declined: it returned None.
    :ivar unread: why the region can't be read in that process, as with an op of the user's program;
        the plugin wasn't asked.
    :ivar guards: on sizes, that its lowering added; None where they can't be told.
    """

    error: str = ""
    for_good: bool = True
    late: bool = False
    declined: bool = False
    unread: str = ""
    artifact: bytes | None = None
    notes: tuple[str, ...] = ()
    guards: list[str] | None = None


def main(directory: Path) -> None:
    """Answer the request; ends the process, without a plugin's handlers at exit."""
    be_killed_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 1
    try:
        from fuseboard.torch_api.views import eager_strides  # torch loads here, not before

        request: LoweringRequest = pickle.loads((directory / "request").read_bytes())
        with eager_strides():
            result = _answer(request, directory)
        unfinished = directory / "unfinished"
        unfinished.write_bytes(pickle.dumps(result))
        os.replace(unfinished, directory / "result")
        code = 0
    except _Ended:
        os.kill(os.getpid(), signal.SIGTERM)  # by its default this time, which the parent is told
    except BaseException:  # the interpreter's own end would abort, as the thread above reads
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Ended(BaseException):
    """The parent, or somebody else, wants this process to end: blocks are left, files removed."""


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise _Ended


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def be_killed_with_parent() -> None:
    """Also while this process is stopped, where Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(request: LoweringRequest, directory: Path) -> LoweringResult:
    import torch

    from fuseboard.board import board, register
    from fuseboard.config import resolve
    from fuseboard.contracts import Region
    from fuseboard.errors import HookTimeout, LoweringError, PluginError
    from fuseboard.run.failure import describe
    from fuseboard.torch_api import internals as torch_internals
    from fuseboard.torch_api.graphs import graph_from_bytes
    from fuseboard.torch_api.switches import set_switches
    from fuseboard.torch_api.symbols import GuardWatch

    torch.set_num_threads(request.state["threads"])
    set_switches(request.state["switches"])
    backend = request.region["backend"]
    if request.module:
        register(importlib.import_module(request.module), backend)
    session = board.session(resolve(request.options))
    options = session.options(backend)
    try:
        # Asked for what it decomposes to, a backend defines the ops of its own among these.
        kind = request.region["kind"]
        session.call("fuseboard_decompositions", backend, kind=kind, options=options)
        graph, inputs, mode = graph_from_bytes(request.graph)
    except Exception as error:  # whatever the objects in a graph raise
        return LoweringResult(unread=describe(error))
    region = Region(**request.region, graph=graph, options=options)
    watch = GuardWatch(mode)
    (directory / "started").touch()
    with torch.no_grad(), torch_internals.isolated_tracing(mode):
        try:
            answer = session.call("fuseboard_lower", backend, region=region, inputs=inputs)
        except (PluginError, LoweringError) as error:
            for_good = getattr(error, "for_good", True)
            late = isinstance(error, HookTimeout)
            return LoweringResult(error=describe(error), for_good=for_good, late=late)
    if answer is None:
        return LoweringResult(declined=True)
    return LoweringResult(artifact=answer.artifact, notes=answer.notes, guards=watch.code())


if __name__ == "__main__":
    # By its full name: what is pickled is the parent's module, not ``__main__``.
    importlib.import_module("fuseboard.lower.isolated").main(Path(sys.argv[1]))
