"""One run of ``perf record`` and ``perf script``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path

import fuseboard
from fuseboard_perf._script import read_script

_REFUSED = ("permission", "perf_event_paranoid", "not permitted", "no access")
_PERMISSION = (
    "Run as root, or: sudo sysctl kernel.perf_event_paranoid=1; in a container: "
    "docker run --cap-add PERFMON, with a seccomp profile that allows perf_event_open."
)


class Perf:
    """A :class:`fuseboard.Sampler`.

    perf starts with its counters off, is told to turn them on, and acknowledges that
    (``--control``): from then on it is running.
    """

    def __init__(self, executable: str, call_graph: str) -> None:
        self.python_frames = _python_names_its_calls()
        self._executable = executable
        self._call_graph = call_graph
        self._folder = Path(tempfile.mkdtemp(prefix="fuseboard-perf-"))
        self._clean_up = weakref.finalize(self, _remove, self._folder, os.getpid())
        self._record: fuseboard.SamplerProcess | None = None
        self._script: fuseboard.SamplerProcess | None = None
        self._pipes: list[int] = []
        self._running = False
        self._stopped = False
        self._done: fuseboard.SamplerStatus | None = None

    def start(self, pid: int, run_id: str, options: fuseboard.SamplingOptions) -> None:
        told, tell = os.pipe()
        acknowledged, acknowledge = os.pipe()
        self._pipes = [acknowledged, tell]  # perf takes an end of the pipe for its own
        os.set_blocking(acknowledged, False)
        try:
            self._record = fuseboard.SamplerProcess(
                [
                    *(self._executable, "record", "--pid", str(pid)),
                    *("--freq", str(max(1, round(options.rate_hz)))),
                    *("--call-graph", self._call_graph),
                    *("--output", str(self._path("perf.data"))),
                    *("--delay", "-1", "--control", f"fd:{told},{acknowledge}"),
                    *("--", "sleep", f"{options.max_duration_s:g}"),  # at whose end perf ends
                ],
                self._path("record.txt"),
                (told, acknowledge),
            )
            os.write(tell, b"enable\n")
        finally:
            os.close(told)
            os.close(acknowledge)

    def _path(self, name: str) -> Path:
        return self._folder / name

    def status(self) -> fuseboard.SamplerStatus:
        if self._done is not None:
            return self._done
        record = self._started()
        self._running = self._running or self._was_acknowledged()
        code = record.returncode
        if code is None:
            if self._stopped:
                return fuseboard.SamplerStatus("processing")
            return fuseboard.SamplerStatus("running" if self._running else "starting")
        if not self._running:
            return fuseboard.SamplerStatus("failed", _explain(record.output, code))
        return self._script_status()

    def _script_status(self) -> fuseboard.SamplerStatus:
        """perf's own format is read by perf, in a process of its own: symbols take their time."""
        if self._script is None:
            data = str(self._path("perf.data"))
            fields = ("--fields", "comm,tid,time,ip,sym,symoff,dso", "--no-inline")
            command = [self._executable, "script", "--input", data, *fields]
            self._script = fuseboard.SamplerProcess(command, self._path("script.txt"))
        code = self._script.returncode
        if code is None:
            return fuseboard.SamplerStatus("processing")
        if code:
            return fuseboard.SamplerStatus("failed", _explain(self._script.output, code))
        return fuseboard.SamplerStatus("finished")

    def _was_acknowledged(self) -> bool:
        if not self._pipes:
            return False
        try:
            return os.read(self._pipes[0], 16).startswith(b"ack")
        except BlockingIOError:
            return False

    def stop(self) -> None:
        """Once: let it write what it has. Again: end it."""
        if self._record is None:
            return
        if not self._stopped:
            self._stopped = True
            self._record.interrupt()
            return
        self._end()

    def _end(self) -> None:
        for process in (self._record, self._script):
            if process is not None:
                process.kill()
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes.clear()
        self._clean_up()

    def results(self) -> list[fuseboard.StackSample] | None:
        state = self.status()
        if state.state == "failed":
            raise fuseboard.SamplingError(f"perf: {state.detail}")
        if state.state != "finished":
            return None
        with self._path("script.txt").open(errors="replace") as lines:
            samples = read_script(lines)
        self._done = state
        self._end()
        return samples

    def _started(self) -> fuseboard.SamplerProcess:
        if self._record is None:
            raise fuseboard.SamplingError("perf was not started")
        return self._record


def _remove(folder: Path, process: int) -> None:
    """Unlike a ``TemporaryDirectory`` the folder stays at the end of a forked child."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _python_names_its_calls() -> bool:
    """Whether this Python runs with ``-X perf`` (3.12 and later), which perf then sees."""
    is_active = getattr(sys, "is_stack_trampoline_active", None)
    return bool(is_active is not None and is_active())


def _explain(output: str, code: int) -> str:
    """Why perf ended, and what helps."""
    lines = [
        line.strip() for line in output.splitlines() if line.strip(" \n:") not in ("", "Error")
    ]
    said = lines[0] if lines else f"it ended with status {code}"
    if any(word in output.lower() for word in _REFUSED):
        return f"no permission to sample this process ({said}). {_PERMISSION}"
    return f"perf failed: {said}"
