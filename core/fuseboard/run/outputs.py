"""The form of a region's outputs in every call: count, dtypes, shapes and strides.

The first call compares it with eager's and with torch's fake values. Later calls compare it with
the first call's, by a condition in the generated function. Where the condition fails, a closer look
decides: strides of dimensions without a second element don't matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import Boxed
from fuseboard.errors import ContractError
from fuseboard.ops.estimate import estimates_us
from fuseboard.run.codegen import Source

#: Calls that look at outputs: so many first ones, and then one of so many.
FIRST, EVERY = 16, 32
#: What checking one output takes, and the share of a call that checks may take, on the CPU.
LOOK_US, SHARE = 3.0, 0.002

#: A size or stride that may differ from call to call.
_ANY = None


@dataclass(frozen=True)
class Output:
    """What one output was like.

    :ivar dtype: None where it is no tensor.
    :ivar shape: sizes that are a symbol's, or that only the data decide, are None.
    :ivar strides: those, too, and all of a tensor that has none.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] = ()
    strides: tuple[int | None, ...] = ()
    is_none: bool = False


def common_form(expected: Sequence[Any], results: Sequence[Any]) -> tuple[Output, ...]:
    """The form of a call's outputs, as far as all calls have it in common.

    :param expected: their fake values.
    """
    return tuple(map(_seen, expected, results))


def _seen(want: Any, got: Any) -> Output:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return Output(is_none=got is None)
    if got.dim() != want.dim():  # a hook that verifies has let it pass
        return Output(got.dtype, (_ANY,) * got.dim(), (_ANY,) * got.dim())
    shape = tuple(map(_if_fixed, want.shape, got.shape))
    if got.layout != torch.strided or want.layout != torch.strided:
        return Output(got.dtype, shape, (_ANY,) * len(shape))
    if _ANY not in shape:
        return Output(got.dtype, shape, got.stride())
    # Where eager's strides differ from the fake ones, what they depend on isn't known.
    strides = tuple(map(_if_fixed, want.stride(), got.stride()))
    known = all(fixed in (_ANY, fake) for fixed, fake in zip(strides, want.stride(), strict=True))
    return Output(got.dtype, shape, strides if known else (_ANY,) * len(shape))


def _if_fixed(want: Any, got: int) -> int | None:
    return got if isinstance(want, int) else _ANY


def is_cheap(outputs: int, nodes: Iterable[Node]) -> bool:
    """Whether each call may look at so many outputs.

    :param nodes: what is computed in the call, on the CPU: what a GPU takes isn't known.
    """
    nodes = list(nodes)
    values = (node.meta.get("val") for node in nodes)
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        return False
    return LOOK_US * outputs <= SHARE * sum(estimates_us(nodes).values())


class _Detour:
    """Calls the function that looks, and lets the other one alone for the next calls.

    :param names: the globals of that one.
    """

    def __init__(self, looking: Boxed, names: dict[str, Any], rest: str) -> None:
        self._looking = looking
        self._names = names
        self._rest = rest
        self._first = FIRST

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._first > 0:
            self._first -= 1
        else:
            self._names[self._rest] = iter(range(EVERY - 1))
        return self._looking(args)


def write_detour(source: Source, looking: Boxed | None) -> None:
    """Write, as the first thing in a function, that another one has some of the calls.

    It comes before the region, when Python's own code is in the processor's caches, and writes to
    no global: after the region, or with a counter, it costs several times as much.
    """
    if looking is None:
        return
    rest = source.bind_apart(iter(range(0)), "rest")
    look = source.bind_apart(_Detour(looking, source.globals, rest), "look")
    source.line(f"for _ in {rest}: break  # so many calls are left until one looks at outputs")
    source.line(f"else: return {look}(args)")


def write_check(
    source: Source, indent: int, backend: str, outputs: Sequence[Output], names: Sequence[str]
) -> None:
    """Write what holds a region's outputs against those of an earlier call.

    :param names: of the variables that hold them.
    """
    for number, (output, name) in enumerate(zip(outputs, names, strict=True)):
        if condition := _condition(source, output, name):
            look = source.bind_apart(partial(check_output, backend, number, output), "check_output")
            source.line(f"if not ({condition}): {look}({name})", indent)


def _condition(source: Source, output: Output, name: str) -> str:
    if output.dtype is None:
        return f"{name} is None" if output.is_none else ""
    dtype = source.bind(output.dtype, str(output.dtype).removeprefix("torch."))
    parts = [f"{name}.dtype is {dtype}"]
    if _ANY not in output.shape:
        parts.append(f"{name}.shape == {output.shape}")
    else:
        parts.append(f"{name}.dim() == {len(output.shape)}")
        parts += [f"{name}.size({d}) == {n}" for d, n in enumerate(output.shape) if n is not _ANY]
    if _ANY not in output.strides:
        parts.append(f"{name}.stride() == {output.strides}")
    else:
        known = ((d, n) for d, n in enumerate(output.strides) if n is not _ANY)
        parts += [f"{name}.stride({d}) == {n}" for d, n in known]
    return " and ".join(parts)


def check_output(backend: str, number: int, output: Output, got: Any) -> None:
    """
    :raises ContractError: an output isn't what it was in an earlier call.
    """
    if problem := _problem(output, got):
        text = f"output {number} {problem} as in the first call"
        raise ContractError(backend, "fuseboard_lower", text)


def _problem(output: Output, got: Any) -> str:
    if output.is_none or not isinstance(got, torch.Tensor):
        return f"is {type(got).__name__}, not {'None' if output.is_none else 'a tensor'}"
    if got.dtype != output.dtype:
        return f"has dtype {got.dtype}, not {output.dtype}"
    if len(got.shape) != len(output.shape) or _differ(output.shape, got.shape):
        return f"has shape {tuple(got.shape)}, not {_text(output.shape)}"
    if all(n is _ANY for n in output.strides) or not got.numel():
        return ""
    if got.layout != torch.strided:
        return f"has layout {got.layout}, not strides {_text(output.strides)}"
    pairs = zip(output.strides, got.stride(), got.shape, strict=True)
    leading = [(want, have) for want, have, size in pairs if size > 1]
    if _differ([want for want, _ in leading], [have for _, have in leading]):
        return f"has strides {got.stride()}, not {_text(output.strides)}"
    return ""


def _differ(expected: Sequence[int | None], actual: Sequence[int]) -> bool:
    pairs = zip(expected, actual, strict=True)
    return any(want is not _ANY and want != have for want, have in pairs)


def _text(numbers: Sequence[int | None]) -> str:
    inside = ", ".join("?" if n is _ANY else str(n) for n in numbers)
    return f"({inside},)" if len(numbers) == 1 else f"({inside})"
