"""Graphs brought down to a backend's level: what a caller can tell of them stays."""

from __future__ import annotations

import pytest
import torch
from torch._decomp import get_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuseboard.lower.decompose import decompose
from fuseboard.torch_api.views import eager_strides
from tests.support.values import rnd

aten = torch.ops.aten


def captured(function, *inputs) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def reversed_in_memory(x: torch.Tensor) -> torch.Tensor:
    """A decomposition of relu with the dimensions in memory the other way round."""
    order = list(reversed(range(x.dim())))
    return x.clamp(min=0).permute(order).clone(memory_format=torch.contiguous_format).permute(order)


LAYOUTS = {
    "contiguous": rnd(2, 3, 4),
    "transposed": rnd(2, 4, 3).transpose(1, 2),
    "channels last": rnd(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "ones": rnd(1, 3, 1, 4),
    "empty": rnd(0, 3, 4),
    "vector": rnd(5),
    "number": rnd(),
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_outputs_keep_their_strides(x):
    """Where the decomposition has others, by a copy."""
    graph = captured(lambda x: (x.relu(),), x)
    (result,) = decompose(graph, {aten.relu.default: reversed_in_memory})(x)
    torch.testing.assert_close(result, x.relu(), rtol=0, atol=0)
    sizes = list(zip(result.shape, result.stride(), x.relu().stride(), strict=True))
    if x.numel():
        assert all(have == want for size, have, want in sizes if size > 1)


def test_an_output_given_twice_is_copied_once():
    x = rnd(2, 3)

    def twice(x):
        y = x.relu()
        return y, y

    lowered = decompose(captured(twice, x), {aten.relu.default: reversed_in_memory})
    first, second = lowered(x)
    assert first is second
    assert first.stride() == (3, 1)


def test_without_an_op_of_the_table_the_graph_is_the_same_object():
    graph = captured(torch.exp, rnd(2))
    assert decompose(graph, {aten.relu.default: reversed_in_memory}) is graph


def test_what_was_a_view_of_a_decomposed_result_may_be_a_copy():
    """Where the kernel's result is row-major and that of the ops that it falls into isn't."""
    x, ones = rnd(4, 5, 6).transpose(1, 2), torch.ones(6)
    norm = aten._native_batch_norm_legit_no_training.default

    def model(x, weight, bias, mean, variance):
        return (norm(x, weight, bias, mean, variance, 0.1, 1e-5)[0].view(4, -1),)

    inputs = x, ones, ones * 2, ones * 3, ones * 4
    with eager_strides():
        lowered = decompose(captured(model, *inputs), get_decompositions([norm]))
    torch.testing.assert_close(lowered(*inputs), model(*inputs))
