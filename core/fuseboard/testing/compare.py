"""Whether compiled code behaved as eager did."""

from __future__ import annotations

import torch

from fuseboard.testing.program import Observations, Seen

#: How many times eager's distance from float64 a result may lie off. Two orders of the same sums
#: differ from each other by about as much as each differs from the exact result.
SLACK = 2.0

#: Units in the last place that are allowed in any case. Where eager happens to hit every element
#: exactly, twice its distance is nothing, and a sum in another order, or a division as a product
#: with the reciprocal, is one or two roundings off.
FLOOR_UNITS = 4

#: Of fewer elements than this the largest error is small by chance at times, in eager as in what is
#: compared with it: there what :func:`torch.testing.assert_close` passes is right as well.
FEW_ELEMENTS = 64


def first_difference(got: Observations, eager: Observations, exact: Observations) -> str:
    """The first thing that a caller could notice, on one line; "" if there is none.

    :param exact: the same program in float64; only its values count.
    """
    for label, fact in eager.facts.items():
        if label not in got.facts:
            return f"{label}: there is none, eager has one"
        if not _equal(got.facts[label], fact):
            return f"{label}: {_shown(got.facts[label])}, eager: {_shown(fact)}"
    extra = [label for label in got.facts if label not in eager.facts]
    if extra:
        return f"{extra[0]}: eager has none"
    for label, want in eager.tensors.items():
        problem = _layout(got.tensors[label], want) or _values(
            got.tensors[label].values, want.values, exact.tensors[label].values
        )
        if problem:
            return f"{label} {problem}"
    return ""


def _equal(got: object, want: object) -> bool:
    return got == want or (got != got and want != want)


def _shown(fact: object) -> str:
    if isinstance(fact, list):
        return "; ".join(map(str, fact)) or "none"
    return str(fact)


def _layout(got: Seen, want: Seen) -> str:
    if got.values.dtype != want.values.dtype:
        return f"has dtype {got.values.dtype}, eager's {want.values.dtype}"
    if got.values.shape != want.values.shape:
        return f"has shape {tuple(got.values.shape)}, eager's {tuple(want.values.shape)}"
    if got.requires_grad != want.requires_grad:
        return f"has requires_grad={got.requires_grad}, eager's {want.requires_grad}"
    if _strides(got) != _strides(want):
        return f"has strides {got.strides}, eager's {want.strides}"
    return ""


def _strides(seen: Seen) -> list[int]:
    """The strides that lead anywhere: those of dimensions of more than one element."""
    if seen.values.numel() == 0:
        return []
    return [s for s, n in zip(seen.strides, seen.values.shape, strict=True) if n > 1]


def _values(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    """Element by element: no further from float64 than eager's worst element, with slack.

    Integers and booleans are eager's, and so are NaN and infinities, or else it is what float64 has
    there: a kernel of eager's may overflow on the way (gelu of large numbers with AVX-512).
    """
    if got.numel() == 0:
        return ""
    if not eager.is_floating_point():
        return _first_wrong(got != eager, got, eager)
    finite = eager.isfinite()
    units = FLOOR_UNITS * torch.finfo(got.dtype).eps
    near = exact.isfinite() & ((got.double() - exact).abs() <= units * exact.abs())
    special = ~finite & ~(_same(got, eager) | _same(got, exact) | near)
    wrong = special | (finite & ~got.isfinite())
    if not wrong.any():
        reference = _reference(eager, exact)
        if eager.numel() < FEW_ELEMENTS and _close(got, reference):
            return ""
        wrong = finite & ((got.double() - reference).abs() > allowed(eager, exact))
    return _first_wrong(wrong, got, eager)


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _close(got: torch.Tensor, reference: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(got, reference.to(got.dtype), equal_nan=True)
    except AssertionError:
        return False
    return True


def allowed(eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far each element may lie off the reference."""
    reference = _reference(eager, exact)
    finite = eager.isfinite()
    distance = torch.where(finite, (eager.double() - reference).abs(), 0.0).max()
    info = torch.finfo(eager.dtype)
    floor = FLOOR_UNITS * info.eps * reference.abs() + info.tiny
    return SLACK * distance + floor


def _reference(eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The float64 values; eager's own where float64 has the wider range or didn't overflow."""
    exact, eager = exact.double(), eager.double()
    return torch.where(exact.isfinite() & eager.isfinite(), exact, eager)


def _first_wrong(wrong: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> str:
    places = wrong.nonzero()
    if len(places) == 0:
        return ""
    place = tuple(places[0].tolist())
    at = f" at {list(place)}" if place else ""
    return (
        f"is {got[place].item()}{at}, eager's {eager[place].item()} "
        f"({len(places)} of {wrong.numel()} elements are wrong)"
    )
