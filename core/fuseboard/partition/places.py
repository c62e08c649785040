"""Where a node runs: what the parts of the partition stage tell each other."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Nodes at one place are one region; regions run in the order of their places.

    :ivar planned: the number of the planned region; -1 for nodes that the board groups.
    """

    stage: int
    backend: str
    planned: int = -1
