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
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

#: How values are checked that are read: none is taken for another type's, and none is unknown.
_CHECKS = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

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

    __pydantic_config__: ClassVar = _CHECKS

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

    __pydantic_config__: ClassVar = _CHECKS

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


def checked(decision: Decision) -> Decision:
    """The decision as it will be read back; candidates' numbers that aren't finite become None.

    :raises ValueError: a field has a wrong type, or the key isn't that of the parts.
    """
    candidates = tuple(map(_finite, decision.candidates))
    try:
        return decode(json.dumps(encode(dataclasses.replace(decision, candidates=candidates))))
    except (TypeError, Damaged) as error:
        raise ValueError(f"{decision!r} can't be kept: {error}") from error


def _finite(candidate: CandidateCost) -> CandidateCost:
    unknown: dict[str, Any] = {
        name: None
        for name, value in vars(candidate).items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return dataclasses.replace(candidate, **unknown)


def encode(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values."""
    return dataclasses.asdict(decision)


def decode(text: str | bytes) -> Decision:
    """The decision that :func:`encode` made values of, from JSON.

    :raises Damaged: it isn't a decision's, or the key isn't that of the parts.
    """
    try:
        decision = _DECISIONS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"it isn't a decision: {where}: {first['msg']}") from error
    if decision.key != decision_key(decision.level, decision.parts):
        raise Damaged(f"its key {decision.key!r} isn't that of its parts")
    return decision


_DECISIONS = TypeAdapter(Decision)
