"""The cost database: what was measured and chosen, for later processes.

``costs.sqlite3`` in the cache directory. What can't be written there (locked, read-only, of a newer
version, a full disk) is kept in memory, which is told once, and written when that works again.
No method of :class:`CostDatabase` raises for the file's sake, but for those that a person calls:
``forget``, ``export`` and ``import_``.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fuseboard.errors import CostsError
from fuseboard.profile.costs.exchange import Imported, read_export, write_export
from fuseboard.profile.costs.file import CostFile, Unusable, guard
from fuseboard.profile.costs.rows import (
    PUT,
    ROW,
    UNLESS_SETTLED,
    CandidateCost,
    Decision,
    checked,
    decision_key,
    differing,
    from_row,
    row_of,
)

if TYPE_CHECKING:
    from fuseboard.config.model import Settings

__all__ = [
    "CandidateCost",
    "CostDatabase",
    "Decision",
    "database",
    "decision_key",
]

log = logging.getLogger("fuseboard")

T = TypeVar("T")

NAME = "costs.sqlite3"


class CostDatabase:
    """Decisions, in a file or in memory only. For any threads and processes.

    :param path: the file; None keeps all in memory.
    :param wait_s: how long locks of other processes are waited for.
    :param retry_s: how long a file that made trouble is left alone.
    """

    def __init__(self, path: Path | None, *, wait_s: float = 5.0, retry_s: float = 30.0) -> None:
        self.path = path
        self._file = None if path is None else CostFile(path, wait_s)
        self._retry_s = retry_s
        self._read_after = self._write_after = 0.0
        #: What isn't in the file: everything without one, else what waits to be written.
        self._decisions: dict[str, tuple[Decision, bool]] = {}
        self._problem = ""
        self._told: set[str] = set()

    @property
    def problem(self) -> str:
        """Why decisions stay in memory at present, for a report; "" if they don't have to."""
        return self._problem

    # --- decisions ------------------------------------------------------------------------------

    def find(self, key: str) -> Decision | None:
        """The decision under a key."""
        if (waiting := self._decisions.get(key)) is not None:
            return waiting[0]
        return next(iter(self._decisions_where("WHERE key = ?", key)), None)

    def record(self, *decisions: Decision, replace: bool = False) -> None:
        """Keep decisions, all of them in one transaction.

        :param replace: also where a settled decision is there and this one isn't settled.
        :raises ValueError: a field has a wrong type, or the key isn't that of the parts.
        """
        kept = list(map(checked, decisions))
        with guard:
            for decision in kept:
                before = self._decisions.get(decision.key)
                if replace or before is None or decision.settled >= before[0].settled:
                    force = replace or (before is not None and before[1])
                    self._decisions[decision.key] = decision, force
        self._flush()

    def nearest(self, level: str, parts: Mapping[str, str]) -> tuple[str, ...]:
        """In which parts the nearest decision on the same graph differs; () where there is none."""
        graph = parts.get("graph", "")
        near = self._decisions_where("WHERE graph = ? AND level = ?", graph, level)
        near += [
            decision
            for decision, _ in list(self._decisions.values())
            if decision.level == level and decision.parts.get("graph", "") == graph
        ]
        return min((differing(parts, other.parts) for other in near), key=len, default=())

    def decisions(self) -> list[Decision]:
        """All of them, the newest first."""
        found = {decision.key: decision for decision in self._decisions_where()}
        found.update((key, decision) for key, (decision, _) in list(self._decisions.items()))
        return sorted(found.values(), key=lambda decision: (-decision.created, decision.key))

    def forget(self, keys: Iterable[str]) -> int:
        """Remove decisions, so that they are measured anew. Returns how many there were.

        :raises CostsError: the file can't be written.
        """
        wanted = [(key,) for key in keys]

        def delete(connection: sqlite3.Connection) -> int:
            return connection.executemany("DELETE FROM decisions WHERE key = ?", wanted).rowcount

        count = self._write_or_raise(delete) if self._has_file() and wanted else 0
        with guard:
            return count + sum(self._decisions.pop(key, None) is not None for (key,) in wanted)

    # --- exchange -------------------------------------------------------------------------------

    def export(self, path: Path) -> int:
        """Write everything to a file of its own, in JSON.

        :returns: how many decisions it has.
        :raises CostsError: it can't be written, or it is this database's own file.
        """
        self._refuse_own(path)
        decisions = self.decisions()
        if self._problem:
            raise CostsError(f"{self.path}: {self._problem}")
        write_export(path, decisions)
        return len(decisions)

    def import_(self, path: Path) -> Imported:
        """Take over what an exported file has and this database hasn't, or has older.

        :raises CostsError: the file is no export, or this database's can't be written.
        """
        self._refuse_own(path)
        content = read_export(path)
        if self._file is None:
            raise CostsError("the setting cache is off: there is no database to import into")
        return self._write_or_raise(content.merge)

    def _refuse_own(self, path: Path) -> None:
        if self.path is not None and os.path.exists(self.path) and os.path.exists(path):
            if os.path.samefile(path, self.path):
                raise CostsError(f"{path} is the database itself")

    # --- the file -------------------------------------------------------------------------------

    def _has_file(self) -> bool:
        return self.path is not None and os.path.exists(self.path)

    def _decisions_where(self, condition: str = "", *values: str) -> list[Decision]:
        """Those in the file; none where it can't be read."""
        if self._file is None or time.monotonic() < self._read_after:
            return []

        def select(connection: sqlite3.Connection) -> list[Decision]:
            return [from_row(*row) for row in connection.execute(f"{ROW} {condition}", values)]

        nothing: list[Decision] = []
        try:
            found = self._file.read(select, nothing)
        except Unusable as error:
            self._read_after = time.monotonic() + self._retry_s
            self._tell(str(error))
            return nothing
        if not self._decisions:
            self._problem = ""
        return found

    def _flush(self) -> None:
        """Write what waits, if the file allows it."""
        if self._file is None or time.monotonic() < self._write_after:
            return
        with guard:
            decisions = dict(self._decisions)

        def put(connection: sqlite3.Connection) -> None:
            for decision, force in decisions.values():
                connection.execute(PUT + ("" if force else UNLESS_SETTLED), row_of(decision))

        try:
            self._file.write(put)
        except Unusable as error:
            self._write_after = time.monotonic() + self._retry_s
            self._tell(str(error))
            return
        self._problem = ""
        self._read_after = 0.0  # it works again, and nothing is kept here that it has
        with guard:
            for key, waiting in decisions.items():
                if self._decisions.get(key) is waiting:
                    del self._decisions[key]

    def _write_or_raise(self, work: Callable[[sqlite3.Connection], T]) -> T:
        assert self._file is not None  # whoever calls has looked
        try:
            return self._file.write(work)
        except Unusable as error:
            raise CostsError(f"{self.path}: {error}") from error

    def _tell(self, why: str) -> None:
        """One warning for each kind of trouble."""
        self._problem = f"measured choices stay in memory: {why}"
        if why not in self._told:
            self._told.add(why)
            log.warning("fuseboard: measured choices stay in memory: %s: %s", self.path, why)


# --- this process's -------------------------------------------------------------------------------

_opened: dict[Path | None, CostDatabase] = {}


def database(settings: Settings) -> CostDatabase:
    """The database of this process for the settings ``cache`` and ``cache_dir``.

    With ``cache = false`` it is in memory only.
    """
    path = None
    if settings.cache:
        import platformdirs

        chosen = settings.cache_dir or platformdirs.user_cache_dir("fuseboard", appauthor=False)
        path = Path(chosen).expanduser().absolute() / NAME
    if path not in _opened:
        _opened.setdefault(path, CostDatabase(path))
    return _opened[path]
