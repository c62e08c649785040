"""What a conformance program is, and how it is run and watched.

A program is data: something to call, arguments for one or more calls, and what happens between
them. :func:`observe` runs it and notes all that a caller could notice: results with their layout,
what became of the inputs, what shares storage with what, gradients, buffers, the generator. The
same function watches eager, the compiled code and the float64 reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

#: Makes the arguments of one call, equal ones each time.
Arguments = Callable[[], tuple[Any, ...]]
Wrap = Callable[[Any], Callable[..., Any]]

_SEED = 1234


@dataclass(frozen=True)
class Program:
    """Something small to compile, and how it is used.

    :ivar name: its family, then what is special about it: ``pooling_ceil_mode``.
    :ivar target: makes the function or module. Modules draw weights from the seed that holds.
    :ivar calls: makes the arguments, one maker for each call.
    :ivar training: it runs with autograd, and gradients are compared.
    :ivar dynamic: compiled with ``dynamic=True``.
    :ivar reference: it can be repeated in float64. If not, eager itself is the reference: random
        numbers differ by dtype, and a cast would separate inputs that overlap.
    :ivar instances: so many targets are made and compiled, and called in turn.
    :ivar between: called after each call but the last with the target, the call's result and its
        number. It changes weights, or what was returned.
    :ivar source: where it is written, ``file:line``: of its target where it isn't given.
    """

    name: str
    target: Callable[[], Any]
    calls: Sequence[Arguments]
    training: bool = False
    dynamic: bool = False
    reference: bool = True
    instances: int = 1
    between: Callable[[Any, Any, int], None] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.source or _place(self.target, *self.calls))

    def inputs(self) -> list[str]:
        """What each call is given, in words: dtypes, shapes, strides, and the seed that holds."""
        return [
            f"call {number} (seed {_SEED + number}): {', '.join(map(_described, make()))}"
            for number, make in enumerate(self.calls)
        ]


def _described(value: Any) -> str:
    """``float32[3, 5] strides (5, 1)``."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        sizes = ", ".join(map(str, value.shape))
        return f"{kind}[{sizes}] strides {tuple(value.stride())}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_described, value))})"
    return repr(value)


def _place(*candidates: Any) -> str:
    """``file:line`` of the first of some functions that is written in Python."""
    codes = (getattr(candidate, "__code__", None) for candidate in candidates)
    code = next((code for code in codes if code is not None), None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class Seen:
    """One tensor as a caller sees it. ``values`` is a copy."""

    values: torch.Tensor
    strides: tuple[int, ...]
    requires_grad: bool


@dataclass
class Observations:
    """All that was noticed, in order. Labels such as ``call 1: output 0`` name each in messages.

    :ivar tensors: label → tensor.
    :ivar facts: label → what has to be equal to eager's.
    """

    tensors: dict[str, Seen] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


# --- writing programs -----------------------------------------------------------------------------


def function(name: str, fn: Callable[..., Any], *calls: Arguments, **options: Any) -> Program:
    """A program that calls a function."""
    return Program(name, lambda: fn, calls, source=_place(fn, *calls), **options)


def module(
    name: str, make: Callable[[], torch.nn.Module], *calls: Arguments, **options: Any
) -> Program:
    """A program that calls a module; in evaluation mode unless it trains."""
    training = options.get("training", False)
    source = _place(make, *calls)
    return Program(name, lambda: make().train(training), calls, source=source, **options)


def trained(programs: Sequence[Program]) -> Iterator[Program]:
    """The same programs with gradients."""
    for program in programs:
        options = {key: value for key, value in vars(program).items() if key != "name"}
        make = program.target
        yield Program(
            **{
                **options,
                "name": f"training_{program.name}",
                "training": True,
                "target": lambda make=make: _in_training(make()),
            }
        )


def _in_training(target: Any) -> Any:
    return target.train() if isinstance(target, torch.nn.Module) else target


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that depend on shape and seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*shape: int, low: int = -9, high: int = 10, seed: int = 0) -> torch.Tensor:
    """Integers from ``low`` to ``high - 1``."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def flags(*shape: int, seed: int = 0) -> torch.Tensor:
    """Booleans."""
    return ints(*shape, low=0, high=2, seed=seed).bool()


NAN, INF = float("nan"), float("inf")
#: What compilers like to forget.
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 1e-40, 3e38)


def special(*shape: int) -> torch.Tensor:
    """The special values over and over, in a tensor of this shape."""
    flat = torch.tensor(SPECIAL).repeat(-(-torch.Size(shape).numel() // len(SPECIAL)))
    return flat[: torch.Size(shape).numel()].reshape(shape)


# --- running them ---------------------------------------------------------------------------------


def observe(program: Program, wrap: Wrap, double: bool = False) -> Observations:
    """Run all calls of a program.

    :param wrap: what becomes of each target before it is called, such as ``torch.compile``.
    :param double: cast weights and arguments to float64 first.
    """
    seen = Observations()
    with torch.random.fork_rng(devices=()), torch.set_grad_enabled(program.training):
        torch.manual_seed(_SEED)
        targets = [program.target() for _ in range(program.instances)]
        if double:
            targets = [_doubled_target(target) for target in targets]
        wrapped = [wrap(target) for target in targets]
        results = []
        for number, make in enumerate(program.calls):
            turn = number % program.instances
            args = tuple(_argument(value, program.training, double) for value in make())
            results.append(_observe_call(seen, number, targets[turn], wrapped[turn], args))
            if program.between is not None and number + 1 < len(program.calls):
                program.between(targets[turn], results[-1], number)
        for number, result in enumerate(results[:-1]):  # a later call may have overwritten them
            for i, output in enumerate(tree_leaves(result)):
                _note(seen, f"call {number}: output {i} after the last call", output)
    return seen


def _doubled_target(target: Any) -> Any:
    """A module in float64; of functions the arguments decide."""
    return copy.deepcopy(target).double() if isinstance(target, torch.nn.Module) else target


def _argument(value: Any, training: bool, double: bool) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        leaf = leaf.detach()
        return (leaf.double() if double else leaf).requires_grad_(training)

    return tree_map(one, value)


def _observe_call(
    seen: Observations, number: int, target: Any, wrapped: Callable[..., Any], args: Any
) -> Any:
    """One call, and its backward if there is one. Returns the call's result."""
    call = f"call {number}"
    torch.manual_seed(_SEED + number)
    result = wrapped(*args)
    outputs, structure = tree_flatten(result)
    inputs = tree_leaves(args)
    seen.facts[f"{call}: structure"] = str(structure)
    seen.facts[f"{call}: sharing"] = _sharing(outputs, inputs)
    for i, output in enumerate(outputs):
        _note(seen, f"{call}: output {i}", output)
    for i, value in enumerate(inputs):
        _note(seen, f"{call}: input {i} afterwards", value)
    _backward(outputs)
    for i, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            _note(seen, f"{call}: gradient of input {i}", value.grad)
    if isinstance(target, torch.nn.Module):
        for name, parameter in target.named_parameters():
            if parameter.grad is not None:
                _note(seen, f"{call}: gradient of {name}", parameter.grad)
        for name, buffer in target.named_buffers():
            _note(seen, f"{call}: buffer {name}", buffer)
    seen.facts[f"{call}: next random number"] = float(torch.rand(()))
    return result


def _backward(outputs: Sequence[Any]) -> None:
    """The backward of all outputs at once, with gradients that are no constants."""
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if roots:
        gradients = [rnd(*o.shape, seed=99 + i).to(o.dtype) for i, o in enumerate(roots)]
        torch.autograd.backward(roots, gradients)


def _note(seen: Observations, label: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        seen.tensors[label] = Seen(copied, value.stride(), value.requires_grad)
        # Also where one side has a tensor and the other hasn't.
        seen.facts[label] = "a tensor"
    else:
        seen.facts[label] = (type(value).__name__, value)


def _sharing(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
    """Which outputs are, or share storage with, an input or an earlier output."""
    named = [(f"input {i}", value) for i, value in enumerate(inputs)]
    found = []
    for i, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        for name, other in named:
            if output is other:
                found.append(f"output {i} is {name}")
            elif isinstance(other, torch.Tensor) and output.numel() and other.numel():
                if output.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
                    offset = output.storage_offset() - other.storage_offset()
                    found.append(f"output {i} shares storage with {name} (offset {offset})")
        named.append((f"output {i}", output))
    return found
