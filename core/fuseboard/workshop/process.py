"""The workshop's process: started when there is work, ended when there has been none for a while.

It has a lower priority, and is what the system ends first where memory is short. It ends with this
process, however that ends: its standard input is closed then, and Linux kills it with its parent.
"""

from __future__ import annotations

import functools
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuseboard.lower.isolation import how_it_ended, import_as_here, last_line
from fuseboard.totals import totals
from fuseboard.workshop.happenings import Happenings, Take
from fuseboard.workshop.request import Answer, Request

#: What importing torch and the plugins may take.
START_S = 120.0
_POLL_S = 0.2
#: What shared memory must have: a multiple of the inputs, and room for the graph and the answer.
_ROOM, _FURTHER_BYTES = 1.5, 16 * 2**20
#: Where files are memory, on Linux.
_SHARED_MEMORY = Path("/dev/shm")


class WorkshopError(Exception):
    """It can't answer; the text says why.

    :ivar started: whether it had started to work on what was asked.
    """

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


class Workshop:
    """A child process that answers one request at a time. For one thread; :meth:`end` for any."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._child: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        self._lock = threading.Lock()
        self._ended = False
        self._problem = ""

    @property
    def is_alive(self) -> bool:
        """Whether the child runs. It takes no lock."""
        child = self._child
        return child is not None and child.poll() is None

    @property
    def why_not_alive(self) -> str:
        """Why no child runs; "" where one does."""
        if self.is_alive:
            return ""
        if self._ended:
            return "this process ends"
        return self._problem or "there is nothing to do for it"

    def ask(
        self,
        request: Request,
        directory: Path,
        limit_s: float,
        wanted: Callable[[], bool],
        take: Take = lambda happening: None,
    ) -> Answer | None:
        """What it answers; None where nobody waits for it any more.

        :param directory: with the inputs' files.
        :param take: is given what happens meanwhile.
        :raises WorkshopError: it can't be started, ended, or took too long.
        """
        happenings = Happenings(directory, take)
        began = time.monotonic()
        self._problem = ""
        try:
            return self._asked(request, directory, limit_s, wanted, happenings)
        except (WorkshopError, OSError, ValueError) as error:
            if self._ended:  # the child was killed, and its streams were closed in another thread
                return None
            self._problem = f"the last one failed: {error}"
            raise
        finally:
            happenings.read()
            totals.asked_workshop(time.monotonic() - began)

    def _asked(
        self,
        request: Request,
        directory: Path,
        limit_s: float,
        wanted: Callable[[], bool],
        happenings: Happenings,
    ) -> Answer | None:
        (directory / "request").write_bytes(pickle.dumps(request))
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        end = time.monotonic() + START_S + limit_s
        try:
            child.stdin.write(os.fsencode(directory) + b"\n")
            child.stdin.flush()
        except OSError as error:
            raise self._broken(child, directory) from error
        while not select.select([child.stdout], [], [], _POLL_S)[0]:
            happenings.read()
            if not wanted() or self._ended:
                self.close()
                return None
            if time.monotonic() > end:
                self.close()
                raise WorkshopError(f"it gave no answer within {limit_s:g} s", started=True)
        if not child.stdout.readline():
            raise self._broken(child, directory)
        answer: Answer = pickle.loads((directory / "answer").read_bytes())
        return answer

    def _broken(self, child: subprocess.Popen[bytes], directory: Path) -> WorkshopError:
        child.wait()
        self._output.seek(0)
        said = last_line(self._output.read().decode(errors="replace"))
        self.close()
        problem = f"it ended with {how_it_ended(child.returncode)}{said}"
        return WorkshopError(problem, started=(directory / "started").exists())

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise WorkshopError("this process ends", started=False)
            if self._child is not None and self._child.poll() is None:
                return self._child
            self._output = tempfile.TemporaryFile()
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "fuseboard.workshop.main"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._output,
                    env={**os.environ, **import_as_here()},
                    start_new_session=True,  # so that compilers which it started go with it
                )
            except OSError as error:
                problem = f"it can't be started: {error}"
                raise WorkshopError(problem, started=False) from error
            return self._child

    def close(self) -> None:
        """End the child and all that it started; the next request starts another one."""
        with self._lock:
            child, self._child = self._child, None
        if child is None or os.getpid() != self._process:
            return
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all of it has ended; macOS says so in the second way
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was left to write has no reader
                    pass

    def end(self) -> None:
        """At this process's end: the child goes, and no other one is started."""
        with self._lock:
            self._ended = True
        self.close()


# --- directories ----------------------------------------------------------------------------------

#: Those of this process that are in use.
_directories: set[Path] = set()


@contextmanager
def request_directory(needed_bytes: int) -> Iterator[Path]:
    """A directory in shared memory, or where temporary files are; it goes with the block.

    :param needed_bytes: what is to be written there. Shared memory may be small, as in containers.
    """
    parent = Path(tempfile.gettempdir())
    if os.access(_SHARED_MEMORY, os.W_OK):
        if shutil.disk_usage(_SHARED_MEMORY).free > _ROOM * needed_bytes + _FURTHER_BYTES:
            parent = _SHARED_MEMORY
    path = _new_directory(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _directories.discard(path)


@functools.cache
def scratch_cache() -> Path:
    """A directory for what is compiled, where there is no cache: it goes with this process."""
    return _new_directory(Path(tempfile.gettempdir()))


def remove_directories() -> None:
    """At this process's end: a daemon thread that uses one is stopped without leaving its block."""
    for path in list(_directories):
        shutil.rmtree(path, ignore_errors=True)


def _new_directory(parent: Path) -> Path:
    """One of this process's. What processes left that were killed goes first."""
    _remove_left_over(parent)
    path = Path(tempfile.mkdtemp(prefix=f"fuseboard-{os.getpid()}-", dir=parent))
    _directories.add(path)
    return path


def _remove_left_over(parent: Path) -> None:
    for path in parent.glob("fuseboard-*-*"):
        number = path.name.split("-")[1]
        if number.isdigit() and not _is_alive(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _after_fork() -> None:
    """What the parent uses isn't a forked child's to remove."""
    _directories.clear()
    scratch_cache.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
