"""Horizontal merging: independent regions of one backend become one region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fuseboard.partition.places import Place

#: Graphs of more regions than this aren't merged: all pairs are looked at.
MAX_MERGED_REGIONS = 256


def merge_places(reads: Mapping[Node, Sequence[Node]], places: dict[Node, Place]) -> None:
    """Put regions of one backend together where no third one stands between them, in place.

    Planned regions stay as they are.

    :param reads: what each node must come after.
    """
    regions = sorted(set(places.values()))
    if len(regions) > MAX_MERGED_REGIONS:
        return
    before: dict[Place, set[Place]] = {place: set() for place in regions}
    for node, place in places.items():
        before[place].update(places[used] for used in reads[node])
        before[place].discard(place)
    home: dict[Place, Place] = {}
    for place in regions:
        home[place] = _partner(place, before) or place
        if home[place] is not place:
            _absorb(home[place], place, before)
    stages = _stages(before)
    for node, place in places.items():
        places[node] = home[place]._replace(stage=stages[home[place]])


def _partner(place: Place, before: Mapping[Place, set[Place]]) -> Place | None:
    """The earliest region that one may join."""
    if place.planned >= 0:
        return None
    return next(
        (
            other
            for other in before
            if other < place
            and other.planned < 0
            and other.backend == place.backend
            and not _something_between(other, place, before)
        ),
        None,
    )


def _something_between(one: Place, other: Place, before: Mapping[Place, set[Place]]) -> bool:
    """Whether a path leads from one region to the other, either way, through a third."""
    for start, goal in ((other, one), (one, other)):
        pending = [place for place in before[start] if place != goal]
        seen = set(pending)
        while pending:
            earlier = before[pending.pop()]
            if goal in earlier:
                return True
            pending.extend(earlier - seen)
            seen |= earlier
    return False


def _absorb(into: Place, place: Place, before: dict[Place, set[Place]]) -> None:
    """Make one region of two."""
    before[into] |= before.pop(place)
    before[into] -= {into, place}
    for earlier in before.values():
        if place in earlier:
            earlier.remove(place)
            earlier.add(into)
    before[into].discard(into)


def _stages(before: Mapping[Place, set[Place]]) -> dict[Place, int]:
    """A number for each region, larger than those of the regions before it."""
    stages: dict[Place, int] = {}
    pending = sorted(before)
    while pending:
        ready = [place for place in pending if before[place] <= stages.keys()]
        assert ready, "merging made a cycle"
        for place in ready:
            stages[place] = len(stages)
        pending = [place for place in pending if place not in stages]
    return stages
