"""What holds on a GPU. Everything here needs one; nothing of it is needed for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuseboard.report.data import ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKENDS = [["eager"], ["inductor", "eager"], None]


def _options(backends: list[str] | None) -> dict[str, object]:
    return {"backends": backends} if backends else {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.25), nn.Linear(64, 31)
    ).cuda()


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_inference_equals_eager(backends):
    """A small network on the GPU gives eager's values, and no region tripped."""
    net = _net().eval()
    x = torch.randn(37, 48, device="cuda")
    compiled = torch.compile(net, backend="fuseboard", options=_options(backends))
    with torch.no_grad(), ledger.collect() as graphs:
        torch.testing.assert_close(compiled(x), net(x))
        torch.testing.assert_close(compiled(x), net(x))
    assert graphs
    assert not any(graph.trips for graph in graphs)


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_training_step_equals_eager(backends):
    """Gradients through forward and backward regions are eager's, dropout's mask included."""
    x = torch.randn(37, 48, device="cuda")
    gradients = []
    for compiled in (False, True):
        net = _net().train()
        function = (
            torch.compile(net, backend="fuseboard", options=_options(backends)) if compiled else net
        )
        torch.manual_seed(7)
        function(x).square().mean().backward()
        gradients.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_batch_sizes_and_a_cpu_scalar(backends):
    """Symbolic batch sizes, and a CPU scalar beside CUDA tensors."""

    def function(x, scale):
        return (x * scale).softmax(-1), x.sum(0) * x.shape[0]

    compiled = torch.compile(
        function, backend="fuseboard", dynamic=True, options=_options(backends)
    )
    scale = torch.tensor(0.5)
    for batch in (5, 3, 1, 8):
        x = torch.randn(batch, 33, device="cuda")
        torch.testing.assert_close(compiled(x, scale), function(x, scale))


def test_half_precision_attention():
    """float16 attention with a causal mask, through Inductor."""

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(2, 4, 65, 32, device="cuda", dtype=torch.float16) for _ in range(3))
    compiled = torch.compile(attend, backend="fuseboard")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_mkldnn_leaves_gpu_graphs_alone():
    """A graph on the GPU has no oneDNN region and says why."""
    net, x = _net().eval(), torch.randn(4, 48, device="cuda")
    with torch.no_grad(), ledger.collect() as graphs:
        torch.compile(net, backend="fuseboard")(x)
    for node in (node for graph in graphs for node in graph.nodes if node.backend != "board"):
        assert node.backend != "mkldnn"
        assert "cuda" in node.declined["mkldnn"]


def test_updated_weights_are_seen():
    """Weights on the GPU are never stale."""
    net, x = _net().eval(), torch.randn(4, 48, device="cuda")
    compiled = torch.compile(net, backend="fuseboard")
    with torch.no_grad():
        compiled(x)
        net[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x))
        net[4].weight.data.mul_(-1)
        torch.testing.assert_close(compiled(x), net(x))
