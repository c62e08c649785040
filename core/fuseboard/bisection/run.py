"""One run of a script, in a process of its own: what is asked of it, and what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

#: Of what a script wrote to standard error, for the exception's line.
_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Step:
    """What holds in a run.

    :ivar label: what is tried, for people.
    :ivar settings: above all that files, the environment and the script set.
    :ivar nodes: which of the ops that the first backend claims it gets, from (and with) the first
        number up to the second, where ``stages.plan`` is :func:`.plan.some_nodes`; None for all.
    :ivar compiler: a backend of torch's own that takes fuseboard's place; "" for fuseboard.
    :ivar compiles: whether ``torch.compile`` does anything.
    """

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, int] | None = None
    compiler: str = ""
    compiles: bool = True


@dataclass(frozen=True)
class Placed:
    """An op of a graph, and where it ran."""

    name: str
    op: str
    backend: str
    graph: str
    region: str
    source: str


@dataclass(frozen=True)
class Fusion:
    """A rewrite that was applied; its number is what ``fuse_limit`` and ``fuse_skip`` count."""

    number: int
    plugin: str
    name: str
    nodes: tuple[str, ...]
    graph: str
    region: str


@dataclass(frozen=True)
class Trace:
    """What the reports of a run say.

    :ivar plugins: those that took part or might have → the stages of their hooks.
    :ivar backends: those that the graphs had, in order of priority.
    :ivar offered: the ops that the bisection's plan had for the first backend: (name, op).
    :ivar function: those that it got, as :func:`.reproduction.function_of` writes them; None where
        they are too many, or in several graphs.
    """

    plugins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    placed: Sequence[Placed] = ()
    fusions: Sequence[Fusion] = ()
    trips: Sequence[str] = ()
    offered: Sequence[tuple[str, str]] = ()
    function: dict[str, Any] | None = None


#: To and from the files between the processes.
STEPS, TRACES = TypeAdapter(Step), TypeAdapter(Trace)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :ivar failure: the kind of the failure, by which two are told apart: the exception's class, a
        signal, an exit status, that it took too long or that something tripped. "" where it passed.
    :ivar message: of the failure, on one line.
    :ivar trace: None where the process was killed before it could be written.
    """

    failure: str = ""
    message: str = ""
    seconds: float = 0.0
    trace: Trace | None = None


def run_script(
    step: Step, script: Path, args: Sequence[str], limit_s: float, trips: bool
) -> Outcome:
    """Run a script in a process of its own.

    :param limit_s: longer is a failure.
    :param trips: so is a failure of a plugin that the board contained.
    """
    with tempfile.TemporaryDirectory(prefix="fuseboard-bisect-") as name:
        job, out, errors = (Path(name) / part for part in ("job.json", "out.json", "errors.txt"))
        job.write_bytes(STEPS.dump_json(step))
        command = [sys.executable, "-m", "fuseboard.bisection.child", str(job), str(out)]
        environ = dict(os.environ) | ({} if step.compiles else {"TORCH_COMPILE_DISABLE": "1"})
        start = time.perf_counter()
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, str(script), *args],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environ,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _kill(process)
        seconds = time.perf_counter() - start
        found = None
        if out.is_file():
            found = TRACES.validate_json(out.read_bytes())
        failure, message = _failure(status, limit_s, errors.read_bytes()[-_TAIL_BYTES:])
        if not failure and trips and found is not None and found.trips:
            failure, message = "a trip", found.trips[0]
        return Outcome(failure, message, seconds, found)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # none is left
    process.wait()


def _failure(status: int | None, limit_s: float, errors: bytes) -> tuple[str, str]:
    if status is None:
        return "too long", f"it took more than {limit_s:g} s"
    if status == 0:
        return "", ""
    if status < 0:
        name = signal.Signals(-status).name
        return name, f"killed by {name}"
    lines = errors.decode("utf-8", "replace").splitlines()
    # The exception's line follows its traceback; what is indented or comes later is its text.
    heads = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    after = lines[heads[-1] + 1 :] if heads else []
    raised = next((line for line in after if line and not line[0].isspace()), "")
    if not raised:
        return f"exit status {status}", f"exit status {status}"
    return raised.partition(":")[0], raised
