"""Norms, however they are written, are one kernel of ONNX Runtime each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd
from tests.test_composites import (
    LAYER,
    RMS,
    layer_of_bert,
    layer_of_torch,
    rms,
    rms_of_gemma,
    rms_of_llama,
    rms_of_torch,
    traced,
)

ort = pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")
onnx = pytest.importorskip("onnx", reason="needs the extra onnxruntime")

from fuseboard_onnxruntime._convert import convert  # noqa: E402 - after the skip

OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}


def kernels_of(directory, function, *inputs) -> Counter[str]:
    """What ONNX Runtime makes of a function: operators of its optimised graph."""
    graph = traced(function, *inputs)
    output = graph.graph.output_node()
    output.args = (tuple(output.args[0]),)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(directory / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(convert(graph).proto, options, providers=["CPUExecutionProvider"])
    model = onnx.load(options.optimized_model_filepath)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("function", [*LAYER, layer_of_torch], ids=lambda f: f.__name__)
@pytest.mark.whole
def test_layer_norms_are_one_kernel(function, tmp_path):
    inputs = rnd(2, 3, 16), rnd(16, seed=1), rnd(16, seed=2)
    assert kernels_of(tmp_path, function, *inputs) == {"LayerNormalization": 1}


@pytest.mark.parametrize("function", [*RMS, rms_of_torch], ids=lambda f: f.__name__)
@pytest.mark.whole
def test_rms_norms_are_one_kernel(function, tmp_path):
    """Also beside an op for which the graph is traced again."""

    def model(x, w):
        return function(x, w) + x.var(-1, keepdim=True)

    kernels = kernels_of(tmp_path, model, rnd(2, 3, 16), rnd(16, seed=1))
    assert kernels["SimplifiedLayerNormalization"] == 1
    assert kernels["Reciprocal"] == kernels["Pow"] == 0


def test_composites_beside_ops_that_are_decomposed(tmp_path):
    """Attention, layer norms and pools keep their kernels where the graph is traced again."""

    def mixed(q, k, v, w, mask):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = F.layer_norm(y, (8,), w)
        pooled = F.max_pool2d(y.relu(), 2)
        return y, pooled, pooled.var(-1)

    inputs = rnd(2, 3, 4, 8), rnd(2, 3, 6, 8, seed=1), rnd(2, 3, 6, 8, seed=2), rnd(8), rnd(4, 6)
    kernels = kernels_of(tmp_path, mixed, *inputs)
    assert kernels["Softmax"] == kernels["LayerNormalization"] == 1
    assert kernels["AveragePool"] == 1
    assert kernels["Exp"] == 0
    with torch.no_grad():
        found = compiled(mixed, "onnxruntime", **OPTIONS)(*inputs)
        exact, eager = mixed(*(x.double() for x in inputs)), mixed(*inputs)
    for got, reference, rival in zip(found, exact, eager, strict=True):
        assert got.stride() == rival.stride()
        assert_closer(got, reference=reference, rival=rival)
    assert not all_trips()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.whole
def test_heads_that_share_keys_and_values(masked):
    """Where nothing repeats these before: torch's kernel takes fewer heads of them."""

    def grouped(q, k, v, mask):
        how = {"attn_mask": mask} if masked else {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how) * 2

    inputs = rnd(2, 6, 5, 8), rnd(2, 3, 7, 8, seed=1), rnd(2, 3, 7, 8, seed=2), rnd(5, 7)
    with torch.no_grad():
        found = compiled(grouped, "onnxruntime", **OPTIONS)(*inputs)
        exact, eager = grouped(*(x.double() for x in inputs)), grouped(*inputs)
    assert found.stride() == eager.stride()
    assert_closer(found, reference=exact, rival=eager)
    assert [one.backend for one in last_graph().regions] == ["onnxruntime"]
    assert not all_trips()


def model(x, w, b):
    return (
        *(function(x, w, b) @ x[0].t() for function in LAYER),
        *(function(x, w) @ x[0].t() for function in (*RMS, rms_of_torch)),
        rms(x) @ x[0].t(),
    )


def exact_model(x, w, b):
    """Without casts to float32, which some of the functions have."""
    x, w, b = x.double(), w.double(), b.double()
    weights = [w + 1 if function is rms_of_gemma else w for function in (*RMS, rms_of_torch)]
    layers = [layer_of_torch(x, w, b) for _ in LAYER]
    return tuple(y @ x[0].t() for y in (*layers, *(rms(x) * one for one in weights), rms(x)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thorough
def test_values(dynamic):
    """As near to float64 as eager's, at a mean of 10 as well, all of it on ONNX Runtime."""
    run = compiled(model, "onnxruntime", "eager", dynamic=dynamic, **OPTIONS)
    w, b = rnd(16, seed=1), rnd(16, seed=2)
    for x in (rnd(3, 3, 16), rnd(5, 3, 16, seed=3) + 10):
        with torch.no_grad():
            got = run(x, w, b)
        assert_closer(got, reference=exact_model(x, w, b), rival=model(x, w, b))
    assert all_trips() == []
    assert {region.backend for region in last_graph("inference").regions} == {"onnxruntime"}


def test_rows_of_any_length():
    """Where the length of rows is symbolic, ops stay as they are written."""

    def norms(x, w, b):
        return layer_of_bert(x, w, b) @ x.t(), rms_of_llama(x, w) @ x.t(), layer_of_any(x, w, b)

    def layer_of_any(x, w, b):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)

    run = compiled(norms, "onnxruntime", "eager", dynamic=True, **OPTIONS)
    for size in (12, 16, 9):
        inputs = rnd(5, size), rnd(size, seed=1), rnd(size, seed=2)
        with torch.no_grad():
            got = run(*inputs)
        assert_closer(got, reference=norms(*[t.double() for t in inputs]), rival=norms(*inputs))
    assert all_trips() == []


@pytest.mark.parametrize("width", [2048, 8192])
def test_long_rows(width):
    """A mean of so many numbers by itself is eager's; within a norm the kernel sums it well."""

    def norms(x, w, b):
        layers = [function(x, w, b) @ x.t() for function in (layer_of_bert, layer_of_torch_wide)]
        # Of another tensor: what two norms share is computed once, and neither is whole.
        return *layers, rms_of_llama(x, w) @ x.t(), torch.rms_norm(x.cos(), (width,), w, 1e-6)

    def layer_of_torch_wide(x, w, b):
        return torch.nn.functional.layer_norm(x, (width,), w, b, 1e-6)

    inputs = rnd(7, width), rnd(width, seed=1), rnd(width, seed=2)
    with torch.no_grad():
        got = compiled(norms, "onnxruntime", "eager", **OPTIONS)(*inputs)
    assert_closer(got, reference=norms(*[t.double() for t in inputs]), rival=norms(*inputs))
    assert all_trips() == []
    assert {region.backend for region in last_graph("inference").regions} == {"onnxruntime"}


def test_a_long_mean_beside_a_norm_stays_with_eager():
    """Only what the kernel computes is taken."""

    def both(x, w):
        return rms_of_llama(x, w) @ x.t(), x.cos().mean(-1)

    x, w = rnd(7, 2048), rnd(2048, seed=1)
    with torch.no_grad():
        got = compiled(both, "onnxruntime", "eager", **OPTIONS)(x, w)
    assert_closer(got, reference=both(x.double(), w.double()), rival=both(x, w))
    placed = {node.name: node.backend for node in last_graph("inference").nodes}
    assert {name: who for name, who in placed.items() if "mean" in name} == {
        "mean": "onnxruntime",
        "mean_1": "eager",
    }


def test_the_report_counts_them(tmp_path):
    """Also in a later process, which loads what was converted."""

    def layers(x, w, b):
        for _ in range(3):
            x = rms_of_llama(layer_of_bert(x, w, b), w) @ x.t() @ x
        return x

    inputs = rnd(8, 16), rnd(16, seed=1), rnd(16, seed=2)
    options = {**OPTIONS, "cache": True, "cache_dir": str(tmp_path)}
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(layers, "onnxruntime", "eager", **options)(*inputs)
        notes = [note for one in last_graph("inference").regions for note in one.notes]
        assert {"composite layer_norm ×3", "composite rms_norm ×3"} <= set(notes)


def test_what_isnt_a_number():
    """NaN and infinities stay where they are."""
    x = torch.stack([rnd(16), rnd(16, seed=1), rnd(16, seed=2), torch.zeros(16)])
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    w, b = rnd(16, seed=3), rnd(16, seed=4)

    def norms(x, w, b):
        return tuple(f(x, w, b) for f in LAYER) + tuple(f(x, w) for f in (*RMS, rms_of_torch))

    with torch.no_grad():
        got = compiled(norms, "onnxruntime", "eager", **OPTIONS)(x, w, b)
    torch.testing.assert_close(got, norms(x, w, b), equal_nan=True)
