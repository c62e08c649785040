"""CUDA graphs on a GPU: what the tests on the recording CPU device can't show."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fuseboard.report.data import GraphReport, ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKENDS = [["eager"], ["inductor", "eager"]]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    ledger.clear()


def recorded(target: Any, backends: list[str], **options: Any) -> Any:
    """Compiled with everything recorded that can be, however small."""
    own = {"enabled": True, "min_nodes": 1, **options.pop("own", {})}
    settings = {"backends": backends, "plugins": {"cudagraphs": own}, **options}
    return torch.compile(target, backend="fuseboard", options=settings)


def notes() -> list[str]:
    return [n for graph in ledger.graphs() for region in graph.regions for n in region.notes]


def trips() -> list[Any]:
    graphs: list[GraphReport] = ledger.graphs()
    return [trip for graph in graphs for trip in graph.trips]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.25), nn.Linear(64, 31)
    ).cuda()


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_inference_equals_eager_and_is_recorded(backends):
    """New inputs, kept results, and weights that are updated in place."""
    net = _net().eval()
    compiled = recorded(net, backends)
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(37, 48, device="cuda")
            kept.append((compiled(x), net(x)))
            net[0].weight.mul_(1.1)
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert "wrapped by cudagraphs" in notes()
    assert trips() == []


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_training_equals_eager(backends):
    """Ten steps with dropout from the same seed: forward and backward recorded."""
    results = []
    for compiled in (False, True):
        net = _net().train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        function = recorded(net, backends) if compiled else net
        torch.manual_seed(7)
        for seed in range(10):
            x = torch.randn(37, 48, generator=torch.Generator().manual_seed(seed)).cuda()
            optimizer.zero_grad()
            function(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(results[1], results[0])
    assert notes().count("wrapped by cudagraphs") >= 2
    assert trips() == []


def test_fewer_launches_reach_the_gpu():
    """A replay is one graph launch: the region's own kernels are launched by the graph."""

    def chain(x):
        for _ in range(12):
            x = torch.sin(x) + 1
        return x

    compiled = recorded(chain, ["eager"])
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        compiled(x)
    with torch.profiler.profile() as profile:
        compiled(x)
        torch.cuda.synchronize()
    launches = {event.key: event.count for event in profile.key_averages()}
    assert launches.get("cudaGraphLaunch", launches.get("hipGraphLaunch", 0)) == 1
    assert launches.get("cudaLaunchKernel", 0) <= 3


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_batch_sizes_and_a_cpu_scalar(backends):
    """Each combination has a recording; numbers on the CPU are never stale."""

    def function(x, scale):
        return (x * scale).softmax(-1), x.sum(0) * x.shape[0]

    compiled = torch.compile(
        function,
        backend="fuseboard",
        dynamic=True,
        options={
            "backends": backends,
            "plugins": {"cudagraphs": {"enabled": True, "min_nodes": 1}},
        },
    )
    for number in (0.5, 0.5, -2.0, 0.5):
        scale = torch.tensor(number)
        for batch in (5, 3, 1, 8, 5):
            x = torch.randn(batch, 33, device="cuda")
            torch.testing.assert_close(compiled(x, scale), function(x, scale))
    assert trips() == []


def test_weights_that_move_are_seen():
    """A replaced parameter, and another instance with the same code."""
    one, two = _net().eval(), _net().eval()
    with torch.no_grad():
        two[0].weight.add_(1)
        x = torch.randn(5, 48, device="cuda")
        for net in (one, two):
            compiled = recorded(net, ["inductor", "eager"])
            for _ in range(3):
                torch.testing.assert_close(compiled(x), net(x))
            net[4].weight = nn.Parameter(torch.randn(31, 64, device="cuda"))
            for _ in range(3):
                torch.testing.assert_close(compiled(x), net(x))
    assert trips() == []


def test_a_recording_that_fails_leaves_the_gpu_usable():
    """The region runs without; random numbers can still be drawn, other recordings be made."""
    library = torch.library.Library("cudagraphs_gpu_test", "DEF")
    library.define("waits(Tensor x) -> Tensor")

    def waits(x):
        y = x * torch.rand_like(x).ceil()
        torch.cuda.synchronize()
        return y

    library.impl("waits", waits, "CUDA")
    library.impl("waits", torch.empty_like, "Meta")

    def function(x):
        return torch.ops.cudagraphs_gpu_test.waits(x) * 2

    own = {"namespaces": ["cudagraphs_gpu_test"]}
    compiled = recorded(function, ["eager"], own=own)
    x = torch.randn(8, device="cuda")
    for _ in range(4):
        torch.testing.assert_close(compiled(x), x * 2)
    (trip,) = trips()
    assert (trip.plugin, trip.instead) == ("cudagraphs", "eager without cudagraphs")
    torch.manual_seed(1)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    torch.testing.assert_close(torch.rand(4, device="cuda"), first, rtol=0, atol=0)
    again = recorded(lambda x: (x * 3).relu(), ["eager"])
    for _ in range(4):
        torch.testing.assert_close(again(x), (x * 3).relu())
    assert len(trips()) == 1


def test_streams_and_threads():
    """Calls on a stream and in a thread of their own give their own results."""
    net = _net().eval()
    compiled = recorded(net, ["eager"])
    wrong: list[int] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(30):
                x = torch.randn(37, 48, device="cuda")
                if not torch.allclose(compiled(x), net(x), rtol=1e-4, atol=1e-5):
                    wrong.append(number)
        stream.synchronize()

    with torch.no_grad():
        compiled(torch.randn(37, 48, device="cuda"))  # compiled before the threads start
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert trips() == []


def test_inside_a_recording_of_the_callers():
    """The region becomes part of it."""

    def function(x):
        return (torch.sin(x) * 2).relu()

    compiled = recorded(function, ["eager"])
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(x)
    x.copy_(torch.randn(64, device="cuda"))
    graph.replay()
    torch.testing.assert_close(result, function(x))


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_a_region_is_recorded_around_what_cant_be(backends):
    """An op whose kernel waits for the GPU, unless a backend makes another one of it."""

    def function(grad, x):
        index = x.long().clamp(0, 9)
        rows = torch.ops.aten.embedding_dense_backward(grad * 2, index, 10, -1, False)
        return torch.tanh(rows * grad.sum()) + 0.5

    compiled = recorded(function, backends)
    for _ in range(5):
        grad, x = torch.randn(3, 4, device="cuda"), torch.randn(3, device="cuda")
        torch.testing.assert_close(compiled(grad, x), function(grad, x))
    if backends == ["eager"]:
        why = "aten.embedding_dense_backward.default: its kernel waits"
        assert any("2 recordings, cut around " + why in note for note in notes())
    assert trips() == []


def test_memory_stays_bounded():
    """Sizes that come in turn don't pile recordings up."""
    net = _net().eval()
    compiled = torch.compile(
        net,
        backend="fuseboard",
        dynamic=True,
        options={
            "backends": ["eager"],
            "plugins": {"cudagraphs": {"enabled": True, "min_nodes": 1, "max_graphs": 4}},
        },
    )
    with torch.no_grad():
        for _ in range(4):
            for batch in range(2, 40):
                compiled(torch.randn(batch, 48, device="cuda"))
    assert any("max_graphs = 4" in note for note in notes())
    assert torch.cuda.memory_allocated() < 256 * 2**20
