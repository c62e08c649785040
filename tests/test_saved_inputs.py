"""What may be written to between a forward and its backward may be so under rewrites as well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseboard.fuse.saved_inputs import copied
from tests.support.attention import rewrite_however_small
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import rnd

FUSED = "fuseboard.attention.default"
B, H, S, D = 2, 3, 8, 4


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    rewrite_however_small(monkeypatch)


def added(q, k, v, m):
    return (q @ k.mT * 0.3 + m).softmax(-1) @ v


def added_twice(q, k, v, m):
    return added(added(q, k, v, m), k, v, m)


def expanded(q, k, v, m):
    return added(q, k, v, m[:1].expand(B, H, S, S))


def scaled_before(q, k, v, m):
    return ((q * 0.3) @ k.mT + m).softmax(-1) @ v


def filled(q, k, v, m):
    return (q @ k.mT * 0.3).masked_fill(m > 0, float("-inf")).softmax(-1) @ v


def inputs(requiring="qkv", mask=(B, 1, S, S)):
    tensors = {name: rnd(B, H, S, D) for name in "qkv"} | {"m": rnd(*mask)}
    for name in requiring:
        tensors[name].requires_grad_()
    return tensors


def gradients(function, tensors, overwritten):
    """Those of a call of which some inputs are overwritten before the backward."""
    result = function(*tensors.values())
    with torch.no_grad():
        for name in overwritten:
            tensors[name].zero_()
    result.square().sum().backward()
    return [one.grad for one in tensors.values()]


@pytest.mark.parametrize(
    ("function", "requiring", "overwritten"),
    [
        (added, "qkv", "m"),
        (added_twice, "qkv", "m"),
        (expanded, "qkv", "m"),
        (filled, "qkv", "m"),  # the comparison is saved, not what it reads
        (added, "q", "q"),  # a product saves its left operand for the gradient of the right one
        (added, "v", "qkv"),
        (scaled_before, "qkv", "qm"),
    ],
)
@pytest.mark.whole
def test_what_eager_s_formula_does_not_save_may_be_overwritten(function, requiring, overwritten):
    """The op that stands for the formula saves it, and so has a copy."""
    torch.manual_seed(1)
    own = inputs(requiring)
    others = {
        name: one.detach().clone().requires_grad_(one.requires_grad) for name, one in own.items()
    }
    wanted = gradients(function, others, overwritten)
    torch.testing.assert_close(gradients(compiled(function), own, overwritten), wanted)
    assert FUSED in {op for region in last_graph("forward").regions for op in region.ops}
    assert not all_trips()


def test_what_eager_s_formula_saves_may_not():
    """The error is eager's: nobody pays for a copy there."""
    for function in (added, compiled(added)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(function, inputs(), "v")


def test_one_copy_serves_all_layers(monkeypatch):
    """And none is made where the mask is the graph's own."""
    made = []

    def counted(write, node, before):
        made.append(copied(write, node, before))
        return made[-1]

    monkeypatch.setattr("fuseboard.fuse.attention.copied", counted)
    compiled(added_twice)(*inputs().values())
    assert len(made) == 2
    assert len(set(made)) == 1
    made.clear()
    compiled(lambda q, k, v, m: added(q, k, v, F.relu(m)))(*inputs().values())
    assert not made
