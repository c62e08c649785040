"""NaN and infinity come out where eager has them, and memory is written over only where allowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.backends import compiled, last_graph
from tests.support.values import assert_same, rnd

NAN, INF = float("nan"), float("inf")


def convolutions(clip: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), clip, nn.Conv2d(8, 4, 3), nn.ReLU()
    ).eval()


def assert_same_nans(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("clip", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-1, 1)])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_from_an_input_is_shown(clip, bad):
    """oneDNN's relu and clip answer a number for NaN; eager's answer NaN."""
    model = convolutions(clip)
    fast = compiled(
        model,
        "mkldnn",
        "eager",
        on_failure="raise",
        plugins={"mkldnn": {"channels_last": "always"}},
    )
    x = rnd(2, 3, 9, 9)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert any(
            "relu and clip are fused" in note
            for region in last_graph().regions
            for note in region.notes
        )
        x[0, 1, 4, 4] = bad
        assert_same_nans(fast(x), model(x))


def test_nan_from_a_weight_is_shown():
    """A weight that becomes NaN after the compile."""
    model, x = convolutions(nn.ReLU()), rnd(2, 3, 9, 9)
    fast = compiled(
        model,
        "mkldnn",
        "eager",
        on_failure="raise",
        plugins={"mkldnn": {"channels_last": "always"}},
    )
    with torch.no_grad():
        fast(x)
        model[0].weight[3] = NAN
        assert_same_nans(fast(x), model(x))


def test_nan_that_arises_inside_is_shown():
    """The logarithm of a negative number, before a convolution and its relu."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convolutions(nn.ReLU())

        def forward(self, x):
            return self.body(torch.log(x))

    model, x = Model(), rnd(2, 3, 9, 9).abs() + 1
    x[0, 1, 4, 4] = -1
    with torch.no_grad():
        options = {"plugins": {"mkldnn": {"channels_last": "always"}}}
        assert_same_nans(
            compiled(model, "mkldnn", "eager", on_failure="raise", **options)(x), model(x)
        )


@pytest.mark.parametrize("packing", ["onednn", "mkl", "none"])
@pytest.mark.parametrize("name", ["relu", "relu6", "gelu", "silu", "hardswish", "leaky_relu"])
def test_nan_passes_linear_layers(name, packing):
    """Every post-operation of a linear layer lets NaN and infinities through as eager does."""
    model = nn.Sequential(nn.Linear(1, 4), getattr(_Activations, name)())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
    x = torch.tensor([[NAN], [INF], [-INF], [1.0], [-0.5]])
    with torch.no_grad():
        fast = compiled(
            model, "mkldnn", "eager", on_failure="raise", plugins={"mkldnn": {"packing": packing}}
        )
        assert_same_nans(fast(x), model(x))


class _Activations:
    relu, relu6, gelu = nn.ReLU, nn.ReLU6, nn.GELU
    silu, hardswish, leaky_relu = nn.SiLU, nn.Hardswish, nn.LeakyReLU


class Lin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def plain(model: nn.Module):
    """Through mkldnn with eager's own kernels, whose bits must be eager's."""
    return compiled(
        model, "mkldnn", "eager", on_failure="raise", plugins={"mkldnn": {"packing": "none"}}
    )


def test_a_value_with_a_view_that_lives_on_is_not_written_over():
    """The view would show the change."""

    class Model(Lin):
        def forward(self, x):
            hidden = self.a(x)
            turned = hidden.t()
            return (hidden + self.b(x)) @ turned, torch.relu(hidden).sum()

    model, x = Model(), rnd(8, 8)
    with torch.no_grad():
        assert_same(plain(model)(x), model(x))


def test_a_value_that_broadcasts_is_not_written_over():
    """A sum that is larger than an operand needs memory of its own."""

    class Model(Lin):
        def forward(self, x):
            return self.a(x[:1]) + self.b(x)

    model, x = Model(), rnd(8, 8)
    with torch.no_grad():
        assert_same(plain(model)(x), model(x))


def test_copies_that_the_caller_gets_stay_copies():
    """An output that eager makes a tensor of its own is one here, too."""

    class Model(Lin):
        def forward(self, x):
            hidden = torch.tanh(self.a(x))
            return hidden, hidden.clone(), x.clone(), torch.tanh(self.a(x))

    model, x = Model(), rnd(8, 8)
    with torch.no_grad():
        result = plain(model)(x)
        assert_same(result, model(x))
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*result, x)}) == 5


def test_random_numbers_are_drawn_as_often_as_in_eager():
    """Equal calls that draw numbers are no equal values."""

    class Model(Lin):
        def forward(self, x):
            return self.a(x) + torch.rand_like(x), self.b(x) + torch.rand_like(x)

    model, x = Model(), rnd(8, 8)
    with torch.no_grad():
        torch.manual_seed(5)
        expected = model(x)
        torch.manual_seed(5)
        assert_same(plain(model)(x), expected)


def test_equal_values_are_computed_once():
    """Each layer's copy of a mask is one value; the results are eager's."""
    import linecache

    class Model(Lin):
        def forward(self, x):
            first = torch.where(x > 0, self.a(x), -1.0)
            return torch.where(x > 0, self.b(first), -1.0)

    model, x = Model(), rnd(8, 8)
    with torch.no_grad():
        assert_same(plain(model)(x), model(x))
    sources = ["".join(entry[2]) for name, entry in linecache.cache.items() if "_region0:" in name]
    assert sources[-1].count("gt_Scalar(") == 1
