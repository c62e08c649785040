"""Random programs over symbolic sizes, one graph for several batches: all ways to run it agree."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, plugged
from tests.support.values import rnd, strides

#: Each keeps a batch of n rows, or makes another size of it; x is (n, m), y is (n, m).
STEPS = {
    "exp": lambda x, y: (x.clamp(-2, 2)).exp(),
    "add": lambda x, y: x + y,
    "scale": lambda x, y: x * x.shape[0] * 0.1,
    "mean": lambda x, y: x - x.mean(0),
    "softmax": lambda x, y: x.softmax(-1),
    "halves": lambda x, y: x[: (x.shape[0] + 1) // 2].repeat(2, 1)[: x.shape[0]],
    "double": lambda x, y: torch.cat([x, y])[x.shape[0] :] * 0.5,
    "flat": lambda x, y: x.reshape(-1).flip(0).view(x.shape),
    "turn": lambda x, y: x.t().contiguous().t() + 1,
    "outer": lambda x, y: (x @ y.t()).tanh() @ y * 0.1,
    "pad": lambda x, y: F.pad(x, (0, 0, 1, x.shape[0]))[1 : x.shape[0] + 1],
    "arange": lambda x, y: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None] * 0.1,
    "norm": lambda x, y: F.layer_norm(x, x.shape[1:]),
    "chunk": lambda x, y: torch.cat([c * 0.5 for c in x.split(2)]),
    "expand": lambda x, y: x.unsqueeze(0).expand(x.shape[0], *x.shape).sum(0) * 0.1,
}


@st.composite
def programs(draw):
    steps = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)
    batches = st.lists(st.integers(2, 9), min_size=2, max_size=4)
    return tuple(draw(steps)), tuple(draw(batches)), draw(st.booleans())


def program(steps):
    def run(x, y):
        for name in steps:
            x = STEPS[name](x, y)
        return x, x.sum(0), x.shape[0] * 2

    return run


def results(function, batch, grad):
    x, y = rnd(batch, 3).requires_grad_(grad), rnd(batch, 3, seed=1).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        outputs = function(x, y)
    if grad:
        (outputs[0].sum() + outputs[1].square().sum()).backward()
    return list(outputs), [v.grad for v in (x, y) if v.grad is not None]


def agrees(steps, batches, grad, **options):
    torch._dynamo.reset()
    ledger.clear()
    function = program(steps)
    fn = torch.compile(function, backend="fuseboard", dynamic=True, options=options)
    for batch in batches:
        got, want = results(fn, batch, grad), results(function, batch, grad)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert [strides(v) for v in got[0][:2]] == [strides(v) for v in want[0][:2]]
    assert not all_trips()


search = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,  # the same programs in every run: a failure is a change
)


@search
@given(programs())
@pytest.mark.thorough
def test_symbolic(drawn):
    """Cut at nearly every node, every check on."""
    with plugged("other"):
        plan = {"plan": "tests.support.plans:shuffled"}
        agrees(*drawn, backends=["other", "eager"], stages=plan, verify="always")
