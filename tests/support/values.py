"""Comparing results: as near to float64 as eager is, bit for bit, and with eager's strides."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

#: How many times its rival's distance from float64 a result may lie off. Two orders of the same
#: sums differ from each other by about as much as each differs from the exact result.
SLACK = 2.0


def assert_closer(candidate: Any, *, reference: Any, rival: Any) -> None:
    """A result is no further from a float64 reference than a rival's is, element by element.

    The worst element decides. Where the rival happens to be exact, a few units in the last
    place of the tensor's largest element are allowed.
    """
    flat = [pytree.tree_leaves(tree) for tree in (candidate, reference, rival)]
    for got, exact, other in zip(*flat, strict=True):
        assert got.dtype == other.dtype
        assert got.shape == exact.shape
        if got.numel() == 0:
            continue
        exact = exact.double()
        scale = float(exact.abs().max())
        allowed = SLACK * _distance(other, exact) + 4 * torch.finfo(got.dtype).eps * scale
        distance = _distance(got, exact)
        assert distance <= allowed, f"{distance:g} from float64, the rival is at most {allowed:g}"


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).abs().max())


def assert_same(candidate: Any, expected: Any) -> None:
    """Equal structure, types, dtypes, shapes, strides and bits: what the same kernels give."""
    assert pytree.tree_structure(candidate) == pytree.tree_structure(expected)
    pairs = zip(pytree.tree_leaves(candidate), pytree.tree_leaves(expected), strict=True)
    for got, want in pairs:
        assert type(got) is type(want)
        if not isinstance(want, torch.Tensor):
            assert got == want
            continue
        assert got.requires_grad == want.requires_grad
        assert strides(got) == strides(want)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides that lead anywhere: those of dimensions of more than one element."""
    if tensor.numel() == 0:
        return []
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that depend on shape and seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
