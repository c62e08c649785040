"""Single ops through the plugin ``tvm``: each is declined with a reason or right.

Right means: eager's dtype, shape and strides, and values within torch's default tolerance of what
eager computes in float64.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from tests.support.tvm_cases import CASES, Case

tvm_plugin = pytest.importorskip("fuseboard_tvm")
pytest.importorskip("tvm", reason="needs the extra tvm")

#: Cases compiled together: a module takes a while however small it is.
BATCH = 48


def graph_of(call: Callable[..., Any], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """An ATen graph with a flat tuple of outputs."""

    def flat(*args: torch.Tensor) -> tuple[Any, ...]:
        found = call(*args)
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    with torch.no_grad():
        graph = make_fx(flat, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


@functools.cache
def graph_of_case(case: Case) -> torch.fx.GraphModule:
    return graph_of(case.call, case.inputs())


def declines(graph: torch.fx.GraphModule) -> list[str]:
    answers = tvm_plugin.fuseboard_claim(graph)
    return [answer.reason for answer in answers if isinstance(answer, fuseboard.Decline)]


def lowered(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    region = fuseboard.Region("test.region0", "tvm", "inference", graph, "test")
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return tvm_plugin.fuseboard_lower(region, inputs).call


def in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def check(case: Case, got: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Values against float64, all else against eager."""
    with torch.no_grad():
        eager = case.call(*inputs)
        exact = case.call(*map(in_double, inputs))
    eager = list(eager) if isinstance(eager, list | tuple) else [eager]
    exact = list(exact) if isinstance(exact, list | tuple) else [exact]
    assert len(got) == len(eager), case.name
    for mine, its, true in zip(got, eager, exact, strict=True):
        assert mine.dtype == its.dtype, case.name
        assert mine.shape == its.shape, case.name
        steps = [
            (a, b)
            for a, b, size in zip(mine.stride(), its.stride(), its.shape, strict=True)
            if size > 1
        ]
        assert all(a == b for a, b in steps), f"{case.name}: {mine.stride()}, {its.stride()}"
        by_value = its.is_floating_point() and not case.as_eager
        wanted = true.to(its.dtype) if by_value else its
        torch.testing.assert_close(
            mine, wanted, equal_nan=True, msg=lambda text: f"{case.name}: {text}"
        )


def test_there_are_enough_cases():
    """The sweep stays as wide as the README says."""
    assert len(CASES) >= 250
    assert len({case.name for case in CASES}) == len(CASES)


def batches() -> list[list[Case]]:
    return [CASES[start : start + BATCH] for start in range(0, len(CASES), BATCH)]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: f"{batch[0].name}...")
@pytest.mark.thorough
def test_each_op_is_declined_or_right(batch):
    """No op is silently wrong."""
    taken, inputs, places = [], [], []
    for case in batch:
        own = case.inputs()
        reasons = declines(graph_of_case(case))
        assert all(reasons), f"{case.name} is declined without a reason"
        assert bool(reasons) == case.declined, f"{case.name}: {reasons}"
        if not reasons:
            taken.append(case)
            places.append((len(inputs), len(inputs) + len(own)))
            inputs.extend(own)

    def everything(*args: torch.Tensor) -> list[Any]:
        results = []
        for case, (start, end) in zip(taken, places, strict=True):
            found = case.call(*args[start:end])
            results.extend(found if isinstance(found, list | tuple) else [found])
        return results

    if not taken:
        return
    got = list(lowered(graph_of(everything, inputs))(list(inputs)))
    for case, (start, end) in zip(taken, places, strict=True):
        with torch.no_grad():
            found = case.call(*inputs[start:end])
        count = len(found) if isinstance(found, list | tuple) else 1
        check(case, got[:count], inputs[start:end])
        del got[:count]


#: Not compared by value: what is empty may hold anything, and one is a step of a decomposition.
UNCOMPARED = {"empty.memory_format", "empty_like", "new_empty", "_native_batch_norm_legit"}


def short(target: Any) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")


def tables() -> set[str]:
    from fuseboard_tvm import _decompose
    from fuseboard_tvm.ops import OPS

    return {short(target) for target in (*OPS, *_decompose.table())}


@pytest.mark.thorough
def test_each_op_is_in_a_case():
    """Nothing is claimed that isn't compared with float64 above."""
    from fuseboard_tvm import _decompose

    reached: set[str] = set()
    for case in CASES:
        if not case.declined:
            graph = graph_of_case(case)
            for one in (graph, fuseboard.decompose(graph, _decompose.table())):
                nodes = one.graph.nodes
                reached.update(short(node.target) for node in nodes if node.op == "call_function")
    assert tables() - reached - UNCOMPARED == set()


def test_the_readme_lists_the_ops():
    """The tables for people are those in the code."""
    text = Path(__file__).parents[2].joinpath("plugins", "tvm", "README.md").read_text()
    section = text[text.index("## Ops") : text.index("## Limits")]
    listed = set(re.sub(r"(?s)^.*?```|```.*?```|```.*$", " ", section).split())
    assert listed == tables() - {"_native_batch_norm_legit"}
