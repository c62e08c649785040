"""Files of a cache that several machines share, at an address that fsspec knows.

A directory, a zip file, a bucket or a web server holds ``artifacts/ab/NAME.artifact`` and
``costs/ab/KEY.json``, as a cache directory does, named by hashes of all that they depend on. What
one machine has written serves any other on which all of that is equal.

Artifacts are code. So an address is read only if nobody can write to it, or to the way there, whom
the user doesn't know of: see :func:`why_not_trusted`. What is read is checked by whoever reads it.

Nothing that fails here stops a compile: it is told once, and the address is left alone for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fuseboard import trust
from fuseboard.errors import error_text
from fuseboard.files import allow_owner_alone, make_private, replacing

log = logging.getLogger("fuseboard")

_T = TypeVar("_T")

#: How long one request may take, and how long an address is left alone after one has failed.
_LIMIT_S, _PAUSE_S = 20.0, 60.0
#: After so many files that were written the size is looked at, and after the first.
_LOOKS_EVERY = 64
#: Protocols that prove who answers, or by which nobody else is asked.
_PROVEN = ("https", "s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "hf", "memory")
#: What of an address is the cache's; it may hold other files.
_FOLDERS = ("artifacts", "costs")
_OURS = re.compile(r".*/(artifacts/../[^/]+\.artifact|costs/../[^/]+\.json)(\.[^/]+\.tmp)?")


class RemoteCache:
    """A cache at an address.

    :param writes: what is compiled here is put there as well.
    :param trusts: whoever can write there is trusted.
    :param limit_bytes: what all files there may hold, as far as this process writes.
    :ivar problem: of the latest request that failed; "" where none has.
    """

    def __init__(self, address: str, writes: bool, trusts: bool, limit_bytes: int) -> None:
        self.address = address
        self.problem = ""
        self.writes = writes
        self._trusts = trusts
        self._limit_bytes = limit_bytes
        self._process = 0
        self._opened: tuple[Any, str] | None = None
        #: The address, where it is a directory of this machine.
        self._directory: Path | None = None
        #: What does a request that wasn't answered in time.
        self._late: threading.Thread | None = None
        self._again_at = 0.0
        self._written = 0
        self._told: set[str] = set()

    @property
    def rests(self) -> bool:
        """Whether the address is left alone for a while, since a request has failed."""
        is_late = self._late is not None and self._late.is_alive()
        return is_late or time.monotonic() < self._again_at

    def names(self, folder: str, start: str = "") -> list[str]:
        """Paths of the files in a folder of it, or below, whose names begin so."""

        def find(files: Any, root: str) -> list[str]:
            files.invalidate_cache()  # others write there
            if not files.exists(f"{root}/{folder}"):
                return []
            found = files.find(f"{root}/{folder}")
            below = [f"{folder}{path.rpartition(folder)[2]}" for path in map(str, found)]
            return sorted(path for path in below if Path(path).name.startswith(start))

        return self._do("listing", "it", find) or []

    def read(self, path: str) -> bytes | None:
        """What a file holds; None where there is none that is to be trusted."""

        def get(files: Any, root: str) -> bytes | None:
            try:
                if problem := self._why_file_not_trusted(path):
                    self.tell("trust", problem)
                    return None
                return bytes(files.cat_file(f"{root}/{path}"))
            except FileNotFoundError:
                return None

        return self._do("reading", path, get)

    def write(self, path: str, content: bytes) -> None:
        """Put a file there, if that is wanted."""
        if not self.writes or len(content) > self._limit_bytes:
            return

        def put(files: Any, root: str) -> bool:
            if self._directory is not None:
                _put(self._directory, path, content)
            else:  # it is there whole, or not at all
                files.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
                files.pipe_file(f"{root}/{path}", content)
            return True

        if self._do("writing", path, put):
            if self._written % _LOOKS_EVERY == 0:
                self._do("making room in", "it", self._make_room)
            self._written += 1

    def tell(self, kind: str, what: str) -> None:
        """One warning for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("fuseboard: the cache at %s: %s", self.address, what)

    def _make_room(self, files: Any, root: str) -> None:
        """Remove the files of ours that were written first, beyond the limit."""
        found: dict[str, Any] = {}
        files.invalidate_cache()
        for folder in _FOLDERS:
            if files.exists(f"{root}/{folder}"):
                there = files.find(f"{root}/{folder}", detail=True)
                found.update((path, there[path]) for path in there if _OURS.fullmatch(str(path)))
        newest = sorted(found.items(), key=lambda item: str(_written_at(item[1])), reverse=True)
        total = 0
        for path, about in newest:
            total += int(about.get("size") or 0)
            if total > self._limit_bytes:
                with contextlib.suppress(FileNotFoundError):  # another process did it
                    files.rm_file(path)

    def _do(self, doing: str, path: str, work: Callable[[Any, str], _T]) -> _T | None:
        """Do something with the files, within the limit; None where that fails."""
        if self.rests:
            return None
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work(*self._files()))
            except Exception as error:  # each of fsspec's file systems raises its own
                errors.append(error)

        thread = threading.Thread(target=run, name="fuseboard cache", daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
        if results:
            return results[0]
        self._again_at = time.monotonic() + _PAUSE_S
        self._late = thread
        problem = error_text(errors[0]) if errors else f"no answer within {_LIMIT_S:g} s"
        self.problem = f"{doing} {path} failed: {problem}"
        self.tell(
            f"{doing} {type(errors[0]) if errors else 'late'}",
            f"{doing} {path} failed, so it isn't used for {_PAUSE_S:g} s: {problem}",
        )
        return None

    def _why_file_not_trusted(self, path: str) -> str:
        """Why a file may be somebody else's, though the address itself isn't; "" if it isn't."""
        if self._trusts or self._directory is None:
            return ""
        place = self._directory / path
        return trust.why_not_trusted(place, place.stat())

    def _files(self) -> tuple[Any, str]:
        """The file system, and the address in it.

        :raises PermissionError: it isn't to be trusted.
        """
        if self._opened is None or self._process != os.getpid():  # some don't survive a fork
            protocol = _protocol(self.address)
            local = _local_path(self.address) if protocol == "file" else None
            if local is not None and self.writes:
                make_private(local)
            elif local is not None:
                local.stat()  # a wrong path is told, and isn't taken for an empty cache
            if not self._trusts and (problem := _why_not_trusted(protocol, local)):
                raise PermissionError(
                    f"{problem}. Artifacts are code, and who writes them decides what runs here: "
                    "change its owner and mode, or set cache_remote_trust = true if you know who "
                    "can write there"
                )
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            files, root = url_to_fs(self.address)
            self._directory = local if local is not None and local.is_dir() else None
            self._opened, self._process = (files, str(root).rstrip("/")), os.getpid()
        return self._opened


def _why_not_trusted(protocol: str, local: Path | None) -> str:
    """Why files at an address may be somebody else's; "" where only its owners write them.

    A bucket, or a server whose name is proven (``https``), is its owners', whom the user has named.
    """
    if local is not None:
        return trust.why_not_trusted(local, local.stat())
    return "" if protocol in _PROVEN else f"{protocol} doesn't prove who answers"


def _put(directory: Path, path: str, content: bytes) -> None:
    """Write a file below a directory; others may write to it if they may write to that.

    :raises OSError: it can't be written.
    """
    shared = directory.stat().st_mode & 0o022
    place = directory / path
    make_private(place.parent, 0o755 | shared)
    with replacing(place) as unfinished:
        unfinished.write_bytes(content)
        if not shared:
            allow_owner_alone(unfinished)


def _local_path(address: str) -> Path:
    """The directory or the archive that an address is of."""
    return Path(address.rpartition("::")[2].rpartition("://")[2]).expanduser().absolute()


def _protocol(address: str) -> str:
    """That of an address, such as ``s3``; of several in a row the last, which reads the others."""
    before, found, _ = address.rpartition("::")[2].partition("://")
    return "file" if not found or before == "local" else before


def _written_at(about: Any) -> Any:
    """When a file was written, by the names that file systems have for that."""
    names = ("mtime", "LastModified", "last_modified", "updated", "created")
    return next((about[name] for name in names if about.get(name) is not None), 0)


@lru_cache(maxsize=16)
def remote_cache(address: str, writes: bool, trusts: bool, size_mb: int) -> RemoteCache:
    """The one of this process for the settings ``cache_remote*``."""
    return RemoteCache(address, writes, trusts, size_mb * 1_000_000)
