"""What a user's call brings with it: modes, levels, hooks, other code's errors.

Each ``case_NN_slug(compile_fn)`` is like those of ``cases_dev.py``: it raises AssertionError where
compiled code does something else than eager does. The right values are written down. Each function
is called several times in the same way, since what answers may change between calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

CALLS = 4


def check(got: Any, want: Any, what: str) -> None:
    """A result's values and dtype; lists and numbers are float32 tensors."""
    want = want if isinstance(want, Tensor) else torch.tensor(want, dtype=torch.float32)
    assert isinstance(got, Tensor), f"{what}: a tensor expected, got {got!r}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, eager has {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager's {tuple(want.shape)}"
    close = torch.allclose(got.detach(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert close, f"{what}: {got.tolist()}, eager has {want.tolist()}"


def check_eager_works() -> None:
    """What eager needs clean surroundings for, outside of anything compiled."""
    x = torch.tensor([1.0, 2.0])
    try:
        check(func.hessian(lambda t: (t**3).sum())(x), [[6.0, 0.0], [0.0, 12.0]], "eager's hessian")
        check(func.jvp(torch.square, (x,), (x,))[1], [2.0, 8.0], "eager's jvp")
        with forward_ad.dual_level():
            square = forward_ad.make_dual(x, x) ** 2
            check(forward_ad.unpack_dual(square).tangent, [2.0, 8.0], "eager's tangent")
    except RuntimeError as error:
        raise AssertionError(f"eager no longer works: {error}") from None
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert modes == (True, False), f"gradients and inference mode are {modes}"
    assert not torch.is_autocast_enabled("cpu"), "autocast is on"


def refused(call: Callable[[], Any]) -> str:
    """What a RuntimeError of a call says; "" where it raises none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def compiled(compile_fn: Any, f: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The compiled function as often as it is to be called."""
    return [compile_fn(f)] * CALLS


# --- transforms inside ----------------------------------------------------------------------------


# torch.func.grad inside: Dynamo's graph holds its levels, and assumes that gradients are on.
def case_01_grad(compile_fn):
    def f(x):
        return func.grad(lambda t: (t**3).sum())(x)

    for fn in compiled(compile_fn, f):
        check(fn(torch.tensor([1.0, 2.0, 3.0])), [3.0, 12.0, 27.0], "grad of cubes")
    with torch.no_grad():
        check(fn(torch.tensor([1.0, 2.0, 3.0])), [3.0, 12.0, 27.0], "the same under no_grad")


# The other reverse-mode transforms: vjp, jacrev, vmap of grad, grad of grad.
def case_02_reverse_mode(compile_fn):
    def f(x):
        _, back = func.vjp(torch.square, x[0])
        rows = func.vmap(func.grad(lambda t: (t**2).sum()))(x)
        second = func.grad(lambda t: func.grad(lambda u: (u**3).sum())(t).sum())(x[0])
        return back(torch.ones(3))[0], func.jacrev(torch.square)(x[1]), rows, second

    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for fn in compiled(compile_fn, f):
        vjp, jacobian, rows, second = fn(x)
        check(vjp, [2.0, 4.0, 6.0], "vjp")
        check(jacobian, [[8.0, 0.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 12.0]], "jacrev")
        check(rows, [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]], "vmap of grad")
        check(second, [6.0, 12.0, 18.0], "grad of grad")


# Forward mode opens levels of which there may be one: a run that ends halfway leaves it open.
def case_03_forward_mode(compile_fn):
    def f(x):
        value, tangent = func.jvp(torch.square, (x,), (torch.ones(2),))
        return value, tangent, func.jacfwd(torch.square)(x), func.hessian(lambda t: (t**3).sum())(x)

    for fn in compiled(compile_fn, f):
        value, tangent, jacobian, hessian = fn(torch.tensor([1.0, 2.0]))
        check(value, [1.0, 4.0], "value")
        check(tangent, [2.0, 4.0], "jvp")
        check(jacobian, [[2.0, 0.0], [0.0, 4.0]], "jacfwd")
        check(hessian, [[6.0, 0.0], [0.0, 12.0]], "hessian")
        check_eager_works()


# A gradient through writes to slices.
def case_04_grad_of_slice_writes(compile_fn):
    def loss(t):
        y = torch.zeros(4)
        y[:3] = t * t
        y[1:] += t
        return (y * torch.arange(1.0, 5.0)).sum()

    for fn in compiled(compile_fn, lambda x: func.grad(loss)(x)):
        check(fn(torch.tensor([1.0, 2.0, 3.0])), [4.0, 11.0, 22.0], "grad through writes")


# MAML: a gradient through a step of gradient descent on a module's weights.
def case_05_maml(compile_fn):
    learner = nn.Linear(1, 1, bias=False)

    def outer(weights, x):
        def inner(weights):
            return (func.functional_call(learner, weights, (x,)) - 1).square().sum()

        steps = func.grad(inner)(weights)
        better = {name: value - 0.05 * steps[name] for name, value in weights.items()}
        return func.functional_call(learner, better, (torch.full((1, 1), 2.0),)).square().sum()

    weights = {"weight": torch.ones(1, 1)}
    for fn in compiled(compile_fn, lambda w, x: func.grad_and_value(outer)(w, x)):
        grads, value = fn(weights, torch.full((1, 1), 3.0))
        check(grads["weight"], [[0.32]], "the gradient through a step")
        check(value, 0.64, "the loss after a step")


# --- transforms outside ---------------------------------------------------------------------------


# Duals as inputs: engines of their own know no tangents, and may not drop them.
def case_06_duals(compile_fn):
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    fn = compile_fn(lambda x: ((x @ swap) * x).relu().softmax(0).log())
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for _ in range(CALLS):
        check(fn(x).exp().sum(0), [1.0, 1.0], "the value")
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones(2, 2))))
            assert found.tangent is not None, "the tangent is lost"
            check(found.tangent[1] - found.tangent[0], [4.0, 4.0], "the tangent")


# Transforms of a function that was compiled without any.
def case_07_transforms_outside(compile_fn):
    fn = compile_fn(lambda x: (x**3).cumsum(-1))
    x = torch.tensor([1.0, 2.0])
    for _ in range(CALLS):
        check(fn(x), [1.0, 9.0], "a plain call")
        check(func.vmap(fn)(torch.stack([x, 2 * x])), [[1.0, 9.0], [8.0, 72.0]], "vmap")
        check(func.grad(lambda t: fn(t).sum())(x), [6.0, 12.0], "grad")
        check(func.jvp(fn, (x,), (torch.ones(2),))[1], [3.0, 15.0], "jvp")
        check(func.jacrev(fn)(x), [[3.0, 0.0], [3.0, 12.0]], "jacrev")


# vmap over a compiled function with control flow.
def case_08_vmap_over_cond(compile_fn):
    def f(x):
        return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))

    fn = compile_fn(f)
    for _ in range(CALLS):
        check(fn(torch.ones(2)), [2.0, 2.0], "a plain call")
        rows = func.vmap(fn)(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
        check(rows, [[2.0, 2.0], [-2.0, -2.0]], "a branch for each row")


# --- backwards ------------------------------------------------------------------------------------


# Batched gradients, as the first thing that a backward sees and later.
def case_09_batched_gradients(compile_fn):
    fn = compile_fn(lambda x, w: x * w + 1)
    for _ in range(CALLS):
        x, w = torch.ones(3, requires_grad=True), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        out = fn(x, w)
        (rows,) = torch.autograd.grad(
            out, x, torch.eye(3), is_grads_batched=True, retain_graph=True
        )
        check(rows, torch.diag(torch.tensor([1.0, 2.0, 3.0])), "a row for each result")
        out.sum().backward()
        check(w.grad, [1.0, 1.0, 1.0], "an ordinary gradient after it")
        jacobian = torch.autograd.functional.jacobian(
            lambda t: fn(t, torch.tensor([4.0, 5.0])), torch.ones(2), vectorize=True
        )
        check(jacobian, [[4.0, 0.0], [0.0, 5.0]], "a vectorised jacobian")


# Code that opts out of autocast: its backward isn't cast either.
def case_10_backward_without_autocast(compile_fn):
    def f(x, w):
        with torch.autocast("cpu", enabled=False):
            return x @ w

    for fn in compiled(compile_fn, f):
        w = torch.full((2, 2), 1.01, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fn(torch.full((2, 2), 1.013), w)
        out.sum().backward()
        check(w.grad, [[2.026, 2.026], [2.026, 2.026]], "a float32 product's gradient")


# A penalty on a gradient: right or refused, never left out. What exp saves for its backward isn't
# its input, by which AOTAutograd notices.
# Source: pytorch/pytorch#91469
def case_11_gradient_penalty(compile_fn):
    for fn in compiled(compile_fn, lambda x: x.exp() * 3):
        x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
        out = fn(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        check(grad, [1.1036383, 3.0, 8.1548455], "the gradient")
        try:
            (total,) = torch.autograd.grad(out + grad.square().sum(), x)
        except RuntimeError:
            continue  # a clear refusal
        check(total, [3.5396557, 21.0, 141.15785], "the loss's and the penalty's gradient")


# An input that a result doesn't depend on has no gradient, which isn't one of zeros.
def case_12_no_gradient(compile_fn):
    for fn in compiled(compile_fn, lambda x, w: ((x * w).relu(), w.square())):
        x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
        fn(x, w)[1].sum().backward()
        check(w.grad, [6.0, 6.0], "the gradient")
        assert x.grad is None, f"the other input's gradient is {x.grad}"


# Deterministic algorithms around the backward alone: right or refused.
def case_13_deterministic_backward(compile_fn):
    for fn in compiled(compile_fn, lambda x: x.square() * 3):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        out = fn(x).sum()
        with deterministic():
            refusal = refused(out.backward)
        if refusal:
            assert "use_deterministic_algorithms" in refusal, refusal
        else:
            check(x.grad, [6.0, 12.0], "the gradient")


# Anomaly detection: what eager reports is reported, and what is fine is computed.
def case_14_anomalies(compile_fn):
    fn = compile_fn(lambda x: x.sqrt() * x)
    for _ in range(CALLS):
        with torch.autograd.detect_anomaly():
            x = torch.tensor([1.0, 4.0], requires_grad=True)
            fn(x).sum().backward()
            check(x.grad, [1.5, 3.0], "the gradient")
            refusal = refused(fn(torch.zeros(2, requires_grad=True)).sum().backward)
            assert "nan" in refusal, f"a NaN in the backward isn't reported: {refusal!r}"


# --- modes and hooks of the user's ----------------------------------------------------------------


class DoublingSines(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if getattr(function, "__name__", "") == "sin" else result


# A mode of the user's that changes a function acts once, in plain code and in a checkpoint's.
def case_15_function_mode(compile_fn):
    def kept(x):
        return checkpoint(torch.sin, x, use_reentrant=False)

    for f in (torch.sin, kept, lambda x: func.vmap(torch.sin)(x)):
        fn = compile_fn(lambda x, f=f: f(x) + 0)
        for _ in range(CALLS):
            with DoublingSines(), torch.no_grad():
                check(fn(torch.ones(2)), [1.6829419, 1.6829419], "twice the sine")
            check(fn(torch.ones(2)), [0.84147098, 0.84147098], "without the mode")


# Hooks of saved tensors see this call's, and no run's that only measures.
def case_16_saved_tensor_hooks(compile_fn):
    for fn in compiled(compile_fn, lambda x: x.exp() * x):
        seen: list[str] = []

        def pack(value, seen=seen):
            seen.append("pack")
            return value.numpy().copy()

        def unpack(value, seen=seen):
            seen.append("unpack")
            return torch.from_numpy(value)

        x = torch.tensor([0.0, 1.0], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda value: pack(value.detach()), unpack):
            out = fn(x)
        out.sum().backward()
        check(x.grad, [1.0, 5.4365637], "the gradient")
        assert 1 <= seen.count("pack") <= 3, f"{seen.count('pack')} tensors saved, eager saves 3"
        assert seen.count("pack") == seen.count("unpack"), seen


# A checkpoint around the call: the same mask when it is computed again, eager's draws afterwards.
def case_17_checkpoint_around_dropout(compile_fn):
    fn = compile_fn(lambda x: F.dropout(x * 1, 0.5, training=True))
    for reentrant in [True, False] * 3:
        torch.manual_seed(4)
        x = torch.ones(3, 5, requires_grad=True)
        out = checkpoint(fn, x, use_reentrant=reentrant)
        out.sum().backward()
        check(x.grad, out.detach(), "the gradient, which is the mask")
        after = torch.rand(1)
        torch.manual_seed(4)
        check(out, F.dropout(torch.ones(3, 5), 0.5, training=True), "eager's mask")
        check(after, torch.rand(1), "eager's next number")


# A checkpoint around a call that writes to a buffer: eager writes when it computes again.
def case_18_checkpoint_around_writes(compile_fn):
    def f(x, state):
        state.mul_(0.5).add_(1)
        return x * state.clone()

    for fn in compiled(compile_fn, f):
        state, x = torch.zeros(2), torch.ones(2, requires_grad=True)
        out = checkpoint(lambda x, fn=fn, state=state: fn(x, state), x, use_reentrant=False)
        check(state, [1.0, 1.0], "the buffer after the call")
        out.sum().backward()
        check(x.grad, [1.5, 1.5], "the gradient, with what is computed again")
        check(state, [1.5, 1.5], "the buffer after the backward")


# --- switches -------------------------------------------------------------------------------------


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Under deterministic algorithms memory that nobody wrote is NaN.
def case_19_deterministic_empties(compile_fn):
    fn = compile_fn(lambda x: (x * 2, torch.empty(2), x.new_empty(2) + 1))
    for _ in range(CALLS):
        with deterministic():
            doubled, empty, more = fn(torch.ones(2))
        check(doubled, [2.0, 2.0], "what is computed")
        check(empty, [float("nan")] * 2, "torch.empty")
        check(more, [float("nan")] * 2, "new_empty")


# The default dtype and device of the call hold inside, and not those of another call.
def case_20_defaults(compile_fn):
    fn = compile_fn(lambda x: (x + torch.ones(2) / 3, torch.arange(2) / 3))
    wide = torch.tensor([4.0, 4.0], dtype=torch.float64) / 3
    for _ in range(CALLS):
        check(fn(torch.ones(2))[0], [4 / 3, 4 / 3], "float32")
        torch.set_default_dtype(torch.float64)
        try:
            got, ramp = fn(torch.ones(2, dtype=torch.float32))
            check(got, wide, "float64")
            check(ramp, torch.arange(2, dtype=torch.float64) / 3, "a quotient of integers")
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert fn(torch.ones(2))[1].is_meta, "the default device isn't the call's"


# Inference mode inside: what is made there is an inference tensor.
def case_21_inference_inside(compile_fn):
    def f(x):
        with torch.inference_mode():
            return x * 2

    for fn in compiled(compile_fn, f):
        got = fn(torch.ones(2))
        check(got, [2.0, 2.0], "the value")
        assert got.is_inference(), "the result isn't an inference tensor"
        assert not torch.is_inference_mode_enabled()


# --- what is left behind --------------------------------------------------------------------------


# An error of the user's own within modes and levels: they are left, and later calls work.
def case_22_errors_within_modes(compile_fn):
    def look_up(x, i):
        return x.index_select(0, i) * 2

    def ungraded(x, i):
        with torch.no_grad():
            return look_up(x, i)

    def inferred(x, i):
        with torch.inference_mode():
            return look_up(x, i)

    def cast(x, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return look_up(x, i)

    def pushed(x, i):
        return func.jvp(lambda t: look_up(t, i), (x,), (x,))[1]

    def graded(x, i):
        return func.grad(lambda t: look_up(t, i).square().sum())(x)[:2] / 4

    x = torch.tensor([1.0, 2.0, 3.0])
    for f in (ungraded, inferred, cast, pushed, graded):
        fn = compile_fn(f)
        for _ in range(3):
            want = [2.0, 4.0]
            check(fn(x, torch.tensor([0, 1])), want, f"{f.__name__}, a good index")
            try:
                fn(x, torch.tensor([0, 9]))
            except IndexError:
                check_eager_works()
            else:
                raise AssertionError(f"{f.__name__}: an index out of range was taken")


# Generators: compiling and choosing draw nothing.
def case_23_generators(compile_fn):
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    fn = compile_fn(lambda x, w: (x @ w).relu() + torch.rand(2))
    for _ in range(CALLS):
        fn(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
    got = (random.random(), float(numpy.random.rand()))
    assert got == (random.Random(5).random(), float(numpy.random.RandomState(5).rand())), got
    own = torch.rand(1)
    torch.manual_seed(5)
    torch.rand(2 * CALLS)
    check(own, torch.rand(1), "torch's next number")


# A negative number to the power of a tensor, in an inference and in a training graph.
def case_24_negative_base(compile_fn):
    fn = compile_fn(lambda x: ((-2) ** x, func.vmap(lambda t: (-2) ** t)(x)))
    for requires_grad in [False, True] * 3:
        x = torch.tensor([2.0, 3.0], requires_grad=requires_grad)
        for got in fn(x):
            check(got, [4.0, -8.0], "powers of -2")
