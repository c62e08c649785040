"""Patterns: where they are found, what is put there, and what keeps them from it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fuseboard
from fuseboard import Pattern, Patterns
from fuseboard.errors import PatternError
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing
from tests.support.values import rnd

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh():
    ledger.clear()


def swish(x):
    return x * torch.sigmoid(x)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rms_put(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def halves(x, scale):
    """Sizes of its own: a view of half the rows."""
    return x.view(2, x.shape[0] // 2, x.shape[1]).sum(0) * scale


SWISH = Pattern("swish", swish, [torch.empty(2, 3)], F.silu)
RMS = Pattern("rms", rms, [torch.empty(2, 8), torch.empty(8), 1e-5], rms_put)
HALVES = Pattern(
    "halves",
    halves,
    [torch.empty(4, 3), 2.0],
    lambda x, s: (x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]) * s,
)


def fuses(*patterns):
    """A hook that puts these."""
    together = Patterns(patterns)

    def fuse(graph, kind, region):
        return together.fusions(graph, kind) if region is None else None

    return fuse


def graph_of(function, *inputs):
    """A function's inference graph."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def trained(function, *inputs, seed=None):
    """Results and gradients."""
    own = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in inputs]
    if seed is not None:
        torch.manual_seed(seed)
    result = function(*own)
    (result * torch.arange(result.numel()).reshape(result.shape).cos()).sum().backward()
    return [result.detach(), *(value.grad for value in own)]


def check_training(function, pattern, count, *inputs, seed=None, **options):
    """Results and gradients are eager's, with so many rewrites of the joint graph."""
    with observing("rewriter", fuse=fuses(pattern)):
        got = trained(compiled(function, **options), *inputs, seed=seed)
    for one, other in zip(got, trained(function, *inputs, seed=seed), strict=True):
        torch.testing.assert_close(one, other)
    assert not all_trips()
    done = [f for g in ledger.graphs() for f in g.fusions if f.plugin == "rewriter" and f.applied]
    assert [one.name for one in done] == [pattern.name] * count


def nearest(pattern, function, *inputs):
    """Why a pattern isn't in a function, in words; "" where it is."""
    miss = Patterns([pattern]).nearest(pattern.name, graph_of(function, *inputs), "inference")
    return "" if miss is None else str(miss)


def check_inference(function, pattern, count, *inputs, **options):
    """A compiled function computes what it does in eager, with so many rewrites."""
    with observing("rewriter", fuse=fuses(pattern)), torch.no_grad():
        got = compiled(function, **options)(*inputs)
        torch.testing.assert_close(got, function(*inputs))
    assert not all_trips()
    done = [one.name for one in last_graph().fusions if one.plugin == "rewriter" and one.applied]
    assert done == [pattern.name] * count


# --- found ----------------------------------------------------------------------------------------


def test_each_place_is_rewritten():
    def f(x, y):
        return swish(x) + swish(y.sin())

    check_inference(f, SWISH, 2, rnd(5, 8), rnd(5, 8, seed=1))
    ops = last_graph().regions[0].ops
    assert ops["aten.silu.default"] == 2
    assert "aten.sigmoid.default" not in ops


@pytest.mark.parametrize("shape", [(3, 8), (2, 1, 5, 16), (7,)])
def test_sizes_and_dimensions_may_be_others_than_the_example_s(shape):
    check_inference(lambda x, w: rms(x, w, 1e-5), RMS, 1, rnd(*shape), rnd(shape[-1], seed=1))


def test_sizes_that_search_computes_are_those_of_the_match():
    check_inference(lambda x: halves(x, 0.5), HALVES, 1, rnd(10, 6))
    text = nearest(HALVES, lambda x: x.view(5, 2, 6).sum(0) * 0.5, rnd(10, 6))
    assert "argument 'size' of aten.view.default is [5, 2, 6], [2, 5, 6] was wanted" in text


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1])
def test_numbers_are_holes(eps):
    """A rewrite gets that of the match."""
    check_inference(lambda x, w: rms(x, w, eps), RMS, 1, rnd(3, 8), rnd(8, seed=1))


def test_operands_may_be_in_the_other_order():
    def f(x, w):
        return w * (torch.rsqrt(1e-6 + x.pow(2).mean(-1, keepdim=True)) * x)

    check_inference(f, RMS, 1, rnd(3, 8), rnd(8, seed=1))


def test_dimensions_may_be_counted_from_the_other_end():
    def f(x, w):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * w

    check_inference(f, RMS, 1, rnd(3, 8), rnd(8, seed=1))


def test_an_inner_value_is_no_input():
    """The activation of a product with itself, which would be read by what replaces it."""
    gated = Pattern("gated", lambda a, b: F.silu(a) * b, [torch.empty(2)] * 2, lambda a, b: b)
    check_inference(lambda x: F.silu(x) * F.silu(x), gated, 0, rnd(4))
    graph = graph_of(lambda x: F.silu(x), rnd(4))
    (silu,) = graph.graph.find_nodes(op="call_function", target=aten.silu.default)
    with graph.graph.inserting_after(silu):
        product = graph.graph.call_function(aten.mul.Tensor, (silu, silu))
    graph.graph.output_node().args = (product,)
    text = str(Patterns([gated]).nearest("gated", graph, "inference"))
    assert "b would be silu, of the pattern" in text


def test_in_inference_mode():
    with torch.inference_mode():
        check_inference(lambda x, w: rms(x, w, 1e-5), RMS, 1, rnd(3, 8), rnd(8, seed=1))


def test_one_value_may_be_two_inputs():
    """In the graph, and as an example."""
    shared = torch.empty(2, 3)
    gated = Pattern(
        "gated", lambda a, b: F.silu(a) * b, [shared, shared], lambda a, b: b * F.silu(a)
    )
    check_inference(lambda x: F.silu(x) * x, gated, 1, rnd(4, 5))
    check_inference(lambda x, y: F.silu(x) * y, gated, 1, rnd(4, 5), rnd(4, 5, seed=1))


def test_a_match_may_start_where_another_ends():
    """What the first one put is read by the second."""
    check_inference(lambda x: swish(swish(swish(x))), SWISH, 3, rnd(4, 5))


def test_of_overlapping_matches_the_first_is_taken():
    pair = Pattern(
        "pair", lambda x: x.sin().sin(), [torch.empty(2)], lambda x: torch.sin(torch.sin(x))
    )
    check_inference(lambda x: x.sin().sin().sin(), pair, 1, rnd(4))
    check_inference(lambda x: x.sin().sin().sin().sin(), pair, 2, rnd(4))


def test_the_first_of_several_patterns_has_the_choice():
    graph = graph_of(lambda x: swish(x), rnd(3))
    other = Pattern("sigmoid", torch.sigmoid, [torch.empty(2)], torch.sigmoid)
    for patterns in ([SWISH, other], [other, SWISH]):
        found = Patterns(patterns).find(graph, "inference")
        assert [match.pattern for match in found] == [patterns[0].name]


def test_several_results():
    """Of which one is read outside."""

    def both(x):
        s = torch.sigmoid(x)
        return s, x * s

    pattern = Pattern("both", both, [torch.empty(2)], lambda x: (torch.sigmoid(x), F.silu(x)))
    check_inference(lambda x: both(x.sin())[1] + both(x)[0], pattern, 1, rnd(4))
    (match,) = Patterns([pattern]).find(graph_of(both, rnd(4)), "inference")
    assert [node.target for node in match.results] == [aten.sigmoid.default, aten.mul.Tensor]


def test_symbolic_sizes():
    """A search that uses sizes, and one that doesn't."""
    for pattern, function in (
        (RMS, lambda x: rms(x, x[0] * 0 + 2, 1e-5)),
        (HALVES, lambda x: halves(x, 3.0)),
    ):
        with observing("rewriter", fuse=fuses(pattern)), torch.no_grad():
            run = compiled(function, dynamic=True)
            for rows in (6, 10):
                torch.testing.assert_close(run(rnd(rows, 8)), function(rnd(rows, 8)))
        assert not all_trips()
        assert [one.name for one in last_graph().fusions if one.plugin == "rewriter"] == [
            pattern.name
        ]


def test_half_types():
    """A search with casts is traced for the dtype that there is."""

    def wide(x):
        return (x.float() * torch.sigmoid(x.float())).to(x.dtype)

    pattern = Pattern(
        "wide", wide, [torch.empty(2, dtype=torch.half)], lambda x: F.silu(x.float()).to(x.dtype)
    )
    check_inference(wide, pattern, 1, rnd(4, 5).bfloat16())
    assert "calls" in nearest(pattern, lambda x: x * x.sigmoid(), rnd(4))


# --- near misses ----------------------------------------------------------------------------------

X, W = rnd(3, 8), rnd(8, seed=1)


def with_reader(x, w):
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * r * w, r.sum()


MISSES = {
    "another op": (
        lambda x, w: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        "calls aten.sqrt.default",
    ),
    "another exponent": (
        lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5) * w,
        "argument 'exponent' of aten.pow.Tensor_Scalar is 4, 2 was wanted",
    ),
    "another dimension": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5) * w,
        "argument 'dim' of aten.mean.dim is [0], [-1] was wanted",
    ),
    "another value": (
        lambda x, w: x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        "was wanted",
    ),
    "another reader": (with_reader, "is read by sum_1 as well"),
    "a tensor for a number": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.abs()) * w,
        "a number was wanted",
    ),
    "an input for an op": (lambda x, w: x * w, "x_1 is an input"),
    "no such op": (lambda x, w: x + w, "no node calls aten.mul.Tensor"),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_is_left_alone(name):
    """And says what stands against it."""
    function, reason = MISSES[name]
    check_inference(function, RMS, 0, X, W)
    assert reason in nearest(RMS, function, X, W)


def test_another_dtype():
    pattern = Pattern(
        "double", lambda x: x.double() * 2, [torch.empty(2)], lambda x: x.double() + x.double()
    )
    assert not nearest(pattern, lambda x: x.double() * 2, rnd(3))
    text = nearest(pattern, lambda x: x.half() * 2, rnd(3))
    assert "argument 'dtype' of aten._to_copy.default is dtype torch.float16, torch.float64" in text


def test_a_check_may_refuse():
    """It is told what the match consists of."""
    asked = []

    def check(match):
        asked.append((match.value("x").shape, match.value("eps"), match.kind))
        return match.value("x").shape[-1] % 16 == 0

    pattern = Pattern("rms", rms, RMS.examples, rms_put, check=check)
    check_inference(lambda x, w: rms(x, w, 1e-5), pattern, 0, X, W)
    check_inference(lambda x, w: rms(x, w, 1e-5), pattern, 1, rnd(3, 16), rnd(16))
    assert asked == [((3, 8), 1e-5, "inference"), ((3, 16), 1e-5, "inference")]
    assert "its check refuses" in nearest(pattern, lambda x, w: rms(x, w, 1e-5), X, W)


REPLACEMENTS = {
    "another dtype": (lambda x: F.silu(x.double()), "has dtype torch.float64, torch.float32 was"),
    "another shape": (lambda x: F.silu(x)[None], r"has sizes [1, 3, 8], [3, 8] were wanted"),
    "other strides": (lambda x: F.silu(x.t()).contiguous().t(), "has strides [1, 3], [8, 1]"),
    "two results": (lambda x: (F.silu(x), x.sin()), "has 2 results, not 1"),
    "a draw": (lambda x: F.silu(x) + torch.rand_like(x), "draws other random numbers"),
    "memory of an input": (lambda x: x.view(3, 8), "in other memory"),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replacement_that_is_not_of_the_same_form_is_refused(name):
    replace, reason = REPLACEMENTS[name]
    pattern = Pattern("swish", swish, SWISH.examples, replace)
    check_inference(swish, pattern, 0, X)
    assert reason in nearest(pattern, swish, X)


def test_a_replacement_that_computes_otherwise_is_a_trip():
    """It is held against the graph before, as any rewrite."""
    wrong = Pattern("swish", swish, SWISH.examples, F.gelu)
    with observing("rewriter", fuse=fuses(wrong)), torch.no_grad():
        torch.testing.assert_close(compiled(swish)(X), swish(X))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == (
        "rewriter",
        "fuse",
        "the graph without its rewrites",
    )


def test_rewrites_have_numbers():
    def f(x):
        return swish(x) + swish(x.sin())

    with observing("rewriter", fuse=fuses(SWISH)), torch.no_grad():
        compiled(f, fuse_skip=[0])(X)
    done = [(one.number, one.applied) for one in last_graph().fusions if one.plugin == "rewriter"]
    assert done == [(0, False), (1, True)]


# --- what lies in between -------------------------------------------------------------------------


def test_a_write_in_between():
    """To what the match reads, which moves no read across it; to something else is no matter."""
    library = torch.library.Library("pattern_tests", "FRAGMENT")
    library.define("double_(Tensor(a!) x) -> ()")
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    gate = graph.call_function(aten.sigmoid.default, (x,))
    write = graph.call_function(torch.ops.pattern_tests.double_.default, (y,))
    graph.output((graph.call_function(aten.mul.Tensor, (x, gate)),))
    for node in graph.nodes:
        node.meta["val"] = None if node is write else mode.from_tensor(rnd(3))
    module = torch.fx.GraphModule({}, graph)
    assert len(Patterns([SWISH]).find(module, "inference")) == 1
    write.args = (x,)
    found = Patterns([SWISH]).nearest("swish", torch.fx.GraphModule({}, graph), "inference")
    assert "double__default writes to what it reads" in str(found)


#: Draws as many numbers as what it replaces.
DROPS = Pattern(
    "drops",
    lambda x, p: F.dropout(x, p) * 2,
    [torch.empty(2), 0.3],
    lambda x, p: 2 * F.dropout(x, p),
)


def test_random_numbers_in_between_are_those_of_eager():
    """Neither their order nor their number changes."""

    def f(x):
        a = torch.sigmoid(x)
        b = F.dropout(x, 0.5) * 2
        return x * a + torch.rand_like(b) * b

    for pattern in (DROPS, SWISH):
        torch.compiler.reset()
        with observing("rewriter", fuse=fuses(pattern)), torch.no_grad():
            torch.manual_seed(1)
            got = compiled(f)(X)
            torch.manual_seed(1)
            torch.testing.assert_close(got, f(X))
        assert not all_trips()
        assert [o.name for o in last_graph().fusions if o.plugin == "rewriter"] == [pattern.name]


# --- training -------------------------------------------------------------------------------------


def test_a_forward_takes_its_backward_along():
    """No op of the pattern is left, forward or backward."""
    check_training(lambda x: swish(x.sin()) * 2, SWISH, 1, X)
    (joint,) = [graph for graph in ledger.graphs() if graph.kind == "joint"]
    assert len(joint.fusions[0].nodes) > 2
    ops = [op for g in ledger.graphs() for r in g.regions for op in r.ops]
    assert "aten.silu_backward.default" in ops
    assert not {"aten.sigmoid.default", "aten.sigmoid_backward.default"} & set(ops)


@pytest.mark.parametrize("backends", [["eager"], ["inductor"]])
@pytest.mark.thorough
def test_numbers_sizes_and_several_inputs_in_training(backends):
    """At the level of ops that the backends want."""

    def f(x, w):
        return rms(rms(x.sin(), w, 1e-5), w.cos(), 1e-3)

    check_training(f, RMS, 2, rnd(4, 16), rnd(16, seed=1), backends=backends)


@pytest.mark.thorough
def test_what_a_backend_decomposes_is_looked_for_in_small_ops():
    """The gates of Inductor's joint graphs, whose ``silu`` isn't one op."""
    gated = Pattern(
        "gated", lambda a, b: F.silu(a) * b, [torch.empty(2, 3)] * 2, lambda a, b: b * F.silu(a)
    )
    check_training(lambda x, y: F.silu(x.sin()) * y, gated, 1, X, X + 1, backends=["inductor"])


def test_an_input_without_a_gradient():
    """Of a pattern whose every input may have one; and one whose results have none."""
    weight = rnd(8, seed=1)
    check_training(lambda x: rms(x, weight, 1e-5), RMS, 1, X)
    ledger.clear()
    check_training(lambda x: rms(weight[None] * 2, weight, 1e-5) + x, RMS, 1, X)


def test_an_input_that_a_residual_reads():
    """Its gradient is summed up in another order; by the weights as well, in several layers."""
    mix = rnd(8, 8, seed=2)

    def f(x, w):
        for _ in range(3):
            x = x + rms(x, w, 1e-5) @ mix
        return x

    check_training(f, RMS, 3, X, W)


def test_an_inner_value_that_the_backward_reads_otherwise():
    """It stays."""

    def f(x):
        gate = torch.sigmoid(x)
        return x * gate + gate.sin()

    check_training(f, SWISH, 0, X)


def test_a_pattern_for_inference_alone():
    once = Pattern("swish", swish, SWISH.examples, F.silu, training=False)
    check_training(lambda x: swish(x), once, 0, X)
    check_inference(swish, once, 1, X)


def test_a_replacement_with_another_gradient_is_a_trip():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.silu(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    wrong = Pattern("swish", swish, SWISH.examples, Doubled.apply)
    with observing("rewriter", fuse=fuses(wrong)):
        for one, other in zip(trained(compiled(swish), X), trained(swish, X), strict=True):
            torch.testing.assert_close(one, other)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("rewriter", "fuse")


def test_dropout_in_training():
    check_training(lambda x: F.dropout(F.dropout(x.sin(), 0.5) * 2, 0.1), DROPS, 1, X, seed=3)


# --- errors ---------------------------------------------------------------------------------------


def test_a_missing_pattern_that_must_match_is_told_node_by_node():
    pattern = Pattern("rms", rms, RMS.examples, rms_put, must_match=True)

    def f(x, w):
        return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5) * w

    with observing("rewriter", fuse=fuses(pattern)), torch.no_grad():
        torch.testing.assert_close(compiled(f)(X, W), f(X, W))
    reason = "pow_1 = aten.pow.Tensor_Scalar(x, 2) isn't there, abs_1 calls aten.abs.default"
    where = f"pattern 'rms', {__file__}:{rms.__code__.co_firstlineno}: it must match"
    assert where in all_trips()[0].error
    assert f"isn't in the inference graph. Nearest: {reason}" in all_trips()[0].error
    with pytest.raises(PatternError, match="it must match") as raised:
        Patterns([pattern]).fusions(graph_of(f, X, W), "inference")
    mean = "mean = aten.mean.dim(pow_1, [-1], True) is mean = aten.mean.dim(abs_1, [-1], True);"
    assert mean in str(raised.value).splitlines()


def constant(x):
    return x * torch.tensor([1.0, 2.0])


def writes(x):
    return x.add_(1) * 2


BAD = {
    "raises": (
        lambda x: x @ x,
        [torch.empty(2, 3)],
        "search can't be traced: .*same reduction dim",
    ),
    "no op": (lambda x: x, [torch.empty(2)], "search has no op"),
    "an input": (lambda x, y: (x, x * y), [torch.empty(2)] * 2, "returns an input as it is"),
    "no tensor": (lambda x: 3, [torch.empty(2)], "returns something else than tensors"),
    "a text": (lambda x, mode: x.sin(), [torch.empty(2), "a"], "the example of 'mode' is a str"),
    "too many": (
        lambda x: x.sin(),
        [torch.empty(2), 1.0],
        r"2 examples for the parameters \['x'\]",
    ),
    "derived": (lambda x, s: x * (s * 3), [torch.empty(2), 0.3], "s is no op's argument as it is"),
    "constant": (constant, [torch.empty(2)], "holds a constant tensor"),
    "writes": (writes, [torch.empty(2)], "search writes to a tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_pattern_that_can_not_be_traced_is_no_plugin_s(name):
    """The plugin is refused when it is registered, with the place, before anything is compiled."""
    search, examples, problem = BAD[name]

    class Plugin:
        patterns = Patterns([Pattern("bad", search, examples, search, training=False)])

        @fuseboard.hookimpl
        def fuseboard_fuse(self, graph, kind):
            return self.patterns.fusions(graph, kind)

    with pytest.raises(
        fuseboard.RegistrationError, match=rf"pattern 'bad', .*: .*{problem}"
    ) as raised:
        fuseboard.register(Plugin(), "bad")
    assert f"{__file__}:{search.__code__.co_firstlineno}" in str(raised.value)
    assert isinstance(raised.value.__cause__, PatternError)


def test_two_patterns_of_one_name():
    with pytest.raises(ValueError, match="two patterns are called 'swish'"):
        Patterns([SWISH, SWISH])
