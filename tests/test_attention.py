"""Attention written out becomes one op: in its forms, in models, and not where it isn't that."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fuseboard
from fuseboard.fuse import attention
from fuseboard.ops import attention_formula
from fuseboard.ops.attention import attention as op
from fuseboard.ops.attention_formula import Step, written
from tests.support.attention import flat, found, no_further, rewrite_however_small
from tests.support.backends import all_trips, compiled, last_graph, observing
from tests.support.values import rnd

FUSED = "fuseboard.attention.default"
MIN = torch.finfo(torch.float32).min
B, H, S, T, D = 2, 3, 5, 7, 8


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    rewrite_however_small(monkeypatch)


def ops(kind):
    return {op for region in last_graph(kind).regions for op in region.ops}


# --- forms ----------------------------------------------------------------------------------------


def scaled_after(q, k, v, m):
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.3, dim=-1), v)


def divided(q, k, v, m):
    return (q @ k.transpose(2, 3) / math.sqrt(D)).softmax(-1) @ v


def scaled_before(q, k, v, m):
    return ((q * 0.3) @ k.mT).softmax(dim=-1) @ v


def unscaled(q, k, v, m):
    return torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)), -1).matmul(v)


def additive(q, k, v, m):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.3 + m, dim=-1) @ v


def additive_first(q, k, v, m):
    return F.softmax(m + torch.matmul(q, k.transpose(-2, -1)) * 0.3, dim=-1) @ v


def two_masks(q, k, v, m):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)) + m[:, :, :1] + m, dim=-1) @ v


def padded(q, k, v, m):
    """A mask of keys only."""
    keep = torch.where(m[:, :, :1] > -1, 0.0, MIN)
    return F.softmax(q @ k.transpose(-2, -1) * 0.3 + keep, dim=-1) @ v


def boolean(q, k, v, m):
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(m > 0.5, -math.inf)
    return F.softmax(scores, dim=-1) @ v


def boolean_least(q, k, v, m):
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(m > 0.5, torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1) @ v


def chosen(q, k, v, m):
    least = torch.full([], MIN, dtype=q.dtype)
    return F.softmax(torch.where(m < 0.5, q @ k.transpose(-2, -1) * 0.3, least), dim=-1) @ v


def causal(q, k, v, m):
    kept = torch.ones(S, T, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(~kept, -math.inf)
    return F.softmax(scores, dim=-1) @ v


def upcast(q, k, v, m):
    weights = F.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, p=0.1, training=False) @ v


def upcast_scores(q, k, v, m):
    scores = q @ k.transpose(-2, -1)
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def repeated(q, k, v, m):
    """Keys and values of one head for three."""
    k, v = (one[:, :1].expand(B, H, T, D).reshape(B, H, T, D) for one in (k, v))
    return F.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def interleaved(q, k, v, m):
    k, v = (one[:, :1].repeat_interleave(H, dim=1) for one in (k, v))
    return F.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def three_dimensions(q, k, v, m):
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, dim=-1), v)


def with_baddbmm(q, k, v, m):
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    m = m.expand(B, H, S, T).flatten(0, 1)
    return F.softmax(torch.baddbmm(m, q, k.transpose(1, 2), beta=1, alpha=0.3), dim=-1) @ v


def heads_second(q, k, v, m):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    weights = F.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def heads_first(q, k, v, m):
    weights = F.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3 + m, dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def merged(q, k, v, m):
    """What models do with the result."""
    weights = F.softmax(q @ k.transpose(-2, -1) * 0.3 + m, dim=-1)
    return (weights @ v).transpose(1, 2).contiguous().reshape(B, S, -1)


def viewed(q, k, v, m):
    return (F.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v).view(B * H, S, D)


FORMS = [
    *(scaled_after, divided, scaled_before, unscaled, additive, additive_first, two_masks, padded),
    *(boolean, boolean_least, chosen, causal, upcast, upcast_scores, repeated, interleaved),
    *(three_dimensions, with_baddbmm, heads_second, heads_first, merged, viewed),
]


def drawn(dtype=torch.float32, seed=0):
    shapes = [(B, H, S, D), (B, H, T, D), (B, H, T, D), (B, 1, S, T)]
    return [rnd(*shape, seed=seed + i).to(dtype) for i, shape in enumerate(shapes)]


def name(function):
    return function.__name__


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_a_form_in_inference(form):
    """It is found, as exact as eager, and laid out as eager's."""
    inputs = drawn()
    with torch.no_grad():
        got, eager = compiled(form)(*inputs), form(*inputs)
        no_further(got, eager, form(*(value.double() for value in inputs)))
    assert found() == 1
    assert got.stride() == eager.stride()
    assert FUSED in ops("inference")
    assert not all_trips()


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_a_form_in_training(form):
    """Its result is as exact as eager's, and its gradients, taken together.

    The kernel takes the sum of a row of P dP from the result. Where a row has one key these cancel
    exactly in eager's formula and not in the kernel's. Of inputs as small as these the error of one
    draw is luck, and other processors have other luck: several draws are taken together.
    """

    def trained(function, dtype):
        results, gradients = [], []
        for seed in range(0, 40, 10):
            *values, mask = (value.to(dtype) for value in drawn(seed=seed))
            own = [value.requires_grad_() for value in values]
            result = function(*own, mask)
            (result * result.detach().sin()).sum().backward()
            results.append(result)
            gradients += [one.grad for one in own]
        return flat(results), flat(gradients)

    got, eager = trained(compiled(form), torch.float32), trained(form, torch.float32)
    precise = trained(form, torch.float64)
    for values in zip(got, eager, precise, strict=True):
        no_further(*values)
    assert found() == 1
    assert FUSED in ops("forward")
    assert FUSED.replace("attention", "attention_backward") in ops("backward")
    assert not all_trips()


@pytest.mark.parametrize(
    "form", [scaled_after, merged, boolean_least, upcast, upcast_scores], ids=name
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_half_types(form, dtype, train):
    """No further from float64 than eager's own, gradients too."""
    inputs = drawn(dtype)

    def run(function, wider=dtype):
        own = [value.to(wider).detach().requires_grad_(train) for value in inputs[:3]]
        result = function(*own, inputs[3].to(wider))
        if train:
            result.double().sin().sum().backward()
        return result, flat([one.grad for one in own] if train else own)

    got, eager, precise = run(compiled(form)), run(form), run(form, torch.float64)
    no_further(got[0], eager[0], precise[0])
    no_further(got[1], eager[1], precise[1])
    assert (found(), got[0].dtype) == (1, dtype)


@pytest.mark.parametrize("form", [scaled_after, additive, boolean], ids=name)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_under_autocast(form, train):
    """Products are cast, masks stay float32."""
    inputs = drawn()

    def run(function, dtype=torch.float32):
        own = [value.clone().to(dtype).requires_grad_(train) for value in inputs[:3]]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            result = function(*own, inputs[3].to(dtype))
        if train:
            result.double().sin().sum().backward()
        return result, flat([one.grad for one in own] if train else own)

    got, eager, precise = run(compiled(form)), run(form), run(form, torch.float64)
    assert (found(), got[0].dtype) == (1, eager[0].dtype)
    no_further(got[0], eager[0], precise[0])
    no_further(got[1], eager[1], precise[1])
    assert not all_trips()


@pytest.mark.parametrize("backend", ["onnxruntime", "tvm"])
@pytest.mark.parametrize("form", [additive, boolean, merged], ids=name)
def test_a_backend_without_such_an_op_gets_the_formula(backend, form):
    """In inference, rows that are masked as a whole included."""
    pytest.importorskip(backend)
    q, k, v, m = drawn()
    m[0, 0, 2] = -math.inf if form is additive else 1.0
    with torch.no_grad():
        got, eager = compiled(form, backend, "eager")(q, k, v, m), form(q, k, v, m)
    torch.testing.assert_close(got, eager, equal_nan=True)
    assert FUSED in {op for r in last_graph().regions if r.backend == backend for op in r.ops}
    assert (found(), all_trips()) == (1, [])


def test_other_sizes():
    """Sizes that change from call to call."""
    run = compiled(additive, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 6, 9):
            q, k, v = (rnd(2, 3, tokens, 8, seed=i) for i in range(3))
            m = rnd(2, 1, tokens, tokens, seed=3)
            torch.testing.assert_close(run(q, k, v, m), additive(q, k, v, m))
    assert found() == 1


@pytest.mark.parametrize("empty", range(5), ids=["batch", "heads", "queries", "keys", "width"])
def test_sizes_of_0(empty):
    """The op is the formula there: the kernel divides by sizes."""
    sizes = [B, H, S, T, D]
    sizes[empty] = 0
    batch, heads, queries, keys, width = sizes
    steps = written([Step("softmax", dtype=torch.float32)], torch.float32)

    def by_op(q, k, v, m):
        return op(q, k, v, None, None, None, None, steps)[0]

    inputs = [rnd(batch, heads, tokens, width) for tokens in (queries, keys, keys)]
    got, eager = (trained_with(function, *inputs, None) for function in (by_op, unscaled))
    torch.testing.assert_close(got, eager)


def is_exact(inputs):
    """Of an addition's mask: the result and all gradients, as far as eager is."""
    results = [learned(compiled(additive), inputs), learned(additive, inputs)]
    for values in zip(*results, learned(additive, inputs, torch.float64), strict=True):
        no_further(*values)
    return (found(), all_trips()) == (1, [])


@pytest.mark.parametrize("width", [1, 3, 256, 300])
def test_other_widths_of_one_head(width):
    """The kernel takes any."""
    sizes = ((S, width), (T, width), (T, width), (S, T))
    assert is_exact([rnd(B, 1, *two, seed=i) for i, two in enumerate(sizes)])


def test_operands_with_gaps():
    """Dimensions may be in any order."""
    q, k = rnd(S, B, D, H).permute(1, 3, 0, 2), rnd(T, D, B, H, seed=1).permute(2, 3, 0, 1)
    v, m = rnd(B, H, D, T, seed=2).mT, rnd(T, S, 1, B, seed=3).permute(3, 2, 1, 0)
    assert is_exact([q, k, v, m])


# --- where the kernel isn't the formula -----------------------------------------------------------


def least_added(q, k, v, m):
    """As transformers mask: the least number is added."""
    mask = torch.zeros_like(m).masked_fill(m > 0.5, torch.finfo(m.dtype).min)
    return F.softmax(q @ k.transpose(-2, -1) * 0.3 + mask, dim=-1) @ v


def little_added(q, k, v, m):
    return F.softmax(q @ k.transpose(-2, -1) * 0.3 + (m > 0.5) * -1e4, dim=-1) @ v


def filled_and_added(q, k, v, m):
    """What is added to a replaced score may make much of it again."""
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(m > 0.5, -1e30)
    return F.softmax(scores + 1e30 * (m > 1.5), dim=-1) @ v


def filled_twice(q, k, v, m):
    scores = (q @ k.transpose(-2, -1)).masked_fill(m > 1.5, -math.inf)
    return F.softmax(scores.masked_fill(m > 0.5, MIN), dim=-1) @ v


def infinities_replaced(q, k, v, m):
    causal = torch.full((S, T), -math.inf).triu(1)
    return F.softmax((q @ k.mT + causal).masked_fill(m > 0.5, MIN), -1) @ v


MASKED = [
    *(additive, boolean, boolean_least, padded, least_added, little_added, filled_and_added),
    *(filled_twice, infinities_replaced),
]


def trained_with(function, q, k, v, m, weigh=torch.sin):
    """The result and the gradients."""
    own = [value.clone().requires_grad_() for value in (q, k, v)]
    result = function(*own, m)
    weigh(result).sum().backward()
    return [result, *(one.grad for one in own)]


@pytest.mark.parametrize("form", MASKED, ids=name)
def test_rows_that_are_masked_as_a_whole(form):
    """As eager has them, gradients too: NaN below -inf, an average below the least number."""
    q, k, v, m = drawn()
    m[0, 0, 2] = -math.inf if form is additive else 1.0
    m[1, 0, 0] = -2.0  # of padded: no key is left
    m[1, 0, 1, 3:] = 2.0
    run = compiled(form)
    for _ in range(2):
        got, eager = (trained_with(function, q, k, v, m) for function in (run, form))
        torch.testing.assert_close(got, eager, equal_nan=True)
    assert bool(eager[0].isnan().any()) == (form in (additive, boolean))
    assert found() == 1
    assert FUSED in ops("forward")
    assert not all_trips()


@pytest.mark.parametrize("form", [boolean, boolean_least, least_added, filled_and_added], ids=name)
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_what_a_mask_replaces_isnt_looked_at(form, what, where):
    """Keys that are masked for every query may hold anything, in any call."""
    q, k, v, m = drawn()
    m[..., 2] = 1.0
    run = compiled(form)
    torch.testing.assert_close(trained_with(run, q, k, v, m), trained_with(form, q, k, v, m))
    {"key": k, "value": v, "query": q}[where][1, :, 2] = what
    got, eager = (trained_with(function, q, k, v, m) for function in (run, form))
    torch.testing.assert_close(got, eager, equal_nan=True)
    assert (found(), all_trips()) == (1, [])


def test_a_gradient_that_isnt_finite():
    """It spreads as far as in eager: not to what a mask replaces."""
    q, k, v, m = drawn()
    m[..., 2] = 1.0
    run = compiled(boolean)

    def weigh(result):
        return result.sin() * torch.where(result == result[0, 0, 0, 0], math.nan, 1.0)

    got, eager = (trained_with(function, q, k, v, m, weigh) for function in (run, boolean))
    torch.testing.assert_close(got, eager, equal_nan=True)
    assert bool(eager[1].isnan().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", [boolean, boolean_least, least_added], ids=name)
def test_masked_rows_of_other_dtypes(form, dtype):
    """By the user's own steps, roundings between them included."""
    q, k, v, m = drawn(dtype)
    m[0, 0, 2] = 1.0
    run = compiled(form)
    got, eager = (trained_with(function, q, k, v, m) for function in (run, form))
    torch.testing.assert_close(got, eager, equal_nan=True, atol=8 * torch.finfo(dtype).eps, rtol=0)
    assert (found(), all_trips()) == (1, [])


def test_gradients_of_gradients_and_tangents():
    """The kernel has neither."""
    q, k, v, m = drawn()

    def twice(function):
        own = [value.clone().requires_grad_() for value in (q, k, v)]
        first = torch.autograd.grad(function(*own, m).sin().sum(), own, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), own)

    def forward(function):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, k[..., :S, :])
            return torch.autograd.forward_ad.unpack_dual(function(dual, k, v, m))

    run = compiled(additive)
    torch.testing.assert_close(twice(run), twice(additive))
    torch.testing.assert_close(forward(run), forward(additive))
    assert found() >= 1


def test_hooks_of_saved_tensors_see_none_that_is_fake():
    """Though they are set while the graph is compiled."""
    shapes = []

    def pack(value):
        shapes.append((value.data_ptr(), value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        got = trained_with(compiled(additive), *drawn())
    torch.testing.assert_close(got, trained_with(additive, *drawn()))
    assert (found(), all_trips()) == (1, [])
    assert (B, H, S, T) not in [tuple(shape) for _, shape in shapes]


def test_gradients_in_a_batch():
    """Each is the kernel's."""
    q, k, v, m = drawn()
    weights = rnd(3, B, H, S, D, seed=9)

    def batch(function):
        own = [value.clone().requires_grad_() for value in (q, k, v)]
        result = function(*own, m)
        return torch.autograd.grad(result, own, weights, is_grads_batched=True)

    torch.testing.assert_close(batch(compiled(additive)), batch(additive))


def left_padded(q, k, v, m):
    """More keys than the kernel takes at once are masked before the first that isn't."""
    gone = torch.arange(1100) < 700
    return F.softmax((q @ k.mT).masked_fill(gone, -math.inf), -1) @ v


def test_many_keys():
    q, k, v = (rnd(1, 2, 1100, 8, seed=i).requires_grad_() for i in range(3))
    run = compiled(left_padded)
    for values in zip(
        trained_with(run, q, k, v, None), trained_with(left_padded, q, k, v, None), strict=True
    ):
        torch.testing.assert_close(*values)
    assert found() == 1


# --- masks with gradients -------------------------------------------------------------------------


def filled_between(q, k, v, m):
    """A mask that replaces scores between two that are added."""
    scores = (q @ k.mT * 0.3 + m[:, :, :1]).masked_fill(m.detach() > 1.0, -math.inf)
    return F.softmax(scores + m, dim=-1) @ v


def halved_mask(q, k, v, m):
    scores = q @ k.transpose(-2, -1) * 0.3 + m.to(q.dtype)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def masked_by_a_position(q, k, v, m):
    """The mask is added twice."""
    m = m[0, 0]
    return F.softmax(q @ k.mT + m + m, dim=-1) @ v


LEARNED = [
    *(additive, additive_first, two_masks, with_baddbmm, heads_first, merged, filled_between),
    *(halved_mask, masked_by_a_position),
]


def learned(function, inputs, dtype=torch.float32):
    """The result, and the gradients, that of the mask among them."""
    own = [value.to(dtype).clone().requires_grad_() for value in inputs]
    result = function(*own)
    (result * result.detach().sin()).sum().backward()
    return [result, *(one.grad for one in own)]


# Blocks of queries, of heads, of batches, and all at once.
@pytest.mark.parametrize(
    ("form", "block_scores"),
    [*((form, 10) for form in LEARNED), *((additive, size) for size in (1, 50, 100, 1000))],
)
def test_a_mask_with_a_gradient(form, block_scores, monkeypatch):
    """Gradients are as exact as eager's, however scores are divided; none are saved."""
    monkeypatch.setattr(attention_formula, "BLOCK_SCORES", block_scores)
    inputs = drawn()
    shapes = []

    def pack(value):
        shapes.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        got = learned(compiled(form), inputs, torch.float32)
    eager, precise = (learned(form, inputs, dtype) for dtype in (torch.float32, torch.float64))
    no_further(got[0], eager[0], precise[0])
    no_further(*(flat(values[1:]) for values in (got, eager, precise)))
    no_further(*(values[4] for values in (got, eager, precise)))
    assert (found(), all_trips()) == (1, [])
    assert FUSED.replace("attention", "attention_gradients") in ops("backward")
    # Of with_baddbmm it is the mask that has this shape.
    assert form is with_baddbmm or not {(B, H, S, T), (B * H, S, T)} & set(shapes)


@pytest.mark.parametrize(
    "shape", [(T,), (S, 1), (H, S, T), (1, 1, 1, T), (B, 1, 1, 1), (B, H, S, T)]
)
def test_a_gradient_of_a_mask_of_any_shape(shape):
    """It is summed over what the mask was broadcast to."""
    inputs, run = [*drawn()[:3], rnd(*shape, seed=3)], compiled(additive)
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(learned(run, inputs, dtype), learned(additive, inputs, dtype))
    assert found() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_of_a_mask_of_half_a_type(dtype, monkeypatch):
    """Sums over blocks are of float32 at least."""
    monkeypatch.setattr(attention_formula, "BLOCK_SCORES", 10)
    results = [learned(one, drawn(dtype), dtype) for one in (compiled(halved_mask), halved_mask)]
    for values in zip(*results, learned(halved_mask, drawn(dtype), torch.float64), strict=True):
        no_further(*values)
    assert (found(), results[0][4].dtype) == (1, dtype)


def test_masked_rows_whose_mask_has_a_gradient():
    """As eager has them: rows of NaN, and rows that a finite number masks."""
    for little in (-math.inf, MIN):
        inputs = drawn()
        inputs[3][0, 0, 2] = little
        got, eager = (learned(function, inputs) for function in (compiled(additive), additive))
        torch.testing.assert_close(got, eager, equal_nan=True)
    assert not all_trips()


def test_more_gradients_of_a_mask():
    """In a batch; of gradients; where nothing else has one."""
    q, k, v, m = drawn()
    weights = rnd(3, B, H, S, D, seed=9)
    run = compiled(additive)

    def batch(function):
        own = [value.clone().requires_grad_() for value in (q, k, v, m)]
        return torch.autograd.grad(function(*own), own, weights, is_grads_batched=True)

    def twice(function):
        own = [value.clone().requires_grad_() for value in (q, k, v, m)]
        first = torch.autograd.grad(function(*own).sin().sum(), own, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), own)

    def alone(function):
        own = m.clone().requires_grad_()
        return torch.autograd.grad(function(q, k, v, own).sin().sum(), own)

    for wanted in (batch, twice, alone):
        torch.testing.assert_close(wanted(run), wanted(additive))
    assert (found() >= 1, all_trips()) == (True, [])


# --- other spellings, and what is done with the result --------------------------------------------


def permuted_by_name(q, k, v, m):
    return F.softmax(q @ k.permute(dims=(0, 1, 3, 2)), dim=-1) @ v


def transposed_by_name(q, k, v, m):
    return F.softmax(q @ k.transpose(dim0=-2, dim1=-1), dim=-1) @ v


def filled_by_name(q, k, v, m):
    least = torch.full(size=(), fill_value=MIN)
    return F.softmax(torch.where(m < 0.5, q @ k.mT, least), dim=-1) @ v


def added_in_place(q, k, v, m):
    """The result is written to: a product doesn't save it."""
    result = F.softmax(q @ k.mT, dim=-1) @ v
    result += 1.0
    return result * 2.0


def merged_and_written(q, k, v, m):
    """As before, where the copy lies as the op has it."""
    result = F.softmax(q @ k.mT, dim=-1) @ v
    result = result.transpose(1, 2).reshape(B, S, -1)
    result += 1.0
    return result * 2.0


def scores_in_place(q, k, v, m):
    """Nobody else reads the scores."""
    scores = q @ k.mT
    scores *= 0.3
    scores += m
    return F.softmax(scores, dim=-1) @ v


def filled_in_place(q, k, v, m):
    scores = q @ k.mT
    scores /= 3.0
    return F.softmax(scores.masked_fill_(m > 0.5, -math.inf), dim=-1) @ v


SPELLINGS = [
    *(permuted_by_name, transposed_by_name, filled_by_name, added_in_place, merged_and_written),
    *(scores_in_place, filled_in_place),
]


@pytest.mark.parametrize("form", SPELLINGS, ids=name)
def test_other_spellings(form):
    q, k, v, m = drawn()
    m[..., 0] = 0.0
    run = compiled(form)
    torch.testing.assert_close(trained_with(run, q, k, v, m), trained_with(form, q, k, v, m))
    assert (found(), all_trips()) == (1, [])


def test_a_result_that_is_written_to_before_the_backward():
    """As in eager, which saves no result of a product."""
    q, k, v, m = drawn()

    def trained(function):
        own = [value.clone().requires_grad_() for value in (q, k, v)]
        result = function(*own, m)
        total = result.sum()
        with torch.no_grad():
            result.zero_()
        total.backward()
        return [one.grad for one in own]

    torch.testing.assert_close(trained(compiled(additive)), trained(additive))


def doubled_scores(q, k, v, m):
    scores = q @ k.mT
    return F.softmax(scores + scores, dim=-1) @ v


def permuted_batch(q, k, v, m):
    weights = F.softmax(torch.einsum("bhqd,bhkd->hbqk", q, k), dim=-1)
    return torch.einsum("hbqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize("form", [doubled_scores, permuted_batch], ids=name)
def test_what_has_another_form_isnt_rewritten(form):
    """Nor is there a warning."""
    inputs = drawn()
    torch.testing.assert_close(trained_with(compiled(form), *inputs), trained_with(form, *inputs))
    assert (found(), all_trips()) == (0, [])


def test_few_scores_are_left_as_written(monkeypatch):
    """The formula takes less time than a call of the op."""
    monkeypatch.undo()
    with torch.no_grad():
        compiled(additive)(*drawn())
        assert found() == 0
        q, k, v = (rnd(1, 4, 64, 8, seed=i) for i in range(3))
        torch._dynamo.reset()
        compiled(scaled_after)(q, k, v, None)
    assert found() == 1


# --- near misses ----------------------------------------------------------------------------------


def other_dimension(q, k, v, m):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-2) @ v


def probabilities_returned(q, k, v, m):
    weights = F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1)
    return weights @ v, weights


def scores_returned(q, k, v, m):
    scores = torch.matmul(q, k.transpose(-2, -1))
    return F.softmax(scores, dim=-1) @ v, scores


def scaled_with_the_mask(q, k, v, m):
    return F.softmax((torch.matmul(q, k.transpose(-2, -1)) + m) * 0.3, dim=-1) @ v


def scaled_by_a_tensor(q, k, v, m):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)) * m, dim=-1) @ v


def wider_mask(q, k, v, m):
    """The mask makes more of the scores."""
    scores = torch.matmul(q[:1], k[:1].transpose(-2, -1))
    return F.softmax(scores + m, dim=-1) @ v


def filled_with_little(q, k, v, m):
    """A row of which nothing is left is -1000, not the scores less 1000."""
    scores = torch.matmul(q, k.transpose(-2, -1)).masked_fill(m > 0.5, -1000.0)
    return F.softmax(scores, dim=-1) @ v


def written_to(q, k, v, m):
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores[:, :, 0] = 0.0
    return F.softmax(scores, dim=-1) @ v


def seen_before_a_write(q, k, v, m):
    scores = q @ k.mT
    seen = scores[0]
    scores += m
    return F.softmax(scores, dim=-1) @ v + seen.sum()


def added_to_the_mask(q, k, v, m):
    mask = m.expand(B, H, S, T).clone()
    mask += q @ k.mT
    return F.softmax(mask, dim=-1) @ v


def rounded_between(q, k, v, m):
    """The kernel rounds nothing before it has the result."""
    return F.softmax((q @ k.mT).half(), dim=-1).float() @ v


def masked_afterwards(q, k, v, m):
    return F.softmax(q @ k.mT, dim=-1).masked_fill(m > 0.5, 0.0) @ v


def largest_taken_off(q, k, v, m):
    scores = q @ k.mT
    return F.softmax(scores - scores.amax(-1, keepdim=True), dim=-1) @ v


def no_product(q, k, v, m):
    return F.softmax(m.expand(B, H, S, T), dim=-1) @ v


def the_other_way(q, k, v, m):
    return v.transpose(-2, -1) @ F.softmax(torch.matmul(k, q.transpose(-2, -1)), dim=-1)


def other_sizes_of_value(q, k, v, m):
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1) @ v[..., :5]


def capped(q, k, v, m):
    return F.softmax(torch.tanh(torch.matmul(q, k.transpose(-2, -1))), dim=-1) @ v


def log_softmax(q, k, v, m):
    return F.log_softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1) @ v


MISSES = [
    *(other_dimension, probabilities_returned, scores_returned, scaled_with_the_mask),
    *(scaled_by_a_tensor, wider_mask, filled_with_little, written_to, no_product, the_other_way),
    *(other_sizes_of_value, capped, log_softmax, seen_before_a_write, added_to_the_mask),
    *(rounded_between, masked_afterwards, largest_taken_off),
]


@pytest.mark.parametrize("miss", MISSES, ids=name)
def test_a_near_miss(miss):
    """It stays as it is written."""
    inputs = drawn()
    with torch.no_grad():
        torch.testing.assert_close(compiled(miss)(*inputs), miss(*inputs))
    assert found() == 0
    assert not all_trips()


def test_a_dropout_is_left_as_it_is():
    """No fused kernel of the CPU has one, and others would draw other numbers than eager."""

    def dropped(q, k, v, m):
        return F.dropout(F.softmax(q @ k.transpose(-2, -1), dim=-1), 0.3) @ v

    for random in ("eager", "fast"):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(dropped, random=random)(*drawn())
    assert found() == 0


@pytest.mark.parametrize("least", ["LEAST_SCORES_WITH_GRADIENT", "LEAST_KEYS_WITH_GRADIENT"])
def test_few_scores_whose_mask_has_a_gradient_are_left_as_written(least, monkeypatch):
    """To compute scores twice costs more than to save their probabilities."""
    monkeypatch.setattr(attention, least, B * H * S * T + 1)
    q, k, v, m = drawn()
    compiled(additive)(q, k, v, m.requires_grad_()).sum().backward()
    assert found() == 0


@pytest.mark.thorough
def test_transforms_are_left_as_they_are():
    """A second gradient, which fused kernels haven't."""

    def second(q, k, v, m):
        return torch.func.hessian(lambda q: scaled_after(q, k, v, m).sum())(q)

    inputs = [value[:1, :1, :2] for value in drawn()]
    with torch.no_grad():
        torch.testing.assert_close(compiled(second)(*inputs), second(*inputs))
    assert found() == 0
    assert not all_trips()


def test_attention_of_an_attention():
    """One reads the result of the other."""

    def twice(q, k, v, m):
        first = F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v
        return F.softmax(first @ first.transpose(-2, -1) + m[..., :S], dim=-1) @ first

    inputs = drawn()
    with torch.no_grad():
        torch.testing.assert_close(compiled(twice)(*inputs), twice(*inputs))
    assert found() == 2


# --- what stands in between -----------------------------------------------------------------------


def writes_the_keys(q, k, v, m):
    k = k.clone()
    scores = q @ k.mT
    k.add_(m[..., :1, :].mT)
    return F.softmax(scores, -1) @ v + k.sum()


def writes_the_mask(q, k, v, m):
    m = m.clone()
    scores = q @ k.mT + m
    m[..., 0] = 9.0
    return F.softmax(scores, -1) @ v


def writes_the_mask_later(q, k, v, m):
    """A sum doesn't save what is added."""
    m = m.clone()
    result = F.softmax(q @ k.mT + m, -1) @ v
    m.zero_()
    return result + m.sum()


def stops_gradients(q, k, v, m):
    with torch.no_grad():
        chosen = F.softmax(q @ k.mT, -1)
    return chosen @ v


def chooses_one(q, k, v, m):
    return F.softmax(q @ k.mT * 100, -1).to(torch.int64).to(v.dtype) @ v


@pytest.mark.parametrize("near_miss", [writes_the_keys, writes_the_mask], ids=name)
def test_what_is_written_to_in_between_is_read_before_that(near_miss):
    """The op would run after the write."""
    run = compiled(near_miss)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(*drawn()), near_miss(*drawn()))
    assert found() == 0


@pytest.mark.parametrize(
    "near_miss", [stops_gradients, chooses_one, writes_the_mask_later], ids=name
)
def test_what_isnt_one_op_stays_as_written(near_miss):
    """Modes between the products; casts that round to whole numbers; masks that aren't kept."""
    inputs = [x.requires_grad_() for x in drawn()]
    run = compiled(near_miss)
    for _ in range(2):
        grads = []
        for called in (near_miss, run):
            result = called(*inputs)
            found_grads = torch.autograd.grad(result.sin().sum(), inputs, allow_unused=True)
            grads.append([result, *found_grads])
        for got, want in zip(*grads, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want)
    assert found() == 0


@pytest.mark.parametrize("how", ["masked_fill_", "setitem", "full_like"])
def test_a_mask_that_is_written_to_may_hold_infinities(how):
    """However it was made: rows of which it leaves nothing are NaN, as in eager."""

    def attended(q, k, v, m):
        mask = torch.zeros(S, T)
        if how == "masked_fill_":
            mask.masked_fill_(m[0, 0] > -9, -torch.inf)
        elif how == "setitem":
            mask[m[0, 0] > -9] = -torch.inf
        else:
            mask = torch.full_like(mask, fill_value=-torch.inf)
        return F.softmax(q @ k.mT + mask, -1) @ v

    with torch.no_grad():
        assert compiled(attended)(*drawn()).isnan().all()


# --- switched off, and counted --------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [{"block": ["attention"]}, {"fuse_limit": 0}, {"fuse_skip": [0]}],
)
def test_it_can_be_switched_off(option):
    with torch.no_grad():
        compiled(additive, **option)(*drawn())
    assert found() == 0
    assert FUSED not in ops("inference")


def test_numbers_go_on_from_dynamos_graph():
    """What is rewritten in later graphs is numbered after it."""
    with (
        observing(fuse=lambda graph: [fuseboard.Fusion("none", (), lambda: None)]),
        torch.no_grad(),
    ):
        compiled(additive)(*drawn())
    assert [(one.number, one.plugin) for one in last_graph().fusions] == [
        (0, "attention"),
        (1, "observer"),
    ]
