"""Composites that a third party's plugin claims by name, and what stands in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fuseboard
from fuseboard.fuse.composites import norms
from fuseboard.lower import cache_keys
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd
from tests.test_composites import layer_centred_once, layer_of_bert, rms_of_llama, traced, turned

OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}


def normed(x, weight, eps, dims):
    """The kernel of another party: RMS norms, with what their backward reads."""
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    y = x.double() * rstd
    return (y if weight is None else y * weight).to(x.dtype), rstd.float()


def rotated(x, cos, sin, interleaved):
    """With the tables of rotary embeddings, whose pairs are of both halves."""
    assert not interleaved
    return x * cos + turned(x) * sin


def rotated_back(grad, cos, sin, interleaved):
    return rotated(grad, cos, -sin, interleaved)


_KERNELS: dict[str, Any] = {
    "rms_norm": (normed, "y", "rstd"),
    "rotary": (rotated, "y"),
    "rotary_backward": (rotated_back, "grad_x"),
}


def first_of(kernel):
    """For who reads one result."""

    def call(*arguments):
        result = kernel(*arguments)
        return result[0] if isinstance(result, tuple) else result

    return call


class Kernels:
    """Takes three names, and only what its kernels give."""

    names = ("rms_norm", "rotary", "rotary_backward")

    def __init__(self) -> None:
        self.put: list[str] = []

    def fits(self, found: fuseboard.Composite) -> bool:
        return found.name != "rms_norm" or found.results.keys() <= {"y", "rstd"}

    @fuseboard.hookimpl
    def fuseboard_backend(self):
        return fuseboard.BackendInfo(
            name="kernels", training=True, dynamic_shapes=True, compiles_quickly=True
        )

    @fuseboard.hookimpl
    def fuseboard_claim(self, graph):
        return fuseboard.claim_composites(graph, self.names, self.fits)

    @fuseboard.hookimpl
    def fuseboard_lower(self, region, inputs):
        for found in fuseboard.find_composites(region.graph, self.names, self.fits):
            kernel, *names = _KERNELS[found.name]
            places = {names.index(name): node for name, node in found.results.items()}
            if len(found.results) == 1:
                kernel, places = first_of(kernel), None
            fuseboard.replace_composite(region.graph, found, kernel, results=places)
            self.put.append(found.name)
        region.graph.graph.lint()
        return fuseboard.lower_eagerly(region)


@pytest.fixture
def kernels():
    plugin = Kernels()
    torch._dynamo.reset()
    fuseboard.register(plugin)
    yield plugin
    fuseboard.unregister("kernels")


#: Of each element of a row, twice for each pair.
ANGLES = torch.arange(8.0).repeat(2)


def block(x, weight, w1, w2):
    normed = rms_of_llama(x, weight)
    cos, sin = (table.to(x.dtype) for table in (ANGLES.cos(), ANGLES.sin()))
    return x + (rotated(normed @ w1, cos, sin, False)) @ w2


def inputs_of(dtype=torch.float32) -> list[torch.Tensor]:
    shapes = [(2, 5, 16), (16,), (16, 16), (16, 16)]
    return [rnd(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference(kernels, dtype):
    """Each is one call of the plugin's; all else is eager's."""
    inputs = inputs_of(dtype)
    with torch.no_grad():
        got = compiled(block, "kernels", "eager", **OPTIONS)(*inputs)
        exact = block(*[x.double() for x in inputs])
        assert_closer(got, reference=exact, rival=block(*inputs))
    assert sorted(kernels.put) == ["rms_norm", "rotary"]
    assert all_trips() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training(kernels, dtype):
    """Forward and backward, with what is saved between them."""
    inputs = inputs_of(dtype)

    def gradients(run, given):
        leaves = [x.detach().requires_grad_() for x in given]
        result = run(*leaves)
        weights = torch.arange(result.numel()).view(result.shape).to(result.dtype) / 100
        return [result.detach(), *torch.autograd.grad((result * weights).sum(), leaves)]

    got = gradients(compiled(block, "kernels", "eager", **OPTIONS), inputs)
    exact = gradients(block, [x.double() for x in inputs])
    assert_closer(got, reference=exact, rival=gradients(block, inputs))
    assert sorted(kernels.put) == ["rms_norm", "rotary", "rotary_backward"]
    assert all_trips() == []


def test_sizes_that_change(kernels):
    """One lowering serves several sizes. Whether rows have pairs is known."""
    run = compiled(block, "kernels", "eager", **OPTIONS)
    inputs = inputs_of()
    with torch.no_grad():
        for rows in (5, 3, 8):
            x = rnd(2, rows, 16)
            torch._dynamo.mark_dynamic(x, 1)
            exact = block(*[t.double() for t in (x, *inputs[1:])])
            assert_closer(run(x, *inputs[1:]), reference=exact, rival=block(x, *inputs[1:]))
    assert sorted(set(kernels.put)) == ["rms_norm", "rotary"]


def test_what_something_else_reads_inside_isnt_claimed(kernels):
    """It stays with eager."""

    def shared(x, y):
        swapped = turned(x)
        return x * y + swapped * y, swapped

    x, y = rnd(3, 4), rnd(3, 4, seed=1)
    with torch.no_grad():
        result = compiled(shared, "kernels", "eager", **OPTIONS)(x, y)
    torch.testing.assert_close(result, shared(x, y), rtol=0, atol=0)
    assert kernels.put == []
    assert {region.backend for region in last_graph("inference").regions} == {"eager"}


def test_every_node_is_claimed_or_declined():
    """With the names in the reason."""
    graph = traced(lambda x, w: layer_of_bert(x, w, w).sin(), rnd(2, 3, 16), rnd(16))
    answers = fuseboard.claim_composites(graph, {"layer_norm"})
    (claim,) = (one for one in answers if isinstance(one, fuseboard.Claim))
    (decline,) = (one for one in answers if isinstance(one, fuseboard.Decline))
    assert claim.together
    assert decline == fuseboard.Decline("sin", "in no composite of layer_norm that fits")
    calls = {node.name for node in graph.graph.nodes if node.op == "call_function"}
    assert claim.nodes | {decline.node} == calls


def test_one_that_isnt_wanted_leaves_its_nodes():
    """A layer norm that a backend has no kernel for holds an RMS norm that it may have one for."""
    graph = traced(lambda x, w: layer_centred_once(x, w, w), rnd(2, 3, 16), rnd(16))
    assert [one.name for one in fuseboard.find_composites(graph)] == ["layer_norm"]
    (inner,) = fuseboard.find_composites(graph, {"rms_norm"})
    assert str(inner.arguments["x"].target) == "aten.sub.Tensor"


def test_a_call_stands_where_its_arguments_are_there():
    """Also where the last of them comes late; the graph's other nodes stay."""

    def late(x, y):
        first = x * y.cos()
        table = y.sin() + first.sum()
        return x * y + turned(x) * table, first

    graph = traced(late, rnd(2, 16), rnd(2, 16, seed=1))
    (found,) = fuseboard.find_composites(graph, {"rotary"})

    fuseboard.replace_composite(graph, found, rotated)
    graph.graph.lint()
    graph.recompile()
    assert not any(node.target is torch.ops.aten.cat.default for node in graph.graph.nodes)
    x, y = rnd(2, 16), rnd(2, 16, seed=1)
    torch.testing.assert_close(graph(x, y), list(late(x, y)))


def test_one_is_the_argument_of_the_next():
    """Each is replaced, whichever comes first."""

    def chain(x, w):
        first = rms_of_llama(x, w)
        second = layer_centred_once(first, w, w)
        return rotated(second, first, first, False), second

    x, w = rnd(2, 3, 16), rnd(16, seed=1)
    kernels = {
        "rms_norm": lambda x, weight, eps, dims: torch.rms_norm(x, (16,), weight, eps),
        "layer_norm": lambda x, weight, eps, dims, bias: F.layer_norm(x, (16,), weight, bias, eps),
        "rotary": rotated,
    }
    for order in (1, -1):
        graph = traced(chain, x, w)
        found = fuseboard.find_composites(graph)
        assert [one.name for one in found] == ["rms_norm", "layer_norm", "rotary"]
        for one in found[::order]:
            fuseboard.replace_composite(graph, one, kernels[one.name])
        graph.graph.lint()
        graph.recompile()
        assert len(graph.graph.nodes) == 6
        torch.testing.assert_close(graph(x, w), list(chain(x, w)))


def test_artifacts_depend_on_what_composites_are(monkeypatch):
    """Code that was made by other definitions isn't loaded; the miss names them."""
    graph = traced(torch.sin, rnd(2, 3))
    region = fuseboard.Region("r", "kernels", "inference", graph, "s")
    info = fuseboard.BackendInfo(name="kernels")

    def key():
        return cache_keys.region_key(region, info, (), []).parts

    before, real = key(), cache_keys.code_hash
    changed = Path(norms.__file__).parents[1]
    monkeypatch.setattr(
        cache_keys, "code_hash", lambda home: "other" if home == changed else real(home)
    )
    after = key()
    assert {name for name in before if before[name] != after[name]} == {"composites"}
