"""Ops that capture takes apart into others, which round otherwise than torch's kernel.

Dynamo's own graph calls the kernel. That is eager, so its roundings are no fault.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseboard.capture.comparison import CaptureCheck
from fuseboard.profile.judge.same_results import difference_of_dynamo_graph
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import rnd

pytestmark = pytest.mark.usefixtures("policy_measured")

#: Taken apart by a kernel of its own for autograd, as ``aten::upsample_bilinear2d.vec`` is.
_LIBRARY = torch.library.Library("fuseboard_rounding_tests", "DEF")
_LIBRARY.define("coarse(Tensor x) -> Tensor")
_LIBRARY.impl("coarse", lambda x: (x + 8) - 8, "CPU")
_COARSE = torch.ops.fuseboard_rounding_tests.coarse


@_COARSE.default.py_impl(torch._C.DispatchKey.Autograd)
def _parts(x):
    return x + 0 * x


def run(function, *inputs):
    """The first call under measured choice."""
    with plugged("quick", info={"compiles_quickly": True}) as name:
        return compiled(function, name, "eager", measure_s=0.01)(*inputs)


def test_eager_s_roundings_are_no_trip():
    """The kernel is farther off than the captured ops' error allows, which is a note."""
    x = torch.rand(1000) * 2 - 1
    torch.testing.assert_close(run(lambda x: _COARSE(x) * 2, x), x * 2)
    assert not all_trips()
    assert any("rounds otherwise" in note for note in last_graph().notes)


def test_what_rounding_does_not_explain_is_found():
    """Zeros, another sign, and one element of a thousand."""
    graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.exp.default(x),))
    x = rnd(1000)
    right = x.exp()
    for wrong in (torch.zeros_like(x), -right, right.index_fill(0, torch.tensor(7), 0.0)):
        assert difference_of_dynamo_graph(graph, [x], [wrong], ["close"])
    assert not difference_of_dynamo_graph(graph, [x], [right * (1 + 4e-7)], ["close"])


def test_a_graph_under_another_state_still_trips(monkeypatch):
    """Without gradients ``torch.func`` gives zeros: that is no rounding."""
    monkeypatch.setattr("fuseboard.capture.original.only_computes", lambda graph: True)
    monkeypatch.setattr(CaptureCheck, "difference", lambda check, inputs: "")

    def cubed(x):
        return torch.func.grad(lambda t: (t**3).sum())(x)

    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(run(cubed, x), 3 * x * x)
    assert "eager" in {trip.plugin for trip in all_trips()}


def resized(mode, **more):
    return lambda x: F.interpolate((x - 0.485) / 0.229, size=(37, 53), mode=mode, **more)


TAKEN_APART = {
    "linear": (lambda x: F.interpolate(x, size=1000, mode="linear"), [(2, 8, 333)]),
    "bilinear": (resized("bilinear"), [(1, 3, 64, 81)]),
    "bicubic": (resized("bicubic", align_corners=True), [(1, 3, 64, 81)]),
    "antialiased": (resized("bilinear", antialias=True), [(1, 3, 64, 81)]),
    "trilinear": (
        lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
        [(1, 2, 9, 11, 7)],
    ),
    "grid_sample": (
        lambda x, t: F.grid_sample(
            x, F.affine_grid(t, (2, 3, 31, 29), align_corners=False), align_corners=False
        ),
        [(2, 3, 33, 31), (2, 2, 3)],
    ),
    "batch norm": (
        lambda x, w: F.batch_norm(x + 5, None, None, w, training=True),
        [(8, 16, 9, 9), (16,)],
    ),
    "norms": (
        lambda x: (
            F.layer_norm(1e-3 * x + 50, (1000,)),
            F.instance_norm(x[None]),
            F.rms_norm(x, (1000,)),
            F.normalize(x),
            x.norm(p=3, dim=-1),
        ),
        [(30, 1000)],
    ),
    "sums": (lambda x: (x.sum(), x.sum(0), x.mean(-1), x.nansum(-1)), [(100, 10_007)]),
    "scans": (lambda x: (x.cumsum(-1), x.logcumsumexp(-1)), [(10, 3001)]),
    "exponentials": (
        lambda x: (x.logsumexp(-1), x.log_softmax(-1), torch.logaddexp(x, x.flip(0))),
        [(30, 3001)],
    ),
    "moments": (
        lambda x: (x.std(-1), (x + 100).var(0), *torch.var_mean(x, 1), torch.cov(x[:9])),
        [(50, 3001)],
    ),
    "special functions": (
        lambda x: (
            x.sigmoid().logit(),
            x.tanh().erfinv(),
            torch.special.ndtri(x.sigmoid()),
            torch.special.log_ndtr(x - 5),
            F.mish(x),
            torch.sinc(x),
        ),
        [(5000,)],
    ),
    "distances": (
        lambda x, y: (torch.cdist(x, y), F.cosine_similarity(x, y), F.pairwise_distance(x, y)),
        [(99, 16), (99, 16)],
    ),
    "losses": (
        lambda x, y: (
            F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
            F.huber_loss(x, y),
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        ),
        [(300, 161), (300, 161)],
    ),
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_ops_that_are_taken_apart_run_judged(name):
    """Neither Dynamo's own graph trips nor another candidate, and the values are eager's."""
    function, shapes = TAKEN_APART[name]
    inputs = [rnd(*shape) for shape in shapes]
    torch.testing.assert_close(run(function, *inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    assert not all_trips()
