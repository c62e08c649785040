"""Symbolic sizes: the part of :mod:`fuseboard.torch_internals` that is about them.

Read against torch 2.13: ``torch/fx/experimental/symbolic_shapes.py`` (``ShapeEnv``),
``torch/fx/experimental/sym_node.py``, ``torch/_subclasses/fake_tensor.py``.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def measures(tensor: torch.Tensor) -> list[Any]:
    """A tensor's sizes, then its strides and storage offset where it has some."""
    if tensor.layout != torch.strided:
        return list(tensor.shape)
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def symbolic_numbers(value: Any) -> list[Any]:
    """The numbers in a node's value that aren't plain: itself, or its sizes, strides, offset."""
    if isinstance(value, list | tuple):
        return [number for item in value for number in symbolic_numbers(item)]
    if isinstance(value, torch.Tensor):
        return [number for number in measures(value) if isinstance(number, NUMBERS)]
    return [value] if isinstance(value, NUMBERS) else []


def expression(number: Any) -> Any:
    """The sympy expression of a symbolic number, under what is known of it now."""
    return number.node.expr


def why_unknown(value: Any) -> str:
    """Why a value's numbers can't be told before a call; "" where sizes of the inputs give them."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for number in symbolic_numbers(value):
        if free_unbacked_symbols(number):
            return "sizes that only the data decide"
        if any(not symbol.is_integer for symbol in expression(number).free_symbols):
            return "a float that changes from call to call"
    return ""


def in_the_example(number: Any) -> Any:
    """A number's plain value in the call that is being compiled. No guard is added.

    Only for numbers of which :func:`why_unknown` knows nothing.
    """
    if not isinstance(number, NUMBERS):
        return number
    if number.node.has_hint():
        return number.node.pytype(number.node.hint)
    expr = expression(number)
    return number.node.pytype(expr.xreplace(dict(number.node.shape_env.backed_var_to_val)))


def source_name(symbol: Any, value: Any) -> str:
    """What a symbol stands for, such as ``x.size()[0]``; its own name where that isn't known.

    :param value: a symbolic number, whose ShapeEnv is asked.
    """
    env = value.node.shape_env
    by_symbol = getattr(env, "var_to_sources", None) or {}
    sources = by_symbol.get(symbol)
    if not sources:
        return str(symbol)
    name = sources[0].name
    name = name() if callable(name) else name
    return re.sub(r"L\['(\w+)'\]", r"\1", str(name))


# --- without symbols ------------------------------------------------------------------------------


def static_fake_mode() -> Any:
    """A fake mode that knows plain sizes only, and constants that aren't fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=None, static_shapes=True, allow_non_fake_inputs=True)


def static_fake(mode: Any, like: torch.Tensor) -> torch.Tensor:
    """A fake tensor with plain sizes: those of a real tensor, or of a fake one in its example."""
    sizes = [in_the_example(number) for number in like.shape]
    with mode:
        if like.layout != torch.strided:
            return torch.empty(sizes, dtype=like.dtype, device=like.device, layout=like.layout)
        strides = [in_the_example(number) for number in like.stride()]
        offset = in_the_example(like.storage_offset())
        made = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
        if offset:
            length = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
            if 0 in sizes:
                length = 0
            made = torch.empty(offset + length, dtype=like.dtype, device=like.device)
            made = made.as_strided(sizes, strides, offset)
        if like.is_conj():
            made = torch._conj(made)
        if like.is_neg():
            made = torch._neg_view(made)
        return made


@contextlib.contextmanager
def compiling_in_a_call(mode: Any) -> Iterator[None]:
    """What holds while Dynamo compiles, in the middle of a call of compiled code.

    Modes, autocast and inference mode of the caller's are off, and random numbers stay where they
    were. Inside, ``mode`` is what :func:`fuseboard.torch_internals.fake_mode_of` finds.
    """
    from torch._guards import TracingContext, tracing
    from torch.utils._python_dispatch import _disable_current_modes

    state, pythons = torch.get_rng_state(), random.getstate()
    try:
        with (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            tracing(TracingContext(mode)),
        ):
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(pythons)


def run_fake(mode: Any, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op returns for fake tensors of ``mode``."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher():
        return target(*args, **kwargs)
