"""Graphs with real inputs, for what holds results against float64: ops, models, wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuseboard.profile.judge.reference import Reference, make_reference
from fuseboard.torch_api import internals as torch_internals
from tests.support.values import rnd

Function = Callable[..., Any]


def listed(function: Function) -> Function:
    """The function with its results in a list, as graphs have them."""

    def run(*args: Any) -> list[Any]:
        results = function(*args)
        return list(results) if isinstance(results, list | tuple) else [results]

    return run


def traced(function: Function, *inputs: Any, **how: Any) -> GraphModule:
    """A function as a graph of ATen ops."""
    with torch.no_grad():
        return make_fx(listed(function), **how)(*inputs)


def reference_of(function: Function, *inputs: Any) -> Reference:
    """What a function gives in eager and in float64."""
    return make_reference(traced(function, *inputs), inputs)


@dataclass(frozen=True)
class Captured:
    """A graph as AOTAutograd gives it, the real inputs of a call of it, and what that returned."""

    kind: str
    graph: GraphModule
    inputs: list[Any]
    results: list[Any]


def captured(
    function: Function, *args: Any, backward: bool = False, lower: Function | None = None
) -> list[Captured]:
    """The graphs that a call of a compiled function runs, with what they are run on.

    Inputs are cloned, since what a graph leaves to its caller may overwrite them.

    :param backward: the sum of the results is differentiated, too.
    :param lower: makes something to call of a graph and its fake inputs; else eager runs it.
    """
    found: list[Captured] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def compile(graph: GraphModule, example: Any) -> Any:
            run = None if lower is None else lower(graph, example)

            def call(inputs: list[Any]) -> Any:
                given = list(inputs)
                kept = [v.clone() if isinstance(v, torch.Tensor) else v for v in given]
                results = graph(*given) if run is None else run(given)
                copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in results]
                found.append(Captured(kind, graph, kept, copies))
                return results

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return compile

    def backend(graph: GraphModule, example: Any, **options: Any) -> Any:
        compilers = {
            "fw_compiler": compiler("forward"),
            "bw_compiler": compiler("backward"),
            "inference_compiler": compiler("inference"),
        }
        return torch_internals.aot_autograd(**compilers)(graph, example)

    torch._dynamo.reset()
    results = torch.compile(function, backend=backend)(*args)
    if backward:
        results.sum().backward()
    return found


# --- ops -----------------------------------------------------------------------------------------

#: Elements of most outputs below: one of them is wrong in 10,000.
SIDE = 100


def op_cases(dtype: torch.dtype) -> Iterator[tuple[str, Function, tuple[torch.Tensor, ...]]]:
    """Small graphs on floating inputs, with results of 10,000 elements."""
    x = rnd(SIDE, SIDE, dtype=dtype)
    y = rnd(SIDE, SIDE, seed=1, dtype=dtype)
    positive = x.abs() + 0.1
    row = rnd(SIDE, seed=2, dtype=dtype)
    image = x.view(1, 1, SIDE, SIDE)
    kernel = rnd(1, 1, 3, 3, seed=3, dtype=dtype)
    heads = [rnd(1, 4, 25, 100, seed=seed, dtype=dtype) for seed in range(3)]
    yield "add", torch.add, (x, y)
    yield "sub", lambda a, b: torch.sub(a, b, alpha=0.3), (x, y)
    yield "mul", torch.mul, (x, y)
    yield "div", torch.div, (x, positive)
    yield "scalars", lambda a: a * 0.1 + 0.7, (x,)
    yield "exp", torch.exp, (x,)
    yield "exp, wide", lambda a: (a * 5).exp(), (x,)
    yield "log", torch.log, (positive,)
    yield "sin", lambda a: torch.sin(a * 10), (x,)
    yield "tanh", torch.tanh, (x,)
    yield "sigmoid", torch.sigmoid, (x,)
    yield "erf", torch.erf, (x,)
    yield "gelu", F.gelu, (x,)
    yield "gelu, tanh", lambda a: F.gelu(a, approximate="tanh"), (x,)
    yield "silu", F.silu, (x,)
    yield "softplus", F.softplus, (x,)
    yield "rsqrt", torch.rsqrt, (positive,)
    yield "pow", lambda a: a**3, (x,)
    yield "atan2", torch.atan2, (x, y)
    yield "lerp", lambda a, b: torch.lerp(a, b, 0.3), (x, y)
    yield "addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), (x, y)
    yield "softmax", lambda a: F.softmax(a, -1), (x,)
    yield "log_softmax", lambda a: F.log_softmax(a, -1), (x,)
    yield "layer_norm", lambda a, w: F.layer_norm(a, (SIDE,), w, w), (x, row)
    yield "rms_norm", lambda a, w: F.rms_norm(a, (SIDE,), w), (x, row)
    yield "group_norm", lambda a: F.group_norm(a.view(1, SIDE, SIDE), 10), (x,)
    yield "batch_norm", lambda a, m: F.batch_norm(a, m, m.abs() + 1), (x, row)
    yield "mm", torch.mm, (x, y)
    yield "linear", F.linear, (x, y, row)
    yield "bmm", lambda a, b: torch.bmm(a.view(4, 25, 100), b.expand(4, 100, 100)), (x, y)
    yield "conv", lambda a, k: F.conv2d(a, k, padding=1), (image, kernel)
    yield "avg_pool", lambda a: F.avg_pool2d(a, 3, 1, 1), (image,)
    yield "attention", F.scaled_dot_product_attention, tuple(heads)
    yield "attention, causal", _causal, tuple(heads)
    yield "cumsum", lambda a: a.cumsum(-1), (x,)
    yield "mlp", lambda a, b: F.gelu(a @ b / 10) @ b / 10, (x, y)
    yield "sub mean", lambda a: a - a.mean(), (x,)
    yield "half inside", lambda a, b: (a.half() * b.half()).to(a.dtype), (x, y)
    yield "index_add", _index_add, (x, y)
    yield "upsample", _upsample, (image,)
    yield "copies", lambda a, b: torch.cat([a[:50].t(), b[50:].flip(1).t()], 1), (x, y)
    yield "relu", torch.relu, (x,)
    yield "where", lambda a, b: torch.where(a > b, a, -b), (x, y)
    yield "masked", lambda a: a.masked_fill(a > 1, 0.0), (x,)
    yield "max_pool", lambda a: F.max_pool2d(a, 3, 1, 1), (image,)
    yield "gather", lambda a: a.gather(1, (a * 0).long() + 3), (x,)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _index_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.index_add(0, torch.arange(SIDE) % 7, b)


def _upsample(a: torch.Tensor) -> torch.Tensor:
    return F.interpolate(a[..., :50, :50], scale_factor=2, mode="bilinear")


#: Names in :func:`op_cases` whose results are elements of the inputs, bit by bit.
EXACT = frozenset({"copies", "relu", "where", "masked", "max_pool", "gather"})
