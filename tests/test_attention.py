"""Attention written out becomes one op: in its forms, in models, and not where it isn't that."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fuseboard
from fuseboard.fuse import attention
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing
from tests.support.transformers_models import LEARNED_MASKS, MODELS, eager_model
from tests.support.values import rnd

FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"
MIN = torch.finfo(torch.float32).min
B, H, S, T, D = 2, 3, 5, 7, 8


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setenv("FUSEBOARD_FUSE_ATTENTION", "1")
    ledger.clear()


def found():
    """How many attentions were written as one op."""
    fusions = [one for graph in ledger.graphs() for one in graph.fusions]
    return sum(one.plugin == "attention" and one.applied for one in fusions)


def ops(kind):
    return {op for region in last_graph(kind).regions for op in region.ops}


def error(got, precise):
    return float((got.detach().double() - precise.detach()).abs().max())


def no_further(got, eager, precise, units=1, level=None):
    """From float64 than twice as far as eager's float32 is, and some units in the last place.

    :param level: of what the units are; the largest element if not given.
    """
    level = float(precise.detach().abs().max()) if level is None else level
    allowed = 2 * error(eager, precise) + units * torch.finfo(got.dtype).eps * level
    assert error(got, precise) <= allowed


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


def drawn(dtype=torch.float32):
    shapes = [(B, H, S, D), (B, H, T, D), (B, H, T, D), (B, 1, S, T)]
    return [rnd(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


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
    """Its gradients are as exact as eager's, but for roundings of a row's sum.

    The kernel takes the sum of a row of P dP from the result. Where a row has one key these cancel
    exactly in eager's formula and not in the kernel's.
    """

    def trained(function, dtype):
        own = [value.to(dtype).requires_grad_() for value in drawn()[:3]]
        result = function(*own, drawn()[3].to(dtype))
        (result * result.detach().sin()).sum().backward()
        return [result, *(one.grad for one in own)]

    got, eager = trained(compiled(form), torch.float32), trained(form, torch.float32)
    for values in zip(got, eager, trained(form, torch.float64), strict=True):
        no_further(*values, units=4)
    assert found() == 1
    assert FUSED in ops("forward")
    assert FUSED.replace("cpu.", "cpu_backward.") in ops("backward")
    assert not all_trips()


@pytest.mark.parametrize(
    "form", [scaled_after, merged, boolean_least, upcast, upcast_scores], ids=name
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(form, dtype):
    """No further from float64 than eager's own."""
    inputs = drawn(dtype)
    with torch.no_grad():
        got = compiled(form)(*inputs)
        no_further(got, form(*inputs), form(*(value.double() for value in inputs)))
    assert (found(), got.dtype) == (1, dtype)


@pytest.mark.parametrize(("form", "count"), [(scaled_after, 1), (additive, 0)])
def test_under_autocast(form, count):
    """Products are cast; a mask that stays float32 isn't for a kernel of halves."""
    inputs = drawn()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, eager = compiled(form)(*inputs), form(*inputs)
    assert (found(), got.dtype) == (count, eager.dtype)
    no_further(got, eager, form(*(value.double() for value in inputs)), units=2)


def test_other_sizes():
    """Sizes that change from call to call."""
    run = compiled(additive, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 6, 9):
            q, k, v = (rnd(2, 3, tokens, 8, seed=i) for i in range(3))
            m = rnd(2, 1, tokens, tokens, seed=3)
            torch.testing.assert_close(run(q, k, v, m), additive(q, k, v, m))
    assert found() == 1


# --- rows of which nothing is left ----------------------------------------------------------------


@pytest.mark.parametrize("form", [additive, boolean, boolean_least, padded], ids=name)
def test_rows_that_are_masked_as_a_whole(form):
    """As eager has them, gradients too: NaN below -inf, an average below the least number."""
    q, k, v, m = drawn()
    m[0, 0, 2] = -math.inf if form is additive else 1.0
    m[1, 0, 0] = -2.0  # of padded: no key is left

    def trained(function):
        own = [value.clone().requires_grad_() for value in (q, k, v)]
        result = function(*own, m)
        result.sin().sum().backward()
        return [result, *(one.grad for one in own)]

    got, eager = trained(compiled(form)), trained(form)
    torch.testing.assert_close(got, eager, equal_nan=True)
    assert bool(eager[0].isnan().any()) == (form in (additive, boolean))
    # The kernel's gradients are others where a mask replaces scores: the first call shows it.
    expected = [] if form is additive else ["attention"]
    assert [trip.plugin for trip in all_trips()] == expected
    assert (FUSED in ops("forward")) == (not expected)


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
    *(other_sizes_of_value, capped, log_softmax),
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


def test_a_mask_with_a_gradient_is_left_as_it_is():
    """No fused kernel gives it."""
    q, k, v, m = drawn()
    got, eager = (m.clone().requires_grad_() for _ in range(2))
    compiled(additive)(q, k, v, got).sin().sum().backward()
    additive(q, k, v, eager).sin().sum().backward()
    torch.testing.assert_close(got.grad, eager.grad)
    assert found() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_other_devices_are_as_exact_as_asked_for(dtype, monkeypatch):
    """Those of CUDA compute float32 in TF32, and gradients in any order."""
    query = torch.empty(2, 3, 5, 8, dtype=dtype, device="meta")
    assert attention._keeps_precision(query) == (dtype == torch.bfloat16)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert attention._keeps_precision(query)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not attention._keeps_precision(query)


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


def stops_gradients(q, k, v, m):
    with torch.no_grad():
        chosen = F.softmax(q @ k.mT, -1)
    return chosen @ v


def chooses_one(q, k, v, m):
    return F.softmax(q @ k.mT * 100, -1).to(torch.int64).to(v.dtype) @ v


def replaces_infinities(q, k, v, m):
    causal = torch.full((S, T), -torch.inf).triu(1)
    return F.softmax((q @ k.mT + causal).masked_fill(m > 0, MIN), -1) @ v


@pytest.mark.parametrize("near_miss", [writes_the_keys, writes_the_mask], ids=name)
def test_what_is_written_to_in_between_is_read_before_that(near_miss):
    """The op would run after the write."""
    run = compiled(near_miss)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(*drawn()), near_miss(*drawn()))
    assert found() == 0


@pytest.mark.parametrize("near_miss", [stops_gradients, chooses_one, replaces_infinities], ids=name)
def test_what_isnt_one_op_stays_as_written(near_miss):
    """Modes between the products; casts that round to whole numbers; replaced masks."""
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
    [{"fuse_attention": False}, {"block": ["attention"]}, {"fuse_limit": 0}, {"fuse_skip": [0]}],
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


# --- models ---------------------------------------------------------------------------------------


def results_of(model, inputs, train):
    """The first result, and the gradients of the weights by which it is reached."""
    result = model(**inputs)[0]
    if not train:
        return {"result": result}
    (result * result.detach().sin()).sum().backward()
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return {"result": result, **{name: grad for name, grad in named.items() if grad is not None}}


def doubled(inputs):
    return {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("which", MODELS)
def test_models_of_the_transformers_library(which, train):
    """Each attention is found; values and gradients are as exact as eager's."""
    pytest.importorskip("transformers")
    model, inputs, count = eager_model(which)
    model.train(train)
    others = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.set_grad_enabled(train):
        got = results_of(compiled(model), inputs, train)
        eager = results_of(others[0], inputs, train)
        precise = results_of(others[1], doubled(inputs), train)
    # The bias of keys moves all scores of a row alike: its gradient is 0 but for roundings.
    level = max(float(value.detach().abs().max()) for value in precise.values())
    for name, value in eager.items():
        no_further(got[name], value, precise[name], level=level)
    assert found() == (0 if train and which in LEARNED_MASKS else count)
    assert not all_trips()
