"""Names and numbers of what is reported, counted through the process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

_graph_numbers: dict[str, Iterator[int]] = {}
#: Numbers of the backend's calls in this process.
call_numbers = itertools.count()


def next_name(kind: str) -> str:
    """A name for the next graph of a kind in this process: ``inference0``."""
    return f"{kind}{next(_graph_numbers.setdefault(kind, itertools.count()))}"
