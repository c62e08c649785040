"""The triton backend under ``torch.compile``, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd

OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """A decoder layer in the manner of Llama: RMS norm, rotary attention, SwiGLU."""

    def __init__(self, width: int = 16, heads: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        size = width // self.heads
        q, k, v = (t.view(batch, length, self.heads, size).transpose(1, 2) for t in (q, k, v))
        angles = torch.arange(length)[:, None] / 10 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        scores = q @ k.transpose(-1, -2) / size**0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        hidden = self.second(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def step(model: nn.Module, x: torch.Tensor, run: nn.Module) -> list[torch.Tensor]:
    """The result and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    result = run(x)
    (result * torch.linspace(0, 1, result.shape[-1], dtype=x.dtype)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [result.detach(), x.grad, *(grad.clone() for grad in grads)]


def test_a_decoder_block_forward_and_backward():
    """Results and gradients are as near to float64 as eager's, all of it in one region each way."""
    torch.manual_seed(0)
    model, exact = Block(), Block().double()
    exact.load_state_dict(model.state_dict())
    x = rnd(2, 5, 16)
    got = step(model, x, compiled(model, "triton", "eager", **OPTIONS))
    assert_closer(got, reference=step(exact, x.double(), exact), rival=step(model, x, model))
    assert all_trips() == []
    for kind in ("forward", "backward"):
        (region,) = last_graph(kind).regions
        assert region.backend == "triton"
        (alone,) = [note for note in region.notes if note.startswith("run by eager")]
        assert alone.removeprefix("run by eager between kernels: ").split(", ") == [
            "aten.bmm.default",
            "aten.cat.default",
            "aten.mm.default",
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes_that_change(dtype):
    """One compile serves further sizes, odd ones and one row among them."""

    def function(x, w):
        return torch.softmax(F.layer_norm(x, (x.shape[-1],), w), -1) + x.mean(), x.sum(0)

    fast = compiled(function, "triton", "eager", dynamic=True, **OPTIONS)
    with torch.no_grad():
        for rows, columns in ((4, 100), (7, 37), (3, 64)):
            x, w = rnd(rows, columns, dtype=dtype), rnd(columns, seed=1, dtype=dtype)
            exact = function(x.double(), w.double())
            assert_closer(fast(x, w), reference=exact, rival=function(x, w))
    assert len([r for r in last_graph().regions if r.backend == "triton"]) == 1


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_zero_and_one(size):
    """Nothing and one element: sums of nothing are zero, means of it NaN, as in eager."""

    def function(x):
        return x.exp(), x.sum(), x.mean(1), x.sum(0), torch.relu(x) + x.sum(1, keepdim=True)

    for shape in ((size, 3), (3, size)):
        x = rnd(*shape)
        with torch.no_grad():
            got = compiled(function, "triton", "eager", **OPTIONS)(x)
        for one, other in zip(got, function(x), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_nan_goes_through():
    """NaN reaches maxima, clamps, relu and positions as in eager."""

    def function(x):
        return (
            *(x.amax(1), x.amin(0), x.argmax(1), x.max(1).indices, x.argmin()),
            *(torch.relu(x), x.clamp(-1, 1), torch.maximum(x, x * 2), torch.sign(x)),
            *(x.softmax(-1), x.isnan(), x.abs()),
        )

    x = rnd(4, 9)
    x[1, 3] = x[2, 0] = x[2, 5] = float("nan")
    x[3] = float("-inf")
    with torch.no_grad():
        got = compiled(function, "triton", "eager", **OPTIONS)(x)
    for one, other in zip(got, function(x), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_layouts_are_kept():
    """Transposed, strided, expanded and channels-last operands; results have eager's strides."""

    def function(a, b, c, d):
        return a.exp() + b, (c * 2).relu(), d.exp() + d.mean(1, keepdim=True), a.sum(0)

    image = rnd(2, 3, 4, 5).to(memory_format=torch.channels_last)
    inputs = (rnd(6, 4).t(), rnd(4, 12)[:, ::2], rnd(4, 1).expand(4, 6), image)
    with torch.no_grad():
        got = compiled(function, "triton", "eager", **OPTIONS)(*inputs)
    for one, other in zip(got, function(*inputs), strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_what_is_declined_says_why():
    """Ops without a kernel run in eager, and the report says so."""

    def function(x):
        return torch.rand_like(x) + x, x.double() * 2, torch.cumsum(x, 0).exp()

    with torch.no_grad():
        compiled(function, "triton", "eager", **OPTIONS)(rnd(4, 5))
    reasons = {n.op: n.declined.get("triton") for n in last_graph().nodes if n.backend == "eager"}
    assert reasons["aten.rand_like.default"] == "aten.rand_like.default draws random numbers"
    assert "float64" in reasons["aten.mul.Tensor"]
    notes = [note for region in last_graph().regions for note in region.notes]
    assert "run by eager between kernels: aten.cumsum.default" in notes
