"""Dynamo's own graph as the candidate ``eager``: where it runs instead of AOTAutograd's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard.capture.original import forward_of
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import rnd

OWN = ["Dynamo's own graph"]


pytestmark = pytest.mark.usefixtures("policy_measured")


def run(function, *inputs, calls=3, **options):
    """Calls beside a backend that takes everything and is slow; the region that was chosen."""
    import time

    def slow(eager_call, region):
        def call(args):
            time.sleep(0.02)
            return eager_call(args)

        return call

    with plugged("slow", call=slow, info={"compiles_quickly": True}):
        fn = compiled(function, "slow", "eager", measure_s=0.1, **options)
        with torch.no_grad():
            for _ in range(calls):
                torch.manual_seed(0)
                expected = function(*inputs)
                torch.manual_seed(0)
                result = fn(*inputs)
                torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not all_trips()
    graph = last_graph()
    assert [told.name for told in graph.candidates if told.state == "chosen"] == ["eager"]
    (region,) = graph.regions
    assert region.backend == "eager"
    assert {node.backend for node in graph.nodes} <= {"eager", "board"}
    return region


# --- where it stands in ---------------------------------------------------------------------------


class Model(nn.Module):
    """Weights, a buffer, two results of which one is a view of the other's operand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()

    def forward(self, x: torch.Tensor):
        y = self.norm(self.linear(x))
        return y, y.sum(-1), [y.exp(), {"k": x.relu()}]


def test_a_model_runs_as_dynamo_has_it():
    assert run(Model().eval(), rnd(3, 4)).notes == OWN


def test_ops_that_capture_takes_apart_are_whole():
    """Resizing an image is one op in Dynamo's graph, and more than ten in AOTAutograd's."""

    def resize(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    assert run(resize, rnd(1, 2, 5, 5)).notes == OWN
    assert len(last_graph().nodes) > 10


def test_results_that_share_storage_do_so_as_in_eager():
    def both(x):
        y = x.exp()
        return y, y[0], y

    assert run(both, rnd(3, 3)).notes == OWN
    with plugged("slow", info={"compiles_quickly": True}):
        with torch.no_grad():
            y, first, again = compiled(both, "slow", "eager")(rnd(3, 3))
    assert first.data_ptr() == y.data_ptr()
    assert again is y


def test_random_numbers_are_eagers():
    assert run(lambda x: F.dropout(x, 0.5), rnd(64)).notes == OWN


def test_the_user_s_own_error_passes_and_later_calls_work():
    def pick(x, i):
        return x.exp()[i]

    region = run(pick, rnd(4), torch.tensor([1]))
    assert region.notes == OWN
    with plugged("slow", info={"compiles_quickly": True}):
        fn = compiled(pick, "slow", "eager")
        with torch.no_grad(), pytest.raises(IndexError):
            fn(rnd(4), torch.tensor([9]))


def test_sizes_may_be_symbolic():
    assert run(lambda x: x.exp() * x.shape[0], rnd(5, 3), dynamic=True).notes == OWN


def test_it_is_told_in_the_report():
    run(Model().eval(), rnd(3, 4))
    assert "Dynamo's own graph" in str(fuseboard.last_report())


# --- where it can't -------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x.exp() * self.seen


def halves(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t()).exp()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.exp(), x[0]),
        halves,
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    ],
    ids=["view of an input", "autocast inside", "higher-order op"],
)
def test_what_belongs_to_aotautograd_stays_there(function):
    """Among the graph's candidates; a later call compares whole calls."""
    assert run(function, rnd(3, 3), calls=1).notes != OWN


def test_a_graph_that_writes_runs_as_captured():
    """Its buffer is written once a call, in the calls that compare candidates too."""
    from copy import deepcopy

    model, x = Counting(), rnd(3)
    twin = deepcopy(model)
    with plugged("quick", info={"compiles_quickly": True}):
        fn = compiled(model, "quick", "eager")
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fn(x), twin(x))
    assert all(region.notes != OWN for region in last_graph().regions)


def test_autocast_around_the_call_is_kept():
    """Casts are a part of AOTAutograd's graph alone; calls run with autocast off."""

    def product(x):
        return x @ x.t()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(product, rnd(3, 3), calls=1).notes != OWN


def test_powers_of_a_negative_number():
    """Torch writes ``-2 ** x`` for them, which is ``-(2 ** x)``."""
    powers = torch.arange(6)
    assert run(lambda x: ((-2) ** x, (-0.5) ** x, 2**x), powers).notes == OWN


def test_powers_inside_of_control_flow():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: (-2) ** x, lambda x: (-3) ** x, (x,))

    fn = compiled(f, "eager")
    assert fn(torch.arange(4)).tolist() == [1, -2, 4, -8]
    assert fn(torch.zeros(2, dtype=torch.int64)).tolist() == [1, 1]


@pytest.mark.parametrize("share", [1.0, 1.3])
def test_eight_bit_floats_are_held_against_dynamos_graph(monkeypatch, tmp_path, share):
    """torch subtracts none of them from others."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))

    def narrow(x):
        return (x * 2).to(torch.float8_e4m3fn), x + 1

    def off(eager_call, region):
        return lambda args: [(v.float() * share).to(v.dtype) for v in eager_call(args)]

    x = torch.linspace(-1, 1, 64)
    with plugged("fake", call=off, info={"compiles_quickly": True}), torch.no_grad():
        got = compiled(narrow, "fake", "eager")(x)
    assert got[0].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got[0].float(), narrow(x)[0].float())
    assert len(all_trips()) == (share != 1.0)
    assert not any("isn't judged" in note for note in last_graph().notes)


def test_dynamos_graph_is_called_without_a_detour():
    """A ``forward`` from before the graph's code was written goes by the module's call, always."""
    found = []

    def backend(graph, example_inputs):
        found.append(forward_of(graph))
        return found[0]

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert found[0].__func__.__name__ == "forward"


# --- checkpoints ----------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    """Dropout in a checkpoint that is in another one."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        def inner(y):
            return F.dropout(self.inner(y).tanh(), 0.5)

        def outer(y):
            return F.dropout(self.outer(checkpoint(inner, y, use_reentrant=False)).sin(), 0.5)

        return checkpoint(outer, x, use_reentrant=False)


def test_a_checkpoint_computes_again_with_the_same_random_numbers(monkeypatch):
    """torch's op in Dynamo's graph doesn't, unless AOTAutograd traces it."""
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    model = _Checkpointed()
    run = torch.compile(model, backend="fuseboard", options={"backends": ["mkldnn", "eager"]})
    x = rnd(4, 6)
    for _ in range(3):
        found = []
        for called in (model, run):
            model.zero_grad()
            torch.manual_seed(1)
            result = called(x)
            torch.manual_seed(2)  # the generator is elsewhere by the time of the backward
            result.sum().backward()
            found.append([result, *(p.grad for p in model.parameters()), torch.rand(1)])
        torch.testing.assert_close(*found, rtol=0, atol=0)


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return checkpoint(lambda y: self.norm(self.linear(y)).relu(), x, use_reentrant=False)


def test_a_batch_norm_in_a_checkpoint_counts_as_in_eager(monkeypatch):
    """Twice a step. torch's op takes its statistics for inputs that were changed."""
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    found = []
    for backend in (None, "fuseboard"):
        torch.manual_seed(0)
        model = _Normed()
        options = {"backends": ["mkldnn", "eager"]}
        run = torch.compile(model, backend=backend, options=options) if backend else model
        for seed in range(2):
            run(rnd(5, 6, seed=seed)).square().sum().backward()
        found.append([*model.buffers(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_an_input_of_a_checkpoint_that_is_changed_before_the_backward_raises(monkeypatch):
    """As in eager: the gradients would be those of other inputs."""
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    model = _Normed()
    run = torch.compile(model, backend="fuseboard", options={"backends": ["mkldnn", "eager"]})
    x = rnd(5, 6)
    result = run(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
