"""Gradients of gradients, and gradients that there are none of: eager's, or a clear refusal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, forget_other_graphs
from tests.support.values import rnd
from tests.support.ways import ALONE, IN_CALLS

#: How a graph settles: by the first call, within calls, with one backend alone.
WAYS = {
    "first_call": {"settle": "first_call"},
    "in_calls": IN_CALLS,
    **ALONE,
}

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    forget_other_graphs(monkeypatch)


def compiled(function, way="first_call", **options):
    more = {"measure_s": 0.01, **WAYS[way], **options}
    if "backends" not in more:
        more["backends"] = ["mkldnn", "eager"]
    return torch.compile(function, backend="fuseboard", options=more)


def leaf(*shape, seed=0):
    torch.manual_seed(seed)
    return rnd(*shape).requires_grad_()


def penalised(function, *inputs):
    """The gradients of a loss in which the first gradients are."""
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(one.sum() for one in results)
    wanted = [one for one in inputs if one.requires_grad]
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    penalty = sum(one.square().sum() for one in first if one is not None)
    return first, torch.autograd.grad(loss + penalty, wanted, allow_unused=True)


def assert_as_eager(function, fn, *inputs, calls=3):
    for _ in range(calls):
        torch.testing.assert_close(penalised(fn, *inputs), penalised(function, *inputs))


# --- gradients of gradients -----------------------------------------------------------------------


def hidden(x, w, v):
    return torch.tanh(x @ w).sigmoid() @ v


CHAINS = {
    "exp": lambda x: x.exp() * 3,
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: x.softmax(-1)[:, 0],
    "sqrt of exp": lambda x: x.exp().sqrt(),
    "views of one": lambda x: tuple(x.exp().unbind(0)),
    "view and its base": lambda x: ((y := x.exp() * 2), y.t()),
    "two results": lambda x: (x.exp(), x.tanh()),
    "without gradient": lambda x: (x.exp(), x.argmax(-1).float()),
}


@every_way
@pytest.mark.parametrize("name", CHAINS)
def test_a_second_gradient_passes_what_only_the_backward_saved(name, way):
    """Of ``exp`` the result alone is saved, which has no history for AOTAutograd."""
    assert_as_eager(CHAINS[name], compiled(CHAINS[name], way), leaf(3, 4))
    assert not all_trips()


def test_a_second_gradient_reaches_every_input():
    """Saved inputs alone would make torch refuse it, and others be dropped."""
    assert_as_eager(hidden, compiled(hidden), leaf(3, 4), leaf(4, 5, seed=1), leaf(5, 2, seed=2))


def test_a_second_gradient_through_inputs_that_others_computed():
    """One input is computed from another one; each has its own share."""
    fn = compiled(hidden)

    def whole(inner):
        def run(x, w):
            h = x * 2
            return inner(h.exp(), w * h.sum(), h.t()[:, :2])

        return run

    inputs = leaf(3, 3), leaf(3, 3, seed=1)
    for _ in range(3):
        torch.testing.assert_close(penalised(whole(fn), *inputs), penalised(whole(hidden), *inputs))


def test_gradients_of_the_third_order():
    """What Dynamo's own graph computes can be differentiated on."""
    x = leaf(4)

    def third(function):
        value = function(x).sum()
        for _ in range(2):
            (value,) = torch.autograd.grad(value, x, create_graph=True)
            value = value.square().sum()
        return torch.autograd.grad(value, x)

    fn = compiled(torch.exp)
    for _ in range(2):
        torch.testing.assert_close(third(fn), third(torch.exp))


def test_hessians():
    """As ``torch.autograd.functional`` computes them."""
    x = leaf(3).detach()

    def function(x):
        return (x.exp() * x.flip(0).sigmoid()).sum()

    fn = compiled(function)
    hessian = torch.autograd.functional.hessian
    for _ in range(2):
        torch.testing.assert_close(hessian(fn, x), hessian(function, x))


def test_a_gradient_inside_of_compiled_code():
    """Dynamo breaks the graph around it: one part's gradient is the other part's input."""

    def function(x, w):
        h = torch.sigmoid(x @ w)
        (first,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return first.square().sum() + h.sum()

    fn = compiled(function)
    x, w = leaf(2, 3), leaf(3, 2, seed=1)
    for _ in range(3):
        got = torch.autograd.grad(fn(x, w), (x, w))
        torch.testing.assert_close(got, torch.autograd.grad(function(x, w), (x, w)))


class Product(torch.autograd.Function):
    """Its backward reads an input, a result, what is neither, and a tensor that it holds."""

    @staticmethod
    def forward(ctx, x, w):
        y = x.exp()
        z = y * w
        ctx.save_for_backward(x, y, z, w)
        ctx.twice = x * 2
        return z, y

    @staticmethod
    def backward(ctx, for_z, for_y):
        x, y, z, w = ctx.saved_tensors
        return for_z * y * w + for_y * y * x.sin() * ctx.twice, for_z * y * z.cos()


class Rounded(torch.autograd.Function):
    """Straight through, with a gradient that its result scales."""

    @staticmethod
    def forward(ctx, x):
        result = x.round()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result


FUNCTIONS = {
    "product": lambda x: Product.apply(x * 3, x.sin()),
    "rounded": lambda x: Rounded.apply(x * 3) * x,
}


@every_way
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_gradient_through_the_user_s_own_function(name, way):
    """As eager: inputs and results have a history in its backward, and nothing else has."""
    assert_as_eager(FUNCTIONS[name], compiled(FUNCTIONS[name], way), leaf(3, 4))


class Once(torch.autograd.Function):
    """Its backward isn't meant to be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def function_of(backward):
    """An ``autograd.Function`` of the exponential with some backward."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp() * 2

    Made.backward = staticmethod(backward)
    return Made


def all_without(ctx, gradient):
    (x,) = ctx.saved_tensors
    with torch.no_grad():
        return gradient * x.exp() * 2


@torch.no_grad()
def decorated(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * x * 3


def partly_without(ctx, gradient):
    (x,) = ctx.saved_tensors
    first = gradient * x
    with torch.no_grad(), torch.autograd.profiler.record_function("part"):
        constant = first * 3
        with torch.set_grad_enabled(True):
            second = x * 2
    return first + constant * second


WITHOUT = {one.__name__: function_of(one) for one in (all_without, decorated, partly_without)}


@every_way
@pytest.mark.parametrize("name", WITHOUT)
def test_a_backward_that_switches_gradients_off_has_no_second_gradient_there(name, way):
    """Dynamo traces it with gradients off, so that the user's switch leaves no node."""
    function = WITHOUT[name]

    def f(x):
        return function.apply(x).sin() + x**2

    fn = compiled(f, way)
    for seed in range(3):
        found = []
        for one in (f, fn):
            x = rnd(3, seed=seed).requires_grad_()
            (first,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
            found.append((first.detach(), *torch.autograd.grad(first.sum(), x)))
        torch.testing.assert_close(found[1], found[0])


@every_way
def test_a_backward_that_is_once_differentiable_has_no_second_gradient(way):
    """Eager's error where all gradients are asked for, and none through it where some are."""

    def function(x):
        return Once.apply(x * 2) * x

    fn, x = compiled(function, way), leaf(3)
    for _ in range(3):
        (got,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        torch.testing.assert_close(got, 32 * x**3)
        (second,) = torch.autograd.grad(got.sum(), x, retain_graph=True)
        torch.testing.assert_close(second, 24 * x**2)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            got.sum().backward()


@every_way
def test_a_second_gradient_through_a_batch_norm_in_training(way):
    """What the call writes to is what it was; and it is written to once a call."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh())
    model = torch.nn.Sequential(*layers)
    eager = copy.deepcopy(model)
    fn, x = compiled(model, way), leaf(5, 4)
    for _ in range(3):
        torch.testing.assert_close(penalised(fn, x), penalised(eager, x))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())


class Scale(torch.nn.Module):
    """Writes to its buffer, by which its result is multiplied."""

    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x):
        self.seen.add_(1)
        return x.exp() * self.seen.sum() / len(self.seen)


def test_a_second_gradient_meets_a_buffer_as_the_call_found_it():
    """Though it was written to, in that call and after it; as often as it is asked for."""
    fn, x = compiled(Scale()), leaf(3)
    for call in range(1, 4):
        loss = fn(x).sum()
        for _ in range(2):
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.testing.assert_close(torch.autograd.grad(first.sum(), x), (x.exp() * call,))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_second_gradient_meets_the_same_random_numbers(rate):
    """Dropout's mask is the one that the result was made with."""

    def function(x):
        return torch.nn.functional.dropout(x.exp(), rate)

    fn, x = compiled(function), leaf(40)
    for seed in range(3):
        torch.manual_seed(seed)
        got, after = penalised(fn, x), torch.rand(1)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, penalised(function, x))
        torch.testing.assert_close(after, torch.rand(1))


def test_a_second_gradient_under_the_forward_s_autocast():
    """What was computed in bfloat16 is so again, though the backward is called outside."""

    def function(x, w):
        return (x @ w).exp()

    def run(function):
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = function(x, w).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return first, *torch.autograd.grad(loss + first.square().sum(), (x, w))

    fn = compiled(function)
    for _ in range(3):
        (first, *second), (want, *wanted) = run(fn), run(function)
        torch.testing.assert_close(first, want, rtol=0, atol=0)
        for one, other in zip(second, wanted, strict=True):  # compiled in part: rounded elsewhere
            assert (one - other).norm() <= 2**-6 * other.norm()


def test_backward_with_create_graph_leaves_gradients_that_can_be_differentiated():
    """``.grad`` has a history then."""
    fn = compiled(torch.exp)
    for _ in range(2):
        x = torch.tensor([0.0, 1.0], requires_grad=True)
        fn(x).sum().backward(create_graph=True)
        torch.testing.assert_close(*(torch.autograd.grad(x.grad.sum(), x)[0], x.exp()))
        x.grad = None


def test_inputs_are_held_no_longer_than_a_backward_needs_them():
    """Neither by the results nor by the function."""
    import weakref

    fn = compiled(torch.exp)
    base = leaf(3)
    x = base * 2
    loss = fn(x).sum()
    held = weakref.ref(x)
    del x
    loss.backward()
    assert held() is None
    assert loss.requires_grad


# --- refusals -------------------------------------------------------------------------------------


def test_what_has_no_second_gradient_says_so_once():
    """A graph that writes to much can't be run again; later calls are Dynamo's own."""
    fn, x = compiled(Scale(1 << 20)), leaf(3)
    with pytest.raises(RuntimeError, match=r"it writes to \d+ bytes"):
        penalised(fn, x)
    torch.testing.assert_close(penalised(fn, x), penalised(lambda x: x.exp() * 2, x))


def test_a_gradient_that_nobody_differentiates_isn_t_refused():
    """``create_graph=True`` alone asks for nothing."""
    fn, x = compiled(Scale(1 << 20)), leaf(3)
    (got,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    torch.testing.assert_close(got, x.exp())


def test_an_input_that_was_written_to_since_is_told():
    """As eager tells it where it needs the old value."""
    fn, base = compiled(torch.exp), leaf(3)
    x = base * 1
    loss = fn(x).sum()
    with torch.no_grad():
        x.add_(1)
    (first,) = torch.autograd.grad(loss, base, create_graph=True)
    with pytest.raises(RuntimeError, match="was written to since"):
        torch.autograd.grad(first.sum(), base)


def test_a_second_gradient_through_a_checkpoint():
    """Right, or refused."""

    def function(x):
        return (x * 2).exp()

    def run(inner):
        return lambda x: checkpoint(lambda t: inner(t.sigmoid()), x, use_reentrant=False)

    fn, x = compiled(function), leaf(3)
    for _ in range(3):
        try:
            got = penalised(run(fn), x)
        except RuntimeError as error:
            assert "second gradient" in str(error)  # noqa: PT017  # a refusal will do
        else:
            torch.testing.assert_close(got, penalised(run(function), x))


# --- no gradient ----------------------------------------------------------------------------------


def apart(x, w):
    return (x * w).relu(), w.square(), w.detach() * 2


@every_way
def test_inputs_that_the_used_results_don_t_depend_on_have_no_gradient(way):
    """None, not zeros; and others' gradients are what they are."""
    fn = compiled(apart, way)
    for used in (0, 1, 0, 1):
        x, w = leaf(3), leaf(3, seed=1)
        want = torch.autograd.grad(apart(x, w)[used].sum(), (x, w), allow_unused=True)
        got = torch.autograd.grad(fn(x, w)[used].sum(), (x, w), allow_unused=True)
        assert [one is None for one in got] == [one is None for one in want]
        torch.testing.assert_close(got, want)
    fn(x, w)[1].sum().backward()
    assert x.grad is None


def test_a_missing_gradient_goes_through_what_was_computed_before():
    """Another compiled function among it."""
    fn, double = compiled(apart), compiled(lambda x: x * 2)
    for _ in range(2):
        x, w = leaf(3), leaf(3, seed=1)
        fn(double(x), w)[1].sum().backward()
        assert x.grad is None


def test_a_hook_isn_t_called_with_none():
    """Eager doesn't call it. With zeros it does what it does."""
    fn = compiled(apart)
    for _ in range(2):
        x, w = leaf(3), leaf(3, seed=1)
        x.register_hook(lambda gradient: gradient + 1)
        fn(x, w)[1].sum().backward()
        torch.testing.assert_close(w.grad, 2 * w)


def test_compiled_autograd_has_zeros_where_gradients_are_missing():
    """It traces AOTAutograd's own backward, which can't do without them."""
    fn = compiled(apart)
    for _ in range(2):
        x, w = leaf(3), leaf(3, seed=1)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="fuseboard")):
            fn(x, w)[1].sum().backward()
        torch.testing.assert_close(w.grad, 2 * w)


def test_a_missing_gradient_in_a_gradient_s_gradient():
    """Both at once."""
    fn = compiled(apart)
    for _ in range(2):
        x, w = leaf(3), leaf(3, seed=1)
        (first,) = torch.autograd.grad(fn(x, w)[1].sum(), w, create_graph=True)
        got = torch.autograd.grad(first.square().sum(), (x, w), allow_unused=True)
        assert got[0] is None
        torch.testing.assert_close(got[1], 8 * w)


def test_that_gradients_come_from_dynamo_s_graph_is_told():
    """Since it takes longer than what was compiled."""
    fn, x = compiled(torch.exp), leaf(3)
    penalised(fn, x)
    notes = [note for report in ledger.graphs() for note in report.notes]
    assert any("create_graph=True" in note for note in notes)


# --- writes to inputs that have gradients ---------------------------------------------------------


@every_way
def test_a_result_depends_on_an_input_as_it_was_left(way):
    """AOTAutograd's function knows the input before the write only, so Dynamo's own graph runs."""

    def function(x):
        x.mul_(2)
        return x.sin()

    fn = compiled(function, way)
    for _ in range(3):
        x = leaf(3) * 1
        result = fn(x)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), x), (x.cos(),))
