"""One run of ``py-spy record``: its process, and what it wrote."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import fuseboard

#: py-spy prints this once it has found the interpreter and takes samples.
_RUNNING = "Sampling process"
#: What it prints where samples are late, and where the kernel lets it read nothing.
_BEHIND = "behind in sampling"
_REFUSED = ("permission denied", "operation not permitted", "(os error 1)", "(os error 13)")
#: Innermost calls of threads that wait: method and the end of its file. py-spy asks the kernel
#: whether a thread runs, and the answer may be wrong while it holds the process.
_WAITS = (("wait", "/threading.py"), ("select", "/selectors.py"), ("poll", "/connection.py"))


class PySpy:
    """A :class:`fuseboard.Sampler`.

    :param native: try with native frames first, and without them where that fails.
    :param blocking: the process stands still while its stacks are read. For native frames it does
        so in any case.
    """

    python_frames = True

    def __init__(self, executable: str, native: bool, blocking: bool = False) -> None:
        self._executable = executable
        self._native = native
        self._blocking = blocking
        self._folder = Path(tempfile.mkdtemp(prefix="fuseboard-pyspy-"))
        self._clean_up = weakref.finalize(self, _remove, self._folder, os.getpid())
        self._command: list[str] = []
        self._process: fuseboard.SamplerProcess | None = None
        self._notes: list[str] = []
        self._seen_running = False
        self._stopped = False
        self._done: fuseboard.SamplerStatus | None = None

    @property
    def _written(self) -> Path:
        return self._folder / "profile.json"

    def start(self, pid: int, run_id: str, options: fuseboard.SamplingOptions) -> None:
        self._command = [
            *(self._executable, "record", "--pid", str(pid)),
            *("--rate", str(max(1, round(options.rate_hz)))),
            *("--duration", str(math.ceil(options.max_duration_s))),
            *("--format", "speedscope", "--output", str(self._written), "--full-filenames"),
        ]
        self._run()

    def _run(self) -> None:
        # py-spy reads native frames only of a process that stands still.
        how = ["--native"] if self._native else [] if self._blocking else ["--nonblocking"]
        log = self._folder / "log.txt"
        self._process = fuseboard.SamplerProcess([*self._command, *how], log)

    def status(self) -> fuseboard.SamplerStatus:
        if self._done is not None:
            return self._done
        process = self._started()
        self._seen_running = self._seen_running or _RUNNING in process.output
        code = process.returncode
        if code is None:
            if self._stopped:
                return fuseboard.SamplerStatus("processing")
            state = "running" if self._seen_running else "starting"
            return fuseboard.SamplerStatus(state, "; ".join(self._notes))
        if self._seen_running and self._written.exists():
            return fuseboard.SamplerStatus("finished", "; ".join(self._all_notes(process.output)))
        if self._native and not self._seen_running:
            self._native = False
            self._notes.append(f"without native frames: {_last_line(process.output)}")
            self._run()
            return fuseboard.SamplerStatus("starting")
        return fuseboard.SamplerStatus("failed", _explain(process.output, code))

    def _all_notes(self, output: str) -> list[str]:
        late = [f"py-spy: {_plain(x)}" for x in output.splitlines() if _BEHIND in x]
        return [*self._notes, *late[-1:]]

    def stop(self) -> None:
        """Once: let it write what it has. Again: end it."""
        if self._process is None:
            return
        if self._stopped:
            self._process.kill()
            self._clean_up()
        else:
            self._stopped = True
            self._process.interrupt()

    def results(self) -> list[fuseboard.StackSample] | None:
        state = self.status()
        if state.state == "failed":
            raise fuseboard.SamplingError(f"py-spy: {state.detail}")
        if state.state != "finished":
            return None
        samples = read_speedscope(json.loads(self._written.read_text()))
        self._done = state
        self._started().kill()  # it has ended; this takes back its leave to trace
        self._clean_up()
        return samples

    def _started(self) -> fuseboard.SamplerProcess:
        if self._process is None:
            raise fuseboard.SamplingError("py-spy was not started")
        return self._process


def _remove(folder: Path, process: int) -> None:
    """Unlike a ``TemporaryDirectory`` the folder stays at the end of a forked child."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def read_speedscope(document: dict[str, Any]) -> list[fuseboard.StackSample]:
    """The samples of a speedscope file of py-spy's: a profile a thread, one weight a sample.

    Those of several threads are put into one order, by the time since each thread's first sample.
    Threads that wait are left out.
    """
    frames = [_frame(entry) for entry in document["shared"]["frames"]]
    timed: list[tuple[float, int, fuseboard.StackSample]] = []
    for number, profile in enumerate(document["profiles"]):
        now = float(profile.get("startValue", 0.0))
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
            sample = fuseboard.StackSample(tuple(frames[i] for i in stack), profile["name"])
            if not _waits(sample):
                timed.append((now, number, sample))
            now += weight
    timed.sort(key=lambda entry: entry[:2])
    return [sample for _, _, sample in timed]


def _waits(sample: fuseboard.StackSample) -> bool:
    inner = next((f for f in reversed(sample.stack) if f.file.endswith(".py")), None)
    return inner is not None and any(
        inner.name.rpartition(".")[2] == name and inner.file.endswith(file) for name, file in _WAITS
    )


def _frame(entry: dict[str, Any]) -> fuseboard.StackFrame:
    return fuseboard.StackFrame(entry["name"], entry.get("file") or "", entry.get("line") or 0)


def _explain(output: str, code: int) -> str:
    """Why py-spy ended, and what helps."""
    said = _last_line(output) or f"it ended with status {code}"
    if any(word in output.lower() for word in _REFUSED):
        return f"no permission to trace this process ({said}). {_permission()}"
    return f"py-spy failed: {said}"


def _permission() -> str:
    if sys.platform == "darwin":
        return "On macOS py-spy needs root: run the program with sudo."
    return (
        "Run as root, or: sudo sysctl kernel.yama.ptrace_scope=0; in a container: "
        "docker run --cap-add SYS_PTRACE; in Kubernetes: "
        "securityContext.capabilities.add: [SYS_PTRACE]."
    )


def _last_line(output: str) -> str:
    """The error that py-spy printed, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return _plain((errors or lines or [""])[-1])


def _plain(line: str) -> str:
    return line.strip().removeprefix("py-spy>").strip()
