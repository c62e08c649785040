"""How reports tell the choice among a graph's candidates, in text and on the page alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fuseboard.report import words
from fuseboard.report.data import CandidateReport, GraphReport, PartReport, PlaceReport

#: What is shown where there is no number.
NONE = "-"
_SIZES = (("GB", 1e9), ("MB", 1e6))


@dataclass(frozen=True)
class ChoiceRow:
    """A candidate as people read it; what isn't known is ``-`` or "".

    :ivar quartiles: between which half of its calls were.
    :ivar factor: how many times as fast as eager.
    :ivar peak: the most that a call allocates at once.
    :ivar error: against float64; "" where no error is allowed.
    :ivar problem: why it is out, where no trip of the report says so already.
    :ivar notes: of its regions, where these aren't shown.
    """

    name: str
    state: str
    latency: str
    quartiles: str
    factor: str
    compile: str
    peak: str
    error: str
    problem: str
    notes: tuple[str, ...]


def rows(graph: GraphReport) -> list[ChoiceRow]:
    """One for each candidate, in order of preference."""
    return [
        ChoiceRow(
            name=candidate.name,
            state=candidate.state,
            latency=NONE if candidate.latency_us is None else duration(candidate.latency_us),
            quartiles=_quartiles(candidate),
            factor=_factor(graph, candidate) or NONE,
            compile=NONE if candidate.compile_s is None else duration(candidate.compile_s * 1e6),
            peak=NONE if candidate.peak_bytes is None else size(candidate.peak_bytes),
            error=_error(graph, candidate),
            problem=problem(graph, candidate),
            notes=tuple(candidate.notes),
        )
        for candidate in graph.candidates
    ]


def tolerance_text(tolerance: float | Mapping[str, float], metric: str) -> str:
    """What the settings allow, such as ``0.01 (norm)``."""
    if isinstance(tolerance, Mapping):
        allowed = ", ".join(f"{value:g} in {pattern}" for pattern, value in tolerance.items())
    else:
        allowed = f"{tolerance:g}"
    return f"{allowed} ({metric})"


def part(found: PartReport) -> str:
    """What was found of a version beyond its budget, in a sentence without the places' names."""
    many, left = len(found.places), sum(not place.exact for place in found.places)
    told = f"{found.name}, {left} of {words.many(many, 'place')}"
    rest = f" and the rest {found.rest}" if found.rest else ""
    if found.whole_error is None:
        return f"{told}{rest}, as an earlier process found"
    whole = f"error {found.whole_error:.2g} {found.name} as a whole"
    runs = f"found in {words.many(found.judged, 'run')}"
    if found.error is None:
        return f"{whole}, and no part that was tried is within the tolerance ({runs})"
    return f"{whole}, {found.error:.2g} with {left} of {words.many(many, 'place')}{rest} ({runs})"


def exact_places(found: PartReport) -> str:
    """The places that aren't in its format, with the errors that they would cause by themselves."""
    exact = [place for place in by_error(found) if place.exact]
    names = words.first([f"{place.module or place.name}{_own(place)}" for place in exact])
    return f"{found.rest or 'exact'}: {names}"


def by_error(found: PartReport) -> list[PlaceReport]:
    """Places, those with the largest errors of their own first."""
    return sorted(found.places, key=lambda place: -(place.error or 0.0))


def _own(place: PlaceReport) -> str:
    return "" if place.error is None else f" ({place.error:.2g} by itself)"


def chosen(graph: GraphReport) -> CandidateReport | None:
    return next((candidate for candidate in graph.candidates if candidate.state == "chosen"), None)


def scaled(graph: GraphReport) -> str:
    """Which times were taken in an earlier comparison than the last one; "" if none were."""
    timed = [candidate for candidate in graph.candidates if candidate.latency_us]
    last = max((one.comparison for one in timed if one.comparison is not None), default=None)
    names = [candidate.name for candidate in timed if candidate.comparison != last]
    if not names:
        return ""
    return (
        f"the times of {words.first(names)} are of an earlier comparison, multiplied by what its "
        "winner took in the last one over what it took then"
    )


def problem(graph: GraphReport, candidate: CandidateReport) -> str:
    """Why a candidate is out, unless a trip says it in full."""
    return "" if any(candidate.problem == trip.error for trip in graph.trips) else candidate.problem


# --- sentences ------------------------------------------------------------------------------------


def why(graph: GraphReport) -> str:
    """What runs and why, in one sentence; "" where nothing was compared."""
    if graph.instead:
        return graph.instead
    winner = chosen(graph)
    if winner is None:
        return "no candidate was right: eager runs" if _all_failed(graph) else ""
    rivals = [one for one in graph.candidates if one.latency_us and one.state == "slower"]
    if not winner.latency_us or not rivals:
        return _alone(graph, winner)
    best = min(rivals, key=lambda candidate: candidate.latency_us or 0.0)
    assert best.latency_us is not None
    gain = 1 - winner.latency_us / best.latency_us
    if gain < 0:
        lag = 1 - best.latency_us / winner.latency_us
        if best.comparison != winner.comparison:
            return (
                f"{winner.name} won the last comparison: {duration(winner.latency_us)} a call; "
                f"{best.name}, which took {_percent(lag)} less, had lost an earlier one to what is "
                "simpler or comes first (the setting margin)"
            )
        return (
            f"{winner.name} is preferred: {best.name} takes {_percent(lag)} less, which is "
            "not enough to leave what is simpler or comes first (the setting margin)"
        )
    text = f"{winner.name} is the fastest: {duration(winner.latency_us)} a call, "
    text += f"{_percent(gain)} less than {best.name}"
    if graph.eager not in (winner, best) and (factor := _factor(graph, winner)):
        text += f" and {factor} times as fast as eager"
    return text + ("; their quartiles overlap" if _overlap(winner, best) else "")


def _alone(graph: GraphReport, winner: CandidateReport) -> str:
    """Why a candidate runs that was timed beside no other one."""
    others = Counter(candidate.state for candidate in graph.candidates if candidate is not winner)
    if not others:
        return f"{winner.name} is the only candidate"
    if others["slower"]:
        return f"{winner.name} won an earlier comparison"
    if others["failed"] + others["inexact"] == others.total():
        return f"{winner.name} is the only candidate that was right"
    return f"{winner.name} runs until others have been tried"


def _all_failed(graph: GraphReport) -> bool:
    return bool(graph.candidates) and all(one.state == "failed" for one in graph.candidates)


def pending(graph: GraphReport) -> str:
    """What is still to be tried; "" once the graph has settled."""
    if graph.settled:
        return ""
    names = [one.name for one in graph.candidates if one.state in ("waiting", "untried")]
    waiting = f"{words.first(names)} {'waits' if len(names) == 1 else 'wait'} to be tried; "
    how = "fuseboard.wait() waits for it, as `fuseboard explain --wait` does"
    return f"not settled yet: {waiting if names else ''}{how}"


def untried(graph: GraphReport) -> dict[str, str]:
    """Backends that are in no candidate, with why; those that took no op first.

    Nothing where nothing was compared.
    """
    if not graph.candidates:
        return {}
    inside = {name for one in graph.candidates for name in one.name.split(" ")[0].split("+")}
    idle = [name for name in graph.backends if name not in inside and name != "eager"]
    return {**{name: _no_op(graph, name) for name in idle}, **graph.left_out}


def _no_op(graph: GraphReport, backend: str) -> str:
    """Why a backend has no op of a graph: its most frequent reason."""
    reasons = Counter(reason for node in graph.nodes if (reason := node.declined.get(backend)))
    return f"it took no op: {reasons.most_common(1)[0][0]}" if reasons else "it took no op"


# --- numbers --------------------------------------------------------------------------------------


def duration(us: float) -> str:
    """A time in the unit that suits it, to three digits."""
    unit, size = _unit(us)
    return f"{_digits(us / size)} {unit}"


def size(number: int) -> str:
    """A number of bytes in the unit that suits it, to three digits."""
    unit, scale = next(((u, s) for u, s in _SIZES if number >= 0.9995 * s), ("kB", 1e3))
    return f"{_digits(number / scale)} {unit}"


def _unit(us: float) -> tuple[str, float]:
    return ("µs", 1.0) if us < 999.5 else ("ms", 1e3) if us < 999.5e3 else ("s", 1e6)


def _digits(value: float) -> str:
    """Three digits, but no more than two behind the point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _quartiles(candidate: CandidateReport) -> str:
    if candidate.low_us is None or candidate.high_us is None:
        return NONE
    unit, size = _unit(candidate.high_us)
    return f"{_digits(candidate.low_us / size)}-{_digits(candidate.high_us / size)} {unit}"


def _factor(graph: GraphReport, candidate: CandidateReport) -> str:
    speedup = graph.speedup(candidate)
    return "" if speedup is None else f"{speedup:.2f}"


def _error(graph: GraphReport, candidate: CandidateReport) -> str:
    if not graph.tolerance:
        return ""
    return NONE if candidate.error is None else f"{candidate.error:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _overlap(one: CandidateReport, other: CandidateReport) -> bool:
    if None in (one.low_us, one.high_us, other.low_us, other.high_us):
        return False
    return one.low_us <= other.high_us and other.low_us <= one.high_us  # type: ignore[operator]
