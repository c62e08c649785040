"""Small programs of a user's: what a function may do to a few tensors.

Each step maps a tensor of shape (..., WIDTH) to one of the same shape, so that steps nest in any
way: the function that ``torch.func.grad`` differentiates is itself a list of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 3, 5

#: A step by name, and the steps inside of it.
Step = tuple[str, tuple[Any, ...]]


@dataclass
class Weights:
    """What a program has beside its input.

    :ivar matrix: (WIDTH, WIDTH).
    :ivar vector: (WIDTH,).
    :ivar state: (WIDTH,), which some steps write to.
    """

    matrix: Tensor
    vector: Tensor
    state: Tensor


class Cubed(torch.autograd.Function):
    """A function with a backward of its own, which isn't its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x * 0.1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * x * 0.5


class Tripled(torch.autograd.Function):
    """The same for functorch, with what its levels need."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin() * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * x.cos() * 2


# --- steps ----------------------------------------------------------------------------------------


def _own_writes(t: Tensor, w: Weights) -> Tensor:
    y = t.clone()
    y.mul_(0.5)
    y[..., 1:3] += 1
    return y


def _slices(t: Tensor, w: Weights) -> Tensor:
    y = torch.zeros_like(t)
    y[..., :3] = t[..., 2:] * 2
    y[..., 3] = t[..., 0].sin()
    return y


def _shifted(t: Tensor, w: Weights) -> Tensor:
    y = t * 1
    y[..., 1:] = y[..., :-1].clone()
    return y


def _state(t: Tensor, w: Weights) -> Tensor:
    w.state.mul_(0.5).add_(t.detach().reshape(-1, WIDTH).mean(0).to(w.state.dtype))
    return t + w.state.clone()


def _conv(t: Tensor, w: Weights) -> Tensor:
    flat = t.reshape(1, 1, -1).to(w.vector.dtype)
    return F.conv1d(flat, w.vector[:3].view(1, 1, 3), padding=1).reshape(t.shape)


def _cond(t: Tensor, w: Weights) -> Tensor:
    return torch.cond(t.sum() > 0, lambda u: u.sin() + 1, lambda u: u.cos() * 2, (t,))


def _attention(t: Tensor, w: Weights) -> Tensor:
    rows = t.reshape(1, 1, -1, WIDTH)
    return F.scaled_dot_product_attention(rows, rows, rows * 2).reshape(t.shape)


def _picked(*places: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.tensor(places, device=t.device)


#: Steps that may stand inside of any transform.
PURE: dict[str, Callable[[Tensor, Weights], Tensor]] = {
    "sin": lambda t, w: t.sin(),
    "gaussian": lambda t, w: (-(t * t)).exp(),
    "tanh": lambda t, w: t.tanh() * t,
    "relu": lambda t, w: t.relu(),
    "gelu": lambda t, w: F.gelu(t),
    "scaled": lambda t, w: t * w.vector + 1,
    "power": lambda t, w: 0.1 * t**3,
    "double": lambda t, w: t.double().sin().to(t.dtype),
    "matmul": lambda t, w: t.to(w.matrix.dtype) @ w.matrix,
    "linear": lambda t, w: F.linear(t.to(w.matrix.dtype), w.matrix, w.vector),
    "conv": _conv,
    "attention": _attention,
    "softmax": lambda t, w: t.softmax(-1),
    "layer_norm": lambda t, w: F.layer_norm(t, (WIDTH,), eps=0.1),
    "centred": lambda t, w: t - t.mean(-1, keepdim=True),
    "normed": lambda t, w: t / (1 + t.square().sum()),
    "largest": lambda t, w: t.amax(-1, keepdim=True) + t,
    "cumsum": lambda t, w: t.cumsum(-1),
    "flipped": lambda t, w: t.flip(-1),
    "viewed": lambda t, w: t.reshape(-1).view(t.shape),
    "turned": lambda t, w: t.mT.contiguous().mT if t.dim() > 1 else t,
    "expanded": lambda t, w: t.unsqueeze(0).expand(2, *t.shape)[1] * 1,
    "split": lambda t, w: torch.cat(t.split([2, 3], -1)[::-1], -1),
    "own_writes": _own_writes,
    "slices": _slices,
    "shifted": _shifted,
    "indexed": lambda t, w: t[..., _picked(4, 0, 0, 2, 1)(t)],
    "selected": lambda t, w: t.index_select(-1, _picked(1, 1, 3, 0, 4)(t)),
    "where": lambda t, w: torch.where(t > 0, t, 0.1 * t),
    "detached": lambda t, w: t * t.detach().cos(),
    "ramp": lambda t, w: t + torch.arange(WIDTH, device=t.device) / 7,
    "default_dtype": lambda t, w: t + torch.linspace(0, 1, WIDTH, device=t.device),
    "default_device": lambda t, w: t + torch.ones(WIDTH),
    "tripled": lambda t, w: Tripled.apply(t),
}

#: Steps that draw, write, or stand in functorch's way.
IMPURE: dict[str, Callable[[Tensor, Weights], Tensor]] = {
    "dropout": lambda t, w: F.dropout(t, 0.4, training=True),
    "noise": lambda t, w: t + 0.1 * torch.rand_like(t),
    "rand": lambda t, w: t * torch.rand(WIDTH, device=t.device),
    "state": _state,
    "cubed": lambda t, w: Cubed.apply(t),
    "cond": _cond,
    "bfloat16": lambda t, w: t.bfloat16().float(),
    "in_place": lambda t, w: (t * 1).add_(1).sin_(),
}


def run(steps: tuple[Step, ...], t: Tensor, w: Weights) -> Tensor:
    """What steps come to, one after the other."""
    for name, inner in steps:
        if name in PURE:
            t = PURE[name](t, w)
        elif name in IMPURE:
            t = IMPURE[name](t, w)
        else:
            t = TRANSFORMS[name](lambda u, inner=inner: run(inner, u, w), t)
    return t


# --- steps around other steps ---------------------------------------------------------------------

Inner = Callable[[Tensor], Tensor]


def _grad(f: Inner) -> Inner:
    return func.grad(lambda u: f(u).sum())


def _vjp(f: Inner, t: Tensor) -> Tensor:
    out, back = func.vjp(f, t)
    return back(torch.ones_like(out))[0]


def _jvp(f: Inner, t: Tensor) -> Tensor:
    out, tangent = func.jvp(f, (t,), (torch.ones_like(t),))
    return out + tangent


_learner = nn.Linear(WIDTH, WIDTH, bias=False)
with torch.no_grad():
    _learner.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH * WIDTH).view(WIDTH, WIDTH))
_learner.requires_grad_(False)


def _maml(f: Inner, t: Tensor) -> Tensor:
    """One step on a module's weight, and the module with what comes of it."""

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return f(func.functional_call(_learner, weights, (t,))).square().mean()

    weights = dict(_learner.named_parameters())
    steps = func.grad(loss)(weights)
    better = {name: value - 0.1 * steps[name] for name, value in weights.items()}
    return func.functional_call(_learner, better, (t,))


def _autograd_grad(f: Inner, t: Tensor) -> Tensor:
    own = t.detach().requires_grad_()
    return torch.autograd.grad(f(own).sum(), own)[0]


def _within(make: Callable[[], Any]) -> Callable[[Inner, Tensor], Tensor]:
    def step(f: Inner, t: Tensor) -> Tensor:
        with make():
            return f(t)

    return step


TRANSFORMS: dict[str, Callable[[Inner, Tensor], Tensor]] = {
    "grad": lambda f, t: _grad(f)(t),
    "grad_and_value": lambda f, t: func.grad_and_value(lambda u: f(u).sum())(t)[0],
    "vjp": _vjp,
    "jvp": _jvp,
    "jacrev": lambda f, t: func.jacrev(lambda u: f(u).reshape(-1)[:2])(t).sum(0),
    "jacfwd": lambda f, t: func.jacfwd(lambda u: f(u).reshape(-1)[:2])(t).sum(0),
    "hessian": lambda f, t: func.hessian(lambda u: f(u).sum())(t).reshape(-1, *t.shape).sum(0),
    "vmap": lambda f, t: func.vmap(f)(t) if t.dim() > 1 else f(t),
    "vmap_grad": lambda f, t: func.vmap(_grad(f))(t) if t.dim() > 1 else _grad(f)(t),
    "grad_grad": lambda f, t: _grad(lambda u: _grad(f)(u).sin())(t),
    "maml": _maml,
    "autograd_grad": _autograd_grad,
    "checkpoint": lambda f, t: checkpoint(f, t, use_reentrant=False),
    "beside": lambda f, t: t + f(t.detach()),
    "no_grad": _within(torch.no_grad),
    "enable_grad": _within(torch.enable_grad),
    "grad_off": _within(lambda: torch.set_grad_enabled(False)),
    "autocast": _within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast_off": _within(lambda: torch.autocast("cpu", enabled=False)),
}
#: Transforms that may stand inside of others.
NESTED = ("grad", "vjp", "jvp", "jacrev", "jacfwd", "vmap", "vmap_grad", "grad_grad", "beside")
#: Transforms inside of which any step may stand.
TRANSPARENT = ("no_grad", "enable_grad", "grad_off", "autocast", "autocast_off", "beside")

# --- programs -------------------------------------------------------------------------------------

#: What a program returns, of its input and of what its steps come to.
RETURNS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "result": lambda x, t: (t,),
    "sum": lambda x, t: (t, t.sum()),
    "detached": lambda x, t: (t, t.detach()),
    "views": lambda x, t: (t, t.mT, x[0]),
    "input": lambda x, t: (t, x),
    "copies": lambda x, t: (t * 2, t.mT.contiguous(), None, 3),
}


@dataclass(frozen=True)
class Program:
    """A function of an input of (ROWS, WIDTH) and of :class:`Weights`.

    :ivar writes: to its input as well.
    """

    steps: tuple[Step, ...]
    returns: str = "result"
    writes: bool = False

    def __call__(self, x: Tensor, matrix: Tensor, vector: Tensor, state: Tensor) -> tuple[Any, ...]:
        if self.writes:
            x.mul_(0.5)
        return RETURNS[self.returns](x, run(self.steps, x, Weights(matrix, vector, state)))

    @property
    def names(self) -> set[str]:
        """Of all steps, those inside of others as well."""

        def inside(steps: tuple[Step, ...]) -> set[str]:
            return {name for name, _ in steps}.union(*(inside(inner) for _, inner in steps))

        return inside(self.steps)
