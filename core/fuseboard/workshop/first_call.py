"""Graphs whose inputs aren't known while Dynamo compiles, as of torch's optimizer for DDP.

That cuts Dynamo's graph at the buckets of gradients, and has the parts compiled for fake inputs,
which it gives them once as well (``torch/_dynamo/backends/distributed.py``, torch 2.13). So the
life of each begins with its first real call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuseboard.forks import fork_safe_lock
from fuseboard.torch_api.tensor_classes import is_fake
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.kept_call import CannotKeep
from fuseboard.workshop.life import Life

log = logging.getLogger("fuseboard")

Run = Callable[..., Any]


def begin_with_a_call(graph: DynamoGraph) -> Run:
    """What answers the calls of a graph, real ones and those on fake tensors."""
    lock = fork_safe_lock()
    answer: Run | None = None

    def begin_once(*args: Any) -> Run:
        nonlocal answer
        with lock:
            if answer is None:
                answer = _begin(graph, args)
        return answer

    begin: Run = torch.compiler.disable(begin_once)

    def run(*args: Any) -> Any:
        if answer is not None:
            return answer(*args)
        if any(map(is_fake, args)):
            return graph.run(*args)
        return begin(*args)(*args)

    return run


def _begin(graph: DynamoGraph, inputs: tuple[Any, ...]) -> Run:
    parameters = {i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)}
    try:
        return Life(replace(graph, weights=graph.static | parameters), inputs).begin()
    except CannotKeep as error:
        log.warning("fuseboard: %s: Dynamo's own graph runs: %s", graph.frame, error)
        return graph.run
