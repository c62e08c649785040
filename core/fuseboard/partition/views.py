"""Views and shape ops go to the side where they are free: they must not cut a stretch in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from fuseboard.contracts import Claim, Decline
from fuseboard.ops.estimate import is_view
from fuseboard.partition.claims import claimed_names


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
    claimed = {backend: claimed_names(answers) for backend, answers in claims.items()}
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
        source = next((s for s in sources if node.name in claimed.get(s, ())), None)
        if source is not None:
            placements[node.name] = source
        else:
            sourceless.append(node)
    for node in reversed(sourceless):
        readers = [placements[user.name] for user in node.users if user.name in placements]
        able = Counter(reader for reader in readers if node.name in claimed.get(reader, ()))
        if able and placements[node.name] not in able:
            placements[node.name] = able.most_common(1)[0][0]
    return placements
