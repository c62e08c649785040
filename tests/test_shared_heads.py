"""The pass ``shared_heads``: a token's attention makes no copies of keys that heads share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseboard.torch_api.allocator import peak_bytes
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd, strides

LENGTH = 1024


def repeated(x, times):
    batch, groups, length, width = x.shape
    x = x[:, :, None].expand(batch, groups, times, length, width)
    return x.reshape(batch, groups * times, length, width)


def attention(q, k, v, mask=None, times=3):
    return F.scaled_dot_product_attention(q, repeated(k, times), repeated(v, times), attn_mask=mask)


def inputs(batch=2, groups=3, times=3, width=37, rows=1, mask=(2, 1, 1, LENGTH)):
    drawn = [
        rnd(batch, rows, groups * times, width).transpose(1, 2),
        *(rnd(batch, groups, LENGTH, width, seed=seed) for seed in (1, 2)),
    ]
    return drawn if mask is None else [*drawn, rnd(*mask, seed=3) > -0.5]


def applied():
    return sum(one.plugin == "shared_heads" and one.applied for one in last_graph().fusions)


def check(function, arguments, expected, **options):
    torch.compiler.reset()
    with torch.no_grad():
        run = compiled(function, policy="priority", **options)
        result, rival = run(*arguments), function(*arguments)
        wide = [one.double() if one.is_floating_point() else one for one in arguments]
        assert_closer(result, reference=function(*wide), rival=rival)
        assert strides(result) == strides(rival)
    assert applied() == expected
    assert not all_trips()
    return run


@pytest.mark.parametrize("mask", [None, (1, 1, 1, LENGTH), (2, 1, 1, LENGTH)])
@pytest.mark.whole
def test_one_token(mask):
    """Values are as near to float64 as eager's, laid out as eager's, and keys aren't repeated."""
    arguments = inputs(mask=mask)
    run = check(attention, arguments, 1)
    with torch.no_grad():
        took = peak_bytes(lambda: run(*arguments), torch.device("cpu"))
    assert took < arguments[1].nbytes


def test_a_cache_that_grows():
    """With the length as a symbol."""
    run = check(attention, inputs(mask=None), 1, dynamic=None)
    for length in (1030, 1031):
        q, k, v = rnd(2, 9, 1, 37), *(rnd(2, 3, length, 37, seed=s) for s in (1, 2))
        with torch.no_grad():
            torch.testing.assert_close(run(q, k, v), attention(q, k, v))
    assert applied() == 1
    assert not all_trips()


def interleaved(q, k, v, mask=None):
    """Heads that follow each other have different keys."""
    k, v = (x[:, None].expand(2, 3, 3, LENGTH, 37).reshape(2, 9, LENGTH, 37) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def one_by_one(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, repeated(k, 3), torch.cat([v] * 3, 1), attn_mask=mask)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (attention, inputs(rows=2, mask=None)),
        (attention, inputs(mask=(2, 9, 1, LENGTH))),
        (interleaved, inputs()),
        (one_by_one, inputs()),
    ],
    ids=["two tokens", "a mask of each head", "interleaved", "values not repeated so"],
)
@pytest.mark.whole
def test_what_is_left(function, arguments):
    check(function, arguments, 0)
