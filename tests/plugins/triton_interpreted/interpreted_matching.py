"""Where the written kernels are found, and that graphs are right with them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from fuseboard_triton.kernels.rotary import turned
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd

OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}


def rms(x, y, w):
    total = x + y
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * normed.to(x.dtype), total


def layer(x, y, w):
    return F.layer_norm(x + y, (16,), w, w, 1e-5)


def rotate(x, y, w):
    table = w.detach()
    return x * table.cos() + turned(x) * table.sin(), y


def layer_by_hand(x, y, w):
    centred = x - x.mean(-1, keepdim=True)
    return w * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + w, y


def rotate_slices(x, y, w):
    table = w.detach()
    return x * table.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * table.sin(), y


def loss(x, y, w):
    target = torch.tensor([0, 15, 3, -100, 7, 2])
    return F.cross_entropy((x + y * w).view(6, 16), target)


#: Function → the kernels of its forward and of its backward.
CASES: dict[Callable[..., Any], tuple[set[str], set[str]]] = {
    rms: ({"add+rms_norm"}, set()),
    layer: ({"add+layer_norm"}, {"layer_norm_backward"}),
    layer_by_hand: ({"layer_norm"}, set()),
    rotate: ({"rotary"}, {"rotary_backward"}),
    rotate_slices: ({"rotary"}, {"rotary_backward"}),
    loss: ({"cross_entropy"}, {"cross_entropy_backward"}),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def written(kind: str) -> set[str]:
    """The written kernels of the newest graph."""
    notes = [note for region in last_graph(kind).regions for note in region.notes]
    found = [note for note in notes if note.startswith("written kernel ")]
    return {note.removeprefix("written kernel ").rsplit(" ", 1)[0] for note in found}


def results(function, run, inputs):
    """The results, and the gradients of their weighted sum."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = pytree.tree_leaves(run(*inputs))
    total = sum((o.double() * (1 + torch.arange(o.numel()).view(o.shape))).sum() for o in outputs)
    grads = torch.autograd.grad(total / 100, inputs, allow_unused=True)
    return [o.detach() for o in outputs], [g for g in grads if g is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_training(function, dtype):
    """The kernels are found, and results and gradients are as near to float64 as eager's."""
    inputs = [rnd(2, 3, 16, dtype=dtype), rnd(2, 3, 16, seed=1, dtype=dtype)]
    inputs.append(rnd(16, seed=2, dtype=dtype))
    run = compiled(function, "triton", "eager", **OPTIONS)
    got = results(function, run, inputs)
    exact = results(function, function, [x.double() for x in inputs])
    assert_closer(got, reference=exact, rival=results(function, function, inputs))
    assert all_trips() == []
    forward, backward = CASES[function]
    assert written("forward") == forward
    assert written("backward") == backward


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_inference(function):
    """Without gradients, and with generated kernels alone where that is asked for."""
    inputs = [rnd(2, 3, 16), rnd(2, 3, 16, seed=1), rnd(16, seed=2)]
    exact = function(*[x.double() for x in inputs])
    rival = function(*inputs)
    for by_hand in (True, False):
        torch._dynamo.reset()
        options = {**OPTIONS, "plugins": {"triton": {"written_kernels": by_hand}}}
        with torch.no_grad():
            got = compiled(function, "triton", "eager", **options)(*inputs)
        assert_closer(got, reference=exact, rival=rival)
        assert written("inference") == (CASES[function][0] if by_hand else set())


def test_sizes_that_change():
    """Matches hold for symbolic sizes."""

    def function(x, w):
        return F.layer_norm(x, (16,), w), F.silu(x) * w

    run = compiled(function, "triton", "eager", dynamic=True, **OPTIONS)
    with torch.no_grad():
        for rows in (3, 7, 2):
            x, w = rnd(rows, 5, 16), rnd(16, seed=1)
            exact = function(x.double(), w.double())
            assert_closer(run(x, w), reference=exact, rival=function(x, w))
    assert written("inference") == {"layer_norm"}


def near_misses(x, y, w):
    active = F.silu(x)
    halves = torch.cat([-x[..., :8], x[..., 8:]], -1)
    return (
        *(active * y, active),  # the activation is read twice
        *(x * w + halves * w, F.layer_norm(x, (3, 16))),  # halves in place; two dimensions
        x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),  # another dimension
        F.silu(x) * w,  # another shape
    )


def test_what_is_nearly_a_pattern():
    """What a kernel doesn't compute isn't given to it."""
    inputs = [rnd(2, 3, 16), rnd(2, 3, 16, seed=1), rnd(16, seed=2)]
    with torch.no_grad():
        got = compiled(near_misses, "triton", "eager", **OPTIONS)(*inputs)
    exact = near_misses(*[x.double() for x in inputs])
    assert_closer(got, reference=exact, rival=near_misses(*inputs))
    assert written("inference") == set()
