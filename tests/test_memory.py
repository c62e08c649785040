"""Measuring what memory budgets cost: the API and ``fuseboard memory``."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fuseboard
from fuseboard.cli.main import app
from fuseboard.contracts import Measurement
from fuseboard.profile.observe import memory
from fuseboard.profile.observe.memory import MemoryPoint, with_pareto
from fuseboard.torch_api.allocator import peak_bytes
from tests.support.backends import compiled
from tests.support.values import rnd

MIB = 2**20


@pytest.fixture(autouse=True)
def _eager_backend():
    with fuseboard.settings(backends=["eager"]):
        yield


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Deep(nn.Module):
    """Layers whose activations are much larger than their weights, and a batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU())]
        self.layers = nn.Sequential(nn.BatchNorm1d(8), *layers, nn.Dropout(0.2))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean(), "other": 3}


def test_steps_are_told_in_terms_of_one_eager(monkeypatch):
    """The machine becomes twice as slow after eager was timed: no budget seems slower for it."""
    answers = [[100.0], [60.0, 200.0]]

    def measured(calls, seconds):
        times = answers.pop(0)
        assert len(calls) == len(times)
        return [Measurement(us, 0.5 * us, 2 * us, 1) for us in times]

    monkeypatch.setattr(memory, "measure_calls", measured)
    x = rnd(4).requires_grad_()
    eager, whole = fuseboard.measure_memory(Sine(), (x,), budgets=[1])
    assert (eager.latency_us, whole.latency_us) == (100.0, 30.0)
    assert (whole.low_us, whole.high_us) == (15.0, 60.0)


def test_what_a_step_allocates():
    """Of a sine of 1 MiB: the result; then its tangent, a cosine and the gradient besides."""
    x = rnd(512, 512).requires_grad_()
    eager, whole = fuseboard.measure_memory(Sine(), (x,), budgets=[1], seconds=0)
    for point in (eager, whole):
        assert point.saved_bytes == MIB
        assert point.peak_bytes == 4 * MIB
        assert point.activation_bytes == 3 * MIB
        assert 0 < point.low_us <= point.latency_us <= point.high_us
        assert point.calls >= 1
    assert (eager.budget, whole.budget) == (None, 1.0)


@pytest.mark.thorough
def test_less_budget_saves_less():
    """Eager first, then each budget in order; the loss of the result is what is derived."""
    points = fuseboard.measure_memory(Deep(), (rnd(4096, 8),), budgets=[1, 0.5, 0], seconds=0)
    assert [point.budget for point in points] == [None, 1.0, 0.5, 0.0]
    eager, full, half, none = (point.saved_bytes for point in points)
    assert none < half < full <= eager
    assert not any(point.trips for point in points)
    assert any(point.pareto for point in points)


def test_nothing_is_left_behind():
    """Gradients, buffers, the generator and Dynamo's code are as before."""
    model, x = Deep(), rnd(64, 8)
    model(x)["loss"].backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    fuseboard.measure_memory(model, (x,), budgets=[0.5], seconds=0)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients, rtol=0, atol=0)
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_of_the_users():
    """``loss`` says from what to derive, also where the result needs no grad as it is."""
    points = fuseboard.measure_memory(
        Deep(), (rnd(16, 8),), budgets=[1], loss=lambda result: result["loss"] * 2, seconds=0
    )
    assert len(points) == 2


def point(budget, peak, time):
    return MemoryPoint(budget, 0, peak, time, time, time, 5)


def test_pareto_points_are_those_that_none_beats():
    """Equal points are both kept; one that is worse in one and equal in the other isn't."""
    points = [point(None, 9, 5), point(1, 8, 4), point(0.5, 8, 4), point(0.2, 8, 6), point(0, 3, 9)]
    assert [p.pareto for p in with_pareto(points)] == [False, True, True, False, True]


def test_points_are_frozen():
    with pytest.raises(AttributeError):
        point(1, 8, 4).peak_bytes = 3


@pytest.mark.parametrize("budgets", [[1.0, 1.5], [-0.1], ["half"], [True], []])
def test_budgets_out_of_range(budgets):
    """Before anything runs; the value is named."""
    with pytest.raises(fuseboard.SettingsError, match="from 0 to 1") as caught:
        fuseboard.measure_memory(Sine(), (rnd(3),), budgets=budgets)
    assert f"budgets = {budgets!r}" in str(caught.value)


def test_nothing_requires_grad():
    """A frozen model has no training step."""
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(fuseboard.FuseboardError, match=r"Linear: none of its parameters and inp"):
        fuseboard.measure_memory(model, (rnd(2, 3),))


@pytest.mark.parametrize(("result", "what"), [(None, "a NoneType"), ("indices", "1 tensor")])
def test_no_output_to_derive(result, what):
    """The error says what came out and how to name a loss."""

    class Odd(nn.Linear):
        def forward(self, x):
            return result and super().forward(x).argmax(-1)

    with pytest.raises(fuseboard.FuseboardError, match="nothing to run a backward from") as caught:
        fuseboard.measure_memory(Odd(3, 3), (rnd(2, 3),))
    assert what in str(caught.value)
    assert "loss=" in str(caught.value)


# --- the command ----------------------------------------------------------------------------------

SCRIPT = """
import torch

def step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    return model, (torch.ones(64, 8),)

def nothing():
    print("no")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def call(*args):
        return CliRunner().invoke(app, ["memory", *args, "--seconds", "0"])

    return call


def test_the_command_shows_a_table(run):
    """A row for eager and for each budget."""
    got = run("train.py:step", "--budgets", "1,0")
    assert got.exit_code == 0, got.output
    first = [line.split()[0] for line in got.stdout.splitlines() if line.split()]
    assert {"eager", "1", "0"} <= set(first)


def test_the_command_prints_json(run):
    """One object, with every field of the points."""
    got = run("train.py:step", "--budgets", "0.5", "--json")
    points = json.loads(got.stdout)["points"]
    assert [p["budget"] for p in points] == [None, 0.5]
    assert set(points[0]) == set(MemoryPoint.__dataclass_fields__)


def test_ctrl_c_shows_what_was_measured(run, monkeypatch):
    """The rows so far, and the exit code that shells give for an interrupt."""

    def points(*args, **kwargs):
        yield point(None, 9 * MIB, 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "memory_points", points)
    got = run("train.py:step")
    assert got.exit_code == 130
    assert "eager" in got.stdout
    assert "9.0" in got.stdout
    assert "interrupted" in got.stderr


def test_the_plot_needs_matplotlib(run, monkeypatch):
    """Before anything is measured, with what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    got = run("train.py:step", "--plot", "out.png")
    assert got.exit_code == 2
    assert "pip install 'fuseboard[benchmarks]'" in " ".join(got.stderr.split())


def test_the_plot_is_drawn(tmp_path):
    """A picture with a point for each row."""
    pytest.importorskip("matplotlib")
    from fuseboard.cli.memory import draw

    draw(with_pareto([point(None, 9, 5), point(1, 8, 4), point(0, 3, 9)]), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("train.py:step", "--budgets", "1,half"), "--budgets '1,half': allowed: numbers"),
        (("train.py:step", "--budgets", "1,2"), "2.0 isn't a number from 0 to 1"),
        (("train.py:step", "--plot", "no/x.png"), "no/x.png' can't be written: No such file"),
        (("train.py:nothing",), "train.py:nothing returned None. It has to return (model, args)"),
        (("train.py:steb",), "Did you mean 'step'?"),
    ],
)
def test_mistakes_of_the_command(run, args, said):
    """Each ends with the user's exit code and a message that says what is allowed."""
    got = run(*args)
    assert got.exit_code == 2
    assert said in " ".join(got.stderr.split())


@pytest.mark.parametrize("settings", [{}, {"memory_budget": 0.5}])
def test_a_step_lets_go_of_what_it_saved_as_eager_does(settings):
    """Activations aren't held until the end of the backward, when all gradients are there."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh()))
    model, x = nn.Sequential(*layers), torch.randn(128, 128)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    own = compiled(loss, verify="off", **settings)

    def step(function: Any) -> int:
        model.zero_grad()
        return peak_bytes(lambda: function(x).backward(), torch.device("cpu"))

    step(own)  # compiles
    assert step(own) <= step(loss)
