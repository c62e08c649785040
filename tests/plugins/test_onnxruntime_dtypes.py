"""Every op of ONNX Runtime's table in every dtype: declined with a reason, or right.

Ops and arguments are those of the graphs of ``test_onnxruntime_ops``, with tensors of another dtype
in the place of those of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tests.plugins import test_onnxruntime_ops as sweep
from tests.support import onnx_cases as cases

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

from fuseboard_onnxruntime._ops import table

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
#: What eager refuses: a dtype that it has no kernel for, a float where an integer has to be.
REFUSALS = (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError)
#: How many calls of each op are tried; further ones differ in sizes and layouts alone.
CALLS = 3
#: Ops to a test.
GROUPS = 6


@cache
def calls() -> dict[Any, list[tuple[list[Any], Any]]]:
    """Op of the table → leaves and structure of the arguments that the sweep's graphs have."""
    found: dict[Any, dict[str, tuple[list[Any], Any]]] = {}
    for graph in _graphs():
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target in table():
                leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
                leaves = [_without_data(graph, leaf) for leaf in leaves]
                found.setdefault(node.target, {})[str(leaves)] = (leaves, structure)
    return {op: list(ways.values())[:CALLS] for op, ways in found.items()}


def _graphs() -> Iterator[GraphModule]:
    for name in sweep.NAMES:
        inputs, function = next(iter(sweep.inputs_of(name).values())), sweep.function_of(name)
        try:
            with torch.no_grad():
                yield make_fx(lambda *args, f=function: f(*args), tracing_mode="fake")(*inputs)
        except REFUSALS:
            continue


def _without_data(graph: GraphModule, leaf: Any) -> Any:
    if not isinstance(leaf, Node):
        return leaf
    value = getattr(graph, str(leaf.target)) if leaf.op == "get_attr" else leaf.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def numbers(like: torch.Tensor, dtype: torch.dtype, seed: int, large: bool) -> torch.Tensor:
    """Of a tensor's shape; large ones reach the limits of the dtype."""
    if dtype == torch.bool:
        return cases.flags(*like.shape, seed=seed)
    if dtype.is_floating_point:
        return cases.floats(*like.shape, seed=seed)
    low, high = (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if large else (-5, 10)
    low = max(low, torch.iinfo(dtype).min)
    return cases.ints(*like.shape, low=low, high=high, seed=seed, dtype=dtype)


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any], list[torch.Tensor]]]:
    """What is special about a call, a function of tensors that makes it, and the tensors."""
    for leaves, structure in calls()[op]:
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        floats = [i for i, leaf in enumerate(given) if leaf.is_floating_point()]
        for whole in {False, any(isinstance(leaf, float) for leaf in leaves)}:
            call = _caller(op, [_whole(leaf) if whole else leaf for leaf in leaves], structure)
            for dtype in DTYPES if floats else ():
                ways = [("all", floats, False)]
                if dtype != torch.bool:
                    ways.append(("all, large", floats, True))
                if len(floats) > 1:
                    ways.append(("the first", floats[:1], False))
                    ways.append(("but the first", floats[1:], False))
                for name, changed, large in ways:
                    tensors = [
                        numbers(leaf, dtype, i, large) if i in changed else _as_it_was(leaf, i)
                        for i, leaf in enumerate(given)
                    ]
                    yield f"{dtype}, {name}, whole scalars: {whole}", call, tensors


def _caller(op: Any, leaves: list[Any], structure: Any) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return op(*args, **kwargs)

    return call


def _whole(leaf: Any) -> Any:
    return int(leaf * 4) if isinstance(leaf, float) and abs(leaf) < 1e9 else leaf


def _as_it_was(leaf: torch.Tensor, seed: int) -> torch.Tensor:
    """Indices aren't negative."""
    kept = numbers(leaf, leaf.dtype, seed, False)
    return kept.abs() % 2 if leaf.dtype == torch.int64 else kept


def wrong(op: Any) -> dict[str, str]:
    """What is special about a call → what is wrong with it."""
    found = {}
    for name, call, tensors in variants(op):
        try:
            expected = sweep.flat(call(*tensors))
        except REFUSALS:
            continue
        try:
            became = sweep.outcome(call, tensors, expected, False)
        except Exception as error:
            became = f"{type(error).__name__}: {error}"
        if isinstance(became, str):
            found[f"{op}, {name}"] = became
    return found


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.thorough
def test_what_is_claimed_is_right_in_each_dtype(group):
    """No kernel is missing for what is claimed, none rounds, saturates or loses bits."""
    found: dict[str, str] = {}
    for op in sorted(calls(), key=str)[group::GROUPS]:
        found.update(wrong(op))
    assert not found


@pytest.mark.thorough
def test_each_op_of_the_table_is_called():
    ops = {op for op in table() if isinstance(op, torch._ops.OpOverload)}
    # test_onnxruntime_int8.py calls PT2E's
    assert {op for op in ops if op.namespace != "quantized_decomposed"} == set(calls())


NUMBER = cases.ints(5, 7, low=-(2**62), high=2**62)
SPECIAL_CALLS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "a sum that wraps around": (lambda x: x.sum(dtype=torch.int32), [NUMBER.int()]),
    "a sum of int64": (lambda x: x.sum(0), [NUMBER]),
    "a sum of booleans": (lambda x: x.sum(-1), [cases.flags(5, 7)]),
    "a comparison beyond the dtype": (lambda x: x == 2**40 + 1, [NUMBER.int()]),
    "a rounded quotient": (lambda x: torch.div(x, 7, rounding_mode="floor"), [NUMBER]),
    "a quotient": (lambda x: x // 7, [NUMBER]),
    "roots": (
        lambda x: (x**0.5, x**-0.5, x**2, x**-1),
        [torch.tensor([-2.0, -0.0, 0.0, torch.inf, -torch.inf, torch.nan])],
    ),
    "bounds of floats": (lambda x: x.clamp(-0.5, 2.5), [cases.ints(5, 7)]),
    "one bound of floats": (
        lambda x: (x.clamp_min(-0.5), x.clamp_max(2.5)),
        [cases.ints(5, 7)],
    ),
    "bounds of booleans": (lambda x: x.clamp(0, 3), [cases.flags(5, 7)]),
}


@pytest.mark.parametrize("name", SPECIAL_CALLS)
def test_special_numbers(name):
    function, inputs = SPECIAL_CALLS[name]
    became = sweep.outcome(function, inputs, sweep.flat(function(*inputs)), False)
    assert not isinstance(became, str), became
