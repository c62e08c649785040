"""Reductions that are split in two, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseboard_triton import _split
from tests.plugins.triton_interpreted.lowering import lower
from tests.support.values import assert_closer, rnd


@pytest.mark.parametrize(
    ("shape", "dims", "parts"),
    [
        ((4096, 768), (0,), 16),  # 12 programs of columns; 21 would be best, 16 divides
        ((8, 512, 768), (0, 1), 16),
        ((4096, 4096), (0,), 4),
        ((4096, 768), (1,), 1),  # a program a row
        ((1, 4096), (1,), 1),  # a row that one program reads at once
        ((1024, 1024), (0, 1), 256),
        ((4099, 768), (0,), 1),  # a prime
        ((4096, 3, 8), (0, 2), 1),  # dimensions apart
        ((0, 768), (0,), 1),
    ],
)
def test_parts(shape, dims, parts):
    """Enough programs, in parts of one length, none too short."""
    assert _split.parts_of(shape, dims) == parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_reductions_equal_float64(dtype, monkeypatch):
    """Sums, extremes, their positions and norms' gradients, over rows, columns and everything."""
    for name in ("LEAST_ROWS", "LEAST_COLUMNS"):
        monkeypatch.setattr(_split, name, 4)
    for name in ("PART_ROWS", "PART_COLUMNS"):
        monkeypatch.setattr(_split, name, 2)

    def function(x, w):
        return (
            *(x.sum(0), x.sum((0, 1)), x.mean(), x.sum(-1), (x * w).exp().sum(1), x.amax()),
            *(x.argmax(), x.argmin(1), x.var((0, 1)), F.layer_norm(x, (8,)), x.softmax(0)),
            *((x > 1).any(), x.std()),
        )

    x, w = rnd(6, 4, 8, dtype=dtype), rnd(8, seed=1, dtype=dtype)
    run, lowered = lower(function, [x, w])
    assert int(lowered.notes[0].split()[0]) > 10
    rivals, exacts = function(x, w), function(x.double(), w.double())
    for got, rival, exact in zip(run(x, w), rivals, exacts, strict=True):
        assert got.stride() == rival.stride()
        if got.is_floating_point():
            assert_closer(got, reference=exact, rival=rival)
        else:
            assert torch.equal(got, rival)
