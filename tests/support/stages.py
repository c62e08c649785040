"""Functions that decide a stage by the settings: right ones, and ones that misbehave."""

from __future__ import annotations

from typing import Any

import torch

import fuseboard

aten = torch.ops.aten


def path(function: Any) -> str:
    """As the setting ``stages`` has it."""
    return f"{function.__module__}:{function.__name__}"


def _instead(graph: Any, nodes: Any, make: Any) -> list[fuseboard.Fusion]:
    """A rewrite of each of some nodes: what ``make(node)`` names, in its place."""

    def rewrite(node: Any) -> None:
        function, args = make(node)
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(function, args)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)

    return [fuseboard.Fusion("r", (n.name,), lambda n=n: rewrite(n)) for n in nodes]  # type: ignore[misc]


# --- fuse -----------------------------------------------------------------------------------------


def halves_graph(graph: Any, kind: str, region: Any) -> Any:
    """``x / 2`` for ``x * 0.5``, in whole graphs."""
    return None if region is not None else halves(graph, kind, region)


def writes_when_asked(graph: Any, kind: str, region: Any) -> Any:
    """Triples what was to be halved, and says that it rewrites nothing."""
    if region is not None:
        return None
    for node in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.args = (node.args[0], 3.0)
    return []


def halves_region(graph: Any, kind: str, region: Any) -> Any:
    """The same, in regions."""
    return None if region is None else halves(graph, kind, region)


def halves(graph: Any, kind: str, region: Any) -> Any:
    products = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    halved = [node for node in products if node.args[1] == 0.5]
    return _instead(graph, halved, lambda n: (aten.div.Tensor, (n.args[0], 2.0)))


def none_graph(graph: Any, kind: str, region: Any) -> Any:
    """Whole graphs are left as they are, whatever plugins offer."""
    return [] if region is None else None


def wrong_graph(graph: Any, kind: str, region: Any) -> Any:
    return None if region is not None else wrong(graph)


def wrong_region(graph: Any, kind: str, region: Any) -> Any:
    return None if region is None else wrong(graph)


def wrong(graph: Any) -> Any:
    """Another function than the sine."""
    sines = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    return _instead(graph, sines, lambda n: (aten.tanh.default, n.args))


def fuse_raises(graph: Any, kind: str, region: Any) -> Any:
    raise ZeroDivisionError("no rewrite found")


def fuse_answers_one(graph: Any, kind: str, region: Any) -> Any:
    return fuseboard.Fusion("alone", (), lambda: None)


def fuse_exits(graph: Any, kind: str, region: Any) -> Any:
    raise SystemExit(3)


def fuse_changes_threads(graph: Any, kind: str, region: Any) -> Any:
    torch.set_num_threads(torch.get_num_threads() + 1)


# --- lower ----------------------------------------------------------------------------------------

#: Names of the regions that ``lowers`` lowered, and how often their code was called.
calls: dict[str, int] = {}


def lowers(region: Any, inputs: Any) -> Any:
    """What eager does, and counts."""
    code = fuseboard.lower_eagerly(region).call

    def call(args: list[Any]) -> Any:
        calls[region.name] = calls.get(region.name, 0) + 1
        return code(args)

    calls[region.name] = 0
    return fuseboard.LoweredRegion(call=call, notes=("counted",), artifact=b"nobody can load it")


def lowers_none(region: Any, inputs: Any) -> Any:
    return None


def lowers_raise(region: Any, inputs: Any) -> Any:
    raise ZeroDivisionError("no code found")


def lowers_nothing(region: Any, inputs: Any) -> Any:
    return "code"


def _around(region: Any, around: Any) -> Any:
    code = fuseboard.lower_eagerly(region).call
    return fuseboard.LoweredRegion(call=lambda args: around(code, args))


def lowers_wrong_values(region: Any, inputs: Any) -> Any:
    return _around(region, lambda code, args: [out + 0.5 for out in code(args)])


def lowers_other_strides(region: Any, inputs: Any) -> Any:
    return _around(region, lambda code, args: [out.t().contiguous().t() for out in code(args)])


def lowers_what_raises(region: Any, inputs: Any) -> Any:
    return _around(region, lambda code, args: 1 // 0)


def lowers_what_writes(region: Any, inputs: Any) -> Any:
    return _around(region, lambda code, args: (args[0].mul_(2), code(args))[1])


# --- verify, measure ------------------------------------------------------------------------------


def verify_in_float64(
    region: Any, expected: Any, result: Any, inputs: Any, reference: Any
) -> fuseboard.Verdict:
    """Agrees, and leaves another default dtype."""
    torch.set_default_dtype(torch.float64)
    return fuseboard.Verdict(ok=True)


def verify_rejects(region: Any, result: Any) -> Any:
    if region.backend == "eager":
        return None
    return fuseboard.Verdict(False, "it isn't wanted", by_value=True)


def verify_raises(region: Any) -> Any:
    raise ZeroDivisionError("no verdict found")


def measure_none(calls: Any, budget_s: float) -> Any:
    return []
