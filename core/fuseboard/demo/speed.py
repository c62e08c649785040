"""The ways to run one function that the demo measures against each other."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Dynamo keeps compiled code with the code object: two arms that share one would look through
    each other's guards in every call.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name)
    return FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )


def why_no_inductor() -> str | None:
    """Why Inductor can't compile for CPU here, or None if it can."""
    # torch/_inductor/config.py, cpp.cxx
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"it needs a C++ compiler, and there is no {compiler!r} on the path"
    return None


def inductor(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """The function compiled by Inductor alone, and a list that gets an entry for each graph."""
    lower = torch._dynamo.lookup_backend("inductor")
    compiled: list[str] = []

    def counting(graph: Any, inputs: Any) -> Any:
        compiled.append(f"graph of {len(graph.graph.nodes)} nodes")
        return lower(graph, inputs)

    return torch.compile(own_code(function, "embed_inductor"), backend=counting), compiled
