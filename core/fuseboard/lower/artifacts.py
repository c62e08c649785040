"""Artifacts of lowered regions on disk, for this and later processes.

Files are written beside their place and moved into it, so readers see whole files only, from
however many processes. A file that isn't whole is set aside. The least recently used go when there
is too much.

Artifacts are code: whoever can write to the directory decides what runs here. It is made for its
owner alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseboard.files import TEMPORARY, make_private, replacing
from fuseboard.lower.artifact_files import (
    Artifact,
    Key,
    digest,
    head_in,
    is_of_another_version,
    named_artifact,
    pieces_of,
    whole_artifact,
)
from fuseboard.profile.costs.database import remote_of
from fuseboard.remote_cache import RemoteCache
from fuseboard.totals import Missed, differing, totals

if TYPE_CHECKING:
    from fuseboard.config.model import Settings

log = logging.getLogger("fuseboard")

ARTIFACT, CRASH, TRIED, ASIDE, LOCK = ".artifact", ".crash", ".tried", ".aside", ".lock"
#: Files that somebody began to write, and that nobody will finish, are removed after this time.
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class ArtifactRow:
    """One file, for ``fuseboard cache show``.

    :ivar kind: ``artifact``, ``crash`` (lowering it ended a process), ``tried`` (it didn't) or
        ``aside`` (damaged).
    :ivar used: when it was last written or read, in seconds since 1970.
    """

    kind: str
    path: Path
    bytes: int
    used: float
    parts: Mapping[str, str]
    problem: str = ""


class Store:
    """The artifacts in a directory. What fails in it is told once and never stops a compile.

    :param limit_bytes: what all files together may hold.
    :param remote: a cache that several machines share: what isn't in the directory is taken from
        there into it.
    """

    def __init__(
        self, directory: Path, limit_bytes: int, remote: RemoteCache | None = None
    ) -> None:
        self.directory = directory
        self._remote = remote
        self.limit_bytes = limit_bytes
        self._told: set[str] = set()

    # --- reading --------------------------------------------------------------------------------

    def find(
        self, key: Key, fits: Callable[[Artifact], bool], again: bool = False
    ) -> Artifact | None:
        """The artifact under an equal key which ``fits``; it counts as used now.

        :param again: it was looked for a moment ago, and that miss was counted.
        """
        found = self._find(key, fits)
        if found is None and self._remote is not None:
            found = next(filter(fits, self._fetched(key, self._remote)), None)
        if found is not None:
            totals.looked_up("hits")
        elif not again:
            totals.looked_up("misses", Missed.of(key.parts, self.nearest(key)))
        return found

    def _find(self, key: Key, fits: Callable[[Artifact], bool]) -> Artifact | None:
        for path in self._files(key, f"{key.stem}*{ARTIFACT}"):
            found = self._read(path)
            if found is None or found.head.get("key") != dict(key.parts) or not fits(found):
                continue
            try:
                os.utime(path)
            except OSError as error:
                self._tell("its use can't be noted, so it may go early", error)
            return found
        return None

    def _fetched(self, key: Key, remote: RemoteCache) -> Iterator[Artifact]:
        """Artifacts of other machines under an equal key; they are kept here if that can be."""
        for path in remote.names(f"artifacts/{key.group[:2]}/", key.stem):
            name = Path(path).name
            place = self.directory / name[:2] / name
            if place.exists() or (content := remote.read(path)) is None:
                continue
            try:
                found = named_artifact(place, content)
            except ValueError as problem:
                totals.looked_up("damaged")
                remote.tell("damaged artifact", f"{path}: {problem}")
                continue
            self._keep(found, content)
            if found.head["key"] == dict(key.parts):
                yield found

    def nearest(self, key: Key) -> Mapping[str, str] | None:
        """The parts of the entry of the same graph that differs in the fewest, if there is one."""
        near: list[Mapping[str, str]] = [
            head["key"]
            for path in self._files(key, f"{key.group}-*{ARTIFACT}")
            if (head := head_in(path)) is not None
        ]
        return min(near, key=lambda other: len(differing(key.parts, other)), default=None)

    def tried(self, key: Key) -> str | None:
        """How lowering under an equal key ended an earlier process: "" if it didn't.

        None where it wasn't tried in a process of its own.
        """
        for path in self._files(key, f"{key.stem}*"):
            if path.suffix in (CRASH, TRIED):
                try:
                    record = json.loads(path.read_text())
                    if record["key"] == dict(key.parts):
                        return str(record["problem"])
                except (OSError, ValueError, KeyError) as error:
                    self._tell(f"{path.name} can't be read", error)
        return None

    def _files(self, key: Key | None, pattern: str) -> list[Path]:
        """The files of a key, or all of them."""
        try:
            directory = self._home(key) if key else self.directory
            return sorted(directory.glob(pattern if key else f"*/{pattern}"))
        except OSError as error:
            self._tell("it can't be read", error)
            return []

    def _home(self, key: Key) -> Path:
        """A directory of 256, so that none grows too long to be listed."""
        return self.directory / key.group[:2]

    def _read(self, path: Path) -> Artifact | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # another process removed it since
            return None
        except OSError as error:
            self._tell(f"{path.name} can't be read", error)
            return None
        if is_of_another_version(content):
            return None
        found = whole_artifact(path, content)
        if found is None:
            totals.looked_up("damaged")
            self.set_aside(path, "it is damaged")
        return found

    # --- writing --------------------------------------------------------------------------------

    def put(self, key: Key, data: bytes, further: Mapping[str, Any], variant: str = "") -> str:
        """Store an artifact; what was there under the name is replaced.

        :param further: goes into the head, beside the key.
        :param variant: tells entries of one key apart that ``fits`` chooses between.
        :returns: why it isn't stored, or "".
        """
        pieces = pieces_of({**further, "key": dict(key.parts)}, data)
        if sum(map(len, pieces)) > self.limit_bytes:
            return (
                f"its artifact of {len(data) / 1e6:.0f} MB is more than cache_size_mb = "
                f"{self.limit_bytes / 1e6:g}"
            )
        name = f"{key.stem}{digest([variant])[:8] if variant else ''}{ARTIFACT}"
        problem = self._write(self._home(key) / name, *pieces)
        if not problem:
            self._make_room()
        if self._remote is not None and self._remote.writes:
            self._remote.write(remote_path(name), b"".join(pieces))
        return problem

    def take(self, name: str, content: bytes) -> str:
        """Store a file of another cache's as it is, if it is whole and what its name says.

        :returns: why it isn't stored, or "".
        """
        try:
            return self._keep(named_artifact(self.directory / name[:2] / name, content), content)
        except ValueError as problem:
            return str(problem)

    def _keep(self, found: Artifact, content: bytes) -> str:
        if len(content) > self.limit_bytes:
            return f"it is larger than cache_size_mb = {self.limit_bytes / 1e6:g}"
        problem = self._write(found.path, content)
        self._make_room()
        return problem

    def whole_files(self) -> Iterator[tuple[Artifact, bytes]]:
        """Every artifact that is whole, with the content of its file."""
        for path in self._files(None, f"*{ARTIFACT}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it since
                if (found := self._read(path)) is not None:
                    yield found, path.read_bytes()

    @contextlib.contextmanager
    def alone(self, key: Key, wait_s: float) -> Iterator[bool]:
        """Keep out other processes that are about to make the same, for the block.

        Where that takes longer than so many seconds, or isn't possible, all go on. Given is whether
        another process was at it, which may have stored it.
        """
        lock = self._home(key) / f"{key.stem}{LOCK}"
        waited = False
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                make_private(lock.parent)
                try:
                    held.enter_context(_alone(lock, time.monotonic()))
                except BlockingIOError:
                    waited = True
                    held.enter_context(_alone(lock, time.monotonic() + wait_s))
            yield waited

    def put_tried(self, key: Key, problem: str) -> str:
        """Remember how lowering under this key ended a process; "" if it didn't.

        Returns why that can't be, or "".
        """
        record = json.dumps({"key": dict(key.parts), "problem": problem}).encode()
        path = self._home(key) / f"{key.stem}{CRASH if problem else TRIED}"
        return self._write(path, record)

    def _write(self, path: Path, *pieces: bytes) -> str:
        try:
            make_private(path.parent)
            with replacing(path) as unfinished, unfinished.open("xb") as file:
                file.writelines(pieces)
        except OSError as error:
            self._tell("nothing can be stored in it", error)
            return f"{self.directory} can't be written: {error.strerror or error}"
        return ""

    def set_aside(self, path: Path, why: str) -> None:
        """Take a file out of use, and keep it so that people can look at it."""
        aside = path.with_name(f"{path.name}{ASIDE}")
        try:
            os.replace(path, aside)
        except FileNotFoundError:
            return  # another process was quicker
        except OSError as error:
            self._tell(f"{path.name} can't be set aside", error)
            return
        log.warning("fuseboard: an artifact was set aside, %s: %s", why, aside)

    def _make_room(self) -> None:
        """Remove the least recently used files beyond the limit, and what nobody will finish."""
        files = self._listed()
        now = time.time()
        total = 0
        for used, size, path in sorted(files, reverse=True):
            abandoned = path.suffix in (TEMPORARY, LOCK) and now - used > _ABANDONED_S
            total += size
            if abandoned or total > self.limit_bytes:
                total -= size
                self._remove(path)

    def _listed(self) -> list[tuple[float, int, Path]]:
        """(last used, bytes, path) of every file of ours."""
        found = []
        for path in self._files(None, "*"):
            if path.suffix in (ARTIFACT, CRASH, TRIED, ASIDE, TEMPORARY, LOCK):
                try:
                    state = path.stat()
                except OSError:
                    continue  # another process removed it since
                found.append((state.st_mtime, state.st_size, path))
        return found

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"{path.name} can't be removed", error)
            return False
        return True

    # --- for people -----------------------------------------------------------------------------

    def rows(self) -> Iterator[ArtifactRow]:
        """Every file, most recently used first."""
        for used, size, path in sorted(self._listed(), reverse=True):
            kind = path.suffix.removeprefix(".")
            if path.suffix in (TEMPORARY, LOCK):
                continue
            head: Mapping[str, Any] | None
            if path.suffix in (CRASH, TRIED):
                try:
                    head = json.loads(path.read_text())
                except (OSError, ValueError):
                    head = None
            else:
                head = head_in(path)
            head = head or {}
            parts, problem = head.get("key", {}), str(head.get("problem", ""))
            yield ArtifactRow(kind, path, size, used, parts, problem)

    def total_bytes(self) -> int:
        """What all files take."""
        return sum(size for _, size, _ in self._listed())

    def clear(self, wanted: Callable[[ArtifactRow], bool] = lambda row: True) -> tuple[int, int]:
        """Remove files. Returns how many, and their bytes."""
        count = size = 0
        for row in self.rows():
            if wanted(row) and self._remove(row.path):
                count, size = count + 1, size + row.bytes
        for path in (*self._files(None, f"*{TEMPORARY}"), *self._files(None, f"*{LOCK}")):
            self._remove(path)
        return count, size

    def _tell(self, what: str, error: Exception) -> None:
        """One warning for each kind of trouble."""
        if what not in self._told:
            self._told.add(what)
            log.warning("fuseboard: the cache in %s: %s: %s", self.directory, what, error)


def remote_path(name: str) -> str:
    """Where the file of an artifact lies in a cache that several machines share."""
    return f"artifacts/{name[:2]}/{name}"


@contextlib.contextmanager
def _alone(lock: Path, end: float) -> Iterator[None]:
    """Keep out other processes, and threads of this one, for the block.

    :raises OSError: another one takes too long.
    """
    if sys.platform == "win32":  # it has no such locks: each makes its own
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
        try:
            os.utime(lock)  # what nobody renews is taken for abandoned
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the file open as well


_stores: dict[tuple[Path, int, RemoteCache | None], Store] = {}


def store_at(settings: Settings) -> Store:
    """The store of this process for the settings whose names begin with ``cache_``."""
    import platformdirs

    chosen = settings.cache_dir or platformdirs.user_cache_dir("fuseboard", appauthor=False)
    place = Path(chosen).expanduser().absolute() / "artifacts"
    key = place, settings.cache_size_mb, remote_of(settings)
    if key not in _stores:
        _stores[key] = Store(place, settings.cache_size_mb * 1_000_000, key[2])
    return _stores[key]
