"""What engines compute for many ops is right by the rule: none is turned away for its roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseboard.board import board
from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.values import judge
from tests.support.references import Function, op_cases, traced

pytestmark = pytest.mark.slow

ENGINES = ("inductor", "mkldnn", "onnxruntime", "tvm")


def _together(dtype: torch.dtype) -> tuple[list[str], Function, list[torch.Tensor]]:
    """All the ops in one function, so that compiling takes one go."""
    cases = list(op_cases(dtype))
    inputs = [value for _, _, given in cases for value in given]

    def function(*values: torch.Tensor) -> list[torch.Tensor]:
        results, start = [], 0
        for _, op, given in cases:
            results.append(op(*values[start : start + len(given)]))
            start += len(given)
        return results

    return [name for name, _, _ in cases], function, inputs


def _of_engine(engine: str, function: Function) -> Any:
    if engine == "inductor":
        return torch.compile(function, backend="inductor")
    (state,) = (state for state in board.states() if state.name == engine)
    if state.state != "ready":
        pytest.skip(state.reason)
    options = {"backends": [engine, "eager"], "policy": "priority", "verify": "off"}
    return torch.compile(function, backend="fuseboard", options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_pass(engine: str, dtype: torch.dtype) -> None:
    """Each op of each engine passes, in each dtype that it takes."""
    names, function, inputs = _together(dtype)
    reference = make_reference(traced(function, *inputs), inputs)
    torch._dynamo.reset()
    with torch.no_grad():
        results = list(_of_engine(engine, function)(*inputs))
    refused = {}
    for number, name in enumerate(names):
        one = list(reference.eager)
        one[number] = results[number]
        verdict = judge(reference, one)
        if not verdict.ok:
            refused[name] = verdict.problem
    assert refused == {}
