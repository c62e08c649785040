"""3-D and transposed convolutions through oneDNN, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard_mkldnn import _ops, _pack
from tests.plugins.test_mkldnn_conv import POST_OPS, fusions, run
from tests.support.backends import compiled, last_graph
from tests.support.values import assert_closer, rnd

NEEDS_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX-512 or AMX"
)


def norm(made: nn.Module) -> nn.Module:
    """Statistics that are worth folding."""
    channels = made.num_features
    with torch.no_grad():
        made.running_mean.copy_(rnd(channels, seed=1))
        made.running_var.copy_(rnd(channels, seed=2).abs() + 0.5)
        made.weight.copy_(rnd(channels, seed=3))
    return made


# --- 3-D ------------------------------------------------------------------------------------------

VOLUMES = {
    "3x3x3": nn.Conv3d(6, 8, 3, padding=1),
    "1x1x1": nn.Conv3d(6, 8, 1),
    "strided": nn.Conv3d(6, 8, 3, stride=(1, 2, 2)),
    "grouped": nn.Conv3d(6, 8, 3, groups=2, padding=1),
    "depthwise": nn.Conv3d(6, 6, 3, groups=6, padding=1),
    "dilated": nn.Conv3d(6, 8, (1, 3, 3), dilation=(1, 2, 2), padding=(0, 2, 2)),
    "reflect": nn.Conv3d(6, 8, 3, padding=1, padding_mode="reflect"),
    "without-bias": nn.Conv3d(6, 8, 3, bias=False),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_a_3d_convolution_with_its_norm_folded(name):
    """Groups, strides, dilation; odd sizes; the strides are eager's."""
    conv = copy.deepcopy(VOLUMES[name])
    last = nn.Conv3d(conv.out_channels, 5, 1)
    model = nn.Sequential(conv, norm(nn.BatchNorm3d(conv.out_channels)), nn.ReLU(), last)
    run(model, rnd(2, 6, 5, 7, 9))
    assert fusions() == ["conv+bn+relu", "conv"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("post", [nn.SiLU(), nn.ReLU()], ids=["silu", "relu"])
def test_a_residual_in_three_dimensions(layout, post):
    """A sum with an input of either layout, and an op after it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.post = nn.Conv3d(4, 6, 3, padding=1), post
            self.last = nn.Conv3d(6, 3, 1)

        def forward(self, x, y):
            hidden = self.post(self.conv(x) + y)
            return hidden, self.last(hidden)

    run(Model(), rnd(2, 4, 5, 6, 7), rnd(2, 6, 5, 6, 7).contiguous(memory_format=layout))


def test_what_lies_between_3d_convolutions():
    """Concatenation, pooling, padding and means, in whatever layout reaches them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(4, 6, 1)
            self.last = nn.Conv3d(12, 3, 3)

        def forward(self, x):
            both = torch.cat([self.one(x).tanh(), self.two(x)], 1)
            padded = nn.functional.pad(both, (1, 1, 0, 2, 1, 0))
            pooled = nn.functional.max_pool3d(padded, 2)
            return both.mean((2, 3, 4)), padded * 2, self.last(padded), pooled

    run(Model(), rnd(2, 4, 5, 6, 7))


@pytest.mark.thorough
def test_symbolic_sizes_of_volumes():
    """A weight packed for one size serves others."""
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 1)).eval()
    call = compiled(
        model,
        "mkldnn",
        "eager",
        dynamic=True,
        on_failure="raise",
        plugins={"mkldnn": {"channels_last": "always"}},
    )
    with torch.no_grad():
        for batch, size in ((2, 6), (3, 8), (5, 9)):
            x = rnd(batch, 3, 5, size, 7)
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(call(x), reference=reference, rival=model(x))
    assert "conv" in fusions()


def test_nan_passes_a_3d_convolution():
    """As in eager, although oneDNN's relu drops it."""
    model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, 1)).eval()
    options = {"plugins": {"mkldnn": {"channels_last": "always"}}}
    call = compiled(model, "mkldnn", "eager", **options)
    x = rnd(1, 2, 4, 5, 6)
    with torch.no_grad():
        call(x)
        x[0, 0, 1, 2, 3] = float("nan")
        assert torch.equal(call(x).isnan(), model(x).isnan())


# --- transposed -----------------------------------------------------------------------------------

TRANSPOSED = {
    "plain": (nn.ConvTranspose2d(6, 8, 3), (2, 6, 7, 9)),
    "strided": (nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1), (2, 6, 7, 9)),
    "uneven": (nn.ConvTranspose2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 6, 7, 9)),
    "dilated": (nn.ConvTranspose2d(6, 8, 3, dilation=2), (2, 6, 7, 9)),
    "grouped": (nn.ConvTranspose2d(6, 8, 3, groups=2, stride=2), (2, 6, 7, 9)),
    "depthwise": (nn.ConvTranspose2d(6, 6, 3, groups=6), (2, 6, 7, 9)),
    "without-bias": (nn.ConvTranspose2d(6, 8, 4, stride=2, bias=False), (2, 6, 7, 9)),
    "volume": (nn.ConvTranspose3d(4, 6, 3, stride=2, padding=1), (2, 4, 3, 5, 7)),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_transposed_convolution(name, layout):
    """Strides, output padding, groups, dilation; in either layout; eager's strides."""
    conv, shape = TRANSPOSED[name]
    x = rnd(*shape)
    if layout == "channels-last":
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=last)
    run(nn.Sequential(copy.deepcopy(conv), nn.Tanh()), x)
    assert fusions() == ([] if name == "depthwise" else ["conv_transpose+tanh"])


@pytest.mark.parametrize("after", POST_OPS)
def test_what_follows_a_transposed_convolution_is_inside(after):
    """Its batch norm is in its weight, the op after that in the kernel."""
    conv = nn.ConvTranspose2d(6, 8, 3, groups=2, stride=2, bias=False)
    post = copy.deepcopy(POST_OPS[after])
    run(nn.Sequential(conv, norm(nn.BatchNorm2d(8)), post), rnd(2, 6, 7, 9))
    assert fusions() == [f"conv_transpose+bn+{after}"]


@pytest.mark.parametrize("after", POST_OPS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_not_finite_passes_a_transposed_convolution(bad, after):
    """As in eager: its kernel's relu makes NaN of an infinity, its sigmoid drops NaN."""
    post = copy.deepcopy(POST_OPS[after])
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 1), post, nn.Conv2d(4, 2, 1)).eval()
    options = {"plugins": {"mkldnn": {"channels_last": "always"}}}
    call = compiled(model, "mkldnn", "eager", **options)
    x = rnd(1, 3, 5, 6)
    with torch.no_grad():
        call(x)
        x[0, 0, 1, 2] = bad
        torch.testing.assert_close(call(x), model(x), equal_nan=True)


def test_an_encoder_and_a_decoder():
    """Convolutions down, transposed ones up, skip connections."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
            self.deep = nn.Sequential(
                nn.Conv2d(8, 12, 3, stride=2, padding=1), norm(nn.BatchNorm2d(12)), nn.ReLU()
            )
            self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
            self.out = nn.ConvTranspose2d(16, 2, 2, stride=2)

        def forward(self, x):
            skip = self.down(x)
            return self.out(torch.cat([skip, self.up(self.deep(skip)).relu()], 1))

    run(Net(), rnd(2, 3, 20, 28))
    assert {"conv_transpose+relu", "conv_transpose"} <= set(fusions())


def test_an_updated_weight_is_packed_again():
    """In place, as an optimiser does."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2)).eval()
    options = {"plugins": {"mkldnn": {"channels_last": "always"}}}
    call = compiled(model, "mkldnn", "eager", **options)
    x = rnd(2, 4, 5, 6)
    with torch.no_grad():
        call(x)
        model[0].weight.mul_(-2)
        reference = copy.deepcopy(model).double()(x.double())
        assert_closer(call(x), reference=reference, rival=model(x))


@pytest.mark.parametrize(("faster", "names"), [("packed", ["conv_transpose"]), ("plain", [])])
def test_the_faster_one_is_taken(faster, names, monkeypatch):
    """Eager packs in each call as well, so it is measured."""
    monkeypatch.setattr(_pack, "_fastest", lambda calls, budget_s: faster)
    monkeypatch.setattr(_pack, "_chosen", {})
    run(nn.Sequential(nn.ConvTranspose2d(5, 7, 3)), rnd(2, 5, 6, 7), channels_last="auto")
    assert fusions() == names


def test_both_candidates_compute_the_same(monkeypatch):
    """What is measured is what runs: in each layout, the two give one result."""
    seen: list[int] = []

    def compare(calls, budget_s):
        with fuseboard.real_tensors():
            plain, packed = calls["plain"](), calls["packed"]()
            # Terms are summed in another order: float32's eps times their size, about.
            torch.testing.assert_close(plain, packed, rtol=1e-4, atol=1e-4)
            assert plain.stride() == packed.stride()
        seen.append(plain.dim())
        return "plain"

    monkeypatch.setattr(_pack, "_fastest", compare)
    monkeypatch.setattr(_pack, "_chosen", {})
    cases = [*TRANSPOSED.values(), (nn.Conv3d(3, 4, 3), (2, 3, 5, 6, 7))]
    for conv, shape in cases:
        torch._dynamo.reset()  # or sizes would become symbolic
        run(nn.Sequential(copy.deepcopy(conv)), rnd(*shape), channels_last="auto")
    assert seen == [len(shape) for conv, shape in cases if conv is not TRANSPOSED["depthwise"][0]]


def test_without_the_operator_eagers_runs(monkeypatch):
    """A torch that hasn't got it, or has another one."""
    monkeypatch.setattr(_ops, "transposed_convolution", lambda: None)
    run(nn.Sequential(nn.ConvTranspose2d(5, 7, 3)), rnd(2, 5, 6, 7))
    assert {region.backend for region in last_graph().regions} == {"eager"}


@NEEDS_BFLOAT16
@pytest.mark.parametrize("name", ["strided", "volume"])
def test_transposed_in_bfloat16(name):
    """As near to float64 as eager's."""
    conv, shape = TRANSPOSED[name]
    run(nn.Sequential(copy.deepcopy(conv)).bfloat16(), rnd(*shape, dtype=torch.bfloat16))


@NEEDS_BFLOAT16
def test_volumes_in_bfloat16():
    """Folding and post-operations as well."""
    conv = nn.Conv3d(6, 8, 3)
    model = nn.Sequential(conv, norm(nn.BatchNorm3d(8)), nn.ReLU(), nn.Conv3d(8, 4, 1))
    run(model.bfloat16(), rnd(2, 6, 5, 7, 9, dtype=torch.bfloat16))
