"""Backwards that are called from other surroundings than their forwards, and modes around calls."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fuseboard.report.data import ledger
from tests.support.backends import all_trips, last_graph
from tests.support.values import rnd


@pytest.fixture(autouse=True)
def _measured(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    ledger.clear()


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
        torch.testing.assert_close(gradients(fn, forward, backward), expected)
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
    gradients(fn, False, False)
    gradients(fn, False, True)
    (note,) = [note for note in last_graph("backward").notes if "autocast" in note]
    assert "call backward() outside of autocast" in note


# --- batched gradients ----------------------------------------------------------------------------


def hidden(x, w):
    return torch.tanh(x @ w).sum(1)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_batched_gradients_are_eager_s(how, first):
    """Whether or not an ordinary backward came before, and so are ordinary ones after them."""
    x, w = rnd(5, 4).requires_grad_(), rnd(4, 3).requires_grad_()

    def batched(function):
        result = function(x, w)
        if how == "is_grads_batched":
            return torch.autograd.grad(result, (x, w), torch.eye(5), is_grads_batched=True)
        return torch.vmap(lambda v: torch.autograd.grad(result, (x, w), v))(torch.eye(5))

    def plain(function):
        return torch.autograd.grad(function(x, w).sum(), (x, w))

    fn = compiled(hidden)
    if not first:
        torch.testing.assert_close(plain(fn), plain(hidden))
    for _ in range(3):
        torch.testing.assert_close(batched(fn), batched(hidden))
    torch.testing.assert_close(plain(fn), plain(hidden))
    assert not all_trips()
    reports = [report for report in ledger.graphs() if report.kind in ("forward", "backward")]
    assert any("batched gradients" in note for report in reports for note in report.notes)


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
