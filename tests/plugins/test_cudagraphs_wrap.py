"""The plugin through ``torch.compile``: on a device that records on the CPU, and without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._wrap import wrap_region
from tests.board_fakes import backend
from tests.support.backends import all_trips, compiled, last_graph, pack_linears, plugged
from tests.support.graph_capture import FakeDevice
from tests.support.values import assert_same, rnd
from tests.support.weights import Linear, assert_equal, overwrite, preparing_is_worth_it, step

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """The plugin as ``recorder``, on a device that records on the CPU."""
    torch._dynamo.reset()
    ledger.clear()
    device = FakeDevice()

    def wrap(lowered, region, options, tell, lower_part):
        return wrap_region(lowered, region, options, tell, lower_part, device, "cpu")

    fuseboard.register(backend("recorder", {"wrap": wrap}, wraps_only=True, options=Options))
    yield device
    fuseboard.unregister("recorder")


def recorded(target: Any, *backends: str, dynamic: bool | None = None, **options: Any) -> Any:
    """Compiled with whatever is lowered recorded, however small."""
    own = {"enabled": True, "min_nodes": 1, **options}
    return compiled(target, *backends, dynamic=dynamic, plugins={"recorder": own})


def notes() -> list[str]:
    return [note for region in last_graph().regions for note in region.notes]


def test_a_model_is_recorded(device):
    """Values bit for bit, weights that are updated in place, replaced, or another instance's."""
    net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 7)).eval()
    function = recorded(net)
    with torch.no_grad():
        for seed in range(4):
            x = rnd(3, 12, seed=seed)
            assert_same(function(x), net(x))
            net[0].weight.mul_(1.5)
        assert device.count("record") == 1
        net[3].weight = nn.Parameter(rnd(7, 16, seed=8))
        for seed in range(3):
            assert_same(function(rnd(3, 12, seed=seed)), net(rnd(3, 12, seed=seed)))
    assert notes() == ["wrapped by recorder"]
    assert last_graph().regions[0].backend == "eager"
    assert all_trips() == []


def test_training_is_recorded(device):
    """Losses and weights of ten steps, bit for bit: forward and backward, weights in place."""

    def run(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 7))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        function = wrap(net)
        losses = []
        for seed in range(10):
            optimizer.zero_grad()
            loss = function(rnd(5, 12, seed=seed)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        return [*losses, *(p.detach() for p in net.parameters())]

    expected = run(lambda net: compiled(net))
    assert device.log == []
    torch._dynamo.reset()
    assert_same(run(recorded), expected)
    assert device.count("replay") == 18
    assert device.count("record") <= 4
    assert all_trips() == []


def test_prepared_weights_are_never_stale(device, monkeypatch):
    """What is hoisted out of the region is an input of it, and lies elsewhere after an update."""
    preparing_is_worth_it(monkeypatch)
    with plugged("packer", fuse=pack_linears):
        model = Linear()
        function = recorded(model, "packer")
        for number in range(8):
            with torch.no_grad():
                assert_equal(function(model.inputs()), model(model.inputs()), str(number))
            step(model) if number % 2 else overwrite(model)
    assert device.count("replay") == 9  # 7 calls, and those that check the first one


def test_batch_sizes(device):
    """Symbolic ones: a recording for each."""
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7)).eval()
    function = recorded(net, dynamic=True)
    with torch.no_grad():
        for seed in range(3):
            for size in (4, 9, 2):
                x = rnd(size, 12, seed=seed)
                assert_same(function(x), net(x))
    assert device.count("record") == 3


def test_mutation_stays_outside_of_the_recording(device):
    """A buffer that the model writes to, and an input."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            x.mul_(2)
            return self.total * x

    nets = Counter(), Counter()
    function = recorded(nets[0])
    with torch.no_grad():
        for seed in range(5):
            xs = rnd(3, 5, seed=seed), rnd(3, 5, seed=seed)
            assert_same(function(xs[0]), nets[1](xs[1]))
            assert_same((xs[0], nets[0].total), (xs[1], nets[1].total))
    assert device.count("replay") == 4


def test_regions_of_several_backends_share_the_pool(device):
    """What one region hands to the next is its own memory."""

    def function(x):
        for _ in range(3):
            x = (x.relu() + 1).sigmoid() * 2
        return x

    def claim(graph):
        return fuseboard.claim_nodes(
            graph, lambda n: None if "sigmoid" in str(n.target) else "another op"
        )

    options = {"stages": {"plan": "tests.support.plans:first_claimer"}}
    own = {"plugins": {"recorder": {"enabled": True, "min_nodes": 1}}}
    with plugged("fake", claim=claim), torch.no_grad():
        run = compiled(function, "fake", "eager", **options, **own)
        for seed in range(4):
            assert_same(run(rnd(3, 5, seed=seed)), function(rnd(3, 5, seed=seed)))
        assert len(last_graph().regions) > 3
    assert set(notes()) == {"wrapped by recorder"}


# --- cuts -----------------------------------------------------------------------------------------


def gathered(y):
    """Rows summed by the number in their first column: an op that can't be recorded."""
    rows = y[:, 0].long().clamp(0, 9)
    return torch.ops.aten.embedding_dense_backward(y, rows, 10, -1, False)


WHY = "aten.embedding_dense_backward.default: its kernel waits for the GPU to count indices"


def numbered(x, w):
    """The op between others that can."""
    y = torch.relu(x @ w) + 1
    return torch.tanh(gathered(y) * y.sum()) + 0.5, y * 2


@pytest.mark.parametrize("backend", ["eager", "fake"])
def test_a_region_is_recorded_around_what_cant_be(device, backend):
    """Values bit for bit; the report says what is in the recordings, and why not the rest."""
    with plugged("fake"), torch.no_grad():
        run = recorded(numbered, *([backend] if backend == "fake" else []))
        for seed in range(5):
            inputs = rnd(4, 6, seed=seed), rnd(6, 5, seed=seed + 10)
            assert_same(run(*inputs), numbered(*inputs))
    (region,) = last_graph().regions
    assert region.backend == backend
    assert notes() == [
        f"CUDA graphs: 10 of 11 ops in 2 recordings, cut around {WHY}",
        "wrapped by recorder",
    ]
    assert device.count("record") == 2
    # Of each part, in all calls but the first; "fake" is checked by two more.
    assert device.count("replay") == (8 if backend == "eager" else 12)
    assert all_trips() == []


def test_a_training_step_is_recorded_around_what_cant_be(device):
    """An embedding's gradient waits for the GPU: the rest of the backward is recorded."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(10, 8)
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(x.long().clamp(0, 9)))

    nets = Net(), Net()
    nets[1].load_state_dict(nets[0].state_dict())
    run = recorded(nets[0])
    for seed in range(5):
        for net, function in zip(nets, (run, nets[1]), strict=True):
            net.zero_grad()
            function(5 * rnd(3, 7, seed=seed)).square().mean().backward()
        grads = [[p.grad for p in net.parameters()] for net in nets]
        torch.testing.assert_close(*grads)
    (region,) = last_graph("backward").regions
    assert f"cut around {WHY}" in region.notes[0]
    assert all_trips() == []


def draws_on_both_sides(x):
    first = nn.functional.dropout(x, 0.5)
    return first * 2 + 1, nn.functional.dropout(x + gathered(first).sum(), 0.5) * 3


def draws_after_and_beside(x):
    """The second draw could run before the cut."""
    first = nn.functional.dropout(x + gathered(x).sum(), 0.5) * 3
    return first, nn.functional.dropout(x, 0.5) * 2 + 1


@pytest.mark.parametrize("function", [draws_on_both_sides, draws_after_and_beside])
def test_draws_keep_their_order(device, function):
    """Random numbers around a cut are those of eager."""
    run = recorded(function)
    with torch.no_grad():
        for seed in range(4):
            x = rnd(6, 5, seed=seed)
            results = []
            for called in (run, function):
                torch.manual_seed(seed)
                results.append((*called(x), torch.rand(3)))
            assert_same(*results)


def test_weights_of_a_part_are_read_where_they_lie(device):
    """They are inputs of the part, known as static; an update in place is seen."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()

    def function(x):
        y = net(x)
        return gathered(y) + y.sum()

    run = recorded(function)
    with torch.no_grad():
        for seed in range(5):
            x = rnd(4, 6, seed=seed)
            assert_same(run(x), function(x))
            net[0].weight.mul_(1.5)
    assert net[0].weight.data_ptr() in device.graphs[0].reads
    assert device.count("record") == 2


@pytest.mark.parametrize("size", [3, 7])
def test_a_cut_region_of_symbolic_sizes(device, size):
    """Sizes reach each part."""
    run = recorded(numbered, dynamic=True)
    with torch.no_grad():
        for seed in range(4):
            inputs = rnd(size + seed % 2, 6, seed=seed), rnd(6, 5, seed=seed + 10)
            assert_same(run(*inputs), numbered(*inputs))
    assert "2 recordings" in notes()[0]


def test_a_part_that_fails_to_record_goes_on(device):
    """It trips once for each part; results are right."""
    device.broken = RuntimeError("operation not permitted when stream is capturing")
    run = recorded(numbered)
    with torch.no_grad():
        for seed in range(4):
            inputs = rnd(4, 6, seed=seed), rnd(6, 5, seed=seed + 10)
            assert_same(run(*inputs), numbered(*inputs))
    assert [trip.plugin for trip in all_trips()] == ["recorder"] * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_cuts": 0}, ""),
        (
            {"min_nodes": 9},
            "; cut around it, no part has as many ops that compute as "
            "plugins.cudagraphs.min_nodes, 9",
        ),
    ],
)
def test_a_region_that_isnt_cut(device, options, reason):
    """It was switched off, or nothing would be gained."""
    run = recorded(numbered, **options)
    inputs = rnd(4, 6), rnd(6, 5)
    with torch.no_grad():
        for _ in range(3):
            assert_same(run(*inputs), numbered(*inputs))
    assert notes() == [f"CUDA graphs skipped: {WHY}{reason}"]
    assert device.log == []


def test_a_region_that_would_take_many_cuts(device):
    """It is left as it is, and the report says how many there would be."""

    def function(x):
        for _ in range(3):
            x = torch.relu(x + 1) * 2
            x = x + gathered(x).sum()
        return x

    run = recorded(function, max_cuts=2)
    with torch.no_grad():
        assert_same(run(rnd(4, 6)), function(rnd(4, 6)))
    (note,) = notes()
    assert note.endswith("; it would take 3 cuts, plugins.cudagraphs.max_cuts is 2")


# --- skips and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_nodes": 5}, "too small: 1 ops that compute, plugins.cudagraphs.min_nodes is 5"),
        ({"inner": ["inductor"]}, "eager isn't among plugins.cudagraphs.inner"),
    ],
)
def test_a_skip_has_a_reason_in_the_report(device, options, reason):
    """And the region runs as it is."""
    function = recorded(torch.relu, **options)
    for seed in range(3):
        assert_same(function(rnd(3, seed=seed)), rnd(3, seed=seed).relu())
    assert notes() == [f"CUDA graphs skipped: {reason}"]
    assert device.log == []
    assert "note: CUDA graphs skipped:" in str(fuseboard.last_report())


def test_it_is_off_unless_it_is_turned_on(device):
    """Nothing is recorded and nothing is said."""
    function = compiled(torch.relu)
    assert_same(function(rnd(3)), rnd(3).relu())
    assert (device.log, notes()) == ([], [])


@pytest.mark.parametrize("training", [False, True])
def test_a_failed_recording_trips_and_the_region_goes_on(device, training):
    """On its own backend, in a backward too, with every call's results right."""
    device.broken = RuntimeError("operation not permitted when stream is capturing")
    function = recorded(torch.tanh)
    for seed in range(4):
        x, y = (rnd(3, seed=seed).requires_grad_(training) for _ in range(2))
        results = function(x), torch.tanh(y)
        assert_same(*results)
        if training:
            for result in results:
                result.sum().backward()
            assert_same(x.grad, y.grad)
    trips = all_trips()
    assert [trip.plugin for trip in trips] == ["recorder"] * (2 if training else 1)
    assert {trip.instead for trip in trips} == {"eager without recorder"}
    assert "not permitted" in trips[0].error


@no_cuda
def test_reduce_overhead_without_a_gpu_compiles_and_says_why():
    """As torch spells it, and with every backend that would have been used."""
    torch._dynamo.reset()
    ledger.clear()
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU()).eval()
    function = torch.compile(
        net, backend="fuseboard", options={"mode": "reduce-overhead", "backends": ["mkldnn"]}
    )
    with torch.no_grad():
        torch.testing.assert_close(function(rnd(3, 12)), net(rnd(3, 12)))
    (note,) = [note for note in last_graph().notes if "cudagraphs" in note]
    assert note.startswith(
        "plugins.cudagraphs, set in mode='reduce-overhead', does nothing: 'cudagraphs' is "
        "unavailable: CUDA graphs need a CUDA device: "
    )
    assert all_trips() == []
    assert "does nothing" in str(fuseboard.last_report())


@no_cuda
def test_the_keyword_mode_is_accepted():
    """``torch.compile(mode="reduce-overhead")`` is no error."""
    torch._dynamo.reset()
    with fuseboard.settings(backends=["eager"]):
        function = torch.compile(torch.relu, backend="fuseboard", mode="reduce-overhead")
        assert_same(function(rnd(3)), rnd(3).relu())
    assert any("does nothing" in note for note in last_graph().notes)
