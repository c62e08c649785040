"""Starts workers, one at a time, each in a fresh process, and brings back what they measured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.protocol import Protocol

ROOT = Path(__file__).resolve().parent.parent
Phase = Literal["full", "first", "compile", "recompiles", "budget", "sampled", "tuned", "runner"]

#: Steps in which no arm had its turn yet: a failure there says nothing about the arm.
_BEFORE_THE_ARM = ("start", "model", "eager, first call")
_PROGRESS = "@step "
#: Variables that would change what is measured. A worker starts without them.
_CLEARED = (
    *("FUSEBOARD_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "AOT_", "TRITON_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD"),
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What came of one worker.

    :ivar values: what it measured; empty where it failed.
    :ivar failure: why it failed, or "".
    :ivar during: the step it was in when it ended.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    during: str = ""

    @property
    def blames_arm(self) -> bool:
        """Whether a failure is the arm's: the model was built and eager had answered."""
        return bool(self.failure) and self.during not in _BEFORE_THE_ARM


class Caches:
    """The folder of all caches of a worker: empty for a cold start, kept for a warm one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self) -> dict[str, str]:
        # TMPDIR too: Inductor keeps its precompiled headers in the default cache folder, under the
        # temporary one, wherever TORCHINDUCTOR_CACHE_DIR points (codecache._HEADER_DIR, 2.13).
        names = {"TMPDIR": "tmp", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "xdg"}
        for name in names.values():
            (self.folder / name).mkdir(exist_ok=True)
        return {variable: str(self.folder / name) for variable, name in names.items()}

    def forget_graphs(self) -> None:
        """Empties all but what a machine makes once, for any model: Inductor's headers."""
        for name in ("inductor", "xdg"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


@contextmanager
def empty_caches() -> Iterator[Caches]:
    with tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True) as folder:
        yield Caches(Path(folder))


def worker_environment(threads: int, caches: Caches) -> dict[str, str]:
    """The caller's environment without what would sway a measurement; threads and caches set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_CLEARED)}
    kept |= dict.fromkeys(_THREADS, str(threads))
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    return kept | caches.environment()


def measure(
    model: str,
    arm: str,
    threads: int,
    phase: Phase,
    protocol: Protocol,
    caches: Caches,
    report: Report,
) -> Outcome:
    """Runs one worker to its end, or kills it at the time limit, or at Ctrl-C.

    :param report: is told each step as it begins.
    """
    request = {"model": model, "arm": arm, "threads": threads, "phase": phase}
    environment = worker_environment(threads, caches)
    if phase in ("compile", "recompiles"):  # what they take apart is a compile within a call
        environment["FUSEBOARD_SETTLE"] = "in_calls"
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        paths = [Path(folder) / name for name in ("request.json", "result.json", "stderr")]
        paths[0].write_text(json.dumps(request | {"protocol": protocol.as_dict()}))
        with paths[2].open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", *map(str, paths[:2])],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches this process only, which then kills all
            )
            during, late = _follow(process, protocol.timeout_s, report)
        return _outcome(process.returncode, during, late, paths[1], paths[2])


def _follow(
    process: subprocess.Popen[str], timeout_s: float, report: Report
) -> tuple[str, threading.Event]:
    """Passes steps on until the worker ends. Returns the last one, and whether time ran out."""
    late = threading.Event()

    def out_of_time() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(timeout_s, out_of_time)
    timer.start()
    during = "start"
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_PROGRESS):
                during = line.removeprefix(_PROGRESS).strip()
                report(during)
        process.wait()
    finally:
        timer.cancel()
        _kill(process)  # with whatever helpers it left behind: they would disturb the next one
        process.wait()
    return during, late


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the whole group has ended


def _outcome(
    code: int, during: str, late: threading.Event, result_path: Path, stderr_path: Path
) -> Outcome:
    if late.is_set():
        return Outcome(failure=f"ran out of time during {during!r}", during=during)
    if result_path.exists():
        values = json.loads(result_path.read_text())
        if "failure" in values:
            return Outcome(failure=values["failure"], during=during)
        return Outcome(values, during=during)
    lines = [line for line in stderr_path.read_text().splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    return Outcome(failure=f"ended with code {code} during {during!r}: {last}", during=during)


def last_line(program: str, request: str, timeout_s: float | None = None) -> str:
    """What a Python program prints last, one thread, in a process of its own with empty caches.

    :param program: the program's text, and ``request`` its argument.
    :param timeout_s: so long it may take; None: as long as it does.
    :raises subprocess.CalledProcessError: it failed.
    :raises subprocess.TimeoutExpired: it took longer.
    """
    with empty_caches() as folder:
        answer = subprocess.run(
            [sys.executable, "-c", program, request],
            cwd=ROOT,
            env=worker_environment(1, folder),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
        )
    return answer.stdout.splitlines()[-1]
