"""How long the partition stage takes on a graph of tens of thousands of ops, step by step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import ROOT, empty_caches, worker_environment

NODES = 40_000
REPEATS = 3
#: The figure that is claimed holds these; the others are other people's share, told beside them.
STEPS = ("board's own nodes", "claims", "plan", "check", "cut")
LIMIT_S = 2.0


@dataclass(frozen=True)
class Case:
    """A graph, how it is claimed, and what the plan hook is told.

    :ivar graph: ``random`` (a DAG without a pattern) or ``layered`` (equal blocks).
    :ivar random_claims: three backends claim half, four fifths and nearly all of the ops, drawn;
        else each claims everything.
    """

    name: str
    graph: str
    random_claims: bool
    arguments: dict[str, Any] = field(default_factory=dict)


def _case(name: str, graph: str, random_claims: bool, **arguments: Any) -> Case:
    given = {"min_region_us": 50.0, "repeats": "never"}
    return Case(name, graph, random_claims, given | arguments)


CASES = (
    _case("random DAG, random claims", "random", True),
    _case("random DAG, claimed whole, repeats", "random", False, repeats="always"),
    _case("equal blocks, random claims", "layered", True),
    _case("equal blocks, claimed whole, repeats", "layered", False, repeats="always"),
)


@dataclass(frozen=True)
class Partitioned:
    """What one case took.

    :ivar seconds: step → median seconds over processes.
    :ivar profile: cProfile's text, or "".
    """

    case: str
    ops: int
    regions: int
    seconds: dict[str, float]
    profile: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.seconds[step] for step in STEPS)


def measure_partitioning(
    nodes: int, repeats: int, report: Callable[[str], None], profile: bool = False
) -> list[Partitioned]:
    """Each case in ``repeats`` fresh processes, which take turns."""
    answers: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES}
    with empty_caches() as caches:
        environment = worker_environment(1, caches)
        for repeat in range(repeats):
            for case in CASES:
                answers[case.name].append(_run(case, nodes, profile, environment))
                report(f"{case.name} · {repeat + 1} of {repeats}")
    return [_median(name, own) for name, own in answers.items()]


def _run(case: Case, nodes: int, profile: bool, environment: dict[str, str]) -> dict[str, Any]:
    request = {
        "graph": case.graph,
        "nodes": nodes,
        "random_claims": case.random_claims,
        "arguments": case.arguments,
        "profile": profile,
    }
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.partitioning_worker", json.dumps(request)],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    values: dict[str, Any] = json.loads(answer.stdout)
    return values


def _median(case: str, answers: Sequence[dict[str, Any]]) -> Partitioned:
    seconds = {
        step: statistics.median(answer["seconds"][step] for answer in answers)
        for step in answers[0]["seconds"]
    }
    last = answers[-1]
    return Partitioned(case, last["ops"], last["regions"], seconds, last.get("profile", ""))
