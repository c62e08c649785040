"""Rotary position embeddings and their gradients. Su et al., RoFormer, 2021.

``x * cos + turned(x) * sin``, where ``turned`` swaps the parts of pairs and negates the new first
one. A pair is an element of the first half with one of the second half, or two neighbours
(``interleaved``). Both tables broadcast to ``x``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseboard.fuse.composites.definition import TRACED, Way, meta, same_shape
from fuseboard.fuse.patterns.matching import same_number
from fuseboard.fuse.patterns.pattern import PatternMatch
from fuseboard.fuse.patterns.rewriting import Patterns

aten = torch.ops.aten

_X, _TABLE = torch.empty(2, 3, 8), torch.empty(3, 8)


def _has_pairs(match: PatternMatch) -> bool:
    """Whether the last dimension, which both halves make up, is known to be even.

    And no table makes the result larger.
    """
    source = match.arguments["grad" if "grad" in match.arguments else "x"]
    even = same_number(meta(source).shape[-1] % 2, 0)
    return same_shape(source, match.results[0]) and even


# --- turned ---------------------------------------------------------------------------------------


def _by_slices(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _by_chunks(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _by_neighbours(x: Any) -> Any:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


# --- and its gradient -----------------------------------------------------------------------------


def _slice_back(part: Any, whole: Any, start: int, end: int, step: int) -> Any:
    return aten.slice_backward(part, whole.shape, whole.dim() - 1, start, end, step)


def _halves_back(grad: Any) -> Any:
    half = grad.shape[-1] // 2
    first, second = grad[..., :half], aten.slice(grad, grad.dim() - 1, half, 2 * half)
    return _slice_back(second, grad, 0, half, 1) + _slice_back(-first, grad, half, sys.maxsize, 1)


def _chunks_back(grad: Any) -> Any:
    half = grad.shape[-1] // 2
    first, second = grad[..., :half], aten.slice(grad, grad.dim() - 1, half, 2 * half)
    return torch.cat([second, -first], -1)


def _neighbours_back(grad: Any) -> Any:
    pairs = grad.view(*grad.shape[:-1], grad.shape[-1] // 2, 2)
    first, second = -pairs.select(-1, 0), pairs.select(-1, 1)
    odd = _slice_back(first, grad, 1, sys.maxsize, 2)
    return odd + _slice_back(second, grad, 0, sys.maxsize, 2)


def _ways() -> Iterator[Way]:
    kinds: list[tuple[str, bool, Callable[..., Any], Callable[..., Any]]] = [
        ("slices", False, _by_slices, _halves_back),
        ("chunks", False, _by_chunks, _chunks_back),
        ("neighbours", True, _by_neighbours, _neighbours_back),
    ]
    examples = (_X, _TABLE, _TABLE)
    for form, interleaved, turned, turned_back in kinds:

        def forward(x: Any, cos: Any, sin: Any, turned: Any = turned) -> Any:
            return x * cos + turned(x) * sin

        def backward(grad: Any, cos: Any, sin: Any, turned_back: Any = turned_back) -> Any:
            return turned_back(grad * sin) + grad * cos

        fixed = {"interleaved": interleaved}
        yield Way("rotary", form, forward, examples, ("y",), fixed, check=_has_pairs)
        yield Way("rotary_backward", form, backward, examples, ("grad_x",), fixed, check=_has_pairs)


WAYS = tuple(_ways())
PATTERNS = Patterns([way.as_pattern() for way in WAYS], TRACED / "rotary")
