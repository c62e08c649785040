"""Packs of a cache: its artifacts and decisions, for machines of the same kind."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fuseboard.errors import error_text
from fuseboard.files import allow_owner_alone, replacing
from fuseboard.lower.artifact_files import whole_artifact
from fuseboard.lower.artifacts import Store, remote_path
from fuseboard.profile.costs import database
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.profile.costs.exchange import Content
from fuseboard.profile.costs.file import content_of, decision_in
from fuseboard.profile.costs.rows import Damaged
from fuseboard.remote_cache import RemoteCache
from fuseboard.totals import differing

#: The parts of a key that are a machine's: nothing that a process does makes them equal.
MACHINE = ("torch", "fuseboard", "python", "system", "processor")


@dataclass
class Unpacked:
    """What became of a pack's files.

    :ivar foreign: parts of keys, such as ``processor`` → how many files aren't for this machine,
        since these differ.
    :ivar problems: of damaged files, by their path.
    """

    artifacts: int = 0
    decisions: int = 0
    foreign: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)


@contextmanager
def written(address: str) -> Iterator[RemoteCache]:
    """Where a pack is written: an address, or a directory that becomes a file at the end."""
    if not address.endswith(".zip"):
        yield RemoteCache(_absolute(address), writes=True, trusts=True, limit_bytes=sys.maxsize)
        return
    with tempfile.TemporaryDirectory() as folder:
        target = RemoteCache(folder, writes=True, trusts=True, limit_bytes=sys.maxsize)
        yield target
        if target.problem:
            return
        path = Path(address)
        try:
            with replacing(path) as unfinished:
                with zipfile.ZipFile(unfinished, "x") as archive:
                    for file in sorted(Path(folder).rglob("*.*")):
                        archive.write(file, file.relative_to(folder))
                allow_owner_alone(unfinished)
        except OSError as error:
            target.problem = error_text(error)


def read_from(address: str, trusts: bool) -> RemoteCache:
    """A pack that is read."""
    return RemoteCache(_absolute(address), writes=False, trusts=trusts, limit_bytes=0)


def _absolute(address: str) -> str:
    if "://" not in address:
        path = Path(address).absolute()
        address = f"file://{path}" if path.suffix == ".zip" else f"{path}"
    is_archive = address.endswith(".zip") and "::" not in address
    return f"zip://::{address}" if is_archive else address


def machine() -> dict[str, str]:
    """The machine's parts of keys."""
    from fuseboard.lower.machine import machine_parts  # which loads torch

    return machine_parts()


def pack(pack: RemoteCache, store: Store, costs: CostDatabase) -> tuple[int, int]:
    """Write what a cache holds. Returns how many artifacts, and how many decisions."""
    artifacts = decisions = 0
    for artifact, content in store.whole_files():
        pack.write(remote_path(artifact.path.name), content)
        artifacts += 1
    for decision in costs.decisions():
        if decision.settled:
            pack.write(database.remote_path(decision.key), content_of(decision))
            decisions += 1
    return artifacts, decisions


def unpack(
    pack: RemoteCache, store: Store, costs: CostDatabase, here: Mapping[str, str] | None
) -> Unpacked:
    """Take what a pack holds into a cache; nothing of it is run.

    What is damaged, and what is for another machine, is left out.

    :param here: the machine's parts of keys; None takes what is for other machines, too.
    """
    done, content = Unpacked(), Content()
    for path, data in _contents(pack, "artifacts/", done):
        found = whole_artifact(Path(path), data)
        if found is None:
            done.problems[path] = "it is damaged"
        elif not _is_foreign(done, found.head["key"], here):
            if problem := store.take(Path(path).name, data):
                done.problems[path] = problem
            else:
                done.artifacts += 1
    for path, data in _contents(pack, f"{database.NAME}/", done):
        try:
            decision = decision_in(Path(path).name, data)
        except Damaged as error:
            done.problems[path] = str(error)
        else:
            if not _is_foreign(done, decision.parts, here):
                content.decisions.append(decision)
    counts = costs.merge(content)
    done.decisions = counts.added + counts.replaced
    return done


def _contents(pack: RemoteCache, folder: str, done: Unpacked) -> Iterator[tuple[str, bytes]]:
    """The files in a folder of a pack, and what they hold; until the pack can't be read."""
    for path in pack.names(folder):
        data = pack.read(path)
        if data is not None:
            yield path, data
        elif pack.rests:
            return  # ``pack.problem`` says why
        else:
            done.problems[path] = "it is gone, or others can write it"


def _is_foreign(done: Unpacked, parts: Mapping[str, str], here: Mapping[str, str] | None) -> bool:
    if here is None:
        return False
    names = [name for name in differing(parts, here) if name in MACHINE and name in parts]
    done.foreign.update(names)
    return bool(names)
