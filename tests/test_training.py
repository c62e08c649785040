"""Training: the joint split, gradients, mutation, and Inductor on regions of a backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.backends import all_trips, compiled, graph_count, last_graph, plugged
from tests.support.values import assert_closer, assert_same, rnd

ALTERNATE = {"stages": {"plan": "tests.support.plans:alternate"}}


class Attention(nn.Module):
    """A small pre-norm transformer block with an MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def train(model, function, steps=3, make=lambda step: rnd(3, 5, 16, seed=step)):
    """Losses, gradients and weights of some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = []
    for step in range(steps):
        optimizer.zero_grad()
        x = make(step).to(next(model.parameters()).dtype).requires_grad_()
        loss = function(x).square().mean()
        loss.backward()
        trace.append([loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    return [trace, [p.detach() for p in model.parameters()]]


def test_a_training_run_is_eagers():
    """Loss, gradients and weights of three steps are no further from float64 than eager's."""
    model = Attention()
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
    got = train(model, compiled(model))
    assert_closer(got, reference=train(exact, exact), rival=train(twin, twin))
    assert graph_count("joint", "forward", "backward") == 3


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_on_regions_writes_to_nothing(dynamic):
    """Every input is bit-equal after every region, forward and backward; gradients are eager's.

    Inductor alternates with eager, node by node. It would reuse buffers that the whole graph's
    metadata calls donated if it saw that, and overwrite saved tensors and weights.
    """
    model = Attention()
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
    fn = compiled(model, "inductor", "eager", verify="always", dynamic=dynamic, **ALTERNATE)
    got = train(model, fn)
    assert_closer(got, reference=train(exact, exact), rival=train(twin, twin))
    assert not all_trips()
    for kind in ("forward", "backward"):
        backends = [region.backend for region in last_graph(kind).regions]
        assert backends.count("inductor") >= 3
        assert backends.count("eager") >= 3


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_the_memory_budget(budget):
    """What is saved shrinks, what comes out doesn't change."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
    twin = copy.deepcopy(model)
    saved = []

    def call(eager_call, region):
        def run(args):
            if region.kind == "backward":
                saved.append(sum(a.nbytes for a in args if isinstance(a, torch.Tensor)))
            return eager_call(args)

        return run

    with plugged(call=call):
        got = train(model, compiled(model, "fake", memory_budget=budget))
    torch.testing.assert_close(got, train(twin, twin))
    _saved[budget] = saved[-1]
    if budget == 1.0 and 0.0 in _saved:
        assert _saved[0.0] < _saved[1.0]


_saved: dict[float, int] = {}


def test_checkpointed_modules_are_recomputed():
    """``torch.utils.checkpoint``: the user's choice stands, dropout draws the same mask twice."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Sigmoid(), nn.Linear(16, 16))
    twin = copy.deepcopy(layers)

    def with_checkpoint(module):
        return lambda x: checkpoint(module, x, use_reentrant=False)

    torch.manual_seed(1)
    got = train(layers, compiled(with_checkpoint(layers)))
    torch.manual_seed(1)
    torch.testing.assert_close(got, train(twin, with_checkpoint(twin)))
    assert any("sigmoid" in op for region in last_graph("backward").regions for op in region.ops)


def test_batch_norm_counts_and_averages():
    """Buffers that the forward mutates are what eager leaves, in training and in evaluation."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(1))
    twin = copy.deepcopy(model)
    fn = compiled(model)
    for seed in range(3):
        for module, function in ((model, fn), (twin, twin)):
            module.train()
            function(rnd(4, 3, 6, 6, seed=seed)).sum().backward()
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        for module in (model, twin):
            module.eval()
        x = rnd(4, 3, 6, 6, seed=seed)
        with torch.no_grad():
            torch.testing.assert_close(fn(x), twin(x))
    grads = ([p.grad for p in m.parameters()] for m in (model, twin))
    torch.testing.assert_close(*(list(g) for g in grads))


def test_a_frozen_part():
    """Weights without gradients, as in fine-tuning, get none."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    fn = compiled(model)
    x = rnd(3, 16)
    fn(x).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    model[0].weight.add_(1)  # a version that no graph may have prepared anything from
    assert_same(fn(x).detach(), model(x).detach())


def test_gradients_of_some_inputs_and_outputs():
    """None for what isn't used; an output without gradient stays without."""

    def f(x, y, z):
        return (x * y).sin(), (x > 0), y.detach() * 2, z + 1

    fn = compiled(f)
    for needs in [(True, False, False), (False, True, True), (True, True, True)]:
        results = []
        for function in (fn, f):
            args = [rnd(3, 4, seed=i).requires_grad_(need) for i, need in enumerate(needs)]
            outputs = function(*args)
            (outputs[0].sum() + outputs[3].sum()).backward()
            results.append((outputs, [arg.grad for arg in args]))
        assert_same(*results)


def test_accumulated_and_retained_gradients():
    """``retain_graph`` runs the same backward again on the same saved tensors."""
    fn = compiled(lambda x: x.exp().sin().sum())
    x, own = rnd(4).requires_grad_(), rnd(4).requires_grad_()
    y = fn(x)
    z = own.exp().sin().sum()
    for _ in range(3):
        y.backward(retain_graph=True)
        z.backward(retain_graph=True)
        assert_same(x.grad, own.grad)


def test_gradients_that_are_not_contiguous():
    """Tangents come with strides that nobody planned for: expanded, transposed."""

    def f(x):
        return x.sigmoid() * 2

    fn = compiled(f)
    for change in (lambda y: y.sum(), lambda y: (y.t() @ y).sum(), lambda y: y[::2].sum()):
        results = []
        for function in (fn, f):
            x = rnd(4, 6).requires_grad_()
            change(function(x)).backward()
            results.append(x.grad)
        torch.testing.assert_close(*results)


def test_mutation_of_an_input_that_needs_no_gradient_in_training():
    """A running average beside the loss."""

    def f(x, average):
        average.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return (x - average).square().sum()

    fn = compiled(f)
    mine, theirs = torch.zeros(4), torch.zeros(4)
    for seed in range(3):
        results = []
        for function, average in ((fn, mine), (f, theirs)):
            x = rnd(5, 4, seed=seed).requires_grad_()
            loss = function(x, average)
            loss.backward()
            results.append((loss.detach(), x.grad, average))
        assert_same(*results)


def test_autocast():
    """bfloat16 regions in training, as the user's context asks."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    twin = copy.deepcopy(model)
    fn = compiled(model)
    for function in (fn, twin):
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(rnd(5, 16)).float().square().sum()
        loss.backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=1e-2)  # bfloat16's eps


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "batch of this call": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch in eval": lambda: nn.BatchNorm2d(4).eval(),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_norms_of_halves_with_float32_weights(norm, dtype):
    """Their statistics are saved as they are computed, in float32; torch's fakes say halves."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.Conv2d(4, 2, 3))
    twin = copy.deepcopy(model)
    fn = compiled(model, on_failure="raise")
    results = []
    for function, parameters in ((fn, model), (twin, twin)):
        with torch.autocast("cpu", dtype):
            y = function(rnd(3, 3, 8, 8))
        y.float().square().sum().backward()
        grads = [p.grad for p in parameters.parameters()]
        results.append([y, *grads, *parameters.buffers()])
    for got, want in zip(*results, strict=True):
        # Another rounding of a few halves; sums that cancel out have an error of their terms'.
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    assert not all_trips()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.thorough
def test_a_later_backward_may_keep_its_graph(backend):
    """No backward overwrites saved tensors, so one that ran before doesn't forbid it."""

    def f(x):
        return (x.sin() * x).sum()

    fn = compiled(f, *dict.fromkeys([backend, "eager"]))
    x = rnd(3).requires_grad_()
    fn(x).backward()
    result = fn(x)
    result.backward(retain_graph=True)
    result.backward()
    torch.testing.assert_close(x.grad, 3 * (x.cos() * x + x.sin()).detach())
