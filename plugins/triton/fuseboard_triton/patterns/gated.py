"""SwiGLU and GeGLU, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_triton.kernels import gated
from fuseboard_triton.patterns.nodes import Match, equal_shapes, is_plain, meta

aten = torch.ops.aten

#: Name of the kernel's activation → the activation and its gradient.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, str]]] = {
    "silu": (aten.silu.default, aten.silu_backward.default, {}),
    "gelu": (aten.gelu.default, aten.gelu_backward.default, {"approximate": "none"}),
    "gelu_tanh": (aten.gelu.default, aten.gelu_backward.default, {"approximate": "tanh"}),
}


def _forward(kind: str) -> fuseboard.Pattern:
    act, _, how = _ACTIVATIONS[kind]

    def search(gate: Any, up: Any) -> Any:
        return act(gate, **how) * up

    return _pattern(f"gated {kind}", search, 2)


def _backward(kind: str) -> fuseboard.Pattern:
    act, act_backward, how = _ACTIVATIONS[kind]

    def search(grad: Any, gate: Any, up: Any) -> Any:
        return act_backward(grad * up, gate, **how), grad * act(gate, **how)

    return _pattern(f"gated {kind} backward", search, 3)


def _pattern(name: str, search: Callable[..., Any], inputs: int) -> fuseboard.Pattern:
    examples = [torch.empty(2, 3)] * inputs
    return fuseboard.Pattern(name, search, examples, check=_fits, training=False)


def _fits(match: fuseboard.PatternMatch) -> bool:
    """Whether all are of one shape and dtype, and what is written, and the gradient, contiguous."""
    gate, nodes = match.arguments["gate"], [*match.arguments.values(), *match.results]
    alike = all(equal_shapes(gate, one) and meta(gate).dtype == meta(one).dtype for one in nodes)
    dense = [one for name, one in match.arguments.items() if name == "grad"]
    return alike and is_plain(*dense, *match.results) and meta(gate).dim() > 0


PATTERNS = fuseboard.Patterns(
    [make(kind) for make in (_backward, _forward) for kind in _ACTIVATIONS],
    Path(__file__).with_name("traced_gated"),
)


def find(graph: GraphModule) -> list[Match]:
    """Each place where a kernel fits."""
    found = []
    for match in PATTERNS.find(graph, "inference", {}):
        kind, _, backward = match.pattern.removeprefix("gated ").partition(" ")
        kernel = gated.gated_backward if backward else _gated_kernel
        args = (*match.arguments.values(), kind)
        outputs = dict(enumerate(match.results))
        found.append(Match(match.pattern, kernel, args, match.nodes, outputs))
    return found


def _gated_kernel(*args: Any) -> tuple[torch.Tensor, ...]:
    return (gated.gated(*args),)
