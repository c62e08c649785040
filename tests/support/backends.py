"""Backends for tests: plugins that are on the board for one block, and how to compile with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard.contracts import Trip
from fuseboard.lower import background
from fuseboard.report.data import GraphReport, ledger
from tests.board_fakes import backend, plugin

aten = torch.ops.aten


def compiled(target: Any, *backends: str, dynamic: bool | None = None, **options: Any) -> Any:
    """``torch.compile`` through the board; ``eager`` alone where no backend is named."""
    return torch.compile(
        target,
        backend="fuseboard",
        dynamic=dynamic,
        options={"backends": list(backends) or ["eager"], **options},
    )


@contextmanager
def plugged(name: str = "fake", *, call: Any = None, **hooks: Any) -> Iterator[str]:
    """A backend on the board for the block, which claims everything and runs it as eager does.

    :param call: wraps the lowered callable: ``call(eager_call, region)`` → the one to use.
    :param hooks: replaces or adds hooks, by their names without ``fuseboard_``. A hook of None
        is left out.
    """
    calls = call or (lambda eager_call, region: eager_call)

    def lower(region: fuseboard.Region) -> fuseboard.LoweredRegion:
        eager_call = fuseboard.lower_eagerly(region).call
        return fuseboard.LoweredRegion(call=calls(eager_call, region))

    given = {"claim": claim_all, "lower": lower, **hooks}
    info = given.pop("info", {})
    with registered(
        backend(
            name,
            {key: hook for key, hook in given.items() if hook is not None},
            **{"training": True, "dynamic_shapes": True, **info},
        ),
        name,
    ):
        yield name


@contextmanager
def observing(name: str = "observer", **hooks: Callable[..., Any]) -> Iterator[str]:
    """A plugin without a backend on the board for the block."""
    with registered(plugin(**hooks), name):
        yield name


@contextmanager
def registered(plugin: Any, name: str) -> Iterator[None]:
    fuseboard.register(plugin, name)
    try:
        yield
    finally:
        fuseboard.unregister(name)


def claim_all(graph: GraphModule) -> list[Any]:
    return fuseboard.claim_nodes(graph, lambda node: None)


def claim_ops(*names: str) -> Callable[..., list[Any]]:
    """A claim hook for ops of these names, such as ``relu``."""

    def claim(graph: GraphModule) -> list[Any]:
        return fuseboard.claim_nodes(graph, lambda n: None if op_name(n) in names else "another op")

    return claim


def op_name(node: Node) -> str:
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))


def forget_other_graphs(monkeypatch: Any) -> None:
    """What other tests compiled is neither reported nor waited for."""
    ledger.clear()
    monkeypatch.setattr(background, "_unsettled", weakref.WeakSet())


# --- a backend that packs weights -----------------------------------------------------------------


def pack_linears(graph: GraphModule, region: Any) -> list[fuseboard.Fusion] | None:
    """A fuse hook: every ``addmm(bias, x, t(w))`` reads a contiguous copy of ``t(w)`` instead."""
    if region is None:
        return None
    fusions = []
    for node in graph.graph.find_nodes(op="call_function", target=aten.addmm.default):
        weight = node.args[2]
        if isinstance(weight, Node) and weight.target is aten.t.default:
            names = (node.name,)
            fusions.append(fuseboard.Fusion("packed linear", names, _packing(graph, node)))
    return fusions


def _packing(graph: GraphModule, node: Node) -> Callable[[], None]:
    def apply() -> None:
        bias, x, transposed = node.args
        with graph.graph.inserting_before(node):
            packed = graph.graph.call_function(
                aten.clone.default,
                (transposed,),
                {"memory_format": torch.contiguous_format},
            )
            value = transposed.meta["val"]
            packed.meta["val"] = value.clone(memory_format=torch.contiguous_format)
        node.args = (bias, x, packed)

    return apply


# --- what happened --------------------------------------------------------------------------------


def last_graph(kind: str = "inference") -> GraphReport:
    """The newest report of a graph of this kind."""
    return next(graph for graph in reversed(ledger.graphs()) if graph.kind == kind)


def all_trips() -> list[Trip]:
    """The trips of every graph since the ledger was cleared."""
    return [trip for graph in ledger.graphs() for trip in graph.trips]


def hoisted(kind: str = "inference") -> int:
    """How many values the newest graph computes once instead of in each call."""
    return sum(region.hoisted for region in last_graph(kind).regions)


def graph_count(*kinds: str) -> int:
    """How many graphs of these kinds were compiled since the ledger was cleared."""
    return sum(graph.kind in kinds for graph in ledger.graphs())
