"""How far eager itself is from float64: the measure for all other engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: Elements that are compared at a time: few enough to stay in the processor's caches in float64.
CHUNK = 1 << 16


@dataclass(frozen=True)
class Spread:
    """Eager against float64, over one floating or complex output.

    :ivar worst: the largest distance of an element.
    :ivar rmse: the root of the mean squared distance.
    :ivar rms: the root of the mean square of the float64 values.
    :ivar relative: the largest distance of an element as a share of its float64 value, where that
        was asked for.
    :ivar mismatches: elements that differ, for integers and booleans.
    :ivar exact: nothing has been rounded: the output is elements of the inputs.
    """

    worst: float = 0.0
    relative: float = 0.0
    rmse: float = 0.0
    rms: float = 0.0
    mismatches: int = 0
    exact: bool = False

    def joined(self, other: Spread) -> Spread:
        """The larger of both, number by number."""
        return Spread(
            worst=max(self.worst, other.worst),
            relative=max(self.relative, other.relative),
            rmse=max(self.rmse, other.rmse),
            rms=max(self.rms, other.rms),
            mismatches=max(self.mismatches, other.mismatches),
            exact=self.exact and other.exact,
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
    """A tensor in float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def aim(eager: torch.Tensor, precise: torch.Tensor) -> torch.Tensor:
    """What results should be near to: float64's values; eager's where either isn't finite.

    Eager decides where there are NaN and infinities: float64 has the wider range, so a float16 that
    overflows doesn't there.
    """
    wide = widened(eager)
    return torch.where(wide.isfinite() & precise.isfinite(), precise, wide)


def spread_of(eager: Any, precise: Any, relative: bool = False) -> Spread:
    """Measure one output; nothing where there is no float64 value, or one of another shape.

    :param relative: measure the distances as shares, too.
    """
    if precise is None:
        return Spread()
    if not isinstance(eager, torch.Tensor):
        if not isinstance(eager, float | complex):
            return Spread(mismatches=int(eager != precise))
        eager, precise = (
            torch.tensor(value, dtype=torch.float64, device="cpu") for value in (eager, precise)
        )
    if eager.shape != precise.shape:
        return Spread()
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = sum(int((e != p).sum()) for _, (e, p) in chunks(eager, precise))
        return Spread(mismatches=wrong)
    total = _Total()
    for _, (piece, exact) in chunks(eager, precise):
        total.add(piece, exact, relative)
    return total.spread()


class _Total:
    """What is known of the pieces so far."""

    def __init__(self) -> None:
        self.worst = self.relative = self.errors = self.squares = 0.0
        self.count = 0

    def add(self, piece: torch.Tensor, exact: torch.Tensor, relative: bool) -> None:
        wide = widened(piece)
        distance = (wide - exact).abs_() if not wide.is_complex() else (wide - exact).abs()
        worst, count = float(distance.max()), piece.numel()
        size = exact.abs() if relative or exact.is_complex() else exact
        if worst == torch.inf or worst != worst:  # not all elements of both are finite
            target = aim(piece, exact)
            finite = target.isfinite() & wide.isfinite()
            size = torch.where(finite, target.abs(), 0)
            distance = torch.where(finite, (wide - target).abs(), 0)
            worst, count = float(distance.max()), int(finite.sum())
        if relative:
            share = float((distance / size).nan_to_num(0.0, posinf=torch.inf).max())
            self.relative = max(self.relative, share)
        self.worst = max(self.worst, worst)
        self.errors += float(distance.dot(distance))
        self.squares += float(size.dot(size))
        self.count += count

    def spread(self) -> Spread:
        if self.count == 0:
            return Spread()
        rmse, rms = (self.errors / self.count) ** 0.5, (self.squares / self.count) ** 0.5
        return Spread(worst=self.worst, relative=self.relative, rmse=rmse, rms=rms)
