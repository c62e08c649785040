"""Which kernel runs a linear layer: measured per shape, since no packing wins everywhere.

On a shared AVX2 machine oneDNN's packed product took 37 ms where plain MKL took 47 at (512, 768,
3072), and 68 us where it took 24 at (1, 256, 256): there the cost of making the call decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

import fuseboard
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pointwise import PostOp

Step = PostOp | Literal["add", "sub"]

#: Kernels, simplest first: a later one must win by ``MARGIN``.
#: ``plain`` as eager · ``vector`` matrix times vector · ``onednn`` packed · ``onednn_fused``
#: packed, the first step inside · ``mkl`` packed. Steps that aren't inside follow in place.
KERNELS = ("plain", "vector", "onednn", "onednn_fused", "mkl")

UNPACKED = ("plain", "vector")

MARGIN = 0.03

#: What it costs in each call to see that a packed weight is still that of the model.
CHECK_US = 0.5

#: Seconds for one shape, and how much slower than the fastest a kernel may be in the first look
#: to be measured any further.
SHAPE_BUDGET_S = 0.15
FIRST_LOOK = 1.25

#: Larger layers are measured by a part of them: elements of a weight (rows are left out, to spare
#: memory), and multiplications (rows of the input are left out, to spare time).
LARGEST_WEIGHT = 1 << 24
LARGEST_WORK = 1 << 28

#: How many rows of a product are compared with float64.
COMPARED_ROWS = 32


@dataclass(frozen=True)
class LinearShape:
    """What a choice depends on. ``x`` is (m, k), the weight (n, k), the result (m, n).

    :ivar transposed: the weight lies in memory as (k, n).
    :ivar steps: what follows the product: post-operations, and ``"add"`` or ``"sub"`` for a
        residual of the result's shape.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    bias: bool
    transposed: bool
    steps: tuple[Step, ...]

    @property
    def work(self) -> int:
        return self.m * self.k * self.n


class Budget:
    """Seconds left for choosing in one graph."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds


_chosen: dict[tuple[Any, ...], str] = {}
_lock = fuseboard.fork_safe_lock()


def choose(shape: LinearShape, possible: tuple[str, ...], options: Options, budget: Budget) -> str:
    """One of ``possible``; the choice is remembered for this process, as :func:`remembered` is."""
    forced = {"none": "plain", "onednn": "onednn_fused", "mkl": "mkl"}.get(options.packing)
    if forced is not None:
        usable = [name for name in (forced, forced.removesuffix("_fused")) if name in possible]
        return usable[0] if usable else "plain"
    if len(possible) == 1:
        return possible[0]
    return remembered(
        (shape, possible, options.max_error),
        lambda: candidates(shape, possible, options.max_error),
        budget,
    )


def remembered(
    what: Any,
    calls: Callable[[], Mapping[str, Callable[[], Any]]],
    budget: Budget,
) -> str:
    """The fastest of ``calls``, as measured once; ``plain`` where no time is left.

    :param what: tells what is chosen for; the number of threads and oneDNN's switches are added.
    """
    key = (what, torch.get_num_threads(), _ops.precisions())
    with _lock:  # one at a time: measurements of two threads would disturb each other
        if key in _chosen:
            return _chosen[key]
        if budget.left_s <= 0:
            return "plain"
        start = time.perf_counter()
        _chosen[key] = _fastest(calls(), min(SHAPE_BUDGET_S, budget.left_s))
        budget.spend(time.perf_counter() - start)
        return _chosen[key]


def _fastest(calls: Mapping[str, Callable[[], Any]], budget_s: float) -> str:
    """The name of the fastest call; the first named within the margin of it."""
    with fuseboard.real_tensors():
        first = {name: _look(call) for name, call in calls.items()}
        bound = FIRST_LOOK * min(first.values())
        close = {name: calls[name] for name in calls if first[name] <= bound}
        if len(close) == 1:
            return next(iter(close))
        found = fuseboard.measure(list(close.values()), budget_s)
    latency = {
        name: one.latency_us + (CHECK_US if name not in UNPACKED else 0.0)
        for name, one in zip(close, found, strict=True)
    }
    bound = min(latency.values()) * (1 + MARGIN)
    return next(name for name in close if latency[name] <= bound)


def _look(call: Callable[[], Any]) -> float:
    """Seconds of the better of two calls, after one that warms up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@dataclass(frozen=True)
class ConvolutionShape:
    """What a choice depends on: sizes of input and weight, the convolution's arguments, and
    whether a batch norm follows.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    norm: bool


def choose_convolution(shape: ConvolutionShape, budget: Budget) -> str:
    """``packed`` or ``plain`` for a convolution whose neighbours aren't channels-last."""
    return remembered(shape, lambda: _convolutions(shape), budget)


def _convolutions(shape: ConvolutionShape) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    arguments = (shape.padding, shape.stride, shape.dilation, shape.groups)
    with fuseboard.real_tensors():
        x = torch.randn(shape.x, generator=generator, device="cpu").to(shape.dtype)
        weight = torch.randn(shape.weight, generator=generator, device="cpu").to(shape.dtype)
        reorder = torch.ops.mkldnn._reorder_convolution_weight.default
        prepared = reorder(weight, *arguments, shape.x)
        statistics = torch.ones(shape.weight[0], dtype=shape.dtype, device="cpu")
    pointwise = torch.ops.mkldnn._convolution_pointwise.default
    padding, stride, dilation, groups = arguments
    convolve: Callable[..., torch.Tensor] = torch.conv2d if x.dim() == 4 else torch.conv3d

    def plain() -> torch.Tensor:
        result = convolve(x, weight, None, stride, padding, dilation, groups)
        if not shape.norm:
            return result
        norms = (statistics,) * 4
        return torch.batch_norm(result, *norms, False, 0.1, 1e-5, False)

    def packed() -> torch.Tensor:
        return pointwise(x, prepared, None, *arguments, "none", [], "").contiguous()

    return {"plain": plain, "packed": packed}


def candidates(
    shape: LinearShape, possible: tuple[str, ...], max_error: float
) -> dict[str, Callable[[], Any]]:
    """Calls on random tensors, by kernel; imprecise kernels are left out.

    The default generator isn't touched.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(shape.dtype)

    n = max(1, min(shape.n, LARGEST_WEIGHT // shape.k))
    m = max(1, min(shape.m, LARGEST_WORK // (shape.k * n)))
    with fuseboard.real_tensors():
        x, other = random(m, shape.k), random(m, n)
        weight = random(shape.k, n).t() if shape.transposed else random(n, shape.k)
        bias = random(n) if shape.bias else None
        products = {
            name: _product(name, shape.steps, x, weight, bias, other)
            for name in KERNELS
            if name in possible
        }
        exact = _ops.nn.linear(x[:COMPARED_ROWS].double(), weight.double())
        allowed = max_error * error_of(_product("plain", (), x, weight, None, other), exact)
        precise = [
            name
            for name in products
            if name == "plain"
            or error_of(_product(name, (), x, weight, None, other), exact) <= allowed
        ]
    return {
        name: _with_steps(products[name], shape.steps[name == "onednn_fused" :], other)
        for name in precise
    }


def error_of(product: Callable[[], torch.Tensor], exact: torch.Tensor) -> float:
    """The root of the mean squared distance of a product from its value in float64."""
    distance = product()[:COMPARED_ROWS].double() - exact
    return float(distance.square().mean().sqrt())


def _product(
    name: str,
    steps: tuple[Step, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """One kernel, called as the rewritten graph would call it."""
    (m, k), n = x.shape, len(weight)
    pointwise = torch.ops.mkldnn._linear_pointwise
    if name == "plain":
        return lambda: _ops.nn.linear(x, weight, bias)
    if name == "vector":
        row = x.view(k)
        if bias is None:
            return lambda: torch.mv(weight, row).view(m, n)
        return lambda: torch.addmv(bias, weight, row).view(m, n)
    if name == "mkl":
        dense = weight.contiguous()
        packed = torch.ops.mkl._mkl_reorder_linear_weight(dense, m)
        product = torch.ops.mkl._mkl_linear.default
        return lambda: product(x, packed, dense, bias, m)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
    if name == "onednn" or not steps:
        return lambda: pointwise.default(x, packed, bias, "none", [], "")
    sign = steps[0]
    if isinstance(sign, str):
        return lambda: pointwise.binary(x, other, packed, bias, sign)
    attr, scalars, algorithm = sign.attr, list(sign.scalars), sign.algorithm
    return lambda: pointwise.default(x, packed, bias, attr, scalars, algorithm)


def _with_steps(
    product: Callable[[], torch.Tensor], steps: tuple[Step, ...], other: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A product with steps in place after it."""

    def call() -> torch.Tensor:
        result = product()
        for step in steps:
            if step == "add":
                result.add_(other)
            elif step == "sub":
                result.sub_(other)
            else:
                step.in_place(result, *step.args, **step.kwargs)
        return result

    return call if steps else product
