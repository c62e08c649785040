"""Indexing, scattering, joining, views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseboard.testing.program import Program, flags, function, ints, rnd, trained


def _basic_indices(x: Tensor) -> Any:
    return (
        x[-1] + 1,
        x[:, -2] * 2,
        x[1:-1, ::2] + 0,
        x[..., None, 0] * 1,
        x[2:2] + 1,
        x[-3:, 5:] + 1,
    )


def _tensor_indices(x: Tensor, rows: Tensor, columns: Tensor) -> Any:
    return x[rows], x[:, columns], x[rows, columns], x[rows[:, None], columns], x[rows[:0]]


def _gathers(x: Tensor, index: Tensor) -> Any:
    picked = x.gather(1, index), torch.take_along_dim(x, index, 1), x.index_select(1, index[0])
    return (*picked, x.gather(0, index[:2, :3]), x.gather(1, index[:, :0]))


def _scatters(x: Tensor, index: Tensor, source: Tensor) -> Any:
    return (
        x.scatter_add(1, index, source),
        x.index_add(0, index[0], source[:, :6], alpha=2),
        x.scatter(1, index[:, :1], source[:, :1]),
        x.scatter(1, index[:, :1], 1.5),
    )


def _puts(x: Tensor, rows: Tensor, values: Tensor) -> Any:
    """Rows that occur more than once are added as often."""
    added = x.index_put((rows,), values, accumulate=True)
    return added, x.index_put((rows[:, None], rows % 3), values[:, :4], accumulate=True)


def _fills(x: Tensor, rows: Tensor, mask: Tensor) -> Any:
    reduced = x.scatter_reduce(0, rows[:, None].expand(4, 6), x[:4], "amax", include_self=False)
    copied = x.index_copy(0, rows[:2], x[2:4]), x.index_fill(1, rows[:1], 7.0)
    return (*copied, reduced, x.masked_scatter(mask, x.flatten() * 2), x.masked_fill(mask, 3.0))


def _joins(x: Tensor, y: Tensor, empty: Tensor) -> Any:
    return (
        torch.cat([x, y, x], 0) * 1,
        torch.cat([x[:2], empty, y[:2]], 1),
        torch.stack([x, x + 1], -1),
        torch.cat([x.t(), y.t()], -1),
        torch.cat([x[0], y[0].double()]),
        torch.hstack([x[:1], y[:1]]),
    )


def _splits(x: Tensor) -> Any:
    a, b, c = x.split([1, 3, 2], 1)
    chunks = (x + 1).chunk(4, 0)
    return a * b.sum(1, keepdim=True), c.exp(), *chunks, *[row * 2 for row in x.unbind(0)[:2]]


def _views(x: Tensor) -> Any:
    return (
        (x * 2).transpose(0, 1).reshape(-1),
        (x + 1).permute(2, 0, 1),
        x.flatten(1).t() * 3,
        (x * 1).view(-1, 2).unsqueeze(1).expand(-1, 3, -1),
        (x + 2).unfold(1, 2, 1) * 1,
        (x.movedim(0, -1) + 1).contiguous(),
        (x - 1).squeeze().diagonal(),
    )


def _moves(x: Tensor) -> Any:
    padded = F.pad(x, (1, 2, 0, 1), value=1.5), F.pad(x[None], (1, 1), mode="reflect")
    turned = x.flip(0), x.roll((1, -2), (0, 1)), x.rot90(), x.tril(-1), x.triu(1)
    return (*padded, *turned, x.repeat(2, 1), x.repeat_interleave(2, 1), x.tile((1, 2)))


def _rows() -> Tensor:
    return torch.tensor([1, -1, 1, 0])


_INDEXING = (
    function("indexing_basic", _basic_indices, lambda: (rnd(5, 6),)),
    function(
        "indexing_negative",
        _tensor_indices,
        lambda: (rnd(5, 6), _rows(), torch.tensor([-6, 5, 0, -2])),
    ),
    function("indexing_gather", _gathers, lambda: (rnd(4, 6), ints(4, 5, low=0, high=4))),
    function(
        "indexing_scatter",
        _scatters,
        lambda: (rnd(4, 6), ints(4, 4, low=0, high=4), rnd(4, 6, seed=1)),
    ),
    function("indexing_put_accumulates", _puts, lambda: (rnd(3, 6), _rows(), rnd(4, 6, seed=1))),
)
_OTHER_INDEXING = (
    function("indexing_fill", _fills, lambda: (rnd(5, 6), torch.tensor([3, 0, 1, 1]), flags(5, 6))),
    function(
        "indexing_one_hot",
        lambda i: (
            F.one_hot(i, 7),
            torch.bincount(i, minlength=9),
            torch.searchsorted(i.sort()[0], i),
        ),
        lambda: (ints(11, low=0, high=7),),
    ),
)
_SHAPES = (
    function(
        "shape_join", _joins, lambda: (rnd(3, 4), rnd(2, 4, seed=1).clone(), rnd(2, 0, seed=2))
    ),
    function("shape_split", _splits, lambda: (rnd(5, 6),)),
    function("shape_views", _views, lambda: (rnd(3, 4, 2),)),
    function("shape_moves", _moves, lambda: (rnd(4, 5),)),
)

PROGRAMS: tuple[Program, ...] = (
    *_INDEXING,
    *_OTHER_INDEXING,
    *_SHAPES,
    *trained((_INDEXING[1], _INDEXING[4], _SHAPES[0], _SHAPES[2])),
)
