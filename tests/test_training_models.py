"""Twenty steps of training on whole models: losses, weights and statistics as eager's.

Training amplifies rounding: two orders of the same sums part by more with each step, and AdamW
turns gradients that are zero but for rounding (a key's bias in attention, a convolution's before
a batch norm) into steps of full size; a ReLU's input that is zero but for rounding switches a
gradient on or off. So the yardstick is the same steps in float64: how far eager lies from them,
and how far they move if the weights that they start from are rounded differently. A compiled run
may lie ``SLACK`` times as far off, no further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, graph_count, last_graph, plugged
from tests.support.models import TASKS, Batch, Task

pytestmark = pytest.mark.usefixtures("_traced_rnns")

STEPS = 20
#: So many batches, again and again: there is something to learn.
BATCHES = 3
#: How many times as far from float64 as its rivals a run may lie. Distances of correct runs
#: scatter by about this much; a wrong gradient is off by orders of magnitude.
SLACK = 4.0
#: And this times the value, in float32: where eager happens to be exact.
FLOOR = 8 * torch.finfo(torch.float32).eps
#: Relative errors of the weights that a rival starts from: a few roundings of float32.
ROUNDING = 4 * torch.finfo(torch.float32).eps
RIVALS = 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.002, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@pytest.fixture
def _traced_rnns() -> Iterator[None]:
    """Dynamo leaves ``nn.LSTM`` to eager unless told otherwise."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@dataclass
class Run:
    """What training left.

    :ivar values: the losses, then every parameter and buffer by name.
    """

    losses: list[torch.Tensor]
    values: dict[str, torch.Tensor]


def train(
    task: Task, optimizer: str, model: nn.Module, function: Callable[..., torch.Tensor]
) -> Run:
    """The steps of a task; the same random numbers in each run."""
    steps = OPTIMIZERS[optimizer](model.parameters())
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = function(*_as(dtype, task.batch(step % BATCHES)))
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return Run(losses, {name: value.detach() for name, value in model.state_dict().items()})


def _as(dtype: torch.dtype, batch: Batch) -> Batch:
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in batch)


@dataclass
class References:
    """The same steps in float64, and what may lie off from them: eager first."""

    exact: Run
    rivals: list[Run]


_references: dict[tuple[str, str], References] = {}


def references(task: Task, optimizer: str) -> References:
    """Made once."""
    key = (task.name, optimizer)
    if key not in _references:
        eager = task.model()
        doubles = [copy.deepcopy(eager).double() for _ in range(1 + RIVALS)]
        for seed, double in enumerate(doubles[1:]):
            _round_differently(double, seed)
        runs = [train(task, optimizer, model, model) for model in (eager, *doubles)]
        _references[key] = References(exact=runs[1], rivals=[runs[0], *runs[2:]])
    return _references[key]


@torch.no_grad()
def _round_differently(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.mul_(1 + ROUNDING * noise)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).abs().max()) if got.numel() else 0.0


def assert_trained_as_eager(task: Task, optimizer: str, run: Run) -> None:
    known = references(task, optimizer)
    farthest = 0.0
    for step, (got, true) in enumerate(zip(run.losses, known.exact.losses, strict=True)):
        farthest = max(farthest, *(distance(r.losses[step], true) for r in known.rivals))
        allowed = SLACK * farthest + FLOOR * float(true.abs())
        off = distance(got, true)
        assert off <= allowed, f"loss of step {step}: {off:g} from float64, allowed {allowed:g}"
    assert run.values.keys() == known.exact.values.keys()
    for name, true in known.exact.values.items():
        got = run.values[name]
        if not got.is_floating_point():
            assert torch.equal(got, true), name
            continue
        farthest = max(distance(r.values[name], true) for r in known.rivals)
        allowed = SLACK * farthest + FLOOR * float(true.abs().max())
        off = distance(got, true)
        assert off <= allowed, f"{name}: {off:g} from float64, allowed {allowed:g}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TASKS)
def test_the_references_differ_as_rounding_does(name, optimizer):
    """The yardstick itself: float64 draws eager's dropout masks, and something is learnt."""
    known = references(TASKS[name], optimizer)
    losses = known.exact.losses
    for rival in known.rivals:  # another mask would move the loss by far more
        assert distance(rival.losses[0], losses[0]) < 1e-5 * float(losses[0])
    assert losses[(STEPS - 1) // BATCHES * BATCHES] < losses[0]  # the same batch


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.thorough
def test_many_regions(name):
    """Two backends in turn, node by node: forward and backward cut into many regions."""
    optimizer = "adamw"  # whole compilers are held to the steps of the other one
    task, model = TASKS[name], TASKS[name].model()
    ledger.clear()
    with plugged("other"):
        plan = {"plan": "tests.support.plans:alternate"}
        run = train(task, optimizer, model, compiled(model, "other", "eager", stages=plan))
    assert_trained_as_eager(task, optimizer, run)
    assert not all_trips()
    for kind in ("forward", "backward"):
        assert graph_count(kind) == 1
        assert len(last_graph(kind).regions) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name != "resnet18"])
def test_backends_that_compile(name):
    """The default order of all that is installed; in training, Inductor takes all that it finds.

    The smooth ResNet has the other one's convolutions, and no ReLU that rounding switches.
    """
    optimizer = "sgd"  # the other one reads the same gradients
    task, model = TASKS[name], TASKS[name].model()
    ledger.clear()
    run = train(task, optimizer, model, torch.compile(model, backend="fuseboard"))
    assert_trained_as_eager(task, optimizer, run)
    assert not all_trips()
