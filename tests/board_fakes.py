"""Boards and plugins for tests: nothing is installed, nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, symbolic_trace

import fuseboard
from fuseboard.board import Board


@dataclass
class FakeDistribution:
    name: str
    version: str = "1.2"


@dataclass
class FakeEntryPoint:
    """What ``importlib.metadata`` would find; ``load`` returns the plugin or raises it."""

    name: str
    plugin: Any
    dist: FakeDistribution = field(default_factory=lambda: FakeDistribution("fake-dist"))
    loads: int = 0

    @property
    def value(self) -> str:
        return f"fake_{self.name}"

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin() if isinstance(self.plugin, type) else self.plugin


def a_board(*points: FakeEntryPoint) -> Board:
    """A board on which exactly these plugins, and the built-in ones, are installed."""
    return Board(entry_points=lambda: points)


def plugin(**hooks: Callable[..., Any]) -> Any:
    """A plugin object with these functions as its hooks, such as ``claim=lambda graph: []``."""
    marked = {f"fuseboard_{name}": fuseboard.hookimpl(hook) for name, hook in hooks.items()}
    return Namespace(**marked)


class Namespace(SimpleNamespace):
    """A namespace that can be hashed, as a module can."""

    __hash__ = object.__hash__


def backend(name: str, hooks: dict[str, Callable[..., Any]] | None = None, **info: Any) -> Any:
    """A plugin with a backend of this name, and further hooks."""
    answer = fuseboard.BackendInfo(name=name, **info)
    return plugin(backend=lambda: answer, **(hooks or {}))


def a_graph() -> GraphModule:
    """``relu(x) + 1``: nodes x, relu, add, output."""
    return symbolic_trace(lambda x: torch.relu(x) + 1)
