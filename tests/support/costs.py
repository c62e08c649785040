"""Decisions for tests of the cost database, and a process that records them. Needs no torch."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from fuseboard.profile.costs.database import CandidateCost, CostDatabase, Decision, decision_key


def decision(
    graph: str = "g",
    *,
    winner: str = "inductor",
    settled: bool = True,
    created: float = 1_000_000.0,
    level: str = "step",
    **changes: str,
) -> Decision:
    """One between three candidates: timed, timed, failed.

    :param changes: further parts of its key.
    """
    parts = {"graph": graph, "threads": "2", **changes}
    candidates = (
        CandidateCost("inductor", 10.5, 10.0, 11.0, compile_s=2.0, peak_bytes=4096),
        CandidateCost("mkldnn", 12.0, 11.5, 13.25, compile_s=0.0, peak_bytes=0, exact=("addmm_3",)),
        CandidateCost("tvm", problem="failed verification: output 0"),
    )
    key = decision_key(level, parts)
    return Decision(key, parts, level, winner, candidates, "model.forward", settled, created)


def files(path: Path) -> set[str]:
    """The names of the files in a database's directory."""
    return {file.name for file in path.rglob("*") if file.is_file()}


def recording(path: str, number: int, count: int) -> None:
    """Record ``count`` decisions of its own and some that all processes record, read them back.

    Prints the graph of each of its own after it was recorded: those must be there.
    """
    database = CostDatabase(Path(path))
    draw = random.Random(number)
    for step in range(count):
        own = decision(f"{number}/{step}", created=float(step))
        shared = decision(f"shared/{draw.randrange(10)}", created=float(step), winner=f"{number}")
        database.record(own)
        database.record(shared)
        if database.problem:
            sys.exit(database.problem)
        print(json.dumps(own.parts["graph"]), flush=True)
        found = database.find(decision(f"{number}/{draw.randrange(step + 1)}").key)
        if found is None or found.winner != "inductor":
            sys.exit(f"lost a decision of its own: {found}")
        time.sleep(draw.uniform(0, 0.01))


if __name__ == "__main__":
    recording(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
