"""How far eager itself is from float64: the measure for all other engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: Elements that are compared at a time, so that comparing takes little memory.
CHUNK = 1 << 20


@dataclass(frozen=True)
class Spread:
    """Eager against float64, over one floating or complex output.

    :ivar worst: the largest distance of an element.
    :ivar rmse: the root of the mean squared distance.
    :ivar rms: the root of the mean square of the float64 values.
    :ivar relative: the largest distance of an element as a share of its float64 value.
    :ivar mismatches: elements that differ, for integers and booleans.
    """

    worst: float = 0.0
    relative: float = 0.0
    rmse: float = 0.0
    rms: float = 0.0
    mismatches: int = 0

    def joined(self, other: Spread) -> Spread:
        """The larger of both, number by number."""
        return Spread(
            worst=max(self.worst, other.worst),
            relative=max(self.relative, other.relative),
            rmse=max(self.rmse, other.rmse),
            rms=max(self.rms, other.rms),
            mismatches=max(self.mismatches, other.mismatches),
        )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has strides."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Tensors of one shape in flat pieces that belong together: (number of the first, pieces).

    The order is that of memory in the first tensor, so that no copy of it has to be made.
    """
    tensors = tuple(map(dense, tensors))
    first = tensors[0]
    order = in_memory(first)
    flat = [tensor.permute(order).reshape(-1) for tensor in tensors]
    for start in range(0, first.numel(), CHUNK):
        yield start, tuple(tensor[start : start + CHUNK] for tensor in flat)


def in_memory(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the longest stride to the shortest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def place_of(number: int, tensor: torch.Tensor) -> tuple[int, ...]:
    """The index of an element by its number in :func:`chunks`."""
    tensor = dense(tensor)
    order = in_memory(tensor)
    place = [0] * tensor.dim()
    for dim in reversed(order):
        number, place[dim] = divmod(number, tensor.shape[dim])
    return tuple(place)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def aim(eager: torch.Tensor, precise: torch.Tensor) -> torch.Tensor:
    """What results should be near to: float64's values; eager's where either isn't finite.

    Eager decides where there are NaN and infinities: float64 has the wider range, so a float16 that
    overflows doesn't there.
    """
    wide = widened(eager)
    return torch.where(wide.isfinite() & precise.isfinite(), precise, wide)


def spread_of(eager: Any, precise: Any) -> Spread:
    """Measure one output; nothing where there is no float64 value, or one of another shape."""
    if precise is None:
        return Spread()
    if not isinstance(eager, torch.Tensor):
        if not isinstance(eager, float | complex):
            return Spread(mismatches=int(eager != precise))
        eager, precise = (torch.tensor(value, dtype=torch.float64) for value in (eager, precise))
    if eager.shape != precise.shape:
        return Spread()
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = sum(int((e != p).sum()) for _, (e, p) in chunks(eager, precise))
        return Spread(mismatches=wrong)
    worst, relative, squares, errors, count = 0.0, 0.0, 0.0, 0.0, 0
    for _, (piece, exact) in chunks(eager, precise):
        target = aim(piece, exact)
        finite = target.isfinite() & piece.isfinite()
        target = torch.where(finite, target, 0)
        size = target.abs()
        distance = (torch.where(finite, widened(piece), 0) - target).abs()
        worst = max(worst, float(distance.max()))
        relative = max(relative, float((distance / size).nan_to_num(0.0, posinf=torch.inf).max()))
        errors += float(distance.square().sum())
        squares += float(size.square().sum())
        count += int(finite.sum())
    if count == 0:
        return Spread()
    rmse, rms = (errors / count) ** 0.5, (squares / count) ** 0.5
    return Spread(worst=worst, relative=relative, rmse=rmse, rms=rms)
