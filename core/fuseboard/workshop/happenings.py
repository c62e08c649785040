"""What happens in the workshop while it works on a graph, for the process that asked it.

It goes through a file in the request's directory, one JSON object a line, and is read while the
workshop is still at work: what happened before it crashed isn't lost. Each line arrives once, in
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuseboard.forks import fork_safe_lock
from fuseboard.totals import totals

#: What takes one happening.
Take = Callable[[Mapping[str, Any]], None]

_FILE = "happenings"


@contextmanager
def sent_through(directory: Path) -> Iterator[None]:
    """In the workshop: send what happens in the block."""
    lock = fork_safe_lock()
    with (directory / _FILE).open("ab", buffering=0) as file:

        def send(happening: Mapping[str, Any]) -> None:
            line = json.dumps(happening, default=str).encode() + b"\n"
            with lock:
                if not file.closed:  # a thread of the workshop's may come too late
                    file.write(line)

        totals.sent_to = send
        try:
            yield
        finally:
            with lock:
                totals.sent_to = lambda happening: None


class Happenings:
    """In the process that asks: what has arrived of a request.

    :param take: is given each happening, in this thread.
    """

    def __init__(self, directory: Path, take: Take) -> None:
        self._path = directory / _FILE
        self._take = take
        self._at = 0

    def read(self) -> None:
        """Pass on what has arrived since."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:  # nothing has happened, or the directory went with the process
            return
        lines = data[: data.rfind(b"\n") + 1]  # the last one may be half written
        self._at += len(lines)
        for line in lines.splitlines():
            self._take(json.loads(line))
