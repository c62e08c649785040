"""Transforms of ``torch.func`` in compiled functions: their values, and the levels that they open.

Dynamo's graph opens and closes levels by nodes of its own, and computes zeros without gradients,
with which AOTAutograd calls the code of inference graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fuseboard
from fuseboard.capture.original import only_computes
from fuseboard.torch_api.state import AUTOGRAD_PARTS, read_state
from tests.support.backends import all_trips
from tests.support.values import rnd

pytestmark = pytest.mark.usefixtures("policy_measured")


def cube(t):
    return (t**3).sum()


def shifted(t):
    """Writes to a slice of its own."""
    out = t.clone()
    out[1:] = t[:-1] * 2
    return out.square().sum()


def inner_step(x):
    """A step of gradient descent on weights, through which the caller may differentiate."""
    model = torch.nn.Linear(3, 3)
    weights = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}

    def loss(weights):
        return functional_call(model, weights, x).square().sum()

    steps = grad(loss)(weights)
    updated = {name: weight - 0.1 * steps[name] for name, weight in weights.items()}
    return functional_call(model, updated, x)


TRANSFORMED = {
    "grad": lambda x: grad(cube)(x),
    "grad of grad": lambda x: grad(lambda t: grad(cube)(t).sum())(x),
    "grad of writes": lambda x: grad(shifted)(x),
    "vjp": lambda x: vjp(lambda t: t.sin() * t, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda x: jacrev(lambda t: t.exp() * t.sum())(x),
    "jacfwd": lambda x: jacfwd(lambda t: t.exp() * t.sum())(x),
    "jvp": lambda x: jvp(lambda t: t.sin() * t, (x,), (torch.ones_like(x),))[1],
    "vmap of grad": lambda x: vmap(grad(lambda t: t.sin() * t))(x),
    "hessian": lambda x: hessian(lambda t: (t.sin() * t.sum()).sum())(x),
    "inner step": inner_step,
    "beside ops of the graph": lambda x: grad(cube)(x.relu() + 1) * x.exp(),
}


def compiled(function, **options):
    more = {"measure_s": 0.01, "backends": ["mkldnn", "eager"], **options}
    return torch.compile(function, backend="fuseboard", options=more)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_have_eager_s_values(name):
    """In the first call and in those after it, and the process is as before."""
    function = TRANSFORMED[name]
    before = read_state(AUTOGRAD_PARTS)
    fn = compiled(function)
    for x in (torch.tensor([1.0, 2.0, 3.0]), rnd(3), rnd(3)):
        torch.testing.assert_close(fn(x), function(x))
    assert read_state(AUTOGRAD_PARTS) == before
    assert not all_trips()
    torch.testing.assert_close(hessian(cube)(torch.ones(2)), 6 * torch.eye(2))
    with forward_ad.dual_level():
        pass


@pytest.mark.parametrize("name", ["grad", "jacfwd", "beside ops of the graph"])
def test_a_call_on_which_zeros_are_right_decides_nothing_for_others(name):
    """What Dynamo's graph computes in no-grad mode agrees on these values, and on no others."""
    function = TRANSFORMED[name]
    fn = compiled(function, settle="first_call")
    for x in (torch.zeros(3), torch.ones(3)):
        torch.testing.assert_close(fn(x), function(x))


def test_later_processes_have_the_same():
    """A decision that was kept is for code that is right."""
    for _ in range(2):
        torch._dynamo.reset()
        fn = compiled(TRANSFORMED["grad"])
        for _ in range(2):
            torch.testing.assert_close(fn(torch.ones(3)), torch.full((3,), 3.0))


def in_no_grad_mode(x, i):
    with torch.no_grad():
        return 2 * x[i] * torch.tensor([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: grad(lambda t: t[i].square().sum())(x),
        lambda x, i: jacfwd(lambda t: t[i].square().sum())(x),
        in_no_grad_mode,
    ],
    ids=["grad", "jacfwd", "no_grad"],
)
def test_the_user_s_error_inside_of_a_context_leaves_nothing_open(pick):
    """The exception is eager's, later calls work, and so does eager."""
    before = read_state(AUTOGRAD_PARTS)
    fn = compiled(pick)
    x = torch.ones(3)
    for _ in range(3):
        with pytest.raises(IndexError):
            fn(x, torch.tensor([7]))
        assert read_state(AUTOGRAD_PARTS) == before
        torch.testing.assert_close(fn(x, torch.tensor([1])), torch.tensor([0.0, 2.0, 0.0]))


def test_waiting_in_another_grad_mode_changes_nothing():
    """Candidates run as they do in calls."""
    fn = compiled(TRANSFORMED["grad"])
    fn(torch.zeros(3))
    with torch.no_grad():
        assert fuseboard.wait(timeout_s=60)
    torch.testing.assert_close(fn(torch.ones(3)), torch.full((3,), 3.0))


def test_what_isn_t_known_may_depend_on_the_grad_mode():
    """Ops of torch's don't; whatever is about autograd, or somebody else's, may."""
    graphs = []

    def look(graph, inputs):
        graphs.append(only_computes(graph))
        return graph.forward

    @torch.library.custom_op("fuseboard_tests::asks_for_the_grad_mode", mutates_args=())
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    asks.register_fake(lambda x: torch.empty_like(x))
    for function in (
        lambda x: torch.nn.functional.gelu(x @ x).softmax(-1)[1:],
        lambda x: x.new_zeros(2).add_(x.shape[0]).clamp(min=1),
        grad(cube),
        lambda x: asks(x),
    ):
        torch._dynamo.reset()
        torch.compile(function, backend=look)(rnd(3, 3))
    assert graphs == [True, True, False, False]
