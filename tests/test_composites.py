"""Composites: each usual way of writing one is found, what nearly is one isn't."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

import fuseboard
from fuseboard.torch_api.pattern_traces import fake_like, trace_forward, trace_joint
from tests.support.backends import compiled
from tests.support.values import rnd

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """An ATen graph with fake values, as of inference."""
    return trace_forward(function, fake_like(inputs), {})


def found_in(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fuseboard.Composite]:
    return fuseboard.find_composites(traced(function, *inputs))


X, HALF = rnd(2, 3, 16), rnd(2, 3, 16, dtype=torch.bfloat16)
W, B = rnd(16, seed=1), rnd(16, seed=2)


# --- RMS norms ------------------------------------------------------------------------------------


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_of_llama(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def rms_of_gemma(x, w):
    """The weight, one less, before the cast back."""
    return (rms(x.float()) * (1.0 + w.float())).type_as(x)


def rms_by_product(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def rms_by_root(x, w):
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * w


def rms_by_root_of_product(x, w):
    return x / (torch.mean(x * x, -1, keepdim=True) + 1e-6).sqrt() * w


def rms_of_torch(x, w):
    return F.rms_norm(x, (16,), w, 1e-6)


RMS = [rms_of_llama, rms_of_gemma, rms_by_product, rms_by_root, rms_by_root_of_product]


@pytest.mark.parametrize("x", [X, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", [*RMS, rms_of_torch], ids=lambda f: f.__name__)
@pytest.mark.whole
def test_rms_norms(function, x):
    """With the input in its own dtype, the weight as it is multiplied by, and eps."""
    graph = traced(function, x, W.to(x.dtype))
    (one,) = fuseboard.find_composites(graph)
    assert one.name == "rms_norm"
    assert one.arguments["x"].op == "placeholder"
    weight = one.arguments["weight"]
    assert weight.target is aten.add.Tensor if function is rms_of_gemma else weight.op != "output"
    assert one.arguments["eps"] == pytest.approx(1e-6)
    assert one.arguments["dims"] == 1
    assert dict(one.results) == {"y": graph.graph.output_node().args[0][0]}


# --- layer norms ----------------------------------------------------------------------------------


def layer_of_torch(x, w, b):
    return F.layer_norm(x, (16,), w, b, 1e-6)


def layer_of_bert(x, w, b):
    """As TensorFlow's BERT was brought over."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(variance + 1e-6)) + b


def layer_centred_once(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-6) * w + b


def layer_by_var(x, w, b):
    variance = x.var(-1, keepdim=True, unbiased=False)
    return b + (x - x.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt() * w


def layer_by_var_mean(x, w, b):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-6) * w + b


def layer_wide(x, w, b):
    """Computed in float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed.to(x.dtype) * w + b


LAYER = [layer_of_bert, layer_centred_once, layer_by_var, layer_by_var_mean, layer_wide]


@pytest.mark.parametrize("x", [X, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", [layer_of_torch, *LAYER], ids=lambda f: f.__name__)
@pytest.mark.whole
def test_layer_norms(function, x):
    """With weight and bias, in each order."""
    graph = traced(function, x, W.to(x.dtype), B.to(x.dtype))
    (one,) = fuseboard.find_composites(graph)
    assert one.name == "layer_norm"
    targets = {name: str(one.arguments[name].target) for name in ("x", "weight", "bias")}
    assert len(set(targets.values())) == 3
    assert list(targets.values()) == [
        node.target for node in graph.graph.find_nodes(op="placeholder")
    ]
    assert (one.arguments["eps"], one.arguments["dims"]) == (1e-6, 1)
    assert dict(one.results) == {"y": graph.graph.output_node().args[0][0]}


# --- rotary embeddings ----------------------------------------------------------------------------


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def turned_chunks(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def turned_neighbours(x):
    """As GPT-J has it."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


TURNED = [(turned, False), (turned_chunks, False), (turned_neighbours, True)]


@pytest.mark.parametrize(("turn", "interleaved"), TURNED)
@pytest.mark.whole
def test_rotary_embeddings(turn, interleaved):
    """Tables for each head or for all."""

    def rotate(x, cos, sin):
        return (x * cos.unsqueeze(1)) + (turn(x) * sin.unsqueeze(1))

    graph = traced(rotate, rnd(2, 4, 3, 16), rnd(2, 3, 16), rnd(2, 3, 16, seed=1))
    (one,) = fuseboard.find_composites(graph)
    assert one.name == "rotary"
    assert one.arguments["interleaved"] == interleaved
    x, cos, sin = (one.arguments[name] for name in ("x", "cos", "sin"))
    inputs = graph.graph.find_nodes(op="placeholder")
    assert inputs == [x, cos.args[0], sin.args[0]]


@pytest.mark.parametrize(("turn", "interleaved"), TURNED)
@pytest.mark.whole
def test_gradients_of_rotary_embeddings(turn, interleaved):
    """As autograd makes them."""

    def rotate(x, cos, sin):
        return x * cos + turn(x) * sin

    inputs = fake_like([rnd(2, 3, 16), rnd(3, 16), rnd(3, 16)])
    graph = trace_joint(rotate, inputs, [0], [0], (), {})
    forward, backward = fuseboard.find_composites(graph)
    assert (forward.name, backward.name) == ("rotary", "rotary_backward")
    assert backward.arguments["interleaved"] == interleaved
    assert backward.arguments["cos"] is forward.arguments["cos"]
    assert backward.arguments["sin"] is forward.arguments["sin"]
    assert backward.results["grad_x"] is graph.graph.output_node().args[0][1]


# --- attention, losses ----------------------------------------------------------------------------

Q = rnd(2, 4, 5, 16)


@pytest.mark.parametrize(
    "given",
    [{}, {"is_causal": True}, {"scale": 0.5}, {"attn_mask": True}],
    ids=["plain", "causal", "scaled", "masked"],
)
@pytest.mark.whole
def test_attention(given):
    """With all that it depends on, by name."""

    def attend(q, k, v):
        mask = {"attn_mask": q.new_zeros(5, 5)} if "attn_mask" in given else {}
        return F.scaled_dot_product_attention(q, k, v, **{**given, **mask})

    (one,) = found_in(attend, Q, Q, Q)
    assert one.name == "attention"
    assert one.arguments["scale"] == given.get("scale", 0.25)
    assert one.arguments["causal"] == ("is_causal" in given)
    assert (one.arguments["mask"] is None) == ("attn_mask" not in given)
    assert not one.arguments["grouped"]
    assert one.results.keys() == {"y"}


def test_attention_of_fewer_heads_of_keys():
    """Also once it is the CPU's op, which has no argument that says so."""
    (one,) = found_in(
        partial(F.scaled_dot_product_attention, enable_gqa=True), Q, Q[:, :1], Q[:, :1]
    )
    assert one.arguments["grouped"]


def test_attention_that_is_trained():
    """What the backward reads is a result, too."""
    inputs = fake_like([Q, Q, Q])
    graph = trace_joint(F.scaled_dot_product_attention, inputs, [0, 1, 2], [0], (), {})
    (one,) = fuseboard.find_composites(graph, {"attention"})
    assert one.results.keys() == {"y", "logsumexp"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction):
    """The loss of class numbers, and its gradient."""

    def loss(logits, target):
        return F.cross_entropy(logits, target, reduction=reduction, ignore_index=7)

    inputs = fake_like([rnd(6, 16), torch.arange(6)])
    graph = trace_joint(loss, inputs, [0], [0], (), {})
    forward, backward = fuseboard.find_composites(graph)
    assert (forward.name, backward.name) == ("cross_entropy", "cross_entropy_backward")
    for one in (forward, backward):
        assert (one.arguments["reduction"], one.arguments["ignore_index"]) == (reduction, 7)
    assert backward.arguments["total_weight"] is forward.results["total_weight"]
    assert backward.results["grad_logits"] is graph.graph.output_node().args[0][1]


# --- what isn't one -------------------------------------------------------------------------------

MISSES: dict[str, Callable[..., Any]] = {
    "another dimension": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "another power": lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    "the sum": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "of another tensor": lambda x, w: x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "an unbiased variance": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6)
    ),
    "eps after the root": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False).sqrt() + 1e-6)
    ),
    "the square is read": lambda x, w: (
        (square := x.pow(2)) + x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)
    ),
    "what is turned is read": lambda x, w: (x * w + (part := turned(x)) * w, part),
    "halves in place": lambda x, w: x * w + torch.cat([-x[..., :8], x[..., 8:]], -1) * w,
    "unequal halves": lambda x, w: x * w + torch.cat([-x[..., 6:], x[..., :6]], -1) * w,
    "complex numbers": lambda x, w: rms(torch.complex(x, x)),
    "no dimension": lambda x, w: rms(x[0, 0, 0]),
    "no halves": lambda x, w: x[..., 1:] * w[1:] + turned(x[..., 1:]) * w[1:],
    "no chunks": lambda x, w: x[..., 1:] * w[1:] + turned_chunks(x[..., 1:]) * w[1:],
    "nothing is negated": lambda x, w: x * w + torch.cat([x[..., 8:], x[..., :8]], -1) * w,
    "dropout": lambda x, w: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "a larger table": lambda x, w: x[0] * x + turned(x[0]) * x,
}


@pytest.mark.parametrize("what", MISSES)
@pytest.mark.whole
def test_what_is_nearly_one(what):
    """Another formula, or one of whose inside something else reads."""
    assert found_in(MISSES[what], X, W) == []


def test_what_follows_is_told_apart():
    """A weight of another shape, a second weight, a bias of an RMS norm stay outside."""
    for function, shape in [
        (lambda x, w: rms(x) * x.sin(), None),
        (lambda x, w: rms(x) + w, None),
        (lambda x, w: rms(x) * w * w, (16,)),
        (lambda x, w: (rms(x), rms(x) * w)[1] * 2.0, (16,)),
    ]:
        (one,) = found_in(function, X, W)
        weight = one.arguments["weight"]
        assert (None if weight is None else weight.meta["val"].shape) == shape
        assert one.results["y"].users


def test_a_norm_that_is_read_before_its_weight():
    """One call can't give both."""

    def early(x, w):
        normed = rms(x)
        return normed * (w + 1.0), normed

    (one,) = found_in(early, X, W)
    assert one.arguments["weight"] is None

    def circle(x, w):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * rstd * (w + rstd.sum())

    assert [one.arguments["weight"] for one in found_in(circle, X, W)] in ([], [None])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, logs: F.nll_loss(logs, logs.argmax(-1)),
        lambda x, logs: F.nll_loss(logs, x.argmax(-1), logs.sum(0)),
        lambda x, logs: rms(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).squeeze(1),
    ],
    ids=["target", "class weights", "weight"],
)
@pytest.mark.whole
def test_an_argument_that_follows_from_a_result(function):
    """One op away or several, a call can't wait for what it gives."""
    x = rnd(16, 16)
    for one in found_in(lambda x: function(x, F.log_softmax(x, -1)), x):
        before = [n for n in one.arguments.values() if isinstance(n, torch.fx.Node)]
        for node in before:
            before.extend(node.all_input_nodes)
        assert not set(before) & set(one.nodes)


def test_sizes_that_change():
    """Symbolic ones are compared as expressions, and no guard is added.

    What has pairs only in some calls is no rotary embedding.
    """
    seen = []

    class Finder:
        @fuseboard.hookimpl
        def fuseboard_backend(self):
            return fuseboard.BackendInfo(name="finder", dynamic_shapes=True, compiles_quickly=True)

        @fuseboard.hookimpl
        def fuseboard_claim(self, graph):
            sizes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            env = next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))
            before = len(env.guards)
            seen.extend(one.name for one in fuseboard.find_composites(graph))
            assert len(env.guards) == before
            return fuseboard.claim_nodes(graph, lambda node: "only looks")

    def model(x, w):
        first = rms_of_llama(x, w) * rms_by_root(x.sin(), w)
        even, table = torch.cat([x, x], -1), torch.cat([w, w])
        rotated = even * table + turned(even) * table
        return first, layer_of_bert(x, w, w), rotated, x * w + turned(x) * w

    fuseboard.register(Finder())
    try:
        run = compiled(model, "finder", "eager", dynamic=True, on_failure="raise")
        with torch.no_grad():
            run(rnd(4, 6, 16), W)
    finally:
        fuseboard.unregister("finder")
    assert sorted(seen) == ["layer_norm", "rms_norm", "rms_norm", "rotary"]
