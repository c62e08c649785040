"""Chains of pointwise ops, run by NumPy: a plugin to copy.

Three hooks make a backend. This module is imported whenever plugins are looked for, so it imports
nothing slow; the engine is imported by ``_lower``, when a region is there to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard import (
    BackendInfo,
    Claim,
    Decline,
    Engine,
    LoweredRegion,
    Region,
    claim_nodes,
    hookimpl,
    why_unavailable,
)

ENGINE = Engine("NumPy", at_least="2.0")
DTYPES = frozenset({torch.float32, torch.float64})

aten = torch.ops.aten
#: ATen op → the NumPy function that computes the same. NaN and signed zeros included: that is why
#: relu and sign aren't here.
FUNCTIONS = {
    aten.abs.default: "absolute",
    aten.add.Tensor: "add",
    aten.cos.default: "cos",
    aten.div.Tensor: "divide",
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.mul.Tensor: "multiply",
    aten.neg.default: "negative",
    aten.sin.default: "sin",
    aten.sqrt.default: "sqrt",
    aten.sub.Tensor: "subtract",
    aten.tanh.default: "tanh",
}


@hookimpl
def fuseboard_backend() -> BackendInfo:
    """What it runs on, what it may be given, whether its engine is installed.

    What isn't declared here (training, dynamic shapes, other devices and dtypes) the board keeps
    away from the other hooks.
    """
    reason = why_unavailable(ENGINE, install="pip install 'numpy>=2'")
    return BackendInfo(
        name="mychip",
        device_types=frozenset({"cpu"}),
        dtypes=DTYPES,
        compiles_quickly=True,
        available=not reason,
        reason=reason,
        fingerprint=f"numpy {ENGINE.version}",
    )


@hookimpl
def fuseboard_claim(graph: GraphModule) -> list[Claim | Decline]:
    """Claim what NumPy has a function for; decline the rest with reasons that people can read.

    ``native`` says which of the claimed ops the backend runs *better than eager*. Here that is
    none: so installing this plugin slows nobody down, and it runs only for who names it in
    ``backends`` before a compiler. Yours is better at something; say at what.
    """
    return claim_nodes(graph, why_not, native=lambda node: False)


def why_not(node: Node) -> str | None:
    """Why NumPy shouldn't run a node; None where it can."""
    if node.target not in FUNCTIONS:
        return f"NumPy has no function that is exactly {node.target}"
    if node.kwargs:
        return f"keyword arguments aren't supported: {', '.join(sorted(node.kwargs))}"
    dtype = node.meta["val"].dtype
    if dtype not in DTYPES:
        return f"{dtype}: only float32 and float64 are supported"
    for argument in node.args:
        if isinstance(argument, Node):
            value = argument.meta["val"]
            if not isinstance(value, torch.Tensor):
                return "a size as an argument isn't supported"
            if value.dtype != dtype:
                return "mixed dtypes: torch and NumPy don't promote alike"
        elif not isinstance(argument, int | float):
            return f"an argument of type {type(argument).__name__} isn't supported"
    return None


@hookimpl
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """Turn a region of claimed nodes into something to call."""
    from fuseboard_mychip._lower import lower_region  # NumPy loads here, on first use

    return lower_region(region)
