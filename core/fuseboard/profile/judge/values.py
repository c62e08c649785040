"""Whether the values of a result are right: as near to float64 as eager's own error allows.

``docs/verification.md`` tells where the constants come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseboard.contracts import Verdict
from fuseboard.profile.judge.reference import Reference
from fuseboard.profile.judge.spread import Spread, aim, chunks, place_of, widened

#: How many times eager's largest error over an output each of its elements may be off.
WORST_FACTOR = 10.0

#: The same for the largest error of a few runs of eager with its roundings disturbed: less, since
#: these errors are larger, and the largest of several is less often small by chance.
DISTURBED_FACTOR = 4.0

#: Units in the last place of an element that it may be off in any case. Half types are computed in
#: float32 and rounded once, or a few times.
FLOOR_UNITS, FLOOR_UNITS_HALF = 16.0, 4.0

#: And in units in the last place of the output's root mean square: some functions, such as erf, are
#: approximated so that the absolute error is small, not the relative one.
LEVEL_UNITS, LEVEL_UNITS_HALF = 4.0, 1.0

#: The first of these where nothing has been rounded, as in copies, or where eager has so many
#: elements or more and all of them exactly.
EXACT_UNITS, MANY_EXACT = 2.0, 64

#: How many times eager's root mean squared error a result's may be, as in
#: ``torch._dynamo.utils.same``; the second for half types and outputs of few elements. Fewer than
#: the last number have no mean to speak of.
RMSE_FACTOR, RMSE_FACTOR_WIDE = 2.0, 3.0
FEW_ELEMENTS, TOO_FEW_ELEMENTS = 1000, 16

#: What is added to that, in units in the last place of the output's root mean square. torch adds
#: 1e-5, which is 84 units in float32 where the output is of the size of 1.
RMSE_UNITS, RMSE_UNITS_HALF = 84.0, 1.0

#: One in so many integers or booleans that floats reach may be another than eager's.
MISMATCH_SHARE = 50_000


def judge(reference: Reference, result: Sequence[Any]) -> Verdict:
    """Check every output of a result; the first one that is wrong is told of.

    Shapes and dtypes that differ make the verdict, too; strides are checked elsewhere.
    """
    if not isinstance(result, list | tuple):
        return Verdict(False, f"returned {type(result).__name__}, not a tuple or list")
    if len(result) != len(reference.eager):
        return Verdict(False, f"returned {len(result)} outputs, expected {len(reference.eager)}")
    for number, (got, eager) in enumerate(zip(result, reference.eager, strict=True)):
        problem = _form(eager, got)
        if problem:
            return Verdict(False, f"output {number} {problem}")
        problem = _value(reference, number, got)
        if problem:
            return Verdict(False, f"output {number} {problem}", by_value=True)
    return Verdict(True)


def _form(eager: Any, got: Any) -> str:
    if eager is None:
        return "" if got is None else f"is {type(got).__name__}, expected None"
    if not isinstance(eager, torch.Tensor):
        number = isinstance(got, int | float | complex)
        return "" if number else f"is {type(got).__name__}, expected a number"
    if not isinstance(got, torch.Tensor):
        return f"is {type(got).__name__}, expected a tensor"
    if got.dtype != eager.dtype:
        return f"has dtype {got.dtype}, expected {eager.dtype}"
    if got.shape != eager.shape:
        return f"has shape {tuple(got.shape)}, expected {tuple(eager.shape)}"
    return ""


def _value(reference: Reference, number: int, got: Any) -> str:
    """What is wrong with an output; "" if nothing is.

    What eager's own error doesn't allow is looked at again: eager may have been lucky, as it easily
    is in outputs of few elements.
    """
    problem = _against(reference, number, got, Spread())
    if not problem or reference.rules[number] == "exact":
        return problem
    disturbed = reference.disturbed()
    return _against(reference, number, got, disturbed[number]) and problem if disturbed else problem


def _against(reference: Reference, number: int, got: Any, disturbed: Spread) -> str:
    spread = reference.spreads[number]
    eager, rule = reference.eager[number], reference.rules[number]
    if eager is None or rule == "unjudged":
        return ""
    precise = reference.precise[number]
    if not isinstance(eager, torch.Tensor):
        if rule != "close":
            right = got in (eager, precise) or max(spread.mismatches, disturbed.mismatches) > 0
            return "" if right else f"is {got}, eager has {eager}"
        eager, got, precise = (
            torch.tensor(value, dtype=torch.float64, device="cpu")
            for value in (eager, got, precise)
        )
    if eager.numel() == 0:
        return ""
    if rule == "close":
        return _far(eager, precise, got.detach(), spread, disturbed)
    exact = rule == "exact"
    spread = spread.joined(disturbed)
    return _mismatches(eager, eager if exact else precise, got.detach(), spread, exact)


def _mismatches(
    eager: torch.Tensor, precise: torch.Tensor, got: torch.Tensor, spread: Spread, exact: bool
) -> str:
    """Integers and booleans: all of them right, or as many as eager has right."""
    allowed = 0 if exact else allowed_mismatches(spread.mismatches, eager.numel())
    wrong, first = 0, -1
    values: tuple[Any, ...] = ()
    for start, (has, want, have) in chunks(eager, precise, got):
        differ = have != want
        wrong += int(differ.sum())
        news = (differ & (have != has)).nonzero()  # where float64 alone differs isn't interesting
        if first < 0 and len(news):
            place = int(news[0])
            first = start + place
            values = (have[place].item(), has[place].item(), want[place].item())
    if wrong <= allowed:
        return ""
    total = eager.numel()
    if exact:
        return (
            f"is {values[0]} at {list(place_of(first, eager))}, eager has {values[1]} "
            f"({wrong} of {total} elements are wrong, and all must be right)"
        )
    return (
        f"differs from float64 in {wrong} of {total} elements, eager in {spread.mismatches} "
        f"(allowed: {allowed}); at {list(place_of(first, eager))} it is {values[0]}, eager has "
        f"{values[1]} and float64 {values[2]}"
    )


def allowed_mismatches(eagers: int, total: int) -> int:
    """How many integers or booleans that floats reach may differ from float64's.

    As many as eager's, give or take what chance makes of that number (three times its root), and
    one in :data:`MISMATCH_SHARE`.
    """
    return eagers + int(3 * eagers**0.5) + total // MISMATCH_SHARE


def _far(
    eager: torch.Tensor,
    precise: torch.Tensor,
    got: torch.Tensor,
    spread: Spread,
    disturbed: Spread,
) -> str:
    """Floating and complex numbers: element by element, then all of them together."""
    found = _Found(Floor.of(eager, spread), spread, disturbed)
    for start, (has, exact, have) in chunks(eager, precise, got):
        found.look(start, has, exact, have)
    if found.wrong:
        factor = "" if found.worst == torch.inf else f", {found.worst:.3g} times beyond the limit"
        have, has, exact = found.values
        return (
            f"is {have} at {list(place_of(found.where, eager))}, eager has {has} and float64 "
            f"{exact}{factor} ({found.wrong} of {eager.numel()} elements are wrong; eager's "
            f"largest error is {spread.worst:.3g})"
        )
    if found.count < TOO_FEW_ELEMENTS:
        return ""
    rmse = (found.squares / found.count) ** 0.5
    limit = rmse_limit(eager, spread, disturbed)
    if rmse > limit:
        return (
            f"is {rmse:.3g} from float64 in the root mean square, eager {spread.rmse:.3g} "
            f"({rmse / limit:.3g} times beyond the limit)"
        )
    return ""


class _Found:
    """What is known of the pieces so far.

    :ivar wrong: elements beyond their limit.
    :ivar worst: how many times the worst of them is; :ivar where: its number; :ivar values: what it
        is, and what eager and float64 have.
    :ivar squares: the sum of the squared distances of the :ivar count: elements that are finite.
    """

    def __init__(self, floor: Floor, spread: Spread, disturbed: Spread) -> None:
        self.floor, self.spread, self.disturbed = floor, spread, disturbed
        self.wrong, self.worst, self.where = 0, 0.0, 0
        self.values: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
        self.squares, self.count = 0.0, 0

    def look(
        self, start: int, eager: torch.Tensor, precise: torch.Tensor, got: torch.Tensor
    ) -> None:
        wide = widened(got)
        distance = (wide - precise).abs()
        most = float(distance.max())
        if most <= WORST_FACTOR * self.spread.worst:  # all are finite, and none needs its floor
            self.squares += float(distance.dot(distance))
            self.count += got.numel()
            return
        target = aim(eager, precise)
        finite = target.isfinite()
        distance = (wide - target).abs()
        allowed = limits(target.abs(), self.floor, self.spread, self.disturbed)
        number = torch.where(wide.isfinite(), distance / allowed, torch.inf)
        same = _same_specials(widened(eager), wide)
        same |= ~precise.isfinite() & _same_specials(precise, wide)
        special = torch.where(same, 0.0, torch.inf)
        beyond = torch.where(finite, number, special)
        self.wrong += int((beyond > 1).sum())
        most, place = (item.item() for item in beyond.max(0))
        if most > self.worst:
            self.worst, self.where = most, start + int(place)
            parts = (got, eager, precise)
            self.values = tuple(part[int(place)].item() for part in parts)  # type: ignore[assignment]
        kept = finite & wide.isfinite()
        distance = torch.where(kept, distance, 0)
        self.squares += float(distance.dot(distance))
        self.count += int(kept.sum())


@dataclass(frozen=True)
class Floor:
    """What an element may be off in any case.

    :ivar share: of its size.
    :ivar level: whatever its size.
    """

    share: float
    level: float

    @staticmethod
    def of(eager: torch.Tensor, spread: Spread) -> Floor:
        info = torch.finfo(eager.dtype)
        flushed = info.tiny < 1e-30  # to zero; float16 and narrower ones are computed in float32
        least = info.tiny if flushed else info.tiny * info.eps
        many = eager.numel() >= MANY_EXACT and eager.dtype not in (torch.float64, torch.complex128)
        if spread.exact or (many and spread.worst == 0):
            return Floor(EXACT_UNITS * info.eps, least)
        wide = info.bits > 16
        share = FLOOR_UNITS if wide else FLOOR_UNITS_HALF
        level = LEVEL_UNITS if wide else LEVEL_UNITS_HALF
        return Floor(share * info.eps, level * info.eps * spread.rms + least)


def limits(sizes: torch.Tensor, floor: Floor, spread: Spread, disturbed: Spread) -> torch.Tensor:
    """How far each element may be off.

    :param sizes: the absolute values of what they should be.
    """
    allowed = WORST_FACTOR * spread.worst + floor.share * sizes + floor.level
    if disturbed.worst > 0:
        further = torch.full_like(sizes, disturbed.worst)
        if disturbed.relative < torch.inf:
            further = further.minimum(disturbed.relative * sizes)
        allowed = allowed.maximum(DISTURBED_FACTOR * further)
    return allowed


def rmse_limit(eager: torch.Tensor, spread: Spread, disturbed: Spread) -> float:
    """How far all elements together may be off."""
    info = torch.finfo(eager.dtype)
    wide = info.bits <= 16 or eager.numel() < FEW_ELEMENTS
    factor = RMSE_FACTOR_WIDE if wide else RMSE_FACTOR
    units = RMSE_UNITS if info.bits > 16 else RMSE_UNITS_HALF
    most = max(factor * spread.rmse, DISTURBED_FACTOR * disturbed.rmse)
    return most + units * info.eps * spread.rms + info.tiny


def _same_specials(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where both are NaN, or the same infinity; of complex numbers: where neither is finite."""
    if one.is_complex():
        return ~one.isfinite() & ~other.isfinite()
    return (one == other) | (one.isnan() & other.isnan())
