"""The file of a package: a zip with a manifest, and a checksum over all of it.

Members are stored as they are, and begin at multiples of a page. The comment at the end of the zip
says where the manifest is, and holds the checksum of every byte before it: of the members, of the
zip's own tables, and of the comment's beginning. So nothing that was changed, cut off, added or
moved is read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from fuseboard.errors import PackageError
from fuseboard.files import allow_owner_alone, replacing
from fuseboard.trust import why_not_trusted

FORMAT = 2
_PAGE = 4096
_COMMENT = "fuseboard package {:04d} manifest {:016d} {:016d} sha256 "
_DIGEST_BYTES = 64
_COMMENT_BYTES = len(_COMMENT.format(0, 0, 0)) + _DIGEST_BYTES
_READ = re.compile(rb"fuseboard package (\d{4}) manifest (\d{16}) (\d{16}) sha256 ([0-9a-f]{64})")
#: So many bytes are hashed at a time, by several threads; the checksum is that of all hashes.
_CHUNK = 1 << 22
#: The id of the extra field that pads a member's head, as Android's zipalign has it.
_PADDING = 0xD935
_MANIFEST = "manifest.json"

Write = Callable[[BinaryIO], Any]


def write(path: Path, manifest: dict[str, Any], members: Mapping[str, Write]) -> None:
    """Write a package, or nothing.

    :param manifest: ``members`` is filled in: name → where it begins, its bytes and checksum. What
        the writers return is put there as well, under ``returned``.
    :raises PackageError: it can't be written.
    """
    try:
        with replacing(path) as unfinished, unfinished.open("x+b") as file:
            _write(file, manifest, members)
            allow_owner_alone(unfinished)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PackageError("file", f"{str(path)!r} can't be written: {error.strerror}") from error


def _write(file: Any, manifest: dict[str, Any], members: Mapping[str, Write]) -> None:
    table: dict[str, Any] = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            begin = _begin(archive, name)
            with archive.open(begin, "w", force_zip64=True) as stream:
                first = file.tell()
                returned = member(stream)  # type: ignore[arg-type]
            table[name] = {"begin": first, "bytes": begin.file_size, "returned": returned}
        for entry in table.values():
            entry["sha256"] = _hash_of(file, entry["begin"], entry["bytes"])
            file.seek(0, os.SEEK_END)
        text = json.dumps({**manifest, "members": table}, indent=1).encode()
        begin = _begin(archive, _MANIFEST)
        with archive.open(begin, "w", force_zip64=True) as stream:
            first = file.tell()
            stream.write(text)
        archive.comment = b"-" * _COMMENT_BYTES
    file.flush()
    size = file.seek(0, os.SEEK_END)
    file.seek(size - len(archive.comment))
    file.write(_COMMENT.format(FORMAT, first, len(text)).encode())
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        digest = _checksum(memoryview(content)[: size - _DIGEST_BYTES])
    file.seek(size - _DIGEST_BYTES)
    file.write(digest)


def _begin(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """The head of a member that begins at a page's start. Its date is fixed."""
    info = zipfile.ZipInfo(name)
    zip64_bytes, own_bytes = 20, 4
    assert archive.fp is not None
    head = archive.fp.seek(0, os.SEEK_END) + 30 + len(name.encode()) + zip64_bytes + own_bytes
    padding = -head % _PAGE
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    return info


def _hash_of(file: Any, begin: int, length: int) -> str:
    digest = hashlib.sha256()
    file.seek(begin)
    while length > 0:
        chunk = file.read(min(length, _CHUNK))
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest()


def _checksum(content: memoryview) -> bytes:
    """Hexadecimal digits."""
    places = range(0, len(content), _CHUNK)

    def digest(place: int) -> bytes:
        return hashlib.sha256(content[place : place + _CHUNK]).digest()

    if len(places) < 2:
        parts = [*map(digest, places)]
    else:
        with ThreadPoolExecutor(min(len(places), os.cpu_count() or 1)) as pool:
            parts = [*pool.map(digest, places)]
    return hashlib.sha256(b"".join(parts)).hexdigest().encode()


class PackageFile:
    """A package that is whole, mapped into memory.

    Nothing in it has been interpreted but JSON. What is written to the memory doesn't come to the
    file.
    """

    def __init__(self, path: Path, trust: bool = False) -> None:
        """
        :raises PackageError: it can't be read, isn't whole, isn't a package, or isn't to be
            trusted.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                state = os.fstat(file.fileno())
                if not trust and (problem := why_not_trusted(path, state)):
                    raise PackageError(
                        "trust",
                        f"{problem}. A package holds code (pickled objects, libraries), and who "
                        "writes it decides what runs here. Load it with trust=True if you know "
                        "where it comes from, or change its owner and mode",
                    )
                if state.st_size < _COMMENT_BYTES:
                    raise self._damaged("it is too short to be a package")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise PackageError("file", f"{str(path)!r} can't be read: {error.strerror}") from error
        self._content = memoryview(self._map)
        self.manifest = self._read()

    def _read(self) -> dict[str, Any]:
        end = len(self._content) - _DIGEST_BYTES
        found = _READ.fullmatch(bytes(self._content[-_COMMENT_BYTES:]))
        if found is None:
            raise self._damaged("its end isn't that of a package")
        if _checksum(self._content[:end]) != found[4]:
            raise self._damaged("its checksum doesn't agree with what is in it")
        if int(found[1]) != FORMAT:
            raise PackageError(
                "format",
                f"{str(self.path)!r} has format {int(found[1])}, this fuseboard reads {FORMAT}. "
                "Package the model again, or install the fuseboard that wrote it",
            )
        begin, length = int(found[2]), int(found[3])
        manifest: dict[str, Any] = json.loads(bytes(self._content[begin : begin + length]))
        return manifest

    def _damaged(self, problem: str) -> PackageError:
        return PackageError(
            "damaged",
            f"{str(self.path)!r} is damaged or no package: {problem}. Nothing of it was run; copy "
            "it again, or package the model again",
        )

    def member(self, name: str) -> memoryview:
        """The bytes of a member; a part of the mapping."""
        entry = self.manifest["members"][name]
        return self._content[entry["begin"] : entry["begin"] + entry["bytes"]]

    def returned(self, name: str) -> Any:
        """What the member's writer returned."""
        return self.manifest["members"][name]["returned"]
