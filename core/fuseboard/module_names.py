"""Dynamo's names, such as ``L['self'].layers.0.mlp`` of a module, as people write them.

Without torch: commands that show what is stored use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

#: Modules that only wrap others, by the name under which they hold them.
_WRAPPERS = {"_modules", "_orig_mod"}
_STEP = re.compile(r"\.(\w+)|\[['\"]?([^\]'\"]+)['\"]?\]")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")
_ROOT = re.compile(r"[LG]\['[^']*'\]")


def module_stack(node: Node) -> tuple[str, ...]:
    """The modules that a node was computed in, outermost first, by Dynamo's names.

    A backward node has those of the forward node that it is the backward of.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, Mapping):
        return ()
    return tuple(entry[0] for entry in stack.values() if isinstance(entry[0], str))


@lru_cache(maxsize=4096)
def split_source(source: str) -> tuple[str, str]:
    """Dynamo's name of a module as (the local or global that it starts at, path)."""
    match = _ROOT.match(source)
    root = match.group() if match else ""
    steps = (name or key for name, key in _STEP.findall(source[len(root) :] if root else ""))
    path = ".".join(steps) if root else source
    return root, without_wrappers(path)


def without_wrappers(path: str) -> str:
    """A module path without the steps that only lead into a wrapper."""
    return ".".join(step for step in path.split(".") if step not in _WRAPPERS)


def readable(name: str) -> str:
    """A function's name in the user's words: Dynamo names what follows a break by itself."""
    name = name.replace(".<locals>", "")
    return _RESUMED.sub(r"\1, resumed at line \2", name)
