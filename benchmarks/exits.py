"""How long a process takes to end after its last line, beside the same program under eager."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.processes import ROOT, empty_caches, worker_environment
from benchmarks.stats import Estimate, median_with_interval

MODEL = "mlp-b64"
LIMIT_S = 0.5
#: When the program ends: everything is decided, or the workshop is at work.
MOMENTS = ("settled", "compiling")

_PROGRAM = f"""
import sys, time
import torch
from benchmarks.models import MODELS
backend, moment = sys.argv[1:]
workload = MODELS[{MODEL!r}].build()
run = torch.compile(workload.module, backend=backend)
with torch.no_grad():
    run(*workload.inputs[0])
    if backend == "fuseboard":
        import fuseboard
        from fuseboard.workshop.desk import desk
        if moment == "settled":
            while not fuseboard.wait(progress=False):
                run(*workload.inputs[0])
        else:
            while desk().workshop._child is None:
                time.sleep(0.01)
            time.sleep(5.0)  # it has begun
            assert not fuseboard.settled(), "it was too quick"
        run(*workload.inputs[0])
print(time.monotonic(), flush=True)
"""


@dataclass(frozen=True)
class ExitCost:
    """Seconds.

    :ivar added: fuseboard's less eager's, pair by pair: the figure.
    :ivar eager: of the same program under ``backend="eager"``; ``fuseboard``, the other.
    """

    moment: str
    added: Estimate
    eager: Estimate
    fuseboard: Estimate


def measure_exits(repeats: int, report: Callable[[str], None]) -> list[ExitCost]:
    """Alternates processes under eager and fuseboard; the first of each is left out.

    What was compiled is forgotten in between, so that each of fuseboard's compiles anew.
    """
    found = []
    for moment in MOMENTS:
        seconds: dict[str, list[float]] = {"eager": [], "fuseboard": []}
        with empty_caches() as caches:
            for repeat in range(repeats + 1):
                report(f"exit · {moment} · {repeat} of {repeats}")
                for backend, own in seconds.items():
                    caches.forget_graphs()
                    took_s = _run(backend, moment, worker_environment(1, caches))
                    if repeat:
                        own.append(took_s)
        pairs = zip(seconds["eager"], seconds["fuseboard"], strict=True)
        added = median_with_interval([theirs - eagers for eagers, theirs in pairs])
        both = {backend: median_with_interval(own) for backend, own in seconds.items()}
        found.append(ExitCost(moment, added, **both))
    return found


def _run(backend: str, moment: str, environment: dict[str, str]) -> float:
    """Seconds from the program's last line to the end of its process."""
    command = [sys.executable, "-c", _PROGRAM, backend, moment]
    # The clock is the system's own, equal in all processes.
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        code = process.wait()
        ended = time.monotonic()
    if code or not said:
        raise subprocess.CalledProcessError(code, command[:2])
    return ended - float(said)
