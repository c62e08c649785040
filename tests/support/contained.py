"""What the tests of failures share: plugins that raise, and comparing with eager bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.values import assert_same

#: Seconds; enough for what honest plugins do in these tests, on a busy machine.
LIMIT_S = 0.5


def f(x: torch.Tensor) -> torch.Tensor:
    """What most of them compile."""
    return torch.relu(x) * 2 + 1


class Boom(Exception):
    """What the plugins here raise."""


def boom(*args: Any, **kwargs: Any) -> Any:
    raise Boom("the engine exploded")


def check(fn: Any, *args: Any, calls: int = 3, reference: Any = f) -> None:
    """Eager's answers, bit for bit."""
    with torch.no_grad():
        for _ in range(calls):
            assert_same(fn(*args), reference(*args))


def train(fn: Any, reference: Any, *args: torch.Tensor) -> None:
    """Eager's answer and gradients."""
    results = []
    for function in (fn, reference):
        own = [arg.detach().clone().requires_grad_() for arg in args]
        result = function(*own)
        result.square().sum().backward()
        results.append((result, *(arg.grad for arg in own)))
    assert_same(*results)


def on_region(wrong: Callable[[list[Any], list[Any]], Any]) -> Any:
    """A call that gives ``wrong`` the right results (a list) and the inputs."""

    def call(eager_call, region):
        def run(args):
            inputs = list(args)
            return wrong(list(eager_call(args)), inputs)

        return run

    return call
