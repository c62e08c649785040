"""Means of batch norms that cancel: other engines sum them in float32, eager in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseboard.profile.judge.values import judge
from tests.support.references import reference_of


def batch_mean(x: Any, weight: Any, kernel: Any) -> tuple[Any, ...]:
    y = F.conv2d(x, kernel)
    norm = torch.ops.aten._native_batch_norm_legit_functional.default
    zeros, ones = torch.zeros_like(weight), torch.ones_like(weight)
    return norm(y, weight, zeros, zeros, ones, True, 0.1, 1e-5)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(3))
def test_means_of_a_batch_that_cancel_may_be_summed_in_float32(seed: int) -> None:
    """Eager sums in float64, and what it reads has mean 0 but for roundings."""
    torch.manual_seed(seed)
    x = torch.randn(8, 16, 64, 64, dtype=torch.float64)
    x = (x - x.mean((0, 2, 3), keepdim=True)).float()
    weight, kernel = torch.randn(12), torch.randn(12, 16, 1, 1)
    reference = reference_of(batch_mean, x, weight, kernel)
    out, _, rstd, running, variance = reference.eager
    values = F.conv2d(x, kernel).transpose(0, 1).flatten(1).split(1, 1)
    total = torch.zeros(12, 1)
    for value in values:
        total = total + value
    mean = total[:, 0] / len(values)
    right = [out, mean, rstd, running - reference.eager[1] * 0.1 + mean * 0.1, variance]
    assert judge(reference, right).ok
    coarse = mean + 100 * (mean - reference.precise[1]).abs().max().float()
    assert not judge(reference, [out, coarse, rstd, running, variance]).ok
