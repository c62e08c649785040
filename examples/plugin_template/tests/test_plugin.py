"""Run with ``pytest`` where fuseboard and this plugin are installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuseboard


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Each test compiles anew."""
    torch._dynamo.reset()


def run_compiled(f, *args):
    """The result, and the report of the graph that was compiled. What fails is raised here."""
    options = {"backends": ["mychip"], "on_failure": "raise"}
    compiled = torch.compile(f, backend="fuseboard", options=options)
    with torch.no_grad():
        result = compiled(*args)
    (graph,) = fuseboard.last_report().graphs
    return result, graph


def chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * 2.5 + y).exp() / torch.sqrt(torch.abs(x) + 1)


# 0 and 1 elements; 37x199, which no vector width divides; a broadcast.
@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [((0,), (0,)), ((), ()), ((1, 1), (1,)), ((37, 199), (37, 199)), ((5, 1), (7,))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_what_eager_does(x_shape, y_shape, dtype):
    """A chain of ops runs whole, is within a few roundings of eager, and keeps its strides."""
    x, y = torch.randn(x_shape, dtype=dtype), torch.randn(y_shape, dtype=dtype)
    result, report = run_compiled(chain, x, y)
    expected = chain(x, y)
    # Each of the seven calls may round the last bit the other way.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=16 * eps, atol=16 * eps)
    assert result.stride() == expected.stride()
    assert {region.backend for region in report.regions} == {"mychip"}
    assert not report.trips


def test_transposed_inputs_keep_their_layout():
    """The output's strides are eager's, also where the inputs aren't contiguous."""
    x = torch.randn(37, 199).t()
    result, _ = run_compiled(torch.sin, x)
    assert result.stride() == torch.sin(x).stride() == (1, 199)


def test_what_it_lacks_runs_elsewhere_with_a_reason():
    """A declined op runs on the next backend, and the report says why."""
    x = torch.randn(64, 64)
    result, report = run_compiled(lambda x: torch.erf(torch.exp(x)), x)
    torch.testing.assert_close(result, torch.erf(torch.exp(x)))
    placed = {node.op: node for node in report.nodes}
    erf = next(node for op, node in placed.items() if "erf" in op)
    assert erf.backend == "eager"
    assert "erf" in erf.declined["mychip"]


def test_other_dtypes_are_left_alone():
    """Half precision isn't declared, so the board doesn't offer it to the backend."""
    x = torch.randn(8, 8, dtype=torch.bfloat16)
    result, report = run_compiled(torch.tanh, x)
    assert torch.equal(result, torch.tanh(x))
    assert {region.backend for region in report.regions} == {"eager"}
