"""Views and shape ops go to the side where they are free: they must not cut a stretch in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.fx import Node

from fuseboard.contracts import Claim, Decline
from fuseboard.partition.estimate import is_view


def pull_views(
    nodes: Sequence[Node],
    chosen: Mapping[str, str],
    claims: Mapping[str, Sequence[Claim | Decline]],
    fixed: Collection[str],
) -> dict[str, str]:
    """The placements with each view beside what it is a view of, else beside its readers.

    Where the other backend claims it, that is. Beside its source a view never waits for anything
    that the source doesn't wait for.

    :param fixed: nodes that stay, since they are pinned.
    """
    takers = _takers(claims)
    together = {
        name
        for answers in claims.values()
        for claim in answers
        if isinstance(claim, Claim) and claim.together
        for name in claim.nodes
    }
    placements = dict(chosen)
    sourceless = []
    for node in nodes:
        if not is_view(node) or node.name in fixed or node.name in together:
            continue
        sources = [placements[n.name] for n in node.all_input_nodes if n.name in placements]
        if any(source in takers[node.name] for source in sources):
            placements[node.name] = next(s for s in sources if s in takers[node.name])
        else:
            sourceless.append(node)
    for node in reversed(sourceless):
        readers = [placements[user.name] for user in node.users if user.name in placements]
        able = Counter(reader for reader in readers if reader in takers[node.name])
        if able and placements[node.name] not in able:
            placements[node.name] = able.most_common(1)[0][0]
    return placements


def _takers(claims: Mapping[str, Sequence[Claim | Decline]]) -> dict[str, list[str]]:
    """Node → the backends that claim it, in order."""
    takers: dict[str, list[str]] = {}
    for backend, answers in claims.items():
        for name in _claimed(answers):
            takers.setdefault(name, []).append(backend)
    return takers


def _claimed(answers: Iterable[Claim | Decline]) -> set[str]:
    return {name for claim in answers if isinstance(claim, Claim) for name in claim.nodes}
