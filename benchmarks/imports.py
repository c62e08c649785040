"""What ``import fuseboard`` costs beyond ``import torch``, in fresh processes in turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.processes import ROOT, empty_caches, worker_environment
from benchmarks.stats import Estimate, median_with_interval

REPEATS = 10

_TORCH = "from time import perf_counter as now; a = now(); import torch; b = now()"
_ALONE = f"{_TORCH}; print(b - a)"
_BOTH = f"{_TORCH}; import fuseboard; c = now(); print(c - a, c - b)"


@dataclass(frozen=True)
class ImportCost:
    """Milliseconds.

    :ivar added: ``import fuseboard`` in a process that has just imported torch: the figure.
    :ivar difference: both imports less torch's alone, process against process; torch's own import
        varies by more than this figure, so its interval is wide.
    :ivar torch: ``import torch`` alone.
    """

    added: Estimate
    difference: Estimate
    torch: Estimate


def measure_imports(repeats: int, report: Callable[[str], None]) -> ImportCost:
    """Alternates processes with and without fuseboard; the first of each is left out (it compiles
    bytecode and reads from disk)."""
    alone: list[float] = []
    both: list[float] = []
    added: list[float] = []
    with empty_caches() as caches:
        environment = worker_environment(1, caches)
        for repeat in range(repeats + 1):
            report(f"imports · {repeat} of {repeats}")
            (torch_s,) = _run(_ALONE, environment)
            both_s, added_s = _run(_BOTH, environment)
            if repeat:
                alone.append(1e3 * torch_s)
                both.append(1e3 * both_s)
                added.append(1e3 * added_s)
    differences = [b - a for a, b in zip(alone, both, strict=True)]
    return ImportCost(
        added=median_with_interval(added),
        difference=median_with_interval(differences),
        torch=median_with_interval(alone),
    )


def _run(code: str, environment: dict[str, str]) -> list[float]:
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [float(word) for word in answer.stdout.split()]
