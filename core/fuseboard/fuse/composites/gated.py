"""Gated products: ``act(gate) * up``, SwiGLU with silu, GeGLU with gelu; and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseboard.fuse.composites.definition import TRACED, Way, same_shape
from fuseboard.fuse.patterns.pattern import PatternMatch
from fuseboard.fuse.patterns.rewriting import Patterns

aten = torch.ops.aten

_ROWS = torch.empty(2, 3)


def _are_of_one_shape(match: PatternMatch) -> bool:
    gate, up = match.arguments["gate"], match.arguments["up"]
    return same_shape(gate, up)


def _tanh_gelu(x: Any) -> Any:
    return aten.gelu.default(x, approximate="tanh")


def _new_gelu(x: Any) -> Any:
    """As GPT-2's authors wrote it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _exact_gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


#: Name, form, activation, what the form fixes.
_ACTIVATIONS: list[tuple[str, str, Callable[..., Any], dict[str, Any]]] = [
    ("swiglu", "silu", aten.silu.default, {}),
    ("swiglu", "sigmoid", lambda x: x * torch.sigmoid(x), {}),
    ("geglu", "gelu", aten.gelu.default, {"approximate": "none"}),
    ("geglu", "erf", _exact_gelu, {"approximate": "none"}),
    ("geglu", "gelu tanh", _tanh_gelu, {"approximate": "tanh"}),
    ("geglu", "tanh", _new_gelu, {"approximate": "tanh"}),
]

#: Name, form, activation and its gradient.
_GRADIENTS: list[Any] = [
    ("swiglu", "silu", aten.silu.default, aten.silu_backward.default, {}),
    ("geglu", "gelu", aten.gelu.default, aten.gelu_backward.default, {"approximate": "none"}),
    ("geglu", "gelu tanh", aten.gelu.default, aten.gelu_backward.default, {"approximate": "tanh"}),
]


def _ways() -> Iterator[Way]:
    """Gradients come first: half of one is a product with the activation as well."""
    for name, form, act, slope, fixed in _GRADIENTS:

        def backward(
            grad: Any, gate: Any, up: Any, act: Any = act, slope: Any = slope, how: Any = fixed
        ) -> Any:
            return slope(grad * up, gate, **how), grad * act(gate, **how)

        results = ("grad_gate", "grad_up")
        name = f"{name}_backward"
        yield Way(name, form, backward, (_ROWS,) * 3, results, fixed, check=_are_of_one_shape)
    for name, form, act, fixed in _ACTIVATIONS:

        def forward(gate: Any, up: Any, act: Any = act) -> Any:
            return act(gate) * up

        yield Way(name, form, forward, (_ROWS,) * 2, ("y",), fixed, check=_are_of_one_shape)


WAYS = tuple(_ways())
PATTERNS = Patterns([way.as_pattern() for way in WAYS], TRACED / "gated")
