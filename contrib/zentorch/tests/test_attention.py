"""Attention on ZenDNN against float64; and the masks and layouts that stay with ATen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fuseboard_zentorch._availability import why_unavailable

import fuseboard

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)


def rnd(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(batch=2, count=3, length=5, keys=7, size=8):
    """Query, key and value."""
    shapes = [(batch, count, n, size) for n in (length, keys, keys)]
    return [rnd(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def run(f, *args):
    """The result of a call, and the names of the rewrites."""
    options = {
        "backends": ["zentorch", "eager"],
        "min_region_us": 0,
        "on_failure": "raise",
        "plugins": {"zentorch": {"min_macs": 0}},
    }
    with torch.no_grad():
        result = torch.compile(f, backend="fuseboard", options=options, dynamic=False)(*args)
    (graph,) = fuseboard.last_report().graphs
    assert not graph.trips
    return result, [fusion.name for region in graph.regions for fusion in region.fusions]


def check(f, *args, taken: bool = True):
    """As near to float64 as the dtype's defaults, laid out as eager's."""
    result, names = run(f, *args)
    expected, reference = f(*args), f(*(value.double() for value in args))
    rtol, atol = (1.3e-6, 1e-5) if expected.dtype == torch.float32 else (1.6e-2, 1e-5)
    if expected.dtype == torch.bfloat16:
        atol = max(atol, (expected.double() - reference).abs().max().item())
    torch.testing.assert_close(result.double(), reference, rtol=rtol, atol=atol)
    assert result.dtype == expected.dtype
    sizes = zip(result.shape, result.stride(), expected.stride(), strict=True)
    assert all(ours == eagers for size, ours, eagers in sizes if size > 1)
    assert (names == ["attention"]) == taken
    assert ("attention" in names) == taken


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


SIZES = {
    "plain": {},
    "one": {"batch": 1, "count": 1, "length": 1, "keys": 1, "size": 1},
    "a query": {"length": 1, "keys": 33},
    "a key": {"length": 33, "keys": 1, "size": 24},
    "odd": {"batch": 1, "count": 7, "length": 37, "keys": 53, "size": 19},
    "long": {"batch": 1, "count": 2, "length": 200, "keys": 600, "size": 64},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("f", [attention, causal, scaled])
def test_attention(f, sizes, dtype):
    """At each size, with as many queries as keys or not."""
    check(f, *(value.to(dtype) for value in heads(**sizes)))


MASKS = {
    "whole": rnd(2, 3, 5, 7, seed=9),
    "for all heads": rnd(2, 1, 5, 7, seed=9),
    "for all queries": rnd(2, 1, 1, 7, seed=9),
    "two axes": rnd(5, 7, seed=9),
    "transposed batches": rnd(3, 2, 5, 7, seed=9).transpose(0, 1),
    "minus infinity": torch.zeros(5, 7).masked_fill(torch.ones(5, 7).triu(1) > 0, -math.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask, dtype):
    """Those whose rows are contiguous."""
    check(masked, *(value.to(dtype) for value in (*heads(), mask)))


def test_a_row_of_minus_infinity():
    """A query that may look at nothing gets what eager gives it."""
    mask = torch.zeros(5, 7)
    mask[2] = -math.inf
    result, names = run(masked, *heads(), mask)
    assert names == ["attention"]
    torch.testing.assert_close(result, masked(*heads(), mask), equal_nan=True)


def test_a_boolean_mask():
    """torch turns it into numbers; the attention is ZenDNN's."""
    mask = rnd(2, 1, 5, 7, seed=9) > -1
    result, names = run(masked, *heads(), mask)
    assert names == ["attention"]
    reference = masked(*(value.double() for value in heads()), mask)
    torch.testing.assert_close(result.double(), reference, rtol=1.3e-6, atol=1e-5)


LAYOUTS = {
    "heads inside": [rnd(2, n, 3, 8, seed=n).transpose(1, 2) for n in (5, 7, 7)],
    "one head for all": [heads()[0], *(value[:, :1].expand(2, 3, 7, 8) for value in heads()[1:])],
    "sliced": [rnd(2, 3, n, 20, seed=n)[..., 3:11] for n in (5, 7, 7)],
}


@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(values):
    """Where the elements of a head lie side by side."""
    check(attention, *values)


STAYS = {
    "query by columns": (attention, [rnd(2, 3, 8, 5).mT, *heads()[1:]]),
    "value by columns": (attention, [*heads()[:2], rnd(2, 3, 8, 7).mT]),
    "mask of one column": (masked, [*heads(), rnd(2, 3, 5, 1)]),
    "mask by columns": (masked, [*heads(), rnd(2, 3, 7, 5).mT]),
    "every second of a mask": (masked, [*heads(), rnd(2, 3, 5, 14)[..., ::2]]),
}


@pytest.mark.parametrize(("f", "values"), STAYS.values(), ids=STAYS)
def test_what_stays_with_aten(f, values):
    """zentorch would raise, or isn't proven; torch itself takes products for the first two."""
    check(f, *values, taken=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e-42])
@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_special_values(place, value):
    """NaN comes out where eager has it."""
    values = heads()
    values[place][0, 0, 1, 2] = value
    result, names = run(attention, *values)
    assert names == ["attention"]
    torch.testing.assert_close(result, attention(*values), equal_nan=True)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}, {"keys": 0}, {"size": 0}], ids=str)
def test_no_elements(sizes):
    """As in eager."""
    values = heads(**sizes)
    result, names = run(attention, *values)
    assert not names
    torch.testing.assert_close(result, attention(*values), equal_nan=True)
