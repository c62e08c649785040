"""Models whose weights are prepared, small and large, and comparing them with eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fuseboard.run.weights import WeightSets
from tests.support.backends import pack_linears, plugged
from tests.support.values import rnd


class Linear(nn.Module):
    """Small: a rewrite's packing is hoisted whatever its size."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(rnd(7, width, seed=seed))
        self.bias = nn.Parameter(rnd(7, seed=seed + 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def inputs(self) -> torch.Tensor:
        return rnd(3, self.weight.shape[1], seed=5)


class Scaled(Linear):
    """Large enough that computing the weight once pays."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, 2731)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight * 2).tanh(), self.bias)


def check(
    model: Any, fn: Any, x: torch.Tensor | None = None, calls: int = 2, after: str = "compiling"
) -> None:
    """The compiled model gives eager's values, in two calls in a row."""
    x = model.inputs() if x is None else x
    with torch.no_grad():
        for _ in range(calls):
            assert_equal(fn(x), model(x), after)


def assert_equal(got: torch.Tensor, want: torch.Tensor, after: str = "") -> None:
    """Up to the order of the sums in a product with a packed weight; a stale one is far off."""
    torch.testing.assert_close(
        got, want, rtol=1e-5, atol=2e-6, msg=lambda text: f"after {after}: {text}"
    )


def step(model: Linear) -> None:
    """A step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(model.inputs()).square().sum().backward()
    optimizer.step()


def overwrite(model: Linear) -> None:
    """Another weight, written in place."""
    with torch.no_grad():
        model.weight.copy_(rnd(*model.weight.shape, seed=8))


def load(model):
    model.load_state_dict(type(model)(seed=9).state_dict())


def load_assign(model):
    model.load_state_dict(type(model)(seed=9).state_dict(), assign=True)


def one_element(model):
    with torch.no_grad():
        model.weight[3, 5] += 1


def through_a_view(model):
    with torch.no_grad():
        model.weight.view(-1)[17] = 4.0


def through_detach(model):
    model.weight.detach()[1, 1] = 4.0


def in_inference_mode(model):
    with torch.inference_mode():
        model.weight[2, 2] = 4.0


def replace_parameter(model):
    model.weight = nn.Parameter(rnd(*model.weight.shape, seed=8))


def data_assigned(model):
    model.weight.data = rnd(*model.weight.shape, seed=8)


def data_copied(model):
    model.weight.data.copy_(rnd(*model.weight.shape, seed=8))


def data_scaled(model):
    model.weight.data.mul_(1.5)


def data_negated(model):
    model.weight.data.neg_()


def data_zeroed(model):
    model.weight.data.zero_()


def data_filled_after_zero(model):
    model.weight.data.fill_(0.25)


#: All ways of giving a model other weights that are noticed.
CHANGES = [
    step,
    load,
    load_assign,
    overwrite,
    one_element,
    through_a_view,
    through_detach,
    in_inference_mode,
    replace_parameter,
    data_assigned,
    data_copied,
    data_scaled,
    data_negated,
    data_zeroed,
    data_filled_after_zero,
]


def preparing_is_worth_it(monkeypatch: Any) -> None:
    """After every change of weights, at once, whatever it takes."""
    monkeypatch.setattr(WeightSets, "_waits_on", lambda *_: False)


@contextmanager
def hoisting_by(how: str) -> Iterator[tuple[type[Linear], str]]:
    """What is hoisted, by which backend: weight-only ops of the user's, or a packed weight."""
    if how == "generic":
        yield Scaled, "eager"
    else:
        with plugged("packer", fuse=pack_linears):
            yield Linear, "packer"
