"""Graphs that aren't captured as they are: inference mode inside, named subclasses, modes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, forget_other_graphs, last_graph
from tests.support.values import rnd
from tests.support.ways import ALONE, IN_CALLS, QUICK

WAYS = {
    "first_call": {"settle": "first_call", "backends": QUICK},
    "in_calls": IN_CALLS,
    "background": {"settle": "background", "backends": QUICK},
    **ALONE,
}

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    forget_other_graphs(monkeypatch)


def compiled(function, way):
    return torch.compile(function, backend="fuseboard", options={"measure_s": 0.01, **WAYS[way]})


def leaves(value):
    return value if isinstance(value, tuple) else (value,)


def assert_as_eager(function, way, make):
    """Values, types, and what autograd may do with them."""
    fn = compiled(function, way)
    for _ in range(4):
        want, got = leaves(function(*make())), leaves(fn(*make()))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
            assert type(one) is type(other)
            assert one.is_inference() == other.is_inference()
            assert one.requires_grad == other.requires_grad
        assert not torch.is_inference_mode_enabled()


# --- inference mode -------------------------------------------------------------------------------


@torch.inference_mode()
def all_inside(x, w):
    return (x @ w).relu(), x[0], x


def twice_inside(x, w):
    with torch.inference_mode():
        y = x @ w
    with torch.inference_mode():
        return y.exp()


def partly_inside(x, w):
    y = x.sin()
    with torch.inference_mode():
        return y, (x @ w).exp()


def outside_inside(x, w):
    with torch.inference_mode():
        y = x @ w
        with torch.inference_mode(False):
            z = torch.ones(2) + 1
        return y * 2, z


MODES = [all_inside, twice_inside, partly_inside, outside_inside]


@every_way
@pytest.mark.parametrize("function", MODES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_results_are_inference_tensors_where_eagers_are(function, way, training):
    """And nothing else is: the mode covers the code that it covers in eager."""
    assert_as_eager(function, way, lambda: (rnd(3, 3), rnd(3, 3).requires_grad_(training)))


def test_what_is_all_inside_is_compiled():
    """As decorated methods are; nothing is lost by it."""
    fn = compiled(all_inside, "mkldnn")
    fn(rnd(3, 3), rnd(3, 3))
    assert not all_trips()


@every_way
def test_an_inference_mode_around_is_as_good(way):
    """Entered once more inside, it changes nothing."""
    fn = compiled(all_inside, way)
    for _ in range(3):
        with torch.inference_mode():
            got = fn(rnd(3, 3), rnd(3, 3))
        assert got[0].is_inference()


# --- subclasses -----------------------------------------------------------------------------------


class Named(torch.Tensor):
    """Differs from a tensor in name alone."""


class Told(torch.Tensor):
    """Computes cosines for sines."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        function = torch.Tensor.cos if function is torch.Tensor.sin else function
        return super().__torch_function__(function, types, args, kwargs)


class Weight(torch.nn.Parameter):
    """A parameter of a class of its own."""


def waves(x):
    return (x * 2).sin(), x.sum()


@every_way
@pytest.mark.parametrize("kind", [Named, Told])
@pytest.mark.parametrize("training", [False, True])
def test_inputs_of_a_subclass_in_name_alone(kind, way, training):
    """The results are of that class, too."""
    assert_as_eager(waves, way, lambda: (rnd(3, 3).as_subclass(kind).requires_grad_(training),))


@every_way
def test_a_plain_input_beside_one_of_a_subclass(way):
    """Whatever comes first."""
    assert_as_eager(torch.mul, way, lambda: (rnd(3), rnd(3).as_subclass(Named)))


@every_way
def test_a_subclass_that_the_code_makes(way):
    """Of plain tensors."""
    assert_as_eager(lambda x: (x.exp().as_subclass(Named) * 2, x + 1), way, lambda: (rnd(3),))


@every_way
def test_gradients_of_a_subclass(way):
    """Reach the leaf."""
    fn = compiled(waves, way)
    for _ in range(3):
        x, y = (rnd(3).as_subclass(Named).requires_grad_() for _ in range(2))
        fn(x)[0].sum().backward()
        waves(y)[0].sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@every_way
def test_parameters_of_a_subclass(way):
    """They are compiled as any other: ops on them give plain tensors."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Weight(rnd(3, 3))

        def forward(self, x):
            return x @ self.weight

    module = Module()
    assert_as_eager(module, way, lambda: (rnd(3, 3),))
    with torch.no_grad():
        assert_as_eager(module, way, lambda: (rnd(3, 3),))
        module.weight.add_(1)
        assert_as_eager(module, way, lambda: (rnd(3, 3),))
    compiled(module, way)(rnd(3, 3)).sum().backward()
    torch.testing.assert_close(module.weight.grad, rnd(3, 3).sum(0)[:, None].expand(3, 3))
    assert type(module.weight) is Weight
    assert not all_trips()


# --- modes around checkpoints ---------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    """Twice the sine, and all else as it is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.sin else result


class Negating(TorchFunctionMode):
    """Changes whatever it sees; a checkpoint isn't seen by any mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return -result if isinstance(result, torch.Tensor) else result


def keeps_a_sine(x):
    return checkpoint(torch.sin, x, use_reentrant=False)


@every_way
@pytest.mark.parametrize("mode", [Doubling, Negating])
def test_a_mode_acts_in_the_body_of_a_checkpoint(mode, way):
    """Dynamo doesn't trace it there, so eager runs the code, and a trip says so."""
    fn = compiled(keeps_a_sine, way)
    for _ in range(3):
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        with mode():
            want, got = keeps_a_sine(x), fn(y)
            torch.autograd.backward([want, got], [torch.ones(2), torch.ones(2)])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(y.grad, x.grad)
        torch.testing.assert_close(fn(y), y.sin())
    assert ("Dynamo", "capture") in [(trip.plugin, trip.stage) for trip in all_trips()]


def test_one_graph_of_a_checkpoint_under_a_mode_is_an_error():
    """There is no graph that does what eager does."""
    fn = torch.compile(keeps_a_sine, backend="fuseboard", fullgraph=True)
    with Doubling(), pytest.raises(BackendCompilerFailed, match=r"modes .* \(Doubling\)"):
        fn(torch.ones(2))


def test_a_default_device_is_no_reason_to_leave_a_checkpoint_to_eager():
    """It is a mode, but the CPU's changes nothing."""
    fn = torch.compile(lambda x: keeps_a_sine(x) + torch.ones(2), backend="fuseboard")
    with torch.device("cpu"):
        torch.testing.assert_close(fn(torch.ones(2)), torch.ones(2).sin() + 1)
    assert not all_trips()


# --- inputs that were made in inference mode ------------------------------------------------------


@every_way
def test_an_inference_tensor_is_not_saved_for_a_backward(way):
    """Eager saves what was computed from it."""
    function = lambda x, y: (x + 1) * y  # noqa: E731
    fn = compiled(function, way)
    for seed in range(3):
        with torch.inference_mode():
            x = rnd(3, seed=seed)
        y = rnd(3, seed=9).requires_grad_()
        fn(x, y).sum().backward()
        torch.testing.assert_close(y.grad, x + 1)
    assert not all_trips()
    assert any("was made in inference mode" in note for note in last_graph().notes)


# --- inputs that are written to and have a gradient -----------------------------------------------


@every_way
def test_a_result_of_a_written_input_has_its_gradient(way):
    """In eager it depends on the input as it is by then; Dynamo's own graph runs, with a note."""

    def function(x, y):
        x.mul_(2)
        return x * y

    def gradients(run):
        x, y = rnd(3).requires_grad_(), rnd(3, seed=1).requires_grad_()
        written = x * 1
        run(written, y).sum().backward()
        return written.detach(), x.grad, y.grad

    fn = compiled(function, way)
    for _ in range(2):
        torch.testing.assert_close(gradients(fn), gradients(function))
        assert fuseboard.wait(120)
    assert not all_trips()
    notes = [note for graph in ledger.graphs() for note in graph.notes]
    assert any("it writes to an input that has a gradient" in note for note in notes)


# --- tensors of other kinds -----------------------------------------------------------------------


def jagged():
    parts = [rnd(2, 3).requires_grad_(), rnd(4, 3, seed=1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)


OTHER_KINDS = {
    "jagged": (lambda t: (torch.softmax(t, -1).values(), (t * 2 + 1).values()), jagged),
    "jagged linear": (lambda t: F.linear(t, rnd(2, 3)).values(), jagged),
    "int_repr": (lambda x: (quantised(x).int_repr(), x + 1), lambda: rnd(5)),
    "dequantised": (lambda x: quantised(x * 2).dequantize(), lambda: rnd(5)),
    "oneDNN": (lambda t: t.to_dense() * 2, lambda: rnd(3, 3).to_mkldnn()),
}


@every_way
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_judged_or_lowered_runs_as_dynamo_has_it(kind, way):
    """With a reason in the report, and no trip."""
    function, make = OTHER_KINDS[kind]
    assert_as_eager(function, way, lambda: [make()])
    assert not all_trips()
    notes = [note for graph in ledger.graphs() for note in graph.notes]
    assert any("Dynamo's own graph runs: " in note for note in notes)
