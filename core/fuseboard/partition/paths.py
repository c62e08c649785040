"""Module paths and ops of nodes, as people write them: ``layers.0.mlp``, ``aten.mm.default``.

Dynamo names modules from the function that it compiles: ``L['self'].layers.0.mlp`` for a module's
forward, ``G['model'].layers.0.mlp`` for a function that uses a global. A function that it compiles
apart, after a graph break, names them from there; the compiled model is then among the callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fuseboard.module_names import module_stack, split_source, without_wrappers
from fuseboard.torch_api.frames import FrameScope
from fuseboard.torch_api.nodes import target_name

#: Nested modules from the outermost: Dynamo's names of them.
_Stack = tuple[str, ...]


class ModulePaths:
    """Which module paths each node has, seen from the model that is compiled.

    :ivar known: the paths of all modules that the compiled function can reach.
    """

    def __init__(self, scope: FrameScope) -> None:
        models = _outermost(module for value in _values(scope) for module in modules_in(value))
        names: dict[int, list[str]] = {}
        for model in models:
            for name, module in model.named_modules(remove_duplicate=False):
                names.setdefault(id(module), []).append(without_wrappers(name))
        self._prefixes = {
            root: tuple(dict.fromkeys(names[id(value)]))
            for root, value in scope.names.items()
            if isinstance(value, nn.Module)
        }
        self.known = {name for own in names.values() for name in own if name}
        self._cache: dict[_Stack, tuple[str, ...]] = {}

    def of_nodes(self, nodes: Sequence[Node]) -> dict[Node, tuple[str, ...]]:
        """For each node the paths of the modules that it was computed in, outermost first.

        A sum of gradients belongs to no module by itself; it gets those that all of its summands
        are in.
        """
        stacks: dict[Node, _Stack] = {}
        for node in nodes:
            stack = module_stack(node)
            if not stack and node.meta.get("is_gradient_acc"):
                stack = _common([stacks.get(used, ()) for used in node.all_input_nodes])
            stacks[node] = stack
        return {node: self._paths(stack) for node, stack in stacks.items()}

    def _paths(self, stack: _Stack) -> tuple[str, ...]:
        if stack not in self._cache:
            found = (path for source in stack for path in self._seen_from_models(source, stack))
            self._cache[stack] = tuple(dict.fromkeys(path for path in found if path))
        return self._cache[stack]

    def _seen_from_models(self, source: str, stack: _Stack) -> Iterator[str]:
        root, path = split_source(source)
        if root in self._prefixes:
            for prefix in self._prefixes[root]:
                yield f"{prefix}.{path}" if prefix and path else prefix or path
            return
        # A model in an attribute or a list: its own paths, and those from what holds it.
        yield path
        model = split_source(stack[0])[1]
        if path.startswith(f"{model}."):
            yield path[len(model) + 1 :]


def _common(stacks: Sequence[_Stack]) -> _Stack:
    """What all stacks begin with."""
    levels = zip(*stacks, strict=False)
    return tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def op_names(node: Node) -> tuple[str, ...]:
    """What a node's op may be called."""
    name = target_name(node)
    short = name.removeprefix("torch.ops.")
    return (name,) if short == name else (short, name)


def paths_in(graph: GraphModule, paths: ModulePaths) -> set[str]:
    """The module paths of a graph's nodes."""
    return {path for own in paths.of_nodes(list(graph.graph.nodes)).values() for path in own}


# --- which modules a function can reach ---------------------------------------------------------


def _values(scope: FrameScope) -> Iterator[Any]:
    yield from scope.names.values()
    yield from scope.callers


def modules_in(value: Any) -> Iterator[nn.Module]:
    """A value that is a module, or the modules that it holds: in attributes, items, arguments."""
    if isinstance(value, GraphModule):
        return
    if isinstance(value, nn.Module):
        yield value
        return
    if isinstance(value, partial):
        held: Any = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        held = value
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, MethodType):
        held = (value.__self__,)
    elif not isinstance(value, type | ModuleType | FunctionType) and hasattr(value, "__dict__"):
        held = vars(value).values()
    else:
        return
    for item in list(held):
        if isinstance(item, nn.Module) and not isinstance(item, GraphModule):
            yield item


def _outermost(modules: Iterator[nn.Module]) -> list[nn.Module]:
    """Those that no other one contains."""
    found = list({id(module): module for module in modules}.values())
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]
