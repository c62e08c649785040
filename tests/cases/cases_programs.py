"""Small programs of the kinds that compilers were reported to get wrong.

Each ``case_NN_slug(compile_fn)`` is like those of ``cases_dev.py``: it raises AssertionError where
compiled code does something else than eager does. They were written for the kind and not taken from
the reports, whose numbers say where it was seen. Each function is called on several inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CALLS = 3


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Any, want: Any, what: str) -> None:
    """Values, dtypes, strides and ``requires_grad`` of tensors and lists of them."""
    if isinstance(want, list | tuple):
        assert len(got) == len(want), f"{what}: {len(got)} results, eager has {len(want)}"
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            check(one, other, f"{what}[{number}]")
        return
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, eager has {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, eager has {want.shape}"
    assert got.stride() == want.stride(), (
        f"{what}: strides {got.stride()}, eager has {want.stride()}"
    )
    assert got.requires_grad == want.requires_grad, f"{what}: requires_grad {got.requires_grad}"
    try:
        torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def hold(compile_fn: Any, f: Callable[..., Any], make: Callable[[int], tuple[Tensor, ...]]) -> None:
    """Results and inputs after the call are eager's, on other inputs in each call."""
    compiled = compile_fn(f)
    for number in range(CALLS):
        got, want = make(number), make(number)
        check(compiled(*got), f(*want), f"call {number}")
        check(got, want, f"inputs after call {number}")


# Half types between fused ops: eager rounds each result. (pytorch#183607, #185337, #115260)
def case_01_half_types_are_rounded(compile_fn):
    def f(x, y):
        half, brain = x.half(), y.bfloat16()
        cancelled = ((brain + 1e-3) - brain).float()
        return (half * half).float(), cancelled, (half * 3.1 + half).float() - half.float()

    hold(compile_fn, f, lambda i: (torch.tensor([5000.0, 3.0 + i, 1e-4]), rnd(20, seed=i)))


# A cache that is written where a 0-d tensor says, which then moves on. (GuardOnDataDependent...)
def case_02_cache_with_its_own_position(compile_fn):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 2, 8, 4))
            self.register_buffer("position", torch.tensor(0))

        def forward(self, x):
            self.keys[:, :, self.position] = x
            self.position += 1
            return self.keys * 1.5, self.keys.sum(2)

    one, other = Cache(), Cache()
    compiled = compile_fn(one)
    with torch.no_grad():
        for number in range(CALLS):
            x = rnd(1, 2, 4, seed=number)
            check(compiled(x), other(x), f"call {number}")
            check(list(one.buffers()), list(other.buffers()), f"buffers after call {number}")


# Extremes of 8-bit integers, over a vector's width of them. (pytorch#191499)
def case_03_extremes_of_bytes(compile_fn):
    def f(x, y):
        return x.min(), x.argmin(), x.amin(-1), y.max(), y.argmax(), y.amax(0), y.max(-1)[0]

    def make(number):
        values = torch.arange(2, 80).roll(number + 20).view(2, 39)
        return values.to(torch.uint8), -values.to(torch.int8)

    hold(compile_fn, f, make)


# Integers wrap around in their own type before they are widened. (pytorch#105264, #108520, #93829)
def case_04_integers_wrap(compile_fn):
    def f(x, y):
        return (x + x).to(torch.int16), (-x) < 4, (y + y).to(torch.int64), (y * y).float(), y.abs()

    def make(number):
        wide = torch.tensor([2**31 - 1, -(2**31), number, -7], dtype=torch.int32)
        return torch.tensor([128, 6, 255, number], dtype=torch.uint8), wide

    hold(compile_fn, f, make)


# A view of an input that overlaps the one which is written to. (pytorch#198095)
def case_05_views_of_overlapping_inputs(compile_fn):
    def f(base, view):
        base.add_(100)
        return view[0], view * 2

    def make(number):
        base = torch.arange(24.0).add(number).view(4, 6)
        return base, base[1:]

    hold(compile_fn, f, make)


# Gradients of writes into slices, diagonals and strided memory. (pytorch#182012)
def case_06_gradients_of_scatters(compile_fn):
    def f(x, values):
        diagonal = torch.diagonal_scatter(x, values)
        select = torch.select_scatter(x * 2, values, 1, -2)
        strided = torch.as_strided_scatter(x.sin(), values[:4].view(2, 2), (2, 2), (3, 1), 1)
        return diagonal.sum() + (select * strided).sum()

    compiled = compile_fn(f)
    for number in range(CALLS):
        inputs = [rnd(5, 5, seed=number).requires_grad_(), rnd(5, seed=9).requires_grad_()]
        got = torch.autograd.grad(compiled(*inputs), inputs)
        check(got, torch.autograd.grad(f(*inputs), inputs), f"gradients of call {number}")


# Layouts that come of the first input, or that a later op reads. (pytorch#174963, #198364)
def case_07_layouts(compile_fn):
    def f(x, a, b):
        flat = torch.as_strided(torch.roll(x, -1, 0), (5, 10), (4, 1), 0)
        return (
            flat,
            torch.copysign(a, b),
            torch.div(a, b, rounding_mode="floor"),
            a.expand(6, 5) + 1,
        )

    def make(number):
        image = torch.arange(100.0).add(number).view(2, 5, 2, 5)
        b = rnd(6, 5, seed=number).abs() + 1
        return image.to(memory_format=torch.channels_last), rnd(5, 6, seed=3).t(), b

    hold(compile_fn, f, make)


# NaN and infinities go through clamps, extremes, sorts and softmaxes. (pytorch#93784)
def case_08_nan_and_infinities(compile_fn):
    def f(x, y):
        rows = x.view(2, 4)
        return (
            *(torch.minimum(x, y), torch.maximum(x, y), torch.fmin(x, y), torch.fmax(x, y)),
            *(x.clamp(-1, 1), x.clamp(min=y), F.relu(x), F.hardtanh(x), F.leaky_relu(x)),
            *(x.max(0)[0], x.min(0)[0], x.sort()[0], x.cummax(0)[0], rows.amax(1)),
            *(rows.softmax(1), rows.log_softmax(1), rows.logsumexp(1), x.nan_to_num()),
        )

    def make(number):
        nan, inf = math.nan, math.inf
        x = torch.tensor([1.0, nan, -inf, inf, 0.5, -inf, -0.0, number])
        return x, torch.tensor([nan, 2.0, 3.0, nan, -inf, nan, 0.0, 1.0])

    hold(compile_fn, f, make)


# What requires a gradient, where grad mode changes inside. (pytorch#114338, #114344, #176854)
def case_09_grad_modes_inside(compile_fn):
    def f(x):
        with torch.no_grad():
            without = x + 1
            with torch.enable_grad():
                inside = x * 2
        detached = x * 3
        detached.detach_()
        return without, x + 1, inside, detached, (x * 3).detach()

    hold(compile_fn, f, lambda i: (rnd(3, seed=i).requires_grad_(),))


# A write to memory that overlaps itself, in a vmap, which eager makes one row after the other.
def case_10_vmap_of_overlapping_writes(compile_fn):
    def f(x, y):
        return torch.vmap(lambda row, new: row.clone().unfold(0, 2, 1).copy_(new))(x, y)

    hold(compile_fn, f, lambda i: (rnd(3, 6, seed=i), rnd(3, 5, 2, seed=i + 5)))


# Sizes by a fraction, whose digits count. (pytorch#147261)
def case_11_a_third_of_a_size(compile_fn):
    def f(x):
        return F.interpolate(x, scale_factor=1 / 3, mode="linear") * 2

    compiled = compile_fn(f, dynamic=True)
    for number in range(CALLS):
        x = rnd(1, 2, 3 * (7 + number), seed=number)
        check(compiled(x), f(x), f"{x.shape[-1]} columns")
