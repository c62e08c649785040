"""Outputs of ONNX models: identities, views of values that lie otherwise, and who computes them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fuseboard
from tests.support.backends import compiled, last_graph
from tests.support.values import rnd, strides

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

import fuseboard_onnxruntime as plugin
from fuseboard_onnxruntime import _decompositions, _forms

aten = torch.ops.aten


def check(function, *inputs):
    """Without verification: eager's values and strides, in memory of their own, from here."""
    call = compiled(function, "onnxruntime", verify="off", on_failure="raise", cache=False)
    with torch.no_grad():
        want = function(*inputs)
        for _ in range(2):
            got = call(*inputs)
            torch.testing.assert_close(got, want)
            for one, other in zip(flat(got), flat(want), strict=True):
                assert strides(one) == strides(other)
                assert all(one.data_ptr() != x.data_ptr() for x in inputs)
    assert "onnxruntime" in {node.backend for node in last_graph().nodes}


def flat(result):
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def lowered(graph, inputs):
    """What the plugin's hooks make of a graph, its results for the inputs."""
    region = fuseboard.Region("case", "onnxruntime", "inference", graph, "case")
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return plugin.fuseboard_lower(region, values).call(list(inputs))


def reasons(function, *inputs):
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    answers = plugin.fuseboard_claim(graph, "inference")
    return [one.reason for one in answers if isinstance(one, fuseboard.Decline)]


# --- identities -----------------------------------------------------------------------------------

IDENTITIES = {
    "repeat": lambda x: x.repeat((1,) * x.dim()),
    "tile": lambda x: x.tile(()),
    "clone": lambda x: x.clone(),
    "clone, contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "alias": lambda x: aten.alias(x) + 0,
    "dropout in eval": lambda x: F.dropout(x, 0.5, training=False).clone(),
    "sums and products": lambda x: (x + 0, x * 1, x / 1, x**1),
    "to": lambda x: x.to(x.dtype, copy=True),
    "contiguous": lambda x: x.contiguous().clone(),
    "expand": lambda x: x.expand(x.shape).clone(),
    "reshape": lambda x: x.reshape(x.shape).clone(),
    "stack of one": lambda x: torch.stack([x]).squeeze(0).clone(),
    "cat of one": lambda x: torch.cat([x.unsqueeze(0)]).clone(),
    "unbind of one": lambda x: x.unsqueeze(0).unbind(0)[0].clone(),
    "squeeze": lambda x: (x.squeeze().clone(), x.unsqueeze(0).squeeze(0).clone()),
    "flip of nothing": lambda x: x.unsqueeze(0).flip(()).squeeze(0),
    "maximum of one": lambda x: x.unsqueeze(0).softmax(0).squeeze(0) * x,
    "the same twice": lambda x: (x.clone(), x.clone(), x.exp(), x.exp()),
    "constants": lambda x: (x.exp(), torch.ones_like(x), torch.zeros(2, 2)),
}
LAYOUTS = {
    "no dimensions": torch.tensor(3.5),
    "transposed": rnd(2, 3).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IDENTITIES)
def test_what_changes_nothing_is_a_copy(name, layout):
    """An op that gives its input back is computed, or copied: never memory that nobody wrote."""

    def function(x):
        return IDENTITIES[name](x)

    check(function, LAYOUTS[layout])


def test_padding_that_moves_is_no_identity():
    """By 1 and -1 a tensor keeps its size."""
    check(lambda x: F.pad(x, (1, -1)), rnd(3, 4))


def test_an_output_that_is_an_input_of_the_model_is_written(monkeypatch):
    """Whatever op torch's library gives back as the value that went in, and twice the same one."""
    monkeypatch.setattr(_decompositions, "drop_identities", lambda graph: None)
    x = torch.tensor(3.5)
    graph = make_fx(lambda x: (x.repeat(()), x.tile(()), x.exp()), tracing_mode="fake")(x)
    torch.testing.assert_close(tuple(lowered(graph, [x])), (x, x, x.exp()))


# --- views of values that lie otherwise -----------------------------------------------------------

VIEWS = {
    "split, whole": lambda y: y.split([y.shape[0]], 0)[0],
    "split": lambda y: y.split(2, 1),
    "split by sizes": lambda y: y.split([1, y.shape[0] - 1]),
    "chunk": lambda y: y.chunk(2, -1),
    "chunk, whole": lambda y: y.chunk(1)[0],
    "tensor_split": lambda y: y.tensor_split(3, 1),
    "unbind": lambda y: y.unbind(1),
    "narrow": lambda y: y.narrow(1, 1, 2),
    "narrow, whole": lambda y: y.narrow(1, 0, y.shape[1]),
    "slice": lambda y: (y[1:], y[:, ::2], y[:]),
    "select": lambda y: (y[1], y[:, -1]),
    "expand": lambda y: (y.unsqueeze(0).expand(2, -1, -1), y.expand(y.shape)),
    "squeeze": lambda y: (y.squeeze(0), y.squeeze((0, 1))),
    "cat of one": lambda y: torch.cat([y]),
    "transposed": lambda y: (y.t(), y.transpose(0, 0), y.permute(0, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_values_and_no_memory(name):
    """Of a transposed value, as outputs and within the model."""

    def function(x):
        y = x.t().exp()
        return (y, *flat(VIEWS[name](y)), *(part * 2 for part in flat(VIEWS[name](y.neg()))))

    check(function, rnd(4, 3))


def test_a_split_by_symbolic_sizes():
    """The sizes are values of the model."""

    def function(x):
        return [part * 2 for part in (x.t() + 1).split([2, x.shape[1] - 2])]

    call = compiled(function, "onnxruntime", dynamic=True, on_failure="raise", verify="off")
    for size in (5, 8):
        x = rnd(3, size)
        torch.testing.assert_close(call(x), function(x))


# --- what is claimed ------------------------------------------------------------------------------


def test_a_claimed_op_of_any_strides_can_be_lowered():
    """What torch's decomposition of it does about strides is no matter for a model."""
    for start in (rnd(4, 3).t(), rnd(3, 4), rnd(3, 8)[:, ::2]):
        check(lambda a, b: torch.lerp(a, b, 0.3), start, rnd(3, 4, seed=1))


def test_what_an_op_decomposes_into_is_held_against_the_list(monkeypatch):
    """An op of which a part has no proven form is declined, with the part and the reason."""

    def flattened(x):
        return torch.as_strided(x.exp(), (x.numel(),), (1,)).view(x.shape)

    own = {**_decompositions.table(), aten.mish.default: flattened}
    monkeypatch.setattr(_decompositions, "table", lambda: own)
    _forms._why_not_parts.cache_clear()
    try:
        (reason,) = reasons(lambda x: F.mish(x), rnd(3, 4))
        assert reason.startswith("it decomposes into aten.as_strided.default")
        assert not reasons(lambda x: torch.lerp(x, x, 0.3), rnd(3, 4))
    finally:
        _forms._why_not_parts.cache_clear()


def test_what_no_form_is_proven_of_is_not_converted():
    """Torch's library has a form of as_strided, which reads values as if they were row-major."""
    x = rnd(3, 4).t()
    graph = make_fx(lambda x: (x.exp().as_strided((3, 4), (4, 1)),), tracing_mode="fake")(x)
    with pytest.raises(fuseboard.LoweringError, match="as_strided"):
        lowered(graph, [x])


def test_a_range_by_fractions_is_declined():
    """In float32 it may have an element more or less; whole numbers are exact."""
    assert reasons(lambda x: torch.arange(0, 1, 0.3) + x, rnd(4))
    assert not reasons(lambda x: torch.arange(0, 8, 2, dtype=torch.float32) + x, rnd(4))
