"""Random programs by hypothesis: each backend agrees with eager, forward and backward.

A program is a list of steps; each reads earlier values and appends what it makes. About fifty ops
over shapes with 0 and 1, several dtypes, views and casts. Values are held against eager's with
torch's tolerances for the dtype, doubled per step, since errors travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, plugged
from tests.support.values import rnd, strides

Step = Callable[..., torch.Tensor]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.bool)

#: Defined and smooth enough everywhere, so that small errors stay small.
POINTWISE: dict[str, Step] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "sin": torch.sin,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": lambda x: x.clamp(-3, 3).square(),
    "exp": lambda x: x.clamp(-3, 3).exp(),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "log": lambda x: (x.abs() + 1).log(),
    "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": F.hardtanh,
    "scaled": lambda x: x * 0.5 + 1,
    "clone": torch.clone,
    "detach": torch.detach,
    "masked": lambda x: torch.where(x > 0, x, x * 0.1),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.5),
}
BINARY: dict[str, Step] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda x, y: x.clamp(-3, 3) * y.clamp(-3, 3),
    "maximum": torch.maximum,
    "div": lambda x, y: x / (y.abs() + 1),
    "lerp": lambda x, y: torch.lerp(x, y.to(x.dtype), 0.25),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
}
REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d) * 0.1,
    "sum_keepdim": lambda x, d: x.sum(d, keepdim=True) * 0.1,
    "mean": lambda x, d: x.sum(d) / max(x.shape[d], 1),
    "amax": lambda x, d: x.amax(d) if x.shape[d] else x.sum(d),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "cumsum": lambda x, d: x.cumsum(d) * 0.1,
    "norm": lambda x, d: (x.square().clamp(max=9).sum(d) + 1).sqrt(),
    "layer_norm": lambda x, d: F.layer_norm(x.transpose(d, -1), x.transpose(d, -1).shape[-1:]),
    "std": lambda x, d: (x.var(d, correction=0) + 1).sqrt() if x.shape[d] else x.sum(d),
    "sort": lambda x, d: x.sort(d)[0],
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
}
VIEWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "transpose": lambda x, d: x.transpose(d, -1),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "flatten": lambda x, d: x.flatten(),
    "slice": lambda x, d: x.narrow(d, min(1, x.shape[d]), max(x.shape[d] - 1, 0)),
    "step": lambda x, d: x.transpose(0, d)[::2],
    "select": lambda x, d: x.select(d, -1) if x.shape[d] else x.sum(d),
    "expand": lambda x, d: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]),
    "squeeze": lambda x, d: x.squeeze(d),
    "reshape": lambda x, d: x.reshape((*x.shape[:d], x.shape[d:].numel())),
    "contiguous": lambda x, d: x.transpose(0, d).contiguous(),
    "pad": lambda x, d: F.pad(x, (1, 2)),
    "chunk": lambda x, d: x.chunk(2, d)[-1],
    "split": lambda x, d: x.split(max(x.shape[d] - 1, 1), d)[0],
    "unbind": lambda x, d: sum(x.unbind(d)[:3]) if x.shape[d] else x.sum(d),
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "stack": lambda x, d: torch.stack([x, x + 1], d),
    "tile": lambda x, d: x.repeat_interleave(2, d),
    "index": lambda x, d: x.transpose(0, d)[torch.tensor([0, -1, 0])] if x.shape[d] else x,
    "index_select": lambda x, d: (
        x.index_select(d, torch.tensor([x.shape[d] - 1, 0])) if x.shape[d] else x
    ),
    "gather": lambda x, d: x.gather(d, torch.zeros_like(x, dtype=torch.int64)),
    "scatter": lambda x, d: x.scatter_add(d, torch.zeros_like(x, dtype=torch.int64), x),
    "triu": lambda x, d: x.unsqueeze(0).triu() if x.dim() == 1 else x.triu(),
}
CASTS = {f"to_{str(dtype)[6:]}": dtype for dtype in FLOATS}


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product of what was there, made to fit: (n, k) times (k, n)."""
    x, y = x.clamp(-3, 3).flatten(1) if x.dim() > 1 else x.clamp(-3, 3)[None], y.to(x.dtype)
    y = (y.flatten(1) if y.dim() > 1 else y[None]).clamp(-3, 3)
    width = min(x.shape[1], y.shape[1])
    return (x[:, :width] @ y[:, :width].t()) * 0.1


@dataclass(frozen=True)
class Program:
    """What to compute: shapes and dtypes of the inputs, then steps that name what they read."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    steps: tuple[tuple[str, int, int, int], ...]

    def inputs(self, grad: bool) -> list[torch.Tensor]:
        made = [
            rnd(*shape, seed=i).to(dtype)
            for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]
        return [x.requires_grad_(grad and x.is_floating_point()) for x in made]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = [x if x.is_floating_point() else x.float() for x in inputs]
        for name, first, second, dim in self.steps:
            x, y = values[first % len(values)], values[second % len(values)]
            values.append(self._step(name, x, y, dim))
        return values[len(inputs) :]

    @staticmethod
    def _step(name: str, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
        if name in POINTWISE:
            return POINTWISE[name](x)
        if name in BINARY:
            return BINARY[name](x, y if _broadcasts(x, y) else x)
        if name == "matmul":
            return matmul(*(v if v.dim() else v.view(1) for v in (x, y)))
        if name in CASTS:
            return x.to(CASTS[name])
        x = x if x.dim() else x.view(1)
        step = REDUCTIONS.get(name) or VIEWS[name]
        result = step(x, dim % x.dim())
        return result if result.numel() < 5000 and result.dim() < 5 else result.flatten()[:50]


def _broadcasts(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)


OPS = [*POINTWISE, *BINARY, *REDUCTIONS, *VIEWS, "matmul", *CASTS]


@st.composite
def programs(draw):
    count = draw(st.integers(1, 3))
    size = st.sampled_from([0, 1, 1, 2, 3, 5, 7])
    shape = st.lists(size, min_size=0, max_size=3).map(tuple)
    step = st.tuples(st.sampled_from(OPS), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2))
    return Program(
        tuple(draw(shape) for _ in range(count)),
        tuple(draw(st.sampled_from(DTYPES)) for _ in range(count)),
        tuple(draw(st.lists(step, min_size=1, max_size=8))),
    )


def results(function, program: Program, grad: bool) -> Any:
    """The answers, and the gradients of their sum."""
    inputs = program.inputs(grad)
    with torch.set_grad_enabled(grad):
        outputs = function(*inputs)
        scalars = [o.double().sum() for o in outputs if o.requires_grad]
    if scalars:
        (sum(scalars) / 10).backward()
    return outputs, [x.grad for x in inputs if x.grad is not None]


def agrees(program: Program, grad: bool, *backends: str, **options: Any) -> None:
    torch._dynamo.reset()
    ledger.clear()
    outputs, gradients = results(compiled(program.__call__, *backends, **options), program, grad)
    expected, expected_gradients = results(program, program, grad)
    for got, want in zip(outputs, expected, strict=True):
        assert strides(got) == strides(want)
        assert got.requires_grad == want.requires_grad
    for got, want in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
        rtol, atol = _tolerance(program)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    assert not all_trips()


def _tolerance(program: Program) -> tuple[float, float]:
    names = {name for name, *_ in program.steps}
    if torch.bfloat16 in program.dtypes or "to_bfloat16" in names:
        return 0.1, 0.1  # eight bits, through up to eight steps
    return 2e-4, 2e-4


def search(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        derandomize=True,  # the same programs in every run: a failure is a change
    )


@search(30)
@given(programs(), st.booleans())
@pytest.mark.thorough
def test_eager(program, grad):
    """The board's own backend: capture, split, generated code."""
    agrees(program, grad, "eager")


@search(20)
@given(programs(), st.booleans())
@pytest.mark.thorough
def test_many_regions(program, grad):
    """Cut at nearly every node, every check on."""
    with plugged("other"):
        plan = {"plan": "tests.support.plans:shuffled"}
        agrees(program, grad, "other", "eager", stages=plan, verify="always")


@search(20)
@given(programs())
@pytest.mark.thorough
def test_symbolic_sizes(program):
    """Every size a symbol that can be one."""
    agrees(program, False, "eager", dynamic=True)


@search(20)
@given(programs())
@pytest.mark.thorough
def test_mkldnn(program):
    """Inference through oneDNN's operators where there is something for them."""
    agrees(program, False, "mkldnn", "eager")


@pytest.mark.slow
@search(12)
@given(programs(), st.booleans())
def test_inductor(program, grad):
    """Each example costs seconds of C++."""
    agrees(program, grad, "inductor", "eager")
