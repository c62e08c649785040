"""Each product that is given to ZenDNN against float64; and what is declined, with its reason."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from fuseboard_zentorch._availability import why_unavailable
from torch import nn

import fuseboard

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)


def rnd(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Holder(nn.Module):
    """A function of its inputs and of tensors that it holds as buffers, in their strides."""

    def __init__(self, f, *held: torch.Tensor):
        super().__init__()
        self.f = f
        for place, value in enumerate(held):
            self.register_buffer(f"held{place}", value)

    def forward(self, *args):
        return self.f(*args, *self.buffers())


def run(module, *args):
    """The result of a call, and the report of its graph."""
    options = {
        "backends": ["zentorch", "eager"],
        "min_region_us": 0,
        "on_failure": "raise",
        "plugins": {"zentorch": {"min_macs": 0}},
    }
    compiled = torch.compile(module, backend="fuseboard", options=options, dynamic=False)
    with torch.no_grad():
        result = compiled(*args)
    (graph,) = fuseboard.last_report().graphs
    assert not graph.trips
    return result, graph


def rewritten(graph) -> list[str]:
    return [fusion.name for region in graph.regions for fusion in region.fusions]


def exact(module, *args):
    """In float64, whatever the dtypes."""
    held = [value.double() for value in module.buffers()]
    return Holder(module.f, *held)(*(value.double() for value in args))


def check(module, *args, name: str | None = None):
    """As float64 is, within the defaults of the dtype, laid out as eager's, by one rewrite."""
    result, graph = run(module, *args)
    expected = module(*args)
    reference = exact(module, *args)
    rtol, atol = (1.3e-6, 1e-5) if expected.dtype == torch.float32 else (1.6e-2, 1e-5)
    if expected.dtype == torch.bfloat16:  # what eager's own rounding leaves is allowed
        atol = max(atol, (expected.double() - reference).abs().max().item())
    torch.testing.assert_close(result.double(), reference, rtol=rtol, atol=atol)
    assert result.dtype == expected.dtype
    sizes = zip(result.shape, result.stride(), expected.stride(), strict=True)
    assert all(ours == eagers for size, ours, eagers in sizes if size > 1)
    if name is not None:
        assert rewritten(graph) == [name]


def linear(x, w, b):
    return F.linear(x, w, b)


#: Name of the rewrite → a function of an input, a weight, a bias, and a residual.
LAYERS = {
    "linear": lambda x, w, b, r: F.linear(x, w),
    "linear+bias": lambda x, w, b, r: F.linear(x, w, b),
    "linear+silu": lambda x, w, b, r: F.silu(F.linear(x, w)),
    "linear+bias+silu": lambda x, w, b, r: F.silu(F.linear(x, w, b)),
    "linear+add": lambda x, w, b, r: F.linear(x, w) + r,
    "linear+bias+add": lambda x, w, b, r: r + F.linear(x, w, b),
    "linear+bias+mul": lambda x, w, b, r: F.linear(x, w, b) * r,
    "linear+bias+silu+add": lambda x, w, b, r: F.silu(F.linear(x, w, b)) + r,
    "linear+silu+mul": lambda x, w, b, r: F.silu(F.linear(x, w)) * r,
    "linear+bias+silu+mul": lambda x, w, b, r: F.silu(F.linear(x, w, b)) * r,
}

#: Leading sizes, then K and N: none that a vector width divides, one of each, a row, many.
SIZES = [
    (4, 6, 5),
    (1, 1, 1),
    (37, 199, 31),
    (1, 64, 16),
    (5, 1, 3),
    (8, 64, 64),
    (2, 3, 7, 5),
    (1, 1, 9, 4),
]


def operands(*sizes: int, dtype: torch.dtype = torch.float32):
    """An input, a weight scaled as layers' are, a bias and a residual."""
    *leading, k, n = sizes
    x, w = rnd(*leading, k), rnd(n, k, seed=1) / math.sqrt(k)
    b, r = rnd(n, seed=2), rnd(*leading, n, seed=3)
    return [value.to(dtype) for value in (x, w, b, r)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_linear_layer(name, sizes, dtype):
    """Each form of it, at each size."""
    x, w, b, r = operands(*sizes, dtype=dtype)
    check(Holder(lambda x, r, w, b: LAYERS[name](x, w, b, r), w, b), x, r, name=name)


STRIDED = {
    "input transposed": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "input sliced": lambda x, w, b: (torch.cat([x, x], 1)[:, 3 : 3 + x.shape[1]], w, b),
    "input expanded": lambda x, w, b: (x[:1].expand_as(x), w, b),
    "weight transposed": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "weight sliced": lambda x, w, b: (x, torch.cat([w, w])[::2], b),
    "weight of one element": (
        lambda x, w, b: (x[:, :1], w[:1, :1].as_strided((1, 1), (7, 9)), b[:1])
    ),
    "weight expanded": lambda x, w, b: (x, w[:1].expand_as(w), b),
    "bias sliced": lambda x, w, b: (x, w, torch.cat([b, b])[::2]),
    "bias expanded": lambda x, w, b: (x, w, b[:1].expand_as(b)),
}


@pytest.mark.parametrize("strides", STRIDED.values(), ids=STRIDED)
def test_a_linear_layer_of_what_isnt_contiguous(strides):
    """ZenDNN reads a strided bias as if it were contiguous, so that one stays with ATen."""
    x, w, b, _ = operands(11, 13, 10)
    x, w, b = strides(x, w, b)
    check(Holder(linear, w, b), x)


@pytest.mark.parametrize("residual", [rnd(5, 11).t(), rnd(1, 5), rnd(11, 1), torch.tensor(2.0)])
def test_a_residual_of_another_layout_or_size(residual):
    """ZenDNN reads it as if it were contiguous or refuses it, so it is added by ATen."""
    x, w, b, _ = operands(11, 13, 5)
    module = Holder(lambda x, r, w, b: F.linear(x, w, b) + r, w, b)
    check(module, x, residual, name="linear+bias")


def test_weights_as_k_by_n():
    """``x @ w`` and ``addmm``, of a weight that no view transposes."""
    x, w, b, _ = operands(11, 13, 5)
    columns = w.t().contiguous()
    check(Holder(lambda x, c: x @ c, columns), x, name="linear")
    torch._dynamo.reset()
    check(Holder(lambda x, c, b: torch.addmm(b, x, c), columns, b), x, name="linear+bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(8, 64, 64), (128, 768, 768), (37, 199, 31)], ids=str)
def test_operands_are_left_alone(sizes, dtype):
    """zentorch's other operators write a packed layout over the weight where it fits."""
    x, w, b, r = operands(*sizes, dtype=dtype)
    before = [value.clone() for value in (x, w, b, r)]
    module = Holder(lambda x, r, w, b: F.silu(F.linear(x, w, b)) + r, w, b)
    run(module, x, r)
    torch._dynamo.reset()
    batch = rnd(3, *sizes[:2]).to(dtype), rnd(3, *sizes[1:], seed=1).to(dtype)
    before += [value.clone() for value in batch]
    run(torch.bmm, *batch)
    for value, copy in zip((x, w, b, r, *batch), before, strict=True):
        assert torch.equal(value, copy)


def test_gated_layers():
    """Both products of a gated unit are ZenDNN's, the second operand of one being the other."""
    x, w, _, _ = operands(2, 5, 16, 24)
    module = Holder(lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), w, w * 0.7 + 0.1)
    result, graph = run(module, x)
    torch.testing.assert_close(result.double(), exact(module, x), rtol=1.3e-6, atol=1e-5)
    assert sorted(rewritten(graph)) == ["linear", "linear+silu+mul"]


def test_a_layer_whose_result_is_read_twice():
    """What is fused is no value any more, so nothing else may read it."""
    x, w, b, r = operands(4, 6, 5)
    module = Holder(lambda x, r, w, b: (y := F.linear(x, w, b), F.silu(y) + r), w, b)
    result, graph = run(module, x, r)
    for ours, theirs in zip(result, exact(module, x, r), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1.3e-6, atol=1e-5)
    assert rewritten(graph) == ["linear+bias"]


def test_an_activation_over_its_product():
    """It is written in place, which nobody who reads the product or the input may notice."""
    x, w, b, _ = operands(4, 6, 5)
    for f in ACTIVATIONS.values():
        torch._dynamo.reset()
        check(Holder(lambda x, w, b, f=f: f(F.linear(x, w, b)), w, b), x)
        torch._dynamo.reset()
        module = Holder(lambda x, w, b, f=f: (y := F.linear(x, w, b), f(y), f(x)), w, b)
        before = x.clone()
        result, _ = run(module, x)
        torch.testing.assert_close(result, module(x))
        assert torch.equal(x, before)


ACTIVATIONS = {
    "none": lambda y: y * 1,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 1e-42, 3e38]


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("place", range(4), ids=["input", "weight", "bias", "residual"])
def test_special_values_in_a_layer(place, activation, value):
    """NaN and infinity come out as in eager: relu, sigmoid, tanh and gelu aren't ZenDNN's."""
    values = operands(5, 7, 6)
    values[place].view(-1)[3] = value
    x, w, b, r = values
    module = Holder(lambda x, r, w, b: activation(F.linear(x, w, b)) + r, w, b)
    result, graph = run(module, x, r)
    assert rewritten(graph)
    torch.testing.assert_close(result, module(x, r), equal_nan=True)


# --- batched products -----------------------------------------------------------------------------

BATCHES = {
    "plain": (rnd(3, 4, 6), rnd(3, 6, 5, seed=1)),
    "twos": (rnd(2, 2, 2), rnd(2, 2, 2, seed=1)),
    "odd": (rnd(7, 37, 19), rnd(7, 19, 31, seed=1)),
    "left transposed": (rnd(3, 6, 4).mT, rnd(3, 6, 5, seed=1)),
    "right transposed": (rnd(3, 4, 6), rnd(3, 5, 6, seed=1).mT),
    "one batch of any stride": (
        rnd(24).as_strided((1, 4, 6), (99, 6, 1)),
        rnd(30, seed=1).as_strided((1, 6, 5), (7, 5, 1)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("operands", BATCHES.values(), ids=BATCHES)
def test_a_batched_product(operands, dtype):
    """Of matrices that lie one after the other, by rows or by columns."""
    left, right = (_with_dtype(value, dtype) for value in operands)
    check(Holder(torch.bmm), left, right, name="bmm")


def _with_dtype(value, dtype):
    """A copy with the same strides, whatever they are."""
    copy = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
    return copy.copy_(value)


MISREAD = {
    "every second batch": (rnd(6, 4, 6)[::2], rnd(3, 6, 5, seed=1)),
    "every second column": (rnd(3, 4, 12)[..., ::2], rnd(3, 6, 5, seed=1)),
    "every second row": (rnd(3, 4, 6), rnd(3, 12, 5, seed=1)[:, ::2]),
    "every second of columns": (rnd(3, 4, 6), rnd(3, 5, 12, seed=1)[..., ::2].mT),
    "expanded": (rnd(1, 4, 6).expand(3, 4, 6), rnd(1, 6, 5, seed=1).expand(3, 6, 5)),
    "batch inside": (rnd(4, 3, 6).transpose(0, 1), rnd(6, 3, 5, seed=1).transpose(0, 1)),
    "ones": (rnd(1, 1, 1), rnd(1, 1, 1, seed=1)),
    "rows": (rnd(12, 1, 64), rnd(12, 64, 128, seed=1)),
    "one row of any stride": (
        rnd(18).as_strided((3, 1, 6), (6, 99, 1)),
        rnd(18, seed=1).as_strided((3, 6, 1), (6, 1, 99)),
    ),
    "one column of any stride": (
        rnd(12).as_strided((3, 4, 1), (4, 1, 99)),
        rnd(15, seed=1).as_strided((3, 1, 5), (5, 99, 1)),
    ),
}


@pytest.mark.parametrize("operands", MISREAD.values(), ids=MISREAD)
def test_batches_of_other_layouts(operands):
    """ZenDNN reads most of these wrongly without a word, so all of them stay with ATen."""
    result, graph = run(torch.bmm, *operands)
    torch.testing.assert_close(result, torch.bmm(*operands), rtol=0, atol=0)
    assert not rewritten(graph)


@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_in_a_batched_product(value):
    """As in eager, on either side."""
    for place in range(2):
        torch._dynamo.reset()
        values = [rnd(3, 4, 6), rnd(3, 6, 5, seed=1)]
        values[place][1, 2, 3] = value
        result, graph = run(Holder(torch.bmm), *values)
        assert rewritten(graph) == ["bmm"]
        torch.testing.assert_close(result, torch.bmm(*values), equal_nan=True)


# --- what is declined -----------------------------------------------------------------------------

DECLINED = {
    "no rows": (lambda x: F.linear(x, rnd(5, 6)), torch.empty(0, 6), "without elements|weight"),
    "nothing to add up": (lambda x: torch.bmm(x, x.mT), torch.empty(3, 4, 0), "without elements"),
    "no batches": (lambda x: torch.bmm(x, x.mT), torch.empty(0, 4, 6), "without elements"),
    "float64": (lambda x: torch.bmm(x, x.mT), rnd(3, 4, 6).double(), "float64"),
    "float16": (lambda x: torch.bmm(x, x.mT), rnd(3, 4, 6).half(), "float16"),
    "alpha": (lambda x: torch.addmm(x, x, x, alpha=2), rnd(4, 4), "alpha"),
    "a matrix is added": (lambda x: torch.addmm(x, x, x), rnd(4, 4), "contiguous row"),
    "no product": (lambda x: x.softmax(-1), rnd(4, 4), "no product"),
}


@pytest.mark.parametrize(("f", "x", "reason"), DECLINED.values(), ids=DECLINED)
def test_what_is_declined_says_why(f, x, reason):
    """The op runs as in eager, and the report has the reason."""
    result, graph = run(f, x)
    torch.testing.assert_close(result, f(x), rtol=0, atol=0)
    assert not rewritten(graph)
    reasons = " ".join(node.declined.get("zentorch", "") for node in graph.nodes)
    assert re.search(reason, reasons)


def test_layers_without_elements():
    """ZenDNN answers with whatever lay in memory where there is nothing to add up."""
    for sizes in [(0, 6, 5), (4, 0, 5), (4, 6, 0)]:
        torch._dynamo.reset()
        x, w, b = rnd(*sizes[:2]), rnd(sizes[2], sizes[1]), rnd(sizes[2])
        module = Holder(linear, w, b)
        result, graph = run(module, x)
        torch.testing.assert_close(result, module(x), rtol=0, atol=0)
        assert not rewritten(graph)


def test_small_products_stay_with_aten():
    """By the option's default, whose name the reason has."""
    module = Holder(linear, rnd(5, 6), rnd(5))
    options = {"backends": ["zentorch", "eager"], "min_region_us": 0}
    with torch.no_grad():
        torch.compile(module, backend="fuseboard", options=options)(rnd(4, 6))
    (graph,) = fuseboard.last_report().graphs
    assert {region.backend for region in graph.regions} == {"eager"}
    reasons = " ".join(node.declined.get("zentorch", "") for node in graph.nodes)
    assert "120 multiply-adds" in reasons
    assert "min_macs" in reasons


def test_a_product_of_two_inputs_isnt_packed():
    """Neither is a weight, so ATen's call stays, and a note says so."""
    result, graph = run(torch.mm, rnd(4, 6), rnd(6, 5))
    torch.testing.assert_close(result, rnd(4, 6) @ rnd(6, 5), rtol=0, atol=0)
    (region,) = graph.regions
    assert not region.fusions
    assert any("no operand is a parameter" in note for note in region.notes)
