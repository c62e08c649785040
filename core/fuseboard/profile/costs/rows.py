"""What the cost database holds: decisions with their candidates.

They are names and numbers only: reading one never runs anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The problem of a candidate that an earlier process didn't come to.
NOT_TRIED = "not tried yet"


@dataclass(frozen=True)
class CandidateCost:
    """One candidate that a decision was made between.

    :ivar name: the backends in it (``mkldnn+eager``), or what was compared at that level.
    :ivar latency_us: the median of a call; ``low_us`` and ``high_us`` are its interval. None where
        it wasn't timed. Those of one decision can be held against each other.
    :ivar error: how far its results were from float64, where an error was allowed.
    :ivar tolerance: the error that it was allowed; None for one that is exact.
    :ivar exact: names of the nodes that stay exact in one that is narrowed in part.
    :ivar problem: why it couldn't be chosen: it failed verification, raised, wasn't tried. "" if it
        could.
    """

    name: str
    latency_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None
    exact: tuple[str, ...] = ()
    problem: str = ""

    @property
    def tried(self) -> bool:
        """Whether it was timed, or is known not to be worth it."""
        return self.latency_us is not None or self.problem not in ("", NOT_TRIED)


@dataclass(frozen=True)
class Decision:
    """What was measured, and chosen.

    :ivar key: :func:`decision_key` of the level and the parts.
    :ivar parts: name → text: all that the decision depends on. ``graph`` names the region's or the
        graph's contents; the others have to be equal as well.
    :ivar level: what was decided on: a ``graph``, a ``region`` (a kind of piece), a ``step`` (or a
        call as a whole), or whether AOTAutograd's ``capture`` computes what Dynamo's graph does.
    :ivar title: for people: the frame, the region, the source line.
    :ivar settled: every candidate was tried; else more remain for a later process.
    :ivar created: in seconds since 1970.
    """

    key: str
    parts: Mapping[str, str]
    level: str
    winner: str
    candidates: tuple[CandidateCost, ...]
    title: str
    settled: bool
    created: float


class Damaged(Exception):
    """A decision isn't what was written."""


#: Digits of a key that are its own; those after them are its group's.
_OWN_DIGITS, _GROUP_DIGITS = 32, 16


def decision_key(level: str, parts: Mapping[str, str]) -> str:
    """The hex digits under which a decision is kept."""
    return _digest([level, sorted(parts.items())])[:_OWN_DIGITS] + group_of(level, parts)


def group_of(level: str, parts: Mapping[str, str]) -> str:
    """Hex digits that are equal for decisions of one level on one graph."""
    return _digest([level, parts.get("graph", "")])[:_GROUP_DIGITS]


def group_of_key(key: str) -> str:
    """The group of the decision under a key."""
    return key[_OWN_DIGITS:]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the parts in which two keys differ."""
    return tuple(
        name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)
    )


def checked(decision: Decision) -> Decision:
    """The decision as it will be read back; numbers that aren't finite become None.

    :raises ValueError: a field has a wrong type, or the key isn't that of the parts.
    """
    candidates = tuple(map(_finite, decision.candidates))
    try:
        text = json.dumps(encode(dataclasses.replace(decision, candidates=candidates)))
        return decode(json.loads(text))
    except (TypeError, Damaged) as error:
        raise ValueError(f"{decision!r} can't be kept: {error}") from error


def _finite(candidate: CandidateCost) -> CandidateCost:
    unknown: dict[str, Any] = {
        name: None for name in _NUMBERS if not _is_finite(getattr(candidate, name))
    }
    return dataclasses.replace(candidate, **unknown)


def encode(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values."""
    return dataclasses.asdict(decision)


def decode(values: Any) -> Decision:
    """The decision that :func:`encode` made values of.

    :raises Damaged: they aren't a decision's, or the key isn't that of the parts.
    """
    try:
        candidates = tuple(map(_candidate, values["candidates"]))
        decision = Decision(**{**values, "candidates": candidates})
        key = decision_key(decision.level, decision.parts)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise Damaged(f"it isn't a decision: {type(error).__name__}: {error}") from error
    if problem := _wrong_field(decision):
        raise Damaged(f"it isn't a decision: {problem}")
    if decision.key != key:
        raise Damaged(f"its key {decision.key!r} isn't that of its parts")
    return decision


def _candidate(values: Any) -> CandidateCost:
    exact = values.get("exact", ())
    if not isinstance(exact, list | tuple):
        raise TypeError("exact is no list")
    return CandidateCost(**{**values, "exact": tuple(exact)})


def _wrong_field(decision: Decision) -> str:
    """Which field has a value of another type, "" if none has."""
    strings = [decision.level, decision.winner, decision.title]
    if not all(map(_is_text, [*strings, *decision.parts.keys(), *decision.parts.values()])):
        return "a text is something else"
    if not isinstance(decision.settled, bool) or not _is_number(decision.created):
        return "settled or created is something else"
    for candidate in decision.candidates:
        numbers = [getattr(candidate, name) for name in _NUMBERS]
        if not all(number is None or _is_number(number) for number in numbers):
            return f"a number of candidate {candidate.name!r} is something else"
        if not all(map(_is_text, (candidate.name, candidate.problem, *candidate.exact))):
            return "a text of a candidate is something else"
    return ""


_NUMBERS = ("latency_us", "low_us", "high_us", "compile_s", "peak_bytes", "error", "tolerance")


def _is_text(value: Any) -> bool:
    """Whether it is text that can be written as UTF-8, as a lone surrogate can't."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _is_finite(value)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
