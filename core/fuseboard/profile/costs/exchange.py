"""Files of decisions that people pass on, in JSON; databases can be read as well."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuseboard.errors import CostsError
from fuseboard.profile.costs.file import Foreign, Unusable, check, connected
from fuseboard.profile.costs.rows import (
    PUT,
    ROW,
    Damaged,
    Decision,
    decode,
    encode,
    from_row,
    row_of,
)

FORMAT, VERSION = "fuseboard costs", 1
_SQLITE = b"SQLite format 3\0"


@dataclass
class Imported:
    """What became of an imported file's entries.

    :ivar skipped: what was there already, as new or newer, or settled where the file's isn't.
    :ivar damaged: entries that aren't what was exported.
    """

    added: int = 0
    replaced: int = 0
    skipped: int = 0
    damaged: int = 0


@dataclass
class Content:
    """What an exported file holds."""

    decisions: list[Decision] = field(default_factory=list)
    damaged: int = 0

    def merge(self, connection: sqlite3.Connection) -> Imported:
        """Put it into a database, in its transaction: the newest of each entry wins."""
        counts = Imported(damaged=self.damaged)
        for decision in self.decisions:
            there = connection.execute(
                "SELECT settled, created FROM decisions WHERE key = ?", (decision.key,)
            ).fetchone()
            if _count(counts, there, (decision.settled, decision.created)):
                connection.execute(PUT, row_of(decision))
        return counts

    def add(self, made: Callable[[], Decision]) -> None:
        """A decision, or one damaged entry more."""
        try:
            self.decisions.append(made())
        except Damaged:
            self.damaged += 1


def _count(counts: Imported, there: tuple[Any, ...] | None, given: tuple[Any, ...]) -> bool:
    """Whether an entry goes in; counted."""
    if there is None:
        counts.added += 1
    elif given > there:
        counts.replaced += 1
    else:
        counts.skipped += 1
        return False
    return True


def _why(error: Exception) -> str:
    """Without the number and the name of a file that the user doesn't know."""
    return getattr(error, "strerror", None) or str(error)


# --- writing --------------------------------------------------------------------------------------


def write_export(path: Path, decisions: Sequence[Decision]) -> None:
    """Write a file beside its place and move it there.

    :raises CostsError: it can't be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "decisions": [encode(decision) for decision in decisions],
    }
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise CostsError(f"{path} can't be written: {_why(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


# --- reading --------------------------------------------------------------------------------------


def read_export(path: Path) -> Content:
    """What a file holds that was exported, or another process's database.

    :raises CostsError: it can't be read, or is neither.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
        return _read_sqlite(path) if start == _SQLITE else _read_json(path)
    except (OSError, sqlite3.Error, Unusable) as error:
        raise CostsError(f"{path} can't be read: {_why(error)}") from error
    except Foreign as error:
        raise CostsError(f"{path} is an SQLite database, but not one of fuseboard's") from error


def _read_sqlite(path: Path) -> Content:
    content = Content()
    with _opened(path) as connection:
        if not check(connection):
            raise Foreign("it is empty")
        for row in connection.execute(ROW):
            content.add(partial(from_row, *row))
    return content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing."""
    wal = path.with_name(f"{path.name}-wal")
    mode = "ro" if wal.exists() else "ro&immutable=1"  # the latter needs no right to write
    with connected(path, mode) as connection:
        yield connection


def _read_json(path: Path) -> Content:
    wrong = f"{path} is neither a database nor what `fuseboard costs export` wrote"
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise CostsError(f"{wrong}: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CostsError(f'{wrong}: it doesn\'t say "format": {FORMAT!r}')
    if not isinstance(version := values.get("version"), int) or version > VERSION:
        raise CostsError(f"{path} has version {version!r}; this fuseboard knows {VERSION}")
    if not isinstance(entries := values.get("decisions"), list):
        raise CostsError(f"{wrong}: decisions is no list")
    content = Content()
    for entry in entries:
        content.add(partial(decode, entry))
    return content
