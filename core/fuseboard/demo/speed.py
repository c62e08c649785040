"""Measure several ways to run one function against each other, in turn."""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

#: Rounds: at least, at most, and no further one after so many seconds.
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 8, 40, 12.0


@dataclass(frozen=True)
class Speed:
    """What one arm took.

    :ivar call_ms: the median.
    :ivar against: other arm → this arm's speed over that one's: quartiles of the rounds' ratios.
    """

    call_ms: float
    against: dict[str, tuple[float, float, float]]
    rounds: int


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


def race(
    arms: Mapping[str, Callable[[], Any]], done: Callable[[int, int], None] = lambda now, of: None
) -> dict[str, Speed]:
    """Time the arms round by round, in random order within a round, without garbage collection.

    :param done: told after each round which one it was, and of how many at most.
    """
    for arm in arms.values():
        for _ in range(3):
            arm()
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin = time.perf_counter()
        for number in range(MAX_ROUNDS):
            for name in order.sample(list(arms), len(arms)):
                start = time.perf_counter()
                arms[name]()
                times[name].append(time.perf_counter() - start)
            done(number + 1, MAX_ROUNDS)
            if number + 1 >= MIN_ROUNDS and time.perf_counter() - begin > SECONDS:
                break
    finally:
        if collecting:
            gc.enable()
    return {
        name: Speed(
            call_ms=statistics.median(own) * 1e3,
            against={
                other: _quartiles([o / s for o, s in zip(theirs, own, strict=True)])
                for other, theirs in times.items()
                if other != name
            },
            rounds=len(own),
        )
        for name, own in times.items()
    }


def _quartiles(ratios: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
