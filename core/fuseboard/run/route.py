"""The route: the one place that says which program answers the next call of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]


class Route:
    """Sends a graph's calls to a program.

    :param kept: lives as long as ``run``.
    :ivar run: what Dynamo calls. One function, which looks up nothing but a variable of its own.
    :ivar put: lets calls go to another program, from the next one on.
    """

    def __init__(self, first: Run, kept: object = None) -> None:
        current = first

        def run(*args: Any) -> Any:
            return current(*args)

        run.kept = kept  # type: ignore[attr-defined]

        def put(program: Run) -> None:
            nonlocal current
            current = program

        self.run: Run = run
        self.put: Callable[[Run], None] = put
