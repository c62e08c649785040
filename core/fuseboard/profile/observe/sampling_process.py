"""A profiler that runs as a process of its own beside this one: started, read, stopped, killed.

For plugins that implement ``fuseboard_sampler``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: ``linux/prctl.h``: who may trace this process under Yama's ``ptrace_scope=1``.
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
#: A child of a process that ignores SIGINT (under nohup, in the background of a plain shell)
#: ignores it too, and ``interrupt`` would not end it.
_HEED_SIGINT = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
#: How long a killed process is waited for.
_KILLED_S = 5.0


class SamplerProcess:
    """Runs a command that samples this process.

    It has a process group of its own, so that a Ctrl-C in the terminal doesn't reach it. Where the
    kernel allows a process to be traced by its parents only (Yama's ``ptrace_scope`` 1), this one
    allows that process, and no other.

    :param command: the executable and its arguments.
    :param log: where what it prints goes.
    :param pass_fds: file descriptors that it inherits, beyond the standard ones.
    """

    def __init__(self, command: Sequence[str], log: Path, pass_fds: Sequence[int] = ()) -> None:
        self.log = log
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            command = [sys.executable, "-I", "-S", "-c", _HEED_SIGINT, *command]
        guarded = _needs_leave()
        if guarded:
            # It waits for a line before it turns into the profiler: leave is given to its pid.
            command = ["/bin/sh", "-c", 'read _ && exec "$@"', "sh", *command]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if guarded else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        self._guarded = guarded
        if guarded:
            _give_leave(self._process.pid)
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Send SIGINT, at which profilers stop sampling and write what they have."""
        if self.returncode is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it now, whatever it does."""
        if self.returncode is None:
            self._process.kill()
            self._process.wait(_KILLED_S)
        if self._guarded:
            _give_leave(0)


def _needs_leave() -> bool:
    """Whether a child must be named before it may trace this process."""
    if not sys.platform.startswith("linux") or os.geteuid() == 0:
        return False
    try:
        return _YAMA.read_text().strip() == "1"
    except OSError:  # a kernel without Yama
        return False


def _give_leave(pid: int) -> None:
    """Allow one process to trace this one; 0 for none. A refusal shows when it tries."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
