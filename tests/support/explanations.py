"""Explanations made by hand: what a page is drawn from, without compiling anything."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from fuseboard import Explanation
from fuseboard.contracts import Trip
from fuseboard.report.data import (
    Break,
    CandidateReport,
    FusionReport,
    GraphReport,
    InputReport,
    NodeReport,
    RegionReport,
)

#: The ops of a layer: each reads the one before it, the last one the layer's input as well.
LAYER = ("native_layer_norm", "getitem", "t", "addmm", "gelu", "add")


def node(
    name: str, *inputs: str, region: str = "", backend: str = "fast", **more: Any
) -> NodeReport:
    """A node of shape ``[4, 8]`` whose op is its name without the number."""
    op = name.rstrip("0123456789").rstrip("_")
    told = {"reason": f"{backend} comes first", "value": "float32[4, 8]", **more}
    return NodeReport(name, f"aten.{op}.default", backend, region, inputs=inputs, **told)


def graph(nodes: list[NodeReport], same_as: dict[str, str] | None = None) -> GraphReport:
    """A graph with a region for each name that the nodes give."""
    alike = same_as or {}
    members: dict[str, list[NodeReport]] = {}
    for member in nodes:
        if member.region:
            members.setdefault(member.region, []).append(member)
    regions = [
        RegionReport(
            name,
            own[0].backend,
            dict(Counter(member.op for member in own)),
            same_as=alike.get(name, ""),
            lower_s=0.0 if name in alike else 0.25,
        )
        for name, own in members.items()
    ]
    return GraphReport(
        name="inference0",
        kind="inference",
        frame="0/0 Net.forward (/a/model.py:10)",
        backends=("fast", "eager"),
        inputs=[InputReport("x", "float32[4, 8]"), InputReport("w", "float32[8, 8]", static=True)],
        outputs=(nodes[-1].name,),
        nodes=nodes,
        regions=regions,
        seconds={"partition": 0.25, "lower": 0.75},
    )


def layered(layers: int, source: Path | None = None, ops: tuple[str, ...] = LAYER) -> Explanation:
    """An embedding and a head on eager, and between them layers that share one lowered region."""
    line = f"{source}:2" if source else ""
    nodes = [
        node(
            "embedding",
            "w",
            "x",
            region="inference0.region0",
            backend="eager",
            declined={"fast": "issue 12: no embedding"},
            source=line,
        )
    ]
    for layer in range(layers):
        region, start = f"inference0.region{layer + 1}", nodes[-1].name
        for position, op in enumerate(ops):
            inputs = (nodes[-1].name, *((start,) if position == len(ops) - 1 else ()))
            module = f"layers.{layer}"
            nodes.append(node(f"{op}_{layer}", *inputs, region=region, module=module))
    last = f"inference0.region{layers + 1}"
    nodes.append(node("softmax", nodes[-1].name, region=last, backend="eager"))
    alike = {f"inference0.region{i}": "inference0.region1" for i in range(2, layers + 1)}
    made = graph(nodes, alike)
    if layers:
        first = made.regions[1]
        first.fusions = [
            FusionReport(
                0, "linear+gelu", "fast", tuple(f"{op}_0" for op in ops[-3:-1]), applied=True
            )
        ]
        first.hoisted = 3
        first.notes = ["sdpa fell back"]
    made.notes = ["whole-graph plan considered"]
    made.trips = [Trip("clumsy", "lower", last, "ValueError: no such op", "eager", "/a/model.py:3")]
    stop = Break("Call of print", "can't be traced", ("remove it",), "forward", "/a/model.py:7")
    return Explanation([made], breaks=[stop])


def whole(layers: int, ops: tuple[str, ...] = LAYER) -> Explanation:
    """The same as :func:`layered`, in one region."""
    made = layered(layers, ops=ops).graphs[0]
    nodes = [
        dataclasses.replace(n, region="inference0.region0", backend="fast") for n in made.nodes
    ]
    return Explanation([graph(nodes)], breaks=[])


def chosen(candidates: list[CandidateReport], **more: Any) -> Explanation:
    """A graph of one op, with candidates and other fields of a :class:`GraphReport`."""
    made = graph([node("exp", "x", region="inference0.region0")])
    made.candidates = candidates
    return Explanation([dataclasses.replace(made, **more)], breaks=[])
