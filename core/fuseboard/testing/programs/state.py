"""What values alone don't show: random numbers, mutation, sharing, weights that change, sizes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseboard.testing.program import Program, function, module, rnd

# --- random numbers -------------------------------------------------------------------------------


def _random(x: Tensor) -> Any:
    drawn = torch.rand_like(x) + x, torch.randn(3, 4) * x[0, 0], torch.randint(0, 9, (5,))
    return (*drawn, torch.bernoulli(x.sigmoid()), F.dropout(x, 0.4), x.new_empty(4).uniform_(-1, 1))


# Random numbers differ by dtype: eager is the reference.
_RANDOM = (
    function(
        "random_dropout",
        lambda x: (
            F.dropout(x * 2, 0.3),
            F.alpha_dropout(x, 0.2),
            F.dropout(x, training=False) * 1,
        ),
        lambda: (rnd(7, 9),),
        lambda: (rnd(7, 9),),
        reference=False,
    ),
    function("random_numbers", _random, lambda: (rnd(3, 4),), reference=False),
    module(
        "training_dropout",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)),
        lambda: (rnd(9, 6),),
        lambda: (rnd(9, 6, seed=1),),
        training=True,
        reference=False,
    ),
)

# --- mutation and sharing -------------------------------------------------------------------------


def _write_inputs(x: Tensor, y: Tensor) -> Any:
    x.add_(y, alpha=2)
    y[1:].mul_(3).clamp_(-1, 1)
    x[:, 0] = 7
    return x.sum(0), y * x


def _shift(x: Tensor) -> Any:
    x[1:] = x[:-1].clone()
    x[:, 2:] += 10 * x[:, :-2].clone()
    return x * 1


def _overlapping() -> tuple[Tensor, Tensor]:
    base = torch.arange(12.0).reshape(4, 3)
    return base, base[1:3]


def _write_overlapping(whole: Tensor, part: Tensor) -> Any:
    whole.mul_(3)
    part.add_(1)
    return whole.sum(0), part * 2


def _return_inputs(x: Tensor, y: Tensor) -> Any:
    z = x + y
    return x, x.view(-1), z, z.t(), x.t()[1:], z[0], z.view(z.shape), y.detach(), x.contiguous()


def _write_and_return(x: Tensor) -> Any:
    x.mul_(2)
    return x, x[0], x + 1


class Counter(nn.Module):
    """Counts its calls in a buffer, and keeps a running mean in another."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        self.mean.lerp_(x.mean(0), 0.25)
        return self.linear(x - self.mean) / self.calls


_MUTATION = (
    function("mutation_of_inputs", _write_inputs, lambda: (rnd(5, 4), rnd(5, 4, seed=1))),
    function("mutation_shifts_rows", _shift, lambda: (torch.arange(60.0).reshape(6, 10),)),
    function("mutation_of_overlapping", _write_overlapping, _overlapping, reference=False),
    function("mutation_returned", _write_and_return, lambda: (rnd(3, 4),), lambda: (rnd(3, 4),)),
    module("mutation_of_buffers", Counter, lambda: (rnd(5, 4),), lambda: (rnd(5, 4, seed=1),)),
    function("aliasing_of_outputs", _return_inputs, lambda: (rnd(3, 4), rnd(3, 4, seed=1))),
)


def _nested(x: Tensor, scale: float, options: dict[str, Any]) -> Any:
    y = x * scale + options["bias"]
    return {"y": y, "more": [y.shape[0], None, (y.sum(),)], "twice": (y, y), "scale": scale}


def _constants(x: Tensor) -> Any:
    table = torch.tensor([1.0, 2.0, 3.0])
    return x + 1, torch.zeros(3), torch.arange(4), table, torch.full((2,), 1.5), torch.eye(2)


def _spoil(target: Any, result: Any, number: int) -> None:
    """Write to all that was returned: the next call mustn't see it."""
    with torch.no_grad():
        for tensor in result:
            tensor.fill_(77)


_FRESHNESS = (
    function(
        "outputs_nested",
        _nested,
        lambda: (rnd(3, 4), 2.5, {"bias": rnd(4, seed=1)}),
        lambda: (rnd(3, 4), -1.0, {"bias": rnd(4, seed=2)}),
    ),
    function(
        "outputs_constants_are_fresh",
        _constants,
        lambda: (rnd(3),),
        lambda: (rnd(3),),
        between=_spoil,
    ),
    module(
        "outputs_are_fresh",
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        *[lambda: (rnd(2, 4),)] * 3,
        between=lambda target, result, number: _spoil(target, [result], number),
    ),
)

# --- weights that change --------------------------------------------------------------------------


def _network() -> nn.Module:
    """Everything that a compiler likes to prepare: weights to pack, a batch norm to fold."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 3, 6),
        nn.GELU(),
        nn.Linear(6, 3),
    )


def _image(seed: int = 0) -> tuple[Tensor]:
    return (rnd(2, 2, 4, 5, seed=seed),)


def _edit(net: Any, result: Any, number: int) -> None:
    """A weight, then a bias, then a statistic, in place."""
    with torch.no_grad():
        if number == 0:
            net[0].weight.mul_(-1.5)
            net[4].weight.add_(0.25)
        elif number == 1:
            net[0].bias.add_(1)
            net[6].bias.sub_(2)
        else:
            net[1].running_mean.add_(0.5)
            net[1].running_var.mul_(3)


def _load(net: Any, result: Any, number: int) -> None:
    """``load_state_dict``, first by copying, then by assigning."""
    scaled = {
        name: value * 0.5 + 0.1 if value.is_floating_point() else value.clone()
        for name, value in net.state_dict().items()
    }
    net.load_state_dict(scaled, assign=number == 1)


def _replace(net: Any, result: Any, number: int) -> None:
    """Another parameter, then another submodule."""
    if number == 0:
        net[6].weight = nn.Parameter(net[6].weight.detach() * -2)
    else:
        other = copy.deepcopy(net[0])
        with torch.no_grad():
            other.weight.mul_(0.3)
        net[0] = other


def _write_data(net: Any, result: Any, number: int) -> None:
    """Past the version counter: ``.data`` of whole tensors."""
    if number == 0:
        net[4].weight.data.mul_(3)
    else:
        net[6].weight.data = net[6].weight.data * -0.5


def _descend(net: Any, result: Any, number: int) -> None:
    """A step of an optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()


_WEIGHTS = (
    module("weights_edited", _network, *[_image] * 4, between=_edit),
    module("weights_loaded", _network, *[_image] * 3, between=_load),
    module("weights_replaced", _network, *[_image] * 3, between=_replace),
    module("weights_written_through_data", _network, *[_image] * 3, between=_write_data),
    module("instances_in_turn", _network, *[_image] * 4, instances=2),
    module(
        "training_optimizer_steps",
        _network,
        *[_image, lambda: _image(1), lambda: _image(2)],
        training=True,
        between=_descend,
    ),
)

# --- sizes that change ----------------------------------------------------------------------------


def _reshape(x: Tensor) -> Any:
    batch, length, dim = x.shape
    pooled = x.reshape(batch * length, dim).sum(0) / (batch * length)
    return pooled, x.flatten(0, 1)[::2] + length, x.new_ones(length, batch).cumsum(0), batch * 2


_DYNAMIC = (
    module(
        "dynamic_batch_linear",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        *[lambda n=n: (rnd(n, 6, seed=n),) for n in (3, 5, 8, 2)],
        dynamic=True,
    ),
    function(
        "dynamic_length_attention",
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).flatten(2).softmax(1),
        *[lambda n=n: (rnd(2, 3, n, 8, seed=n),) for n in (4, 7, 3)],
        dynamic=True,
    ),
    function(
        "dynamic_sizes_in_results",
        _reshape,
        *[lambda n=n: (rnd(n, n + 2, 3, seed=n),) for n in (3, 5, 2)],
        dynamic=True,
    ),
    # Without being told: static at first, general once a size has changed.
    module(
        "dynamic_by_itself",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        *[lambda n=n: (rnd(n, 6, seed=n),) for n in (3, 5, 1, 0, 8)],
    ),
)

PROGRAMS: tuple[Program, ...] = (*_RANDOM, *_MUTATION, *_FRESHNESS, *_WEIGHTS, *_DYNAMIC)
