"""The SQLite file of the cost database: opening, retrying, and setting aside what is damaged.

Each piece of work has a connection of its own, closed when it is done: there are few of them, far
apart, and so no connection is shared between threads or survives a fork. The file is in WAL mode:
readers don't wait for writers, and a process that is killed leaves whole transactions only.

Nothing here opens the file but SQLite: closing any other descriptor of it would drop the locks
that SQLite holds in this process (https://www.sqlite.org/howtocorrupt.html, 2.2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from fuseboard.profile.costs.rows import ROW, Damaged, from_row

log = logging.getLogger("fuseboard")

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

#: Marks a file as a cost database: "fbco".
APPLICATION_ID = 0x6662636F

#: ``STEPS[n]`` makes version n + 1 of version n, in the transaction that notes the new version. A
#: file of an older version is brought up to date by whoever opens it first; one of a newer version
#: is left alone. A step that is released is never changed.
STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE decisions (
            key TEXT PRIMARY KEY, level TEXT NOT NULL, graph TEXT NOT NULL,
            settled INTEGER NOT NULL, created REAL NOT NULL, body TEXT NOT NULL,
            checksum TEXT NOT NULL) WITHOUT ROWID""",
        "CREATE INDEX decisions_of_graph ON decisions (graph, level)",
    ),
)

#: Held while a database is worked on. A fork waits for it: SQLite's own mutexes, held by a thread
#: that the child doesn't have, would never be free there.
guard = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=guard.acquire, after_in_parent=guard.release, after_in_child=guard.release
    )

#: How long one statement waits for a lock inside SQLite, which Ctrl-C can't end.
_BUSY_S = 0.1
_ROUNDS = 3

_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
#: SQLITE_ERROR: one of our statements doesn't fit the tables.
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
}
_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_NO_ROOM = {sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMSIZE}
#: Read a file that nobody writes, without locks.
_FROZEN = "ro&immutable=1"
_WHY = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "it can't be written",
    sqlite3.SQLITE_PERM: "it can't be written",
    sqlite3.SQLITE_CANTOPEN: "it can't be opened",
    sqlite3.SQLITE_IOERR: "reading or writing it failed",
}


class Unusable(Exception):
    """Why the file can't be used now; the message completes "PATH: "."""


class Foreign(Exception):
    """A file that is no cost database."""


class CostFile:
    """The file at a path, which is made when something is first written.

    :param wait_s: how long a lock of other processes is waited for.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        self.path = path
        self.wait_s = wait_s

    def read(self, work: Work[T], default: T) -> T:
        """What ``work`` finds; the default where there is no file, or nothing in it.

        :raises Unusable: the file can't be read.
        """

        def reading() -> T:
            if not os.path.exists(self.path):
                return default
            try:
                return self._read_in("rw", work, default)
            except sqlite3.OperationalError as error:
                # WAL needs two files beside the database. Where they can't be made, without
                # permission or on a full disk, and there is no log, the file is all there is.
                wal = self.path.with_name(f"{self.path.name}-wal")
                if not _lacks_files(error) or (wal.exists() and wal.stat().st_size):
                    raise
                return self._read_in(_FROZEN, work, default)

        return self._persist(reading)

    def write(self, work: Work[T]) -> T:
        """Run ``work`` in one transaction: all of it is in the file afterwards, or nothing.

        :raises Unusable: the file can't be written.
        """

        def writing() -> T:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise Unusable(f"{self.path.parent} can't be made: {error}") from error
            with connected(self.path, "rwc") as connection:
                if not check(connection):
                    # Needs the file for itself, once; whoever comes second finds it done.
                    connection.execute("PRAGMA journal_mode = WAL").fetchone()
                with transaction(connection):
                    upgrade(connection)
                    return work(connection)

        return self._persist(writing)

    def _read_in(self, mode: str, work: Work[T], default: T) -> T:
        with connected(self.path, mode) as connection:
            if not check(connection):
                return default
            if version_of(connection) < len(STEPS):
                if mode == _FROZEN:
                    raise Unusable("it is of an older version and can't be brought up to date")
                with transaction(connection):
                    upgrade(connection)
            return work(connection)

    def _persist(self, attempt: Callable[[], T]) -> T:
        """The attempt's answer, after waiting for locks and setting damaged files aside."""
        end = time.monotonic() + self.wait_s
        rounds = 0
        while True:
            try:
                with guard:
                    return attempt()
            except (Foreign, Damaged, UnicodeDecodeError) as error:
                problem: Exception = error
            except sqlite3.Error as error:
                if _code(error) in _LOCKED and time.monotonic() < end:
                    time.sleep(random.uniform(0.002, 0.03))
                    continue
                if _code(error) not in _DAMAGED:
                    raise Unusable(_why(error, self.wait_s)) from error
                problem = error
            rounds += 1
            if rounds > _ROUNDS:
                raise Unusable(f"it is damaged ({problem})") from problem
            self._set_aside(problem, end)

    # --- damage ---------------------------------------------------------------------------------

    def _set_aside(self, problem: Exception, end: float) -> None:
        """Rename a damaged file, unless another process has done so meanwhile.

        :raises Unusable: it can't be renamed.
        """
        try:
            with _alone(self.path.with_name(f"{self.path.name}.lock"), end):
                with guard:
                    sound = self._is_sound()
                if sound:
                    return
                aside = self._free_name()
                # First what belongs to it: a log that stayed would be applied to the new file.
                for ending in ("-wal", "-shm", ""):
                    part = self.path.with_name(self.path.name + ending)
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(part, aside.with_name(aside.name + ending))
        except OSError as error:
            raise Unusable(f"it is damaged ({problem}) and can't be set aside: {error}") from error
        log.warning(
            "fuseboard: the database of measured choices was set aside, it is damaged (%s): %s",
            problem,
            aside,
        )

    def _free_name(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.corrupt-{number}")).exists():
            number += 1
        return aside

    def _is_sound(self) -> bool:
        """Whether what is there now is an undamaged cost database, or nothing is there."""
        if not os.path.exists(self.path):
            return True
        try:
            with connected(self.path, "rw") as connection:
                if check(connection):
                    for row in connection.execute(ROW):
                        from_row(*row)
                verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
                return bool(verdict == "ok")
        except (Foreign, Damaged, UnicodeDecodeError):
            return False
        except sqlite3.Error as error:
            return _code(error) not in _DAMAGED


# --- connections ----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection without implicit transactions, closed at the end."""
    uri = f"file:{quote(str(path))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        # What isn't UTF-8 is damage, which checksums tell of.
        connection.text_factory = lambda text: text.decode(errors="replace")
        # In WAL mode a killed process loses nothing by it, and a power cut whole transactions only.
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end, roll back on any exception, Ctrl-C included."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the file's tables, 0 if there are none."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check(connection: sqlite3.Connection) -> bool:
    """Whether the file holds a cost database; False if it is empty.

    :raises Foreign: it is something else.
    :raises Unusable: it is of a newer version.
    """
    version = version_of(connection)
    mark = connection.execute("PRAGMA application_id").fetchone()[0]
    if mark != APPLICATION_ID:
        if mark or version or _tables(connection):
            raise Foreign("it is no cost database")
        return False
    if version < 1:
        raise Foreign("it is a cost database without a version")
    if version > len(STEPS):
        raise Unusable(
            f"it has format {version}, of a newer fuseboard; this one knows {len(STEPS)}"
        )
    return True


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring the tables up to date; in a transaction."""
    version = version_of(connection)
    for step in STEPS[version:]:
        for statement in step:
            connection.execute(statement)
    if version < len(STEPS):
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(STEPS)}")


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
    return {name for (name,) in rows}


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return _extended(error) & 0xFF


def _extended(error: sqlite3.Error) -> int:
    """The code that says more; 0 where the error is Python's own."""
    return getattr(error, "sqlite_errorcode", 0)


def _lacks_files(error: sqlite3.Error) -> bool:
    """Whether the files beside the database can't be made."""
    return _code(error) in _UNWRITABLE or _extended(error) in _NO_ROOM


def _why(error: sqlite3.Error, waited_s: float) -> str:
    if _code(error) in _LOCKED:
        return f"another process kept it locked for {waited_s:g} s"
    if _extended(error) in _NO_ROOM:
        return f"there is no room for the files beside it: {error}"
    return f"{_WHY.get(_code(error), 'it fails')}: {error}"


@contextlib.contextmanager
def _alone(lock: Path, end: float) -> Iterator[None]:
    """Keep out other processes, and threads of this one, until the end.

    :raises OSError: another one takes too long.
    """
    if sys.platform == "win32":  # files that are open can't be renamed there anyway
        yield
        return
    import fcntl

    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        yield
