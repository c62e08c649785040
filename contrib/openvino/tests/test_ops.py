"""Each op that is claimed, alone, against float64: exact float32, or declined with a reason."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from fuseboard_openvino._claim import CARRIED, NATIVE

import fuseboard

SHAPES = {"plain": (4, 6), "ones": (1, 1), "odd": (7, 13), "batched": (2, 3, 5)}


def rnd(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Each test compiles anew."""
    torch._dynamo.reset()


def through_openvino(f, *args):
    """The result, and the report of the graph that was compiled."""
    options = {"backends": ["openvino", "eager"], "min_region_us": 0}
    compiled = torch.compile(f, backend="fuseboard", options=options, dynamic=False)
    with torch.no_grad():
        result = compiled(*args)
    (graph,) = fuseboard.last_report().graphs
    return result, graph


def double(value):
    return value.double() if value.is_floating_point() else value


def check(f, *args):
    """As float64 within float32's defaults, with eager's dtype and strides, and no trip."""
    result, graph = through_openvino(f, *args)
    assert not graph.trips
    expected, exact = f(*args), f(*map(double, args))
    if expected.is_floating_point():
        torch.testing.assert_close(result.double(), exact, rtol=1.3e-6, atol=1e-5)
    else:
        assert torch.equal(result, expected)
    assert result.dtype == expected.dtype
    sizes = zip(result.shape, result.stride(), expected.stride(), strict=True)
    assert all(ours == eagers for size, ours, eagers in sizes if size > 1)
    return graph


def backends_of(graph) -> set[str]:
    return {region.backend for region in graph.regions}


POINTWISE = {
    "_log_softmax": lambda x: F.log_softmax(x, -1),
    "_softmax": lambda x: F.softmax(x, -1),
    "_softmax_first_axis": lambda x: F.softmax(x, 0),
    "abs": lambda x: x.abs() + 1,
    "add": lambda x: x + x * 0.5,
    "add_number": lambda x: x + 3,
    "add_row": lambda x: x + x[:1],
    "cat": lambda x: torch.cat([x, x * 2], -1),
    "cat_first": lambda x: torch.cat([x * 3, x], 0),
    "clone": lambda x: (x * 2).clone(),
    "cos": lambda x: x.cos() * 2,
    "div": lambda x: x / (x.abs() + 1),
    "div_number": lambda x: x / 3,
    "erf": lambda x: x.erf() * 2,
    "exp": lambda x: x.exp() * 2,
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "hardswish": lambda x: F.hardswish(x * 3),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm_all": lambda x: F.layer_norm(x, x.shape),
    "mean": lambda x: x.mean(-1),
    "mean_kept": lambda x: x.mean(0, keepdim=True),
    "mul": lambda x: x * x,
    "mul_number": lambda x: x * 2.5,
    "neg": lambda x: -x * 2,
    "pow": lambda x: x**2,
    "pow_three": lambda x: x**3,
    "pow_half": lambda x: (x.abs() + 1) ** 0.5,
    "relu": lambda x: x.relu(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "rsub": lambda x: 1 - x,
    "select": lambda x: x.select(-1, 0) * 2,
    "select_last": lambda x: x.select(-1, -1) * 2,
    "sigmoid": lambda x: x.sigmoid(),
    "silu": lambda x: F.silu(x),
    "sin": lambda x: x.sin() * 2,
    "slice": lambda x: x[..., :3] * 2,
    "slice_end": lambda x: x[..., -1:] * 2,
    "slice_step": lambda x: x[..., ::2] * 2,
    "split": lambda x: x.split(1, 0)[0] * 2,
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "squeeze": lambda x: (x[..., :1] * 2).squeeze(-1) + 1,
    "sub": lambda x: x - 2 * x,
    "sum": lambda x: x.sum(-1),
    "sum_kept": lambda x: x.sum((0, -1), keepdim=True),
    "tanh": lambda x: x.tanh(),
    "transpose": lambda x: (x * 2).transpose(0, -1) + 1,
    "permute": lambda x: (x * 2).permute(*reversed(range(x.ndim))).contiguous() * 3,
    "unsqueeze": lambda x: (x * 2).unsqueeze(1) + x,
    "expand": lambda x: (x[:1] * 2).expand_as(x) * x,
    "view": lambda x: (x * 2).reshape(-1) + 1,
    "where": lambda x: torch.where(x.abs() > 0.5, x, x * 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("f", POINTWISE.values(), ids=POINTWISE)
def test_an_op_by_itself(f, shape):
    """Every shape: one element, sizes that no vector width divides, three axes."""
    check(f, rnd(*shape))


@pytest.mark.parametrize("f", POINTWISE.values(), ids=POINTWISE)
def test_an_op_on_a_transposed_input(f):
    """Strides in, strides out."""
    check(f, rnd(6, 4).t())


SPECIAL = ["relu", "sigmoid", "gelu", "exp", "_softmax", "tanh", "where", "silu", "layer_norm"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e-42])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name, value):
    """NaN and infinity come out where eager has them, or the report says that NaN doesn't."""
    x = rnd(4, 6)
    x[1, 2] = value
    f = POINTWISE[name]
    result, graph = through_openvino(f, x)
    expected = f(x)
    notes = [note for region in graph.regions for note in region.notes]
    if expected.isnan().any() and any("NaN doesn't come" in note for note in notes):
        return
    torch.testing.assert_close(result, expected, equal_nan=True)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def masked_attention(q, k, v):
    mask = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill_(torch.eye(q.shape[-2]) > 0, -1e9)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


@pytest.mark.parametrize("f", [attention, masked_attention, causal_attention, scaled_attention])
def test_attention(f):
    """With and without masks."""
    check(f, *(rnd(2, 3, 5, 8, seed=i) for i in range(3)))


PRODUCTS = {
    "mm": (lambda x, y: x @ y, (4, 6), (6, 5)),
    "mm_transposed": (lambda x, y: x @ y.t(), (4, 6), (5, 6)),
    "bmm": (lambda x, y: torch.bmm(x, y), (3, 4, 6), (3, 6, 5)),
    "addmm": (lambda x, y: torch.addmm(x[:, :5], x, y), (4, 6), (6, 5)),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), (2, 3, 8, 8), (4, 3, 3, 3)),
    "conv_stride": (lambda x, w: F.conv2d(x, w, stride=2), (2, 3, 9, 9), (4, 3, 3, 3)),
    "conv_dilated": (lambda x, w: F.conv2d(x, w, dilation=2), (2, 3, 9, 9), (4, 3, 3, 3)),
    "conv_groups": (lambda x, w: F.conv2d(x, w, groups=3), (2, 3, 8, 8), (6, 1, 3, 3)),
    "conv_1d": (lambda x, w: F.conv1d(x, w), (2, 3, 9), (4, 3, 3)),
    "conv_3d": (lambda x, w: F.conv3d(x, w), (1, 2, 5, 5, 5), (3, 2, 2, 2, 2)),
}


@pytest.mark.parametrize(("f", "x", "y"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(f, x, y):
    """Products and convolutions run on OpenVINO."""
    graph = check(f, rnd(*x), rnd(*y, seed=1))
    assert "openvino" in backends_of(graph)


POOLS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, padding=1),
    "max_ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean_padded": lambda x: F.avg_pool2d(x, 3, 2, padding=1),
    "mean_padded_own_count": lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
    "norm": lambda x: F.batch_norm(x, x.new_zeros(3), x.new_ones(3) * 2),
}


@pytest.mark.parametrize("f", POOLS.values(), ids=POOLS)
def test_pools_and_norms(f):
    """On odd sizes."""
    check(f, rnd(2, 3, 9, 11))


def test_embedding():
    """Indices may be int64: the table's size bounds them."""
    table, indices = rnd(11, 5), torch.tensor([[0, 10, 3], [7, 7, 1]])
    graph = check(lambda t, i: F.embedding(i, t) * 2, table, indices)
    assert backends_of(graph) == {"openvino"}


DECLINED = {
    "whole numbers": (lambda x: (x.long() + 2**40) * 3, "32 bits"),
    "alpha": (lambda x: torch.add(x, x, alpha=2), "alpha"),
    "rounding": (lambda x: torch.div(x, 3, rounding_mode="floor"), "proven|rounds"),
    "max indices": (lambda x: F.max_pool2d(x[None], 2, return_indices=True)[1], "first result"),
    "no elements": (lambda x: x[:0] + 1, "without elements"),
    "double": (lambda x: x.double() * 2, "float64"),
    "transposed": (lambda x: F.conv_transpose1d(x, x[:, :1, None]), "transposed"),
    "divisor": (lambda x: F.avg_pool2d(x[None], 3, 2, divisor_override=5), "divisor"),
}


@pytest.mark.parametrize(("f", "reason"), DECLINED.values(), ids=DECLINED)
def test_what_is_declined_says_why(f, reason):
    """The op runs elsewhere, with a reason."""
    x = rnd(6, 4)
    result, graph = through_openvino(f, x)
    torch.testing.assert_close(result, f(x), rtol=0, atol=0)
    reasons = " ".join(node.declined.get("openvino", "") for node in graph.nodes)
    assert re.search(reason, reasons)


def test_every_claimed_op_is_in_a_test():
    """Compiled here, all of the tables above reach every op that is claimed."""
    seen: set[str] = set()
    cases = [(f, [rnd(4, 6)]) for f in POINTWISE.values()]
    cases += [(f, [rnd(2, 3, 9, 11)]) for f in POOLS.values()]
    cases += [(f, [rnd(*x), rnd(*y)]) for f, x, y in PRODUCTS.values()]
    cases += [(attention, [rnd(2, 3, 5, 8, seed=i) for i in range(3)])]
    cases += [(lambda t, i: F.embedding(i, t) * 2, [rnd(11, 5), torch.tensor([1, 2])])]
    cases += [(lambda x, w: F.linear(x, w), [rnd(2, 3, 6), rnd(5, 6)])]
    cases += [(lambda x: x.split([1, 3], 0)[1] * 2, [rnd(4, 6)])]
    for f, args in cases:
        torch._dynamo.reset()
        _, graph = through_openvino(f, *args)
        seen |= {node.op for node in graph.nodes}
    claimed = {str(op) for op in NATIVE | CARRIED}
    assert claimed - seen <= {"aten.linear.default", "aten._unsafe_view.default"}
