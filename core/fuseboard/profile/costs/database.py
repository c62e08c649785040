"""The cost database: what was measured and chosen, for later processes.

A file for each decision, in the directory ``costs`` of the cache directory. What can't be written
there (read-only, a full disk) is kept in memory, which is told once, and written with a later
decision when that works again. No method of :class:`CostDatabase` raises for the files' sake, but
for those that a person calls: ``forget``, ``export`` and ``import_``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fuseboard.errors import CostsError
from fuseboard.files import make_private
from fuseboard.forks import fork_safe_lock
from fuseboard.profile.costs.exchange import Content, Imported, read_export, write_export
from fuseboard.profile.costs.file import (
    ENDING,
    content_of,
    decision_in,
    read_decision,
    write_whole,
)
from fuseboard.profile.costs.rows import (
    CandidateCost,
    Damaged,
    Decision,
    checked,
    decision_key,
    group_of,
    group_of_key,
)
from fuseboard.remote_cache import RemoteCache, remote_cache
from fuseboard.totals import differing

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

NAME = "costs"
#: What a damaged file is called from then on.
_ASIDE = ".damaged"


class CostDatabase:
    """Decisions, in files or in memory only. For any threads and processes.

    :param path: the directory; None keeps all in memory.
    :param remote: a cache that several machines share: what isn't in the directory is taken from
        there into it.
    """

    def __init__(self, path: Path | None, remote: RemoteCache | None = None) -> None:
        self.path = path
        self._remote = remote
        #: Keys that were looked for at the remote address.
        self._looked_for: set[str] = set()
        #: What is in no file: everything without a directory, else what waits to be written.
        self._waiting: dict[str, Decision] = {}
        self._lock = fork_safe_lock()
        self._problem = ""
        self._told: set[str] = set()

    @property
    def problem(self) -> str:
        """Why decisions stay in memory at present, for a report; "" if they don't have to."""
        return self._problem

    # --- decisions ------------------------------------------------------------------------------

    def find(self, key: str) -> Decision | None:
        """The decision under a key."""
        found = self._here(key)
        if found is None and self._remote is not None and key not in self._looked_for:
            found = self._fetched(key, self._remote)
        return found

    def _here(self, key: str) -> Decision | None:
        """The decision on this machine; whoever holds the lock asks no other one."""
        if (waiting := self._waiting.get(key)) is not None:
            return waiting
        place = self._place(key)
        return None if place is None else self._read(place)

    def _fetched(self, key: str, remote: RemoteCache) -> Decision | None:
        """A decision of another machine's, which is kept here from now on."""
        content = remote.read(remote_path(key))
        if not remote.rests:
            self._looked_for.add(key)
        try:
            found = None if content is None else decision_in(f"{key}{ENDING}", content)
        except Damaged as problem:
            remote.tell("damaged decision", f"{remote_path(key)}: {problem}")
            return None
        if found is not None:
            self._keep(found)
        return found

    def record(self, decision: Decision, replace: bool = False) -> None:
        """Keep a decision.

        Where two processes decide on the same at the same time the later one stays.

        :param replace: also where a settled decision is there and this one isn't settled.
        :raises ValueError: a field has a wrong type, or the key isn't that of the parts.
        """
        kept = checked(decision)
        with self._lock:
            before = None if replace or kept.settled else self._here(kept.key)
            if before is None or not before.settled:
                self._keep(kept)
        if self._remote is not None and kept.settled:
            self._remote.write(remote_path(kept.key), content_of(kept))

    def _keep(self, *decisions: Decision) -> None:
        with self._lock:
            self._waiting.update((decision.key, decision) for decision in decisions)
            self._write_waiting()

    def nearest(self, level: str, parts: Mapping[str, str]) -> Mapping[str, str] | None:
        """What the nearest decision on the same graph depends on; None where there is none."""
        near = [decision.parts for decision in self._all_of(group_of(level, parts))]
        return min(near, key=lambda other: len(differing(parts, other)), default=None)

    def decisions(self) -> list[Decision]:
        """All of them, the newest first."""
        return sorted(self._all_of(""), key=lambda decision: (-decision.created, decision.key))

    def forget(self, keys: Iterable[str]) -> int:
        """Remove decisions, so that they are measured anew. Returns how many there were.

        :raises CostsError: a file can't be removed.
        """
        count = 0
        with self._lock:
            for key in keys:
                place = self._place(key)
                try:
                    in_file = place is not None and place.exists()
                    if place is not None and in_file:
                        place.unlink(missing_ok=True)
                except OSError as error:
                    raise CostsError(f"{place} can't be removed: {error.strerror}") from error
                count += in_file or key in self._waiting
                self._waiting.pop(key, None)
        return count

    # --- exchange -------------------------------------------------------------------------------

    def export(self, path: Path) -> int:
        """Write everything to a file of its own, in JSON.

        :returns: how many decisions it has.
        :raises CostsError: it can't be written.
        """
        decisions = self.decisions()
        if self._problem:
            raise CostsError(f"{self.path}: {self._problem}")
        write_export(path, decisions)
        return len(decisions)

    def import_(self, path: Path) -> Imported:
        """Take over what a file or directory has and this database hasn't, or has older.

        :raises CostsError: it is no export, or this database's directory can't be written.
        """
        if self.path is not None and path.exists() and self.path.exists():
            if os.path.samefile(path, self.path):
                raise CostsError(f"{path} is the database itself")
        return self.merge(read_export(path))

    def merge(self, content: Content) -> Imported:
        """Take over what this database hasn't, or has older.

        :raises CostsError: its directory can't be written.
        """
        if self.path is None:
            raise CostsError("the setting cache is off: there is no database to import into")
        counts = Imported(damaged=content.damaged)
        with self._lock:
            for decision in content.decisions:
                if counts.count(self._here(decision.key), decision):
                    self._keep(decision)
        if self._waiting:
            raise CostsError(f"{self.path}: {self._problem}")
        return counts

    # --- the files ------------------------------------------------------------------------------

    def _place(self, key: str) -> Path | None:
        """A directory of 256, so that none grows too long to be listed."""
        if self.path is None:
            return None
        return self.path / group_of_key(key)[:2] / f"{key}{ENDING}"

    def _all_of(self, group: str) -> list[Decision]:
        """The decisions of a group, or all of them."""
        read = map(self._read, self._files(group))
        found = {decision.key: decision for decision in read if decision is not None}
        found.update(
            (key, one)
            for key, one in list(self._waiting.items())
            if group in ("", group_of_key(key))
        )
        return list(found.values())

    def _files(self, group: str) -> list[Path]:
        if self.path is None:
            return []
        try:
            homes = [self.path / group[:2]] if group else [*self.path.iterdir()]
            files = [file for home in homes if home.is_dir() for file in home.iterdir()]
        except FileNotFoundError:  # nothing was recorded yet
            return []
        except OSError as error:
            self._tell("it can't be read", error)
            return []
        return [file for file in files if file.name.endswith(f"{group}{ENDING}")]

    def _read(self, place: Path) -> Decision | None:
        """The decision in a file; a damaged one is set aside."""
        try:
            return read_decision(place)
        except Damaged as problem:
            self._set_aside(place, problem)
        except OSError as error:
            self._tell("it can't be read", error)
        return None

    def _set_aside(self, place: Path, problem: Damaged) -> None:
        aside = place.with_name(f"{place.name}{_ASIDE}")
        try:
            os.replace(place, aside)
        except OSError as error:
            self._tell(f"{place.name} is damaged and can't be set aside", error)
            return
        log.warning("fuseboard: a measured choice was set aside, %s: %s", problem, aside)

    def _write_waiting(self) -> None:
        """Write what waits, if that can be done."""
        if self.path is None:
            return
        try:
            for key, decision in list(self._waiting.items()):
                place = self._place(key)
                assert place is not None
                make_private(place.parent)
                write_whole(place, content_of(decision))
                del self._waiting[key]
        except OSError as error:
            self._tell("it can't be written", error)
        else:
            self._problem = ""

    def _tell(self, what: str, error: OSError) -> None:
        """One warning for each kind of trouble."""
        self._problem = f"measured choices stay in memory: {what}: {error.strerror or error}"
        if what not in self._told:
            self._told.add(what)
            log.warning("fuseboard: %s: %s", self._problem, self.path)


# --- this process's -------------------------------------------------------------------------------

_opened: dict[tuple[Path | None, RemoteCache | None], CostDatabase] = {}


def remote_path(key: str) -> str:
    """Where the decision under a key lies in a cache that several machines share."""
    return f"{NAME}/{group_of_key(key)[:2]}/{key}{ENDING}"


def remote_of(settings: Settings) -> RemoteCache | None:
    """The cache that several machines share, if the settings name one."""
    if settings.cache_remote is None or not settings.cache:
        return None
    return remote_cache(
        settings.cache_remote,
        settings.cache_remote_write,
        settings.cache_remote_trust,
        settings.cache_remote_size_mb,
    )


def database(settings: Settings) -> CostDatabase:
    """The database of this process for the settings ``cache`` and ``cache_dir``.

    With ``cache = false`` it is in memory only.
    """
    path = None
    if settings.cache:
        import platformdirs

        chosen = settings.cache_dir or platformdirs.user_cache_dir("fuseboard", appauthor=False)
        path = Path(chosen).expanduser().absolute() / NAME
    place = path, remote_of(settings)
    if place not in _opened:
        _opened.setdefault(place, CostDatabase(*place))
    return _opened[place]
