"""Try a region in a child process first, where compiling it may end the process."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.contracts import Region
from fuseboard.errors import LoweringError
from fuseboard.lower.isolated import LoweringRequest, LoweringResult
from fuseboard.torch_api import graphs as torch_graphs
from fuseboard.torch_api.switches import read_switches

#: What importing torch and the plugin may take, beyond the limit of the hook.
START_S = 120.0
_POLL_S = 0.02
#: What a process has to remove its temporary files, when it is ended before its time.
_GRACE_S = 0.2
#: Signals that a process gets for what its own code does. Any other one comes from outside, such as
#: from a system that is short of memory.
_FAULTS = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")


class Crash(LoweringError):
    """The child process ended before it had answered, or took too long; "it ended with SIGABRT".

    :param own: what was compiled did that, rather than somebody who killed the process.
    """

    def __init__(self, message: str, *, own: bool = True, for_good: bool = True) -> None:
        super().__init__(message, for_good=for_good)
        self.own = own


def lower_in_child(region: Region, inputs: Sequence[Any], session: Session) -> LoweringResult:
    """What ``fuseboard_lower`` answers in a process of its own; see :func:`answer_in_child`.

    :raises LoweringError: it can't be tried there.
    """
    request = make_request(region, inputs, session)
    settings = session.settings
    return answer_in_child(request, settings.hook_limit_s, settings.origin("hook_limit_s"))


def answer_in_child(
    request: LoweringRequest,
    limit_s: float,
    origin: str,
    started: Callable[[int], None] = lambda process: None,
    wanted: Callable[[], bool] = lambda: True,
) -> LoweringResult:
    """Start a process that lowers a region, and wait for what it answers.

    Whatever becomes of that process, and if this one is interrupted, it is gone in the end.

    :param limit_s: seconds that the backend has.
    :param origin: where that was set.
    :param started: is told the process's group.
    :param wanted: whether somebody still waits; asked all the while.
    :raises Crash: it ended with a signal or an exit code, or didn't answer in time.
    :raises LoweringError: it didn't start, or nobody waits for it.
    """
    backend = request.region["backend"]
    with _own_directory() as directory:
        (directory / "request").write_bytes(pickle.dumps(request))
        with (directory / "output").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "fuseboard.lower.isolated", str(directory)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **import_as_here()},
                start_new_session=True,  # so that compilers which it started go with it
            )
            try:
                started(child.pid)
                late = _wait(child, directory, limit_s, wanted)
            finally:
                _end(child)
        result = directory / "result"
        if result.exists():
            return _read(result)
        began = (directory / "started").exists()
        said = last_line((directory / "output").read_text(errors="replace"))
    if late and began:
        raise Crash(f"it gave no answer within hook_limit_s = {limit_s:g} (set in {origin}){said}")
    how = "it didn't start in time" if late else f"it ended with {how_it_ended(child.returncode)}"
    if not began:
        problem = f"{backend} can't be tried in a child process: {how}{said}"
        raise LoweringError(problem, for_good=False)
    code = child.returncode
    own = code >= 0 or how_it_ended(code) in _FAULTS
    raise Crash(f"{how}{said}", own=own, for_good=code >= 0)


@contextmanager
def _own_directory() -> Iterator[Path]:
    """A temporary directory that goes with the block, and at the latest with this process.

    :class:`tempfile.TemporaryDirectory` goes with any process as well that was forked in the
    meantime, at that one's end.
    """
    process, path = os.getpid(), Path(tempfile.mkdtemp(prefix="fuseboard-isolated-"))

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)  # a daemon thread's block is never left
    try:
        yield path
    finally:
        remove()
        atexit.unregister(remove)


def import_as_here() -> dict[str, str]:
    """Environment under which a child imports what this process does, and not from its directory
    first because it was started with ``-m``."""
    return {"PYTHONPATH": os.pathsep.join(module_paths()), "PYTHONSAFEPATH": "1"}


def module_paths() -> list[str]:
    """Where this process looks for modules now."""
    return [path or os.getcwd() for path in sys.path]


def _read(path: Path) -> LoweringResult:
    """
    :raises Crash: Python code in the child was stopped at the limit.
    """
    result: LoweringResult = pickle.loads(path.read_bytes())
    if result.late:
        raise Crash(f"it gave {result.error}")
    return result


def make_request(region: Region, inputs: Sequence[Any], session: Session) -> LoweringRequest:
    """A region for another process.

    :raises LoweringError: it can't be sent, or that process wouldn't find the plugin.
    """
    module = session.module_name(region.backend)
    if module is None:
        raise LoweringError(
            f"{region.backend} can't be tried in a child process, which wouldn't find it: it is an "
            "object of this process. Make it a module, or give it an entry point"
        )
    settings = session.settings
    options: dict[str, Any] = {
        "backends": [region.backend],
        "hook_limit_s": settings.hook_limit_s,
        "random": settings.random,
        "cache": settings.cache,
        "cache_dir": settings.cache_dir,
    }
    given = settings.plugins.get(region.backend, {})
    options.update({f"plugins.{region.backend}.{key}": value for key, value in given.items()})
    fields = ("name", "backend", "kind", "signature", "static_inputs", "whole", "random", "source")
    return LoweringRequest(
        module=module,
        region={field: getattr(region, field) for field in fields},
        graph=torch_graphs.graph_to_bytes(region.graph, inputs),
        options=options,
        state={"threads": torch.get_num_threads(), "switches": read_switches()},
    )


def _wait(
    child: subprocess.Popen[bytes], directory: Path, limit_s: float, wanted: Callable[[], bool]
) -> bool:
    """Wait for the child's end. True where it took too long to start or to answer.

    :raises LoweringError: nobody waits any more.
    """
    begun = time.monotonic()
    started = False
    while True:
        try:
            child.wait(_POLL_S)
            return False
        except subprocess.TimeoutExpired:
            pass
        if not wanted():
            raise LoweringError("nobody waits for it any more", for_good=False)
        now = time.monotonic()
        if not started and (directory / "started").exists():
            started, begun = True, now
        if now - begun > (limit_s if started else max(limit_s, START_S)):
            return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """End it and what it started, if anything of it is left.

    Compilers remove their temporary files at SIGTERM, which this waits for; then it kills.
    """
    try:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end:
                child.poll()  # a zombie would count as left
                os.killpg(child.pid, 0)
                time.sleep(0.005)
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # all of it has ended; macOS says so in the second way
    finally:
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def how_it_ended(code: int) -> str:
    """How a process ended: ``SIGSEGV``, or ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def last_line(output: str) -> str:
    """What it said last, as the end of a sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
