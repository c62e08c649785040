"""The sweep behind the op table: every case is declined with a reason, or right.

Right means within ``torch.testing``'s defaults of float64 eager, with eager's dtypes and strides;
integers and booleans exactly. Cases go through the plugin's hooks, without Dynamo, so that each is
one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from tests.support import onnx_cases as cases
from tests.support.values import strides

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

import fuseboard_onnxruntime as plugin
from fuseboard_onnxruntime._ops import QUANTISED, TABLE, table

INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = plugin.fuseboard_backend().dtypes

SIZES = {"no rows": [cases.within(0, 6)], "symbolic": [cases.within(5, 7)]}
POINTWISE = frozenset(list(cases.UNARY)[: list(cases.UNARY).index("zeros_like")])


@dataclass(frozen=True)
class Result:
    """What became of a case: the ops in it, and why it was declined; "" where it ran."""

    ops: tuple[Any, ...]
    declined: str = ""


def inputs_of(name: str) -> dict[str, list[torch.Tensor]]:
    """Variant → inputs, for a case by its table and name."""
    kind, _, op = name.partition(":")
    if kind == "one":
        return {
            "transposed": [cases.within(7, 4).t()],
            "NaN and infinities": [cases.SPECIAL],
            # To ops of one element at a time sizes don't matter.
            **({} if op in POINTWISE else SIZES),
            **({"no dimensions": [cases.within()]} if op in cases.OF_A_NUMBER else {}),
        }
    if kind == "two":
        return {
            "broadcast, with gaps": [cases.floats(5, 7)[:, ::2], cases.floats(1, 4, seed=1)],
            "empty": [cases.floats(0, 7), cases.floats(1, 7, seed=1)],
            "integers": [cases.ints(5, 7), cases.ints(5, 7, seed=1, low=1)],
            "float and integer": [cases.floats(5, 7), cases.ints(5, 7, low=-3, high=0, seed=1)],
            "NaN and infinities": [cases.SPECIAL, cases.SPECIAL.flip(0, 1)],
            "booleans": [cases.flags(5, 7), cases.flags(5, 7, seed=1)],
            "symbolic": [cases.floats(5, 7), cases.floats(5, 7, seed=1)],
        }
    if kind == "integer":
        found = {
            str(dtype): [
                cases.ints(5, 7, dtype=dtype, low=0 if dtype == torch.uint8 else -9),
                cases.ints(5, 7, seed=1, dtype=dtype, low=1),
            ]
            for dtype in INTEGERS
        }
        return {**found, "empty": [cases.ints(0, 7), cases.ints(0, 7, seed=1, low=1)]}
    _, given = cases.OTHER[op]
    found = {"plain": given, "symbolic": given}
    if op in cases.LAID_OUT:
        found["transposed"] = [transposed(one) for one in given]
        found["one transposed"] = [transposed(given[0]), *given[1:]]
    return found


def transposed(value: torch.Tensor) -> torch.Tensor:
    """Equal to a value, and with its last two dimensions in another order in memory."""
    return value.mT.contiguous().mT if value.dim() > 1 else value


def function_of(name: str) -> Callable[..., Any]:
    kind, _, op = name.partition(":")
    tables = {"one": cases.UNARY, "two": cases.BINARY, "integer": cases.INTEGER}
    return tables[kind][op] if kind in tables else cases.OTHER[op][0]


NAMES = [
    f"{kind}:{op}"
    for kind, ops in (
        ("one", cases.UNARY),
        ("two", cases.BINARY),
        ("integer", cases.INTEGER),
        ("other", cases.OTHER),
    )
    for op in ops
]


def flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


@cache
def sweep(name: str) -> dict[str, Result | str]:
    """Variant → what became of it; a text says what is wrong. What eager refuses isn't there."""
    function = function_of(name)
    found: dict[str, Result | str] = {}
    for variant, inputs in inputs_of(name).items():
        try:
            expected = flat(function(*inputs))
        except (RuntimeError, IndexError, NotImplementedError):
            continue  # eager has no such case
        found[variant] = outcome(function, inputs, expected, variant == "symbolic")
    return found


def outcome(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    expected: tuple[torch.Tensor, ...],
    symbolic: bool,
) -> Result | str:
    mode = "symbolic" if symbolic else "fake"
    with torch.no_grad():
        graph = make_fx(lambda *args: flat(function(*args)), tracing_mode=mode)(*inputs)
    graph.graph.eliminate_dead_code()  # as in the graphs that AOTAutograd captures
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    ops = tuple(node.target for node in nodes)
    # Arithmetic on sizes is the board's: it isn't asked about.
    sizes = {
        node.name for node in nodes if not isinstance(node.meta["val"], torch.Tensor | tuple | list)
    }
    refused = refusals(graph, nodes, sizes)
    if refused:
        return Result(ops, refused)
    region = fuseboard.Region("case", "onnxruntime", "inference", graph, "case")
    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    try:
        lowered = plugin.fuseboard_lower(region, given)
        result = lowered.call(list(inputs))
    except fuseboard.LoweringError as error:
        return f"claimed, then: {error}"
    return difference(result, expected, reference(function, inputs, expected)) or Result(ops)


def refusals(graph: Any, nodes: Sequence[Any], sizes: set[str]) -> str:
    """Why the case isn't run: the board's reasons (dtypes), then the plugin's."""
    for node in [*nodes, *graph.graph.find_nodes(op="placeholder")]:
        value = node.meta["val"]
        for one in flat(value):
            if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()):
                if one.dtype not in DTYPES:
                    return f"dtype {one.dtype}"
    for answer in plugin.fuseboard_claim(graph, "inference"):
        if isinstance(answer, fuseboard.Decline) and answer.node not in sizes:
            assert answer.reason
            return answer.reason
    return ""


def reference(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], expected: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The same in float64; eager's own result where the function has no float64 form."""
    try:
        return flat(function(*map(double, inputs)))
    except (RuntimeError, NotImplementedError):
        return expected


def difference(result: Sequence[Any], expected: tuple[Any, ...], exact: tuple[Any, ...]) -> str:
    """What is wrong with a result, or ""."""
    for got, want, reference in zip(result, expected, exact, strict=True):
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
        if strides(got) != strides(want):
            return f"strides {got.stride()}, not {want.stride()}"
        close = reference.to(want.dtype) if want.is_floating_point() else want
        limits = {} if want.is_floating_point() else {"rtol": 0, "atol": 0}
        try:
            torch.testing.assert_close(got, close, equal_nan=True, **limits)
        except AssertionError as error:
            return " ".join(str(error).split())
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_declined_with_a_reason_or_right(name):
    """No op is silently wrong, in any layout, size or dtype of the sweep."""
    wrong = {variant: text for variant, text in sweep(name).items() if isinstance(text, str)}
    assert not wrong


@pytest.mark.thorough
def test_the_sweep_is_large():
    """Most cases run; each declined one is known by its reason."""
    results = [result for name in NAMES for result in sweep(name).values()]
    ran = sum(isinstance(result, Result) and not result.declined for result in results)
    assert ran >= 600
    assert len(results) >= 1000


@pytest.mark.thorough
def test_every_op_of_the_table_is_proven():
    """No op is claimed that no case holds against float64."""
    proven = {
        op
        for name in NAMES
        for result in sweep(name).values()
        if isinstance(result, Result) and not result.declined
        for op in result.ops
    }
    # PT2E's are held against float64 in test_onnxruntime_int8.py: these have no float64 kernels.
    unproven = {str(op) for op in table()} - {str(op) for op in proven}
    assert {name for name in unproven if not name.startswith("quantized_decomposed.")} == set()


def test_the_readme_lists_the_table():
    """Op by op, with the condition under which it is taken."""
    rows = [
        (
            ", ".join(f"`{name}`" for name in names.split()),
            (condition.__doc__ or "").splitlines()[0].rstrip(".") if condition else "",
        )
        for names, condition in (*TABLE, *QUANTISED)
    ]
    readme = Path(plugin.__file__).parents[1] / "README.md"
    lines = readme.read_text("utf-8").splitlines()
    start = lines.index("|---|---|") + 1
    written = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[start:]]
    assert written[: len(rows)] == rows
    assert written[len(rows)] == ()
