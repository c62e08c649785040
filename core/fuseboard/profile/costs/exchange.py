"""Files of decisions that people pass on, in JSON; databases can be read as well."""

from __future__ import annotations

import base64
import binascii
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
    PUT_RECORD,
    RECORD_ROW,
    ROW,
    Damaged,
    Decision,
    TuningRecord,
    checked_record,
    decode,
    encode,
    from_row,
    record_from_row,
    record_row_of,
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
    records: list[TuningRecord] = field(default_factory=list)
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
        for record in self.records:
            there = connection.execute(
                "SELECT created FROM records WHERE namespace = ? AND key = ?",
                (record.namespace, record.key),
            ).fetchone()
            if _count(counts, there, (record.created,)):
                connection.execute(PUT_RECORD, record_row_of(record))
        return counts

    def add(self, kind: str, made: Callable[[], Any]) -> None:
        """An entry, or one damaged entry more."""
        try:
            getattr(self, kind).append(made())
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


def write_export(
    path: Path, decisions: Sequence[Decision], records: Sequence[TuningRecord]
) -> None:
    """Write a file beside its place and move it there.

    :raises CostsError: it can't be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "decisions": [encode(decision) for decision in decisions],
        "records": [
            {
                "namespace": record.namespace,
                "key": record.key,
                "created": record.created,
                "value": base64.b64encode(record.value).decode(),
            }
            for record in records
        ],
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
            content.add("decisions", partial(from_row, *row))
        for row in connection.execute(RECORD_ROW):
            content.add("records", partial(record_from_row, *row))
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
    content = Content()
    made: Callable[[Any], Any]
    for kind, made in (("decisions", decode), ("records", _record)):
        entries = values.get(kind)
        if not isinstance(entries, list):
            raise CostsError(f"{wrong}: {kind} is no list")
        for entry in entries:
            content.add(kind, partial(made, entry))
    return content


def _record(values: Any) -> TuningRecord:
    try:
        value = base64.b64decode(values["value"], validate=True)
        given = values["namespace"], values["key"], value, values["created"]
        return checked_record(TuningRecord(*given))
    except (TypeError, KeyError, ValueError, binascii.Error) as error:
        raise Damaged(f"it isn't a record: {error}") from error
