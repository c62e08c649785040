"""Cold compiles taken apart: Dynamo's trace, AOTAutograd, lowering; with depth, and arm by arm.

What the first compile of a process pays whatever it compiles (imports, CPU feature checks,
precompiled headers, helper processes: 10 to 20 s with empty caches) is paid by a trivial compile
before the clock starts, and told beside the figures, with and without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import pairs
from benchmarks.findings import Finding, judge_at_least, verdict
from benchmarks.pairs import Pair
from benchmarks.processes import empty_caches
from benchmarks.session import Session

OURS, THEIRS = "fuseboard-inductor", "inductor"
ARMS = (THEIRS, OURS)
THREADS = 1

LOWERING_LIMIT = 0.5
GROWTH_LIMIT = 1.25
SPEED_LIMIT = 0.97


@dataclass(frozen=True)
class Depths:
    """One model at two depths."""

    what: str
    shallow: str
    deep: str


DEPTHS = (
    Depths("inference", "llama4-1x128", "llama24-1x128"),
    Depths("training", "train-llama4", "train-llama24"),
)
#: What each cold worker measures of its compile, and is summed up by the median.
PARTS = ("dynamo_s", "aot_s", "split_s", "lowering_s", "first_s", "call_s", "trivial_s")


@dataclass
class Compile:
    """The cold compiles of one arm on one model.

    :ivar workers: what each worker measured, in order.
    """

    model: str
    arm: str
    workers: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    def seconds(self, part: str) -> float:
        """The median over workers."""
        return float(statistics.median(worker[part] for worker in self.workers))

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """How fuseboard cut each graph, in the last worker; none for another arm."""
        graphs: list[dict[str, Any]] = self.workers[-1].get("board", {}).get("graphs", [])
        return graphs


def measure(
    session: Session, models: Sequence[str], repeats: int, done: list[Compile]
) -> dict[tuple[str, str], Compile]:
    """Cold workers in turn: each repeat goes through all models and both arms.

    :param done: gets the compiles at once, to be filled as it goes.
    """
    compiles = {(m, arm): Compile(m, arm) for m in models for arm in ARMS}
    done.extend(compiles.values())
    for _ in range(repeats):
        for (model, arm), compile_ in compiles.items():
            if compile_.failure:
                continue
            with empty_caches() as caches:
                outcome = session.measure(model, arm, THREADS, "compile", caches)
            if outcome.failure:
                compile_.failure = outcome.failure
            else:
                compile_.workers.append(outcome.values)
    return compiles


def findings(session: Session, repeats: int) -> list[Finding]:
    """Lowering against plain Inductor's, and with depth; a claim each for both kinds."""
    models = [model for depths in DEPTHS for model in (depths.shallow, depths.deep)]
    compiles = measure(session, models, repeats, [])
    return [found for depths in DEPTHS for found in _judge(depths, compiles)]


def _judge(depths: Depths, compiles: dict[tuple[str, str], Compile]) -> list[Finding]:
    deep, shallow, theirs = (
        compiles[key]
        for key in ((depths.deep, OURS), (depths.shallow, OURS), (depths.deep, THEIRS))
    )
    claims = (
        f"{depths.deep}: cold, {OURS} lowers in at most {LOWERING_LIMIT:g} of {THEIRS}'s time",
        f"{depths.deep}: cold, {OURS} lowers in at most {GROWTH_LIMIT:g} of its time on "
        f"{depths.shallow}",
    )
    own = [compiles[m, arm] for m in (depths.shallow, depths.deep) for arm in ARMS]
    data = {"compiles": own}
    if failed := next((c for c in own if c.failure or not c.workers), None):
        reason = f"{failed.model}, {failed.arm}: {failed.failure or 'not measured'}"
        return [Finding(claim, reason, "no", data) for claim in claims]
    return [
        _finding(claims[0], deep, theirs, LOWERING_LIMIT, data),
        _finding(claims[1], deep, shallow, GROWTH_LIMIT, data),
    ]


def _finding(claim: str, a: Compile, b: Compile, limit: float, data: dict[str, Any]) -> Finding:
    ratio = a.seconds("lowering_s") / b.seconds("lowering_s")
    both = [c.seconds("lowering_s") + c.seconds("trivial_s") for c in (a, b)]
    measured = (
        f"{ratio:.3f}; with the first compile of a process {both[0] / both[1]:.3f}; "
        f"{_described(a)}; {_described(b)}"
    )
    return Finding(claim, measured, verdict(ratio <= limit), data)


def _described(one: Compile) -> str:
    return (
        f"{one.arm} on {one.model}: Dynamo {one.seconds('dynamo_s'):.2f} s, AOTAutograd "
        f"{one.seconds('aot_s'):.2f} s, lowering {one.seconds('lowering_s'):.2f} s"
    )


def speed_findings(session: Session, repeats: int) -> list[Finding]:
    """Steady speed of the deep models, whose regions are shared code."""
    return [
        speed_finding(pairs.run(session, Pair(depths.deep, OURS, THEIRS, THREADS), repeats))
        for depths in DEPTHS
    ]


def speed_finding(pair: Pair) -> Finding:
    """At least ``SPEED_LIMIT`` of Inductor's speed, or the graphs left whole with a reason."""
    claim = (
        f"{pair.model}: {pair.a} at least {SPEED_LIMIT:g} of {pair.b}'s speed, or its graphs left "
        "whole and the reason reported"
    )
    data = {"pair": pair, "limit": SPEED_LIMIT}
    if pair.speed is None or pair.latency is None:
        return Finding(claim, pair.failure, "no", data)
    calls = ", ".join(f"{arm} {pair.call_ms(arm):.3f} ms" for arm in (pair.a, pair.b))
    graphs = pair.of(pair.a)[-1]["board"]["graphs"]
    cut = "; ".join(how_cut(graph) for graph in graphs if graph["regions"])
    measured = f"{pair.speed} beside eager; {pair.latency} times a call; {calls}; {cut}"
    whole = all(graph["whole"] and graph["notes"] for graph in graphs if graph["regions"])
    holds = judge_at_least(pair.speed, SPEED_LIMIT)
    return Finding(claim, measured, "yes" if holds == "no" and whole else holds, data)


def how_cut(graph: dict[str, Any]) -> str:
    """One graph's cut in words, with what the report says of it."""
    if graph["whole"]:
        cut = "whole"
    else:
        cut = f"{graph['regions']} regions, {graph['lowered']} of them lowered"
    notes = f" ({'; '.join(graph['notes'])})" if graph["notes"] else ""
    return f"{graph['name']} {cut}{notes}"
