"""Times the partitioner in a fresh process: ``python -m benchmarks.partitioning_worker REQUEST``.

Started by ``benchmarks.partitioning`` alone; REQUEST is JSON, and so is the answer on stdout. It
takes the steps that ``fuseboard.pipeline.stages`` takes.
"""

from __future__ import annotations

import cProfile
import gc
import io
import json
import pstats
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule, Node

from benchmarks.synthetic import layered_graph, random_graph
from fuseboard.contracts import BackendInfo, Claim, Decline
from fuseboard.partition.board_nodes import board_nodes
from fuseboard.partition.claims import arbitrate, claim_nodes
from fuseboard.partition.garbage import collection_paused
from fuseboard.partition.paths import ModulePaths
from fuseboard.partition.plan import make_plan
from fuseboard.partition.plan_check import PlanCheck
from fuseboard.partition.regions import cut_regions
from fuseboard.partition.support import Support
from fuseboard.torch_api.copies import copy_graph
from fuseboard.torch_api.frames import FrameScope

Claims = dict[str, list[Claim | Decline]]

#: Backend → the share of ops that it claims, drawn for each op.
SHARES = {"first": 0.5, "second": 0.8, "third": 0.95, "eager": 1.0}
PROFILED_LINES = 30


class Steps:
    """Seconds of each step, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def backends() -> list[BackendInfo]:
    return [BackendInfo(name) for name in SHARES]


def claims_of(graph: GraphModule, nodes: Mapping[str, Node], random_claims: bool) -> Claims:
    """Each backend's claims, less what the board declines on its behalf."""
    chance = random.Random(1)
    support = Support(nodes.values())
    claims: Claims = {}
    for info in backends():
        share = SHARES[info.name] if random_claims else 1.0

        def why_not(node: Node, share: float = share) -> str | None:
            return None if chance.random() < share else "not drawn"

        answers = claim_nodes(graph, why_not)
        claims[info.name] = arbitrate(answers, support.refusals(info), nodes)
    return claims


def partition(graph: GraphModule, random_claims: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    step = Steps()
    with step("copies for plugins"):
        for _ in range(len(SHARES) + 1):  # one for each claim hook, one for the plan hook
            copy_graph(graph)
    with step("board's own nodes"):
        kept = board_nodes(graph)
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]
    with step("claims"):
        claims = claims_of(graph, {node.name: node for node in nodes}, random_claims)
    with step("plan"):
        plan = make_plan(
            graph=graph,
            kind="inference",
            claims=claims,
            backends=backends(),
            pins={},
            **arguments,
        )
    with step("check"):
        PlanCheck(nodes, claims, {}, ModulePaths(FrameScope({}, [])), "benchmark")(plan)
    with step("cut"):
        cuts = cut_regions(graph, plan.placements, list(kept), plan.regions)
        for cut in cuts:
            cut.graph  # noqa: B018  it is made when it is asked for, as lowering does
    return {
        "ops": len(nodes),
        "regions": len(cuts),
        "planned": len(plan.regions),
        "seconds": step.seconds,
    }


def serve(request: dict[str, Any]) -> dict[str, Any]:
    make = random_graph if request["graph"] == "random" else layered_graph
    graph = make(request["nodes"])
    gc.collect()
    profile = cProfile.Profile() if request["profile"] else None
    if profile is not None:
        profile.enable()
    with collection_paused():
        result = partition(graph, request["random_claims"], request["arguments"])
    if profile is not None:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(PROFILED_LINES)
        result["profile"] = text.getvalue()
    return result


if __name__ == "__main__":
    print(json.dumps(serve(json.loads(sys.argv[1]))))
