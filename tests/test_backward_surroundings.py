"""Backwards that are called from other surroundings than their forwards, and modes around calls."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, last_graph
from tests.support.values import rnd

pytestmark = pytest.mark.usefixtures("policy_measured")


def compiled(function, **options):
    more = {"measure_s": 0.01, "backends": ["onnxruntime", "eager"], **options}
    return torch.compile(function, backend="fuseboard", options=more)


# --- autocast -------------------------------------------------------------------------------------


def half_opted_out(x, w, v):
    """A product under the caller's autocast, and one that is excepted from it."""
    h = x @ v
    with torch.autocast("cpu", enabled=False):
        return (h.float() @ w).sum()


def gradients(function, forward: bool, backward: bool):
    leaves = [rnd(8, 8).requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
        loss = function(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
        return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("backward", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("forward", [False, True], ids=["plain", "autocast"])
def test_autocast_around_a_backward_is_its_own(forward, backward):
    """Gradients are cast where eager's are, whatever the forward was called under."""
    expected = gradients(half_opted_out, forward, backward)
    fn = compiled(half_opted_out)
    for _ in range(4):
        (x, w, v) = gradients(fn, forward, backward)
        # Rounded to bfloat16 where eager's are: another order of sums moves some by a unit.
        torch.testing.assert_close((x, v), (expected[0], expected[2]), rtol=2**-6, atol=2**-6)
        if backward:
            torch.testing.assert_close(w, expected[1], rtol=2**-6, atol=2**-6)
        else:
            torch.testing.assert_close(w, expected[1])
    assert not all_trips()


def test_a_backward_that_autocast_changes_nothing_in_stays_compiled():
    """Called under autocast it runs what was chosen, and nothing has to be told."""
    fn = compiled(lambda x, w, v: (x.sin() * w.exp() + v).sum())
    for _ in range(3):
        expected = gradients(lambda x, w, v: (x.sin() * w.exp() + v).sum(), False, True)
        torch.testing.assert_close(gradients(fn, False, True), expected)
    assert not [note for note in last_graph("backward").notes if "autocast" in note]


def test_what_runs_op_by_op_under_autocast_is_told():
    """With what to do about it."""
    fn = compiled(half_opted_out)
    gradients(fn, False, True)
    notes = [note for report in ledger.graphs() for note in report.notes]
    (note,) = [note for note in notes if "autocast" in note]
    assert "call backward() outside of autocast" in note


# --- batched gradients ----------------------------------------------------------------------------


def hidden(x, w):
    return torch.tanh(x @ w).sum(1)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_batched_gradients_are_eager_s(first):
    """Whether or not an ordinary backward came before, and so are ordinary ones after them."""
    x, w = rnd(5, 4).requires_grad_(), rnd(4, 3).requires_grad_()

    def batched(function):
        result = function(x, w)
        return torch.autograd.grad(result, (x, w), torch.eye(5), is_grads_batched=True)

    def plain(function):
        return torch.autograd.grad(function(x, w).sum(), (x, w))

    fn = compiled(hidden)
    if not first:
        torch.testing.assert_close(plain(fn), plain(hidden))
    for _ in range(3):
        torch.testing.assert_close(batched(fn), batched(hidden))
    torch.testing.assert_close(plain(fn), plain(hidden))
    assert not all_trips()
    notes = [note for report in ledger.graphs() for note in report.notes]
    assert not first or any("batched gradients" in note for note in notes)


# --- forward-mode AD ------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [False, True], ids=["inference", "training"])
def test_tangents_of_inputs_pass_through(leaf):
    """In the first call and in later ones, and plain calls run what was compiled."""

    def attend(x, w):
        return torch.nn.functional.gelu(x @ w).softmax(-1)

    fn = compiled(attend, backends=["mkldnn", "eager"])
    w = rnd(4, 4).requires_grad_(leaf)
    for _ in range(3):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(rnd(2, 4), torch.ones(2, 4))
            got, want = (forward_ad.unpack_dual(f(x, w)).tangent for f in (fn, attend))
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(fn(rnd(2, 4), w), attend(rnd(2, 4), w))
    assert not all_trips()


# --- modes ----------------------------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    """Doubles every sine."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "").partition(".")[0]
        return 2 * result if name in ("sin", "cos") else result


def test_a_mode_that_dynamo_has_traced_through_is_applied_once():
    """Torch's own backends apply it to their graphs again."""
    fn = compiled(lambda x: x.sin() + 1)
    for _ in range(3):
        with Doubling():
            result = fn(torch.ones(3))
        torch.testing.assert_close(result, 2 * torch.ones(3).sin() + 1)
    torch.testing.assert_close(fn(torch.ones(3)), torch.ones(3).sin() + 1)


def test_a_mode_around_a_backward_isn_t_asked():
    """As in eager, where backwards are no Python."""
    fn = compiled(lambda x: x.sin().sum())
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        loss = fn(x)
        with Doubling():
            (gradient,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(gradient, torch.ones(3).cos())


# --- checkpoints ----------------------------------------------------------------------------------


def test_what_a_checkpointed_call_writes_is_written_again_by_the_recomputation():
    """As in eager, whose recomputation stops only once all tensors are saved."""

    def scale(x, state):
        state.mul_(0.5).add_(1)
        return (x * state).sin()

    def run(function):
        state, x = torch.zeros(3), torch.ones(3, requires_grad=True)
        result = checkpoint(lambda t: function(t, state), x, use_reentrant=False)
        return result, *torch.autograd.grad(result.sum(), x), state

    fn = compiled(scale, backends=["mkldnn", "eager"])
    for _ in range(3):
        torch.testing.assert_close(run(fn), run(scale))
