"""Reductions, softmax, sorting: rows of special values, empty ones, single ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseboard.testing.program import (
    INF,
    NAN,
    Program,
    flags,
    function,
    ints,
    rnd,
    special,
    trained,
)


def _sums(x: Tensor) -> Any:
    whole = x.sum(), x.mean(), x.prod()
    along = x.sum(0), x.mean(-1), x.sum((0, 2), keepdim=True), x.prod(1), x.norm(dim=1)
    return (*whole, *along, x.cumsum(1), x.logsumexp(-1))


def _spreads(x: Tensor) -> Any:
    pair = torch.var_mean(x, dim=1, correction=1)
    return x.var(0), x.std(-1), x.var((0, 2), correction=0), x.std(1, correction=2), *pair


def _extremes(x: Tensor) -> Any:
    pairs = (*x.max(1), *x.min(0))
    return x.amax((0, 2)), x.amin(-1, keepdim=True), x.max(), x.min(), x.argmax(1), *pairs


def _special_rows(x: Tensor) -> Any:
    sums = x.sum(1), x.mean(1), x.prod(1), x.logsumexp(1), x.cumsum(1)
    return (*sums, x.amax(1), x.amin(1), x.max(1).values, x.any(1), x.all(1), x.nansum(1))


def _special_table() -> Tensor:
    return torch.tensor(
        [
            [1.0, NAN, 2.0],
            [INF, 1.0, 2.0],
            [-INF, 1.0, INF],
            [-INF, -INF, -INF],
            [0.0, -0.0, 3.0],
        ]
    )


def _integer_sums(x: Tensor, b: Tensor) -> Any:
    counts = b.sum(), b.sum(1), b.any(0), b.all(1), b.float().mean()
    return (x.sum(), x.sum(0), x.prod(1), x.amax(1), x.argmin(0), x.cumsum(0), *counts)


_REDUCTIONS = (
    function("reduction_sums", _sums, lambda: (rnd(5, 7, 3) + 1.5,)),
    function("reduction_extremes", _extremes, lambda: (rnd(5, 7, 3),)),
)
_SPECIAL_REDUCTIONS = (
    function("reduction_spreads", _spreads, lambda: (rnd(3, 7, 5).permute(2, 1, 0),)),
    function("reduction_nan_and_infinities", _special_rows, lambda: (_special_table(),)),
    function("reduction_integers", _integer_sums, lambda: (ints(5, 4), flags(5, 4))),
    function(
        "reduction_bfloat16",
        lambda x: (x.sum(1), x.mean(0), x.sum(1, dtype=torch.float32), x.amax(), x.var(1)),
        lambda: (rnd(9, 33, dtype=torch.bfloat16) + 2,),
    ),
    function(
        "reduction_of_nothing_and_of_one",
        lambda x, y: (
            *(x.sum(0), x.prod(0), x.mean(0), x.any(), x.all(), x.sum(1), x.cumsum(0)),
            *(y.sum(), y.var(1, correction=0), y.mean(), y.amax(0), y.argmax(1), y.softmax(0)),
        ),
        lambda: (rnd(0, 3), rnd(1, 1)),
    ),
    function(
        "reduction_scans",
        lambda x: (x.cumsum(0), x.cumprod(1), *torch.cummax(x, 1), x.logcumsumexp(0), x.diff()),
        lambda: (rnd(4, 6) / 2 + 1.5,),
    ),
)


def _masked() -> tuple[Tensor]:
    """A row of -inf alone, one with a single finite value, one with +inf, one with NaN."""
    x = rnd(6, 5)
    x[1] = -INF
    x[2, 1:] = -INF
    x[3, 2] = INF
    x[4, 0] = NAN
    return (x,)


_SOFTMAX = (
    function(
        "softmax_dims",
        lambda x: (x.softmax(-1), x.softmax(0), x.log_softmax(-1), x.log_softmax(1)),
        lambda: (rnd(3, 5, 7),),
    ),
)
_SPECIAL_SOFTMAX = (
    function(
        "softmax_infinite_rows",
        lambda x: (x.softmax(-1), x.log_softmax(-1), x.softmax(0)),
        _masked,
    ),
    function(
        "softmax_large_values",
        lambda x: ((x * 1e4).softmax(-1), (x * 1e4 + 3e4).log_softmax(-1)),
        lambda: (ints(5, 7).float(),),
    ),
)


def _distinct() -> tuple[Tensor]:
    """No two equal elements, so that every order is the only one."""
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    return ((order.float() - 17).reshape(5, 7),)


_SORTING = (
    function(
        "sorting_sort",
        lambda x: (*x.sort(), *x.sort(0, descending=True), x.argsort(1), *x.kthvalue(3)),
        _distinct,
    ),
    function(
        "sorting_topk",
        lambda x: (*x.topk(3), *x.topk(2, dim=0, largest=False), x.median(1).values),
        _distinct,
    ),
    function(
        "sorting_stable_ties",
        lambda x: (*x.sort(stable=True), *torch.sort(x, dim=0, descending=True, stable=True)),
        lambda: (ints(6, 9, low=0, high=3),),
    ),
    function(
        "sorting_special_values",
        lambda x: (x.sort(stable=True).values, x.sort(descending=True).values, x.topk(4).values),
        lambda: (special(3, 18),),
    ),
)

PROGRAMS: tuple[Program, ...] = (
    *_REDUCTIONS,
    *_SPECIAL_REDUCTIONS,
    *_SOFTMAX,
    *_SPECIAL_SOFTMAX,
    *_SORTING,
    *trained((*_REDUCTIONS[:1], *_SOFTMAX, *_SORTING[:1])),
)
