"""Starts the processes of a job of several ranks, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def start(program: str, rank: int, size: int, folder: Path, *more: str) -> subprocess.Popen[str]:
    """One rank. Its program is told its rank, their number, a file for the store, a cache."""
    # The tests' settings aren't the default ones.
    own = {name: text for name, text in os.environ.items() if not name.startswith("FUSEBOARD_")}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", program, str(rank), str(size)),
            *(str(folder / "store"), str(folder / "cache"), *more),
        ],
        cwd=ROOT,
        env={**own, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def seen_by(program: str, size: int, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What each rank printed as its last line, which is JSON."""
    ranks = [start(program, rank, size, folder, *more) for rank in range(size)]
    seen = []
    try:
        for rank in ranks:
            out, problems = rank.communicate(timeout=900)
            assert rank.returncode == 0, problems
            seen.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return seen
