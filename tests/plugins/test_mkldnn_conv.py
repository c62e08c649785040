"""Convolutions through oneDNN: folding, post-operations, residuals and layouts, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.backends import compiled, hoisted, last_graph
from tests.support.half_types import HALVES
from tests.support.values import assert_closer, rnd, strides

POST_OPS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "hardtanh": nn.Hardtanh(-0.5, 0.25),
    "leaky_relu": nn.LeakyReLU(0.2),
}

CONVOLUTIONS = {
    "3x3": nn.Conv2d(16, 24, 3, padding=1),
    "1x1": nn.Conv2d(16, 24, 1),
    "strided": nn.Conv2d(16, 24, 3, stride=2),
    "grouped": nn.Conv2d(16, 24, 3, groups=4, padding=1),
    "depthwise": nn.Conv2d(16, 16, 3, groups=16, padding=1),
    "dilated": nn.Conv2d(16, 24, 3, dilation=2, padding=2),
    "same": nn.Conv2d(16, 24, (3, 5), padding="same"),
    "reflect": nn.Conv2d(16, 24, 3, padding=1, padding_mode="reflect"),
    "circular": nn.Conv2d(16, 24, 3, padding=1, padding_mode="circular"),
    "uneven": nn.Conv2d(16, 24, (3, 1), stride=(2, 1), padding=(1, 0)),
    "without-bias": nn.Conv2d(16, 24, 3, bias=False),
}


def norm(channels: int, affine: bool = True) -> nn.BatchNorm2d:
    """A batch norm with statistics that are worth folding."""
    made = nn.BatchNorm2d(channels, affine=affine)
    with torch.no_grad():
        made.running_mean.copy_(rnd(channels, seed=1))
        made.running_var.copy_(rnd(channels, seed=2).abs() + 0.5)
        if affine:
            made.weight.copy_(rnd(channels, seed=3))
            made.bias.copy_(rnd(channels, seed=4))
    return made


class Added(nn.Module):
    """A convolution, a norm, a residual and an op, then another convolution."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.after = nn.Conv2d(16, 24, 3, padding=1), norm(24), after
        self.last = nn.Conv2d(24, 5, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.after(self.norm(self.conv(x)) + y)
        return hidden, self.last(hidden)


def run(model: nn.Module, *inputs: torch.Tensor, channels_last: str = "always") -> None:
    """Hold the result through mkldnn against eager's and float64's; inputs must stay."""
    model.eval()
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        options = {"plugins": {"mkldnn": {"channels_last": channels_last}}}
        result = compiled(model, "mkldnn", "eager", on_failure="raise", **options)(*inputs)
        rival = model(*inputs)
        reference = copy.deepcopy(model).double()(*[x.double() for x in inputs])
    assert_closer(result, reference=reference, rival=rival)
    pairs = zip(*(t if isinstance(t, tuple) else (t,) for t in (result, rival)), strict=True)
    for got, want in pairs:
        assert strides(got) == strides(want)
    assert all(map(torch.equal, inputs, before))


def fusions() -> list[str]:
    return [fusion.name for region in last_graph().regions for fusion in region.fusions]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_with_its_norm_folded(name):
    """Groups, strides, dilation and paddings; odd sizes; the strides are eager's."""
    conv = copy.deepcopy(CONVOLUTIONS[name])
    last = nn.Conv2d(conv.out_channels, 5, 1)
    run(nn.Sequential(conv, norm(conv.out_channels), nn.ReLU(), last), rnd(2, 16, 9, 11))
    assert fusions() == ["conv+bn+relu", "conv"]


@pytest.mark.parametrize("name", POST_OPS)
def test_a_post_operation_is_as_accurate_as_eagers(name):
    """Each op after a convolution is recognised and computed right."""
    run(nn.Sequential(nn.Conv2d(16, 24, 3), copy.deepcopy(POST_OPS[name])), rnd(2, 16, 9, 11))
    assert fusions() == [f"conv+{name}"]


@pytest.mark.parametrize("name", POST_OPS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_residual_is_added_and_left_alone(name, layout):
    """A sum with an input of either layout, and an op after it."""
    x, y = rnd(2, 16, 9, 11), rnd(2, 24, 9, 11).contiguous(memory_format=layout)
    run(Added(copy.deepcopy(POST_OPS[name])), x, y)
    assert fusions()[0] == ("conv+bn+add+relu" if name == "relu" else "conv+bn+add")


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(), nn.SiLU()], ids=["", "relu", "silu"])
@pytest.mark.parametrize("own", [True, False], ids=["own-minus-other", "other-minus-own"])
def test_a_difference_with_a_residual(own, after):
    """Of noise and what is predicted of it, as in a denoising network."""

    class Denoised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.last, self.norm = nn.Conv2d(8, 3, 3, padding=1), norm(3)
            self.after = after

        def forward(self, x):
            noise = self.norm(self.last(self.first(x)))
            return self.after(noise - x if own else x - noise)

    run(Denoised(), rnd(2, 3, 9, 11))
    inside = "+relu" if isinstance(after, nn.ReLU) else ""
    assert fusions() == ["conv", f"conv+bn+sub{inside}"]


def test_a_residual_of_the_regions_own_that_is_read_later():
    """A convolution adds into its residual's memory only where nothing reads that afterwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            early = torch.tanh(self.first(x))
            late = torch.relu(self.second(early) + early)
            return self.second(late) + late, torch.relu(self.second(x) + early)

    run(Model(), rnd(2, 8, 7, 5))


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_without_weights(affine):
    """A batch norm folds with and without a weight of its own."""
    run(nn.Sequential(nn.Conv2d(16, 24, 3), norm(24, affine)), rnd(2, 16, 9, 11))
    assert fusions() == ["conv+bn"]


def test_a_norm_in_training_is_left_alone():
    """Statistics of the batch can't be folded; the running ones are updated as in eager."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    other = copy.deepcopy(model)
    x = rnd(2, 3, 9, 9)
    with torch.no_grad():
        result = compiled(model, "mkldnn", "eager", on_failure="raise")(x)
        rival, reference = other(x), copy.deepcopy(other).double()(x.double())
    assert_closer(result, reference=reference, rival=rival)
    assert torch.equal(model[1].num_batches_tracked, other[1].num_batches_tracked)
    assert_closer(
        model[1].running_mean, reference=other[1].running_mean, rival=other[1].running_mean
    )


@pytest.mark.parametrize(
    "x",
    [
        rnd(2, 16, 9, 11).contiguous(memory_format=torch.channels_last),
        rnd(2, 9, 16, 11).transpose(1, 2),
        rnd(2, 16, 1, 1),
        rnd(16, 9, 11),
        rnd(0, 16, 9, 11),
        rnd(1, 16, 9, 11).expand(3, 16, 9, 11),
    ],
    ids=["channels-last", "transposed", "one-pixel", "no-batch", "empty", "expanded"],
)
def test_inputs_of_any_layout(x):
    """Kernels read the elements that strides say; the results' strides are eager's."""
    run(nn.Sequential(nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 4, 1)), x)


@pytest.mark.parametrize("channels_last", ["auto", "always", "never"])
def test_ops_between_convolutions(channels_last):
    """Pools, sums, products and concatenations run channels-last; views get eager's layout."""

    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
            self.down, self.up = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
            self.head = nn.Linear(24 * 4 * 3, 5)

        def forward(self, x):
            wide = nn.functional.silu(self.wide(x))
            scale = wide.mean((2, 3), keepdim=True)
            scaled = wide * torch.sigmoid(self.up(torch.relu(self.down(scale))))
            both = torch.cat([nn.functional.hardswish(scaled), self.narrow(scaled) + x], 1)
            pooled = nn.functional.max_pool2d(nn.functional.pad(both, (1, 0, 1, 0)), 2)
            indices = nn.functional.max_pool2d(scaled, 2, return_indices=True)[1]
            largest = scaled.flatten(2).gather(2, indices.flatten(2))
            return self.head(pooled.flatten(1)), largest, pooled.permute(0, 2, 3, 1)

    run(Squeeze(), rnd(2, 8, 7, 5), channels_last=channels_last)


def test_layouts_stay_channels_last_between_convolutions():
    """Nothing is converted between convolutions: the lowered code makes one copy, at the end."""
    import linecache

    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3)),
    )
    run(model, rnd(2, 3, 33, 29))
    sources = ["".join(entry[2]) for name, entry in linecache.cache.items() if "_region0:" in name]
    assert sources[-1].count("_convolution_pointwise_default(") == 3
    assert sources[-1].count("clone(") == 1


def test_sizes_that_change():
    """A packed weight serves other batch sizes and images than those it was packed for."""
    model = nn.Sequential(
        nn.Conv2d(16, 24, 3, padding=1), norm(24), nn.ReLU(), nn.Conv2d(24, 4, 1)
    ).eval()
    fast = compiled(model, "mkldnn", "eager", on_failure="raise", dynamic=True)
    for batch, height in ((2, 9), (3, 12), (5, 7)):
        x = rnd(batch, 16, height, 11)
        with torch.no_grad():
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(fast(x), reference=reference, rival=model(x))
            assert strides(fast(x)) == strides(model(x))


def test_changed_statistics_are_seen():
    """A folded norm follows its buffers, and the convolution its weight."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    fast = compiled(
        model,
        "mkldnn",
        "eager",
        on_failure="raise",
        plugins={"mkldnn": {"channels_last": "always"}},
    )
    x = rnd(2, 8, 9, 9)
    with torch.no_grad():
        fast(x)
        model[1].running_var.mul_(3)
        model[1].running_mean.add_(1)
        model[3].weight.mul_(-1)
        assert_closer(fast(x), reference=copy.deepcopy(model).double()(x.double()), rival=model(x))
    assert hoisted() > 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        nn.Sequential(nn.ConvTranspose1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
    ],
    ids=["1d", "transposed"],
)
def test_one_dimensional_convolutions_run_as_in_eager(model):
    """They are carried along or left to eager."""
    run(model, rnd(2, 3, 13))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_types_are_as_accurate_as_eagers(dtype):
    """Folding and post-operations in half types, where oneDNN has kernels for them."""
    model = nn.Sequential(nn.Conv2d(16, 24, 3), norm(24), nn.ReLU(), nn.Conv2d(24, 8, 3))
    run(model.to(dtype), rnd(2, 16, 12, 12, dtype=dtype))
