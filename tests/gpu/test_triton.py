"""The triton backend on a GPU: what the interpreter and the compiler alone can't show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseboard.report.data import GraphReport, ledger
from tests.support.values import assert_closer, strides

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    ledger.clear()


def compiled(target: Any, dynamic: bool | None = None, **options: Any) -> Any:
    settings = {
        "backends": ["triton", "eager"],
        "on_failure": "raise",
        "verify": "always",
        "min_region_us": 0,
        **options,
    }
    return torch.compile(target, backend="fuseboard", dynamic=dynamic, options=settings)


def cuda(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


def notes() -> list[str]:
    graphs: list[GraphReport] = ledger.graphs()
    return [note for graph in graphs for region in graph.regions for note in region.notes]


def check(function: Any, *inputs: torch.Tensor, **options: Any) -> None:
    """As near to float64 as eager on the GPU, with eager's strides; the inputs stay."""
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        run = compiled(function, **options)
        got, rival = run(*inputs), function(*inputs)
        again = run(*inputs)
        exact = function(*[x.double() if x.is_floating_point() else x for x in inputs])
    for first, second, other, true in zip(got, again, rival, exact, strict=True):
        assert strides(first) == strides(other)
        if first.is_floating_point():
            assert_closer(first, reference=true, rival=other)
        else:
            torch.testing.assert_close(first, other)
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, inputs, before))
    assert any("Triton kernel" in note for note in notes())


# --- generated ------------------------------------------------------------------------------------


def pointwise(x, y):
    return (
        *(F.gelu(x) * y, torch.relu(x) + y.tanh(), x.sigmoid() / (y.abs() + 1), torch.erf(x)),
        *(torch.where(x > y, x, y).exp(), x.clamp(-1, 1), torch.maximum(x, y), x.t() * 2),
        *(torch.log1p(x.abs()), torch.sin(x), torch.pow(x.abs() + 0.5, 1.7), x > 0, x.int() // 3),
        *(torch.atan2(x, y), F.silu(x), F.softplus(x), torch.rsqrt(x.abs() + 0.1), x.round()),
    )


def rows(x, y):
    return (
        *(
            x.sum(-1),
            x.mean(-1),
            x.amax(-1),
            x.argmax(-1),
            x.max(-1).values,
            x.var(-1, correction=0),
        ),
        *(torch.softmax(x, -1), torch.log_softmax(y, -1), F.layer_norm(x + y, x.shape[-1:])),
        (x > 0).any(-1),
    )


def columns(x, y):
    return x.sum(0), (x * y).mean(0), x.amax(0), torch.softmax(x, 0), x.argmin(0), x.float().sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 199), (512, 1024)])
@pytest.mark.parametrize("function", [pointwise, rows, columns])
def test_generated(function, shape, dtype):
    """Chains and reductions of every kind, for sizes of no aligned tile among others."""
    check(function, cuda(*shape, dtype=dtype), cuda(*shape, dtype=dtype, seed=1))


@pytest.mark.parametrize("shape", [(3, 50257), (20000, 64), (2, 3, 70000)])
def test_long_rows_and_columns(shape):
    """More than a tile holds: kernels that loop."""
    check(rows, cuda(*shape), cuda(*shape, seed=1))
    torch._dynamo.reset()
    check(lambda x, y: (x.sum(0), (x * y).sum(), x.amax()), cuda(*shape), cuda(*shape, seed=1))


def test_integers_and_booleans():
    """Division and remainder round as ATen's; products wrap."""
    generator = torch.Generator().manual_seed(0)

    def function(k, m):
        return (
            *(k // m, k % m, torch.div(k, m, rounding_mode="trunc"), k * 2_000_000_000, k & m),
            *(k.sum(0), k.amax(1), (k > m).all(1), (k > 0) & (m > 0), ~(k == m), k.argmax(1)),
        )

    for dtype in (torch.int32, torch.int64):
        torch._dynamo.reset()
        k = torch.randint(-99, 99, (64, 100), generator=generator).to(dtype).cuda()
        m = torch.randint(1, 9, (64, 100), generator=generator).to(dtype).cuda()
        check(function, k, torch.where(k % 2 == 0, m, -m))


def test_nan_and_infinities():
    """They go through as in eager."""

    def function(x):
        return (
            *(x.amax(1), x.amin(0), x.argmax(1), x.max(1).indices, torch.relu(x), x.clamp(-1, 1)),
            *(torch.maximum(x, x * 2), torch.softmax(x, -1), x.isnan(), torch.sign(x), x.sum(1)),
        )

    x = cuda(4, 300)
    x[1, 3] = x[2, 0] = x[2, 5] = float("nan")
    x[3], x[0, 7] = float("-inf"), float("inf")
    with torch.no_grad():
        for got, want in zip(compiled(function)(x), function(x), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_layouts():
    """Transposed, strided, expanded and channels-last operands; unaligned ones as well."""
    image = cuda(2, 8, 16, 16).to(memory_format=torch.channels_last)
    inputs = (cuda(64, 40).t(), cuda(40, 128)[:, ::2], cuda(40, 1).expand(40, 64), image)
    check(lambda a, b, c, d: (a.exp() + b, (c * 2).relu(), d.exp(), d.mean(1)), *inputs)
    torch._dynamo.reset()
    flat = cuda(4097)
    check(lambda x: (x * 2 + 1, x.sum()), flat[1:])


def test_sizes_that_change():
    """One compile for all sizes, and aligned and unaligned ones share it."""

    def function(x, w):
        return F.layer_norm(x, (x.shape[-1],), w) * x.sigmoid(), x.sum(0), x.mean()

    run = compiled(function, dynamic=True)
    with torch.no_grad():
        for size in ((64, 256), (37, 199), (5, 9000), (300, 64)):
            x, w = cuda(*size), cuda(size[1], seed=1)
            exact = function(x.double(), w.double())
            assert_closer(run(x, w), reference=exact, rival=function(x, w))
    assert len([graph for graph in ledger.graphs() if graph.kind == "inference"]) == 1


@pytest.mark.parametrize("autotune", [True, False])
def test_autotuning(autotune):
    """A kernel is tuned once; without it the first configuration runs."""
    from fuseboard_triton import _launch

    _launch._tuned.clear()

    def function(x):
        return torch.softmax(x * 1.25, -1) + 0.125

    run = compiled(function, plugins={"triton": {"autotune": autotune, "written_kernels": False}})
    x = cuda(256, 2048)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), function(x))
    assert len(_launch._tuned) == 1


# --- written, training, combinations --------------------------------------------------------------


def turned(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rms(x, y, w):
    return F.rms_norm(x + y, w.shape, w, 1e-5), x + y


def layer(x, y, w):
    return F.layer_norm(x + y, w.shape, w, w, 1e-5)


def swiglu(x, y, w):
    return F.silu(x) * y * w


def rotate(x, y, w):
    table = w.detach()
    return x * table.cos() + turned(x) * table.sin(), y


def loss(x, y, w):
    target = torch.arange(x[..., 0].numel(), device=x.device) % w.numel()
    return F.cross_entropy((x + y * w).view(-1, w.numel()), target)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 1000])
@pytest.mark.parametrize("function", [rms, layer, swiglu, rotate, loss])
def test_forward_and_backward(function, width, dtype, by_hand):
    """Results and gradients, from written kernels and from generated ones."""
    given = [cuda(3, 65, width, dtype=dtype), cuda(3, 65, width, dtype=dtype, seed=1)]
    given.append(cuda(width, dtype=dtype, seed=2))

    def results(run, double):
        inputs = [(x.double() if double else x).detach().requires_grad_() for x in given]
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((o.double() * o.numel() ** -0.5).sum() for o in outputs)
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
        return [o.detach() for o in outputs], [g for g in grads if g is not None]

    run = compiled(function, plugins={"triton": {"written_kernels": by_hand}})
    got = results(run, False)
    assert_closer(got, reference=results(function, True), rival=results(function, False))
    is_written = by_hand and function is not swiglu  # which is pointwise
    assert any(note.startswith("written kernel") for note in notes()) == is_written


class Block(nn.Module):
    """A decoder layer in the manner of Llama."""

    def __init__(self, width: int = 256, heads: int = 4, hidden: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, size).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        steps = torch.arange(0, size, 2, device=x.device) / size
        angles = torch.arange(length, device=x.device)[:, None] / 10000**steps
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = self.second(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_steps(dtype, mode):
    """Steps of SGD follow eager's, inside CUDA graphs as well."""
    torch.manual_seed(0)
    ours, theirs = Block().cuda().to(dtype), Block().cuda().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    options = {"mode": mode} if mode != "default" else {}
    run = compiled(ours, **options)
    tolerance = (
        {"rtol": 2e-3, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
    )
    for step in range(5):
        x = cuda(2, 64, 256, dtype=dtype, seed=step)
        for model, call in ((ours, run), (theirs, theirs)):
            model.zero_grad()
            call(x).float().square().mean().backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, **tolerance)
        with torch.no_grad():
            for parameter in (*ours.parameters(), *theirs.parameters()):
                parameter -= 0.1 * parameter.grad
    assert not any(graph.trips for graph in ledger.graphs())


def test_recorded_as_cuda_graphs():
    """``mode="reduce-overhead"`` records regions with matrix products between kernels."""
    torch.manual_seed(0)
    model = Block().cuda().eval()
    run = compiled(model, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(6):
            x = cuda(2, 64, 256, seed=step)
            torch.testing.assert_close(run(x), model(x), rtol=2e-3, atol=2e-4)
            model.out.weight.mul_(1.05)
    assert not any(graph.trips for graph in ledger.graphs())
    assert not any(note.startswith("CUDA graphs skipped") for note in notes())
