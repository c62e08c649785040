"""Files of decisions that people pass on, in JSON; databases can be read as well."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuseboard.errors import CostsError
from fuseboard.profile.costs.file import ENDING, read_decision, write_whole
from fuseboard.profile.costs.rows import Damaged, Decision, decode, encode

FORMAT, VERSION = "fuseboard costs", 1


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

    def count(self, there: Decision | None, given: Decision) -> bool:
        """Whether an entry goes in, the newest of each; counted."""
        if there is None:
            self.added += 1
        elif (given.settled, given.created) > (there.settled, there.created):
            self.replaced += 1
        else:
            self.skipped += 1
            return False
        return True


@dataclass
class Content:
    """What an exported file holds."""

    decisions: list[Decision] = field(default_factory=list)
    damaged: int = 0

    def add(self, made: Callable[[], Decision | None]) -> None:
        """A decision, or one damaged entry more."""
        try:
            decision = made()
        except Damaged:
            self.damaged += 1
        else:
            self.decisions += [] if decision is None else [decision]


def write_export(path: Path, decisions: Sequence[Decision]) -> None:
    """Write a file.

    :raises CostsError: it can't be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "decisions": [encode(decision) for decision in decisions],
    }
    try:
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise CostsError(f"{path} can't be written: {error.strerror}") from error


def read_export(path: Path) -> Content:
    """What a file holds that was exported, or the directory of a database.

    :raises CostsError: it can't be read, or is neither.
    """
    try:
        return _read_directory(path) if path.is_dir() else _read_json(path)
    except OSError as error:
        raise CostsError(f"{path} can't be read: {error.strerror}") from error


def _read_directory(path: Path) -> Content:
    """
    :raises CostsError: nothing in it is a decision.
    """
    content = Content()
    for file in path.glob(f"??/*{ENDING}"):
        content.add(partial(read_decision, file))
    if not content.decisions and not content.damaged:
        raise CostsError(f"{path} is a directory, but not one of decisions")
    return content


def _read_json(path: Path) -> Content:
    wrong = f"{path} is neither a database nor what `fuseboard costs export` wrote"
    try:
        values: Any = json.loads(path.read_bytes())
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
        content.add(partial(decode, json.dumps(entry)))
    return content
