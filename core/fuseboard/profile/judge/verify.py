"""Whether a lowered region keeps its contract on a real call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuseboard.contracts import Region, Verdict
from fuseboard.hookspecs import hookimpl
from fuseboard.profile.judge.reference import Reference
from fuseboard.profile.judge.values import judge
from fuseboard.torch_api import internals as torch_internals


@hookimpl(specname="fuseboard_verify")
def verify(
    region: Region,
    expected: Sequence[Any],
    result: Sequence[Any],
    inputs: Sequence[Any],
    reference: Reference | None,
) -> Verdict:
    """Check count, types, dtypes, shapes, devices and strides of a region's outputs, then values.

    Sizes that were symbolic when the region was captured are compared where they are known. Strides
    are eager's own where they are known, which may be others than torch's fake values have
    (``log_sigmoid`` of a transposed tensor); between regions these do as well, on which the others
    were compiled.

    :param reference: what the values are held against; None: they aren't.
    """
    if not isinstance(result, list | tuple):
        return Verdict(False, f"returned {type(result).__name__}, not a tuple or list")
    if len(result) != len(expected):
        return Verdict(False, f"returned {len(result)} outputs, expected {len(expected)}")
    for number, (want, got) in enumerate(zip(expected, result, strict=True)):
        problem = _problem(want, got) or misplaced(_layout(region, want, number, reference), got)
        if problem and reference is not None and number in reference.inner:
            problem = _problem(want, got) or misplaced(want, got)
        if problem:
            return Verdict(False, f"output {number} {problem}")
    return Verdict(True) if reference is None else judge(reference, result)


def _problem(want: Any, got: Any) -> str:
    if want is None:
        return "" if got is None else f"is {type(got).__name__}, expected None"
    if not isinstance(want, torch.Tensor):
        if not isinstance(got, int | float | bool | torch.SymInt):
            return f"is {type(got).__name__}, expected a number"
        return ""
    if not isinstance(got, torch.Tensor):
        return f"is {type(got).__name__}, expected a tensor"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype}, expected {want.dtype}"
    if got.device.type != want.device.type:
        return f"is on {got.device}, expected {want.device}"
    if got.layout != want.layout:
        return f"has layout {got.layout}, expected {want.layout}"
    if len(got.shape) != len(want.shape) or _differ(want.shape, got.shape):
        return f"has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    return ""


def _layout(region: Region, want: Any, number: int, reference: Reference | None) -> Any:
    """The tensor whose strides an output must have; None where it may have any."""
    if region.backend == "eager":
        return None
    return want if reference is None else reference.eager[number]


def misplaced(want: Any, got: Any) -> str:
    """What is wrong with the strides of a tensor of the right shape; "" for nothing."""
    if not isinstance(want, torch.Tensor) or want.layout != torch.strided or got.numel() == 0:
        return ""
    pairs = [
        (expected, actual)
        for expected, actual, size in zip(want.stride(), got.stride(), got.shape, strict=True)
        if size > 1
    ]
    if _differ([e for e, _ in pairs], [a for _, a in pairs]):
        return f"has strides {got.stride()}, expected {tuple(want.stride())}"
    return ""


def _differ(expected: Sequence[Any], actual: Sequence[int]) -> bool:
    return any(
        int(want) != have
        for want, have in zip(expected, actual, strict=True)
        if isinstance(want, int) or not torch_internals.free_symbols(want)
    )


def shares_storage(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    may_share: Sequence[frozenset[int]],
    visible: int,
) -> list[int]:
    """Positions of outputs that share storage although they must not.

    What the caller can write to matters: the inputs and the visible outputs. Values that are only
    saved for the backward may share storage with each other.

    :param may_share: for each output, the outputs that may share its storage; one that may
        share an input's has -1 among them.
    :param visible: how many leading outputs the caller gets.
    """
    taken = {_identity(value) for value in inputs if isinstance(value, torch.Tensor)}
    wrong: list[int] = []
    first: dict[tuple[str, int], int] = {}
    for number, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            continue
        own = _identity(value)
        if (own in taken and -1 not in may_share[number]) or (
            own in first and first[own] not in may_share[number]
        ):
            wrong.append(number)
        elif number < visible:
            first.setdefault(own, number)
    return wrong


def _identity(value: torch.Tensor) -> tuple[str, int]:
    """The storage; where there is none, or nothing in it, the object itself."""
    if value.layout == torch.strided and value.numel() > 0:
        return "storage", torch_internals.storage_address(value)
    return "object", id(value)


def reused_outputs(
    earlier: Sequence[Any], later: Sequence[Any], inputs: Sequence[Any]
) -> list[int]:
    """Positions of outputs in memory that an earlier call's outputs have, which are still alive.

    Whoever holds those would see them overwritten. Memory of the inputs is the caller's affair.

    :param inputs: of both calls.
    """
    given = _places(inputs).values()
    taken = [place for place in _places(earlier).values() if not _meets(place, given)]
    return [number for number, place in _places(later).items() if _meets(place, taken)]


def _places(values: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Where in memory the storage of each begins and ends; of tensors that have some."""
    storages = {
        number: value.untyped_storage()
        for number, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel()
    }
    return {
        number: (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for number, storage in storages.items()
    }


def _meets(place: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(place[0] < end and begin < place[1] for begin, end in others)
