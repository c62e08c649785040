"""The states that a user's call may be made in, and calls in them, drawn at random from a seed."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.small_programs import (
    IMPURE,
    NESTED,
    PURE,
    RETURNS,
    ROWS,
    TRANSFORMS,
    TRANSPARENT,
    Program,
    Step,
)
from tests.support.values import rnd

# --- contexts -------------------------------------------------------------------------------------


class CountingFunctions(TorchFunctionMode):
    """Counts calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class CountingOps(TorchDispatchMode):
    """Counts calls of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


class DoublingSines(TorchFunctionMode):
    """Changes what ``sin`` gives."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if getattr(function, "__name__", "") == "sin" else result


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            yield


def copied() -> AbstractContextManager[Any]:
    """Hooks of saved tensors by which a backward reads copies."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda pair: pair[0])


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "grad_off": lambda: torch.set_grad_enabled(False),
    "inference": torch.inference_mode,
    "inference_off": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "autocast_uncached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "float64": _float64,
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "functions": CountingFunctions,
    "ops": CountingOps,
    "doubling": DoublingSines,
    "anomaly": _anomalies,
    "deterministic": deterministic,
    "warn_only": lambda: deterministic(warn_only=True),
    "copied": copied,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "no_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "saved_written": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "dual": forward_ad.dual_level,
    "one_thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "mkldnn_off": lambda: torch.backends.mkldnn.flags(enabled=False),
}
#: Those around a backward: not those that AOTAutograd refuses there.
AROUND_BACKWARDS = (
    *("autocast", "autocast_off", "no_grad", "enable_grad", "anomaly"),
    *("functions", "ops", "copied", "float64", "dual", "cpu"),
)

# --- ways to call ---------------------------------------------------------------------------------

Call = Callable[[Tensor], Any]


def _first(call: Call) -> Call:
    return lambda x: call(x)[0]


def in_a_thread(call: Callable[[], Any]) -> Any:
    """In a thread of its own, which starts with the defaults of what is local to threads."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except Exception as error:  # raised below
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


def dual(call: Call, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The first result and its tangent, where all of the input's tangent is 1."""
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(x, torch.ones_like(x)))[0]
        value, tangent = forward_ad.unpack_dual(out)
        return value.clone(), None if tangent is None else tangent.clone()


class _Around(torch.autograd.Function):
    """Calls in its forward, where autograd sees nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        return call(x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


DRIVES: dict[str, Callable[[Call, Tensor], Any]] = {
    "plain": lambda call, x: call(x),
    "twice": lambda call, x: (*call(x), *call(x)),
    "chained": lambda call, x: call(call(x)[0]),
    "vmap": lambda call, x: func.vmap(_first(call))(torch.stack([x, x * 2])),
    "grad": lambda call, x: func.grad(lambda t: _first(call)(t).sum())(x),
    "vjp": lambda call, x: func.vjp(_first(call), x)[1](torch.ones_like(x)),
    "jvp": lambda call, x: func.jvp(_first(call), (x,), (torch.ones_like(x),)),
    "dual": dual,
    "jacrev": lambda call, x: func.jacrev(_first(call))(x),
    "jacfwd": lambda call, x: func.jacfwd(_first(call))(x),
    "hessian": lambda call, x: func.hessian(lambda t: _first(call)(t).sum())(x),
    "vmap_grad": lambda call, x: func.vmap(func.grad(lambda t: _first(call)(t).sum()))(
        torch.stack([x, x * 2])
    ),
    "functionalize": lambda call, x: func.functionalize(_first(call))(x),
    "checkpoint": lambda call, x: checkpoint(call, x, use_reentrant=False),
    "reentrant": lambda call, x: checkpoint(call, x, use_reentrant=True),
    "thread": lambda call, x: in_a_thread(lambda: call(x)),
    "function": lambda call, x: _Around.apply(x, call),
    "jacobian": lambda call, x: torch.autograd.functional.jacobian(_first(call), x),
    "vectorised": lambda call, x: torch.autograd.functional.jacobian(
        _first(call), x, vectorize=True
    ),
}

#: Of these and of a program's steps: what runs within a level of functorch's, what within one of
#: forward AD's, what for several inputs at once; and what runs twice.
_LEVELS = {
    "vmap",
    "grad",
    "vjp",
    "jvp",
    "jacrev",
    "jacfwd",
    "hessian",
    "vmap_grad",
    "functionalize",
}
_LEVELS |= {"grad_and_value", "grad_grad", "maml"}
_FORWARDS = {"jvp", "jacfwd", "hessian", "dual"}
_BATCHES = {"vmap", "vmap_grad", "jacrev", "jacfwd", "hessian", "vectorised"}
_CHECKPOINTS = {"checkpoint", "reentrant"}
#: Contexts that are modes of the dispatcher, and those that set hooks of saved tensors.
_DISPATCH_MODES = {"ops", "saved_written"}
_HOOKS = {"copied", "save_on_cpu", "saved_written"}

# --- backwards ------------------------------------------------------------------------------------


def _loss(results: Sequence[Tensor]) -> Tensor:
    """A number in which each element of each result has a weight of its own."""
    ends = [result for result in results if result.requires_grad]
    steps = [torch.arange(end.numel(), dtype=torch.float64, device=end.device) for end in ends]
    pairs = zip(ends, steps, strict=True)
    return sum(((end.double() * (1 + s.sin()).view(end.shape)).sum() for end, s in pairs))  # type: ignore[return-value]


def _batched(results: list[Tensor], leaves: list[Tensor]) -> Any:
    end = next(result for result in results if result.requires_grad)
    given = rnd(2, *end.shape, seed=5).to(end.dtype)
    rows = torch.autograd.grad(end, leaves, given, is_grads_batched=True, allow_unused=True)
    return [row if row is None else row.contiguous() for row in rows]  # vmap's own layouts


def _batched_later(results: list[Tensor], leaves: list[Tensor]) -> Any:
    torch.autograd.grad(_loss(results), leaves, allow_unused=True, retain_graph=True)
    return _batched(results, leaves)


def _retained(results: list[Tensor], leaves: list[Tensor]) -> None:
    loss = _loss(results)
    loss.backward(retain_graph=True)
    loss.backward()


def _penalty(results: list[Tensor], leaves: list[Tensor]) -> Any:
    """A gradient of a gradient. The loss is curved, without which AOTAutograd may drop it."""
    loss = _loss([result.square() for result in results if result.is_floating_point()])
    grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    again = [grad for grad in grads if grad is not None and grad.requires_grad]
    return torch.autograd.grad(_loss(again), leaves, allow_unused=True) if again else None


def _unused_graph(results: list[Tensor], leaves: list[Tensor]) -> Any:
    """Gradients that could be differentiated, and aren't."""
    grads = torch.autograd.grad(_loss(results), leaves, create_graph=True, allow_unused=True)
    return [grad if grad is None else grad.detach() for grad in grads]


def _hooked(results: list[Tensor], leaves: list[Tensor]) -> Any:
    seen: list[Tensor] = []
    if len(results) == 1:  # what others are computed from is another tensor to a compiled graph
        results[0].register_hook(lambda grad: grad * 2)
    # AOTAutograd calls those of a leaf without a gradient, too.
    leaves[0].register_hook(lambda grad: None if grad is None else seen.append(grad.clone()))
    handle = leaves[0].register_post_accumulate_grad_hook(
        lambda leaf: None if leaf.grad is None else seen.append(leaf.grad + 1)
    )
    _loss(results).backward()
    handle.remove()
    return seen


BACKWARDS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "once": lambda results, leaves: _loss(results).backward(),
    "batched": _batched,
    "batched_later": _batched_later,
    "retained": _retained,
    "penalty": _penalty,
    "unused_graph": _unused_graph,
    "hooked": _hooked,
    "thread": lambda results, leaves: in_a_thread(lambda: _loss(results).backward()),
}

#: What an input is to autograd: the input and the leaves behind it.
INPUTS: dict[str, Callable[[Tensor], tuple[Tensor, list[Tensor]]]] = {
    "leaf": lambda x: (x.requires_grad_(), [x]),
    "view": lambda x: _view_of(torch.cat([x, x]).requires_grad_()),
    "computed": lambda x: _computed_from(x.requires_grad_()),
    "constant": lambda x: (x, []),
    "turned": lambda x: (x.mT.contiguous().mT, []),
    "inference": lambda x: (_made_in_inference_mode(x), []),
}


def _view_of(base: Tensor) -> tuple[Tensor, list[Tensor]]:
    return base[1 : 1 + ROWS], [base]


def _computed_from(leaf: Tensor) -> tuple[Tensor, list[Tensor]]:
    return leaf.sin(), [leaf]


def _made_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 1


# --- calls at random ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """How a program is called.

    :ivar around: contexts around the call, the outermost first.
    :ivar backward: what follows the call; "" for nothing.
    :ivar around_backward: contexts around that.
    :ivar inside: the backward happens within ``around`` as well.
    """

    around: tuple[str, ...] = ()
    drive: str = "plain"
    input: str = "leaf"
    backward: str = ""
    around_backward: tuple[str, ...] = ()
    inside: bool = False

    @property
    def is_skipped(self) -> bool:
        """Whether Dynamo gives up a function for good that it first meets here."""
        return self.drive in _LEVELS or not _DISPATCH_MODES.isdisjoint(self.around)

    @contextmanager
    def entered(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """The contexts of these names; what they are as."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(CONTEXTS[name]()) for name in names]


@dataclass(frozen=True)
class Case:
    """A program, and the scenes that its calls are made in by turns.

    :ivar training: weights have gradients.
    :ivar exact: nothing is to be rounded to bfloat16, whatever autocast is on.
    """

    program: Program
    scenes: tuple[Scene, ...]
    training: bool = True
    exact: bool = False

    @property
    def rounds_to_bfloat16(self) -> bool:
        """Whether anything may be computed in bfloat16, by steps or by what is around them."""
        if self.exact:
            return False
        names = set(self.program.names)
        for scene in self.scenes:
            names.update(scene.around_backward)
            switches = [name for name in scene.around if name.startswith("autocast")]
            names.update(switches[-1:])  # the innermost holds
        return bool(names & {"autocast", "autocast_uncached", "bfloat16"})


def random_case(seed: int) -> Case:
    """The same one for the same seed."""
    draw = random.Random(seed)
    program = Program(
        _steps(draw, draw.randint(1, 4), depth=2, pure=False),
        draw.choice(list(RETURNS)) if draw.random() < 0.5 else "result",
        draw.random() < 0.12,
    )
    scenes = [_scene(draw, program) for _ in range(draw.choice([1, 1, 2]))]
    scenes.sort(key=lambda scene: scene.is_skipped)
    if scenes[0].is_skipped or draw.random() < 0.3:
        scenes.insert(0, Scene(input=scenes[0].input, backward="once"))
    training = draw.random() < 0.7 and not any(scene.drive == "dual" for scene in scenes)
    return Case(program, tuple(scenes), training)


def _steps(draw: random.Random, count: int, depth: int, pure: bool) -> tuple[Step, ...]:
    found: list[Step] = []
    for _ in range(count):
        if depth and draw.random() < 0.45:
            name = draw.choice(NESTED if pure else list(TRANSFORMS))
            deeper = 0 if name == "checkpoint" else depth - 1  # functorch takes none of its hooks
            inner = _steps(draw, draw.randint(1, 2), deeper, pure or name not in TRANSPARENT)
            found.append((name, inner))
        else:
            found.append((draw.choice([*PURE] if pure else [*PURE, *IMPURE, *IMPURE]), ()))
    return tuple(found)


def _scene(draw: random.Random, program: Program) -> Scene:
    drives, contexts = _fitting(program)
    drive = draw.choice(sorted(drives)) if draw.random() < 0.4 else "plain"
    if drive in _LEVELS:
        contexts -= _HOOKS
    if drive in _FORWARDS:
        contexts -= {"dual"}
    inputs = ["leaf", "leaf", "leaf", "view", "computed", "constant", "turned", "inference"]
    if program.writes:
        inputs = ["computed", "constant", "turned"]
    if drive == "dual":
        inputs = ["constant", "turned"]
    again = drive in _CHECKPOINTS or "checkpoint" in program.names
    more = 0 if again else draw.choice([0, 0, 0, 1, 2])
    return Scene(
        around=tuple(draw.sample(sorted(contexts), draw.choice([0, 1, 1, 2, 3]))),
        drive=drive,
        input=draw.choice(inputs),
        backward=draw.choice([*BACKWARDS, *["once"] * 3, ""]),
        around_backward=tuple(draw.sample(AROUND_BACKWARDS, more)),
        inside=again or draw.random() < 0.5,
    )


def _fitting(program: Program) -> tuple[set[str], set[str]]:
    """Ways to call, and contexts, that a program goes with.

    Left out is what eager refuses, as hooks of saved tensors in functorch's levels, and what torch
    has other rules for than eager, whatever compiles: a checkpoint computes again what the call did
    before, writes included, and in the same state; forward AD doesn't go with AOTAutograd's
    training graphs, nor vmap with its ``cond``.
    """
    drives, contexts = set(DRIVES), set(CONTEXTS)
    names = program.names
    if program.writes or "state" in names:
        drives -= _CHECKPOINTS
    if names & {"cond", "cubed", "tripled", "checkpoint"}:
        drives -= _LEVELS | _FORWARDS | {"vectorised"}
    if names & {"dropout", "noise", "rand"}:
        drives -= _BATCHES
    if names & _LEVELS:
        contexts -= _HOOKS
        drives -= {"checkpoint"}
    if names & _FORWARDS:
        contexts -= {"dual"}
        drives -= _FORWARDS
    return drives, contexts
