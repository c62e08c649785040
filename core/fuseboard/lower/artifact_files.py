"""Files of artifacts: how they are named, and what they hold.

A file is named by two hashes: of the region's graph, and of the whole key. It holds a line with
the format's version, the length of a JSON head, a checksum over all that follows, the head (the
parts of the key in clear) and the artifact.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMAT = b"fuseboard artifact "
_MAGIC = _FORMAT + b"1\n"
_LENGTH_BYTES = 8
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_HEAD_AT = len(_MAGIC) + _LENGTH_BYTES + _CHECKSUM_BYTES

#: Of an artifact's file: its key's stem, and which of the entries of one key it is.
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}([0-9a-f]{8})?\.artifact")


@dataclass(frozen=True)
class Key:
    """What an artifact is good for.

    :ivar parts: name → text. ``graph`` is the region's; the others have to be equal as well.
    """

    parts: Mapping[str, str]

    @property
    def group(self) -> str:
        """Equal for entries of one graph on one backend, whatever else differs."""
        return digest([self.parts["backend"], self.parts["graph"]])[:16]

    @property
    def stem(self) -> str:
        """What its files are called, without an ending."""
        return f"{self.group}-{digest(sorted(self.parts.items()))[:32]}"


@dataclass(frozen=True)
class Artifact:
    """What a file holds.

    :ivar head: ``key`` and what the writer put beside it.
    """

    path: Path
    head: Mapping[str, Any]
    data: bytes


def whole_artifact(path: Path, content: bytes) -> Artifact | None:
    """What the content of a file holds; None where it isn't as it was written."""
    head_bytes, checksum = _sizes(content)
    body = memoryview(content)[_HEAD_AT:]
    if checksum is None or hashlib.sha256(body).digest() != checksum:
        return None
    try:
        head = json.loads(bytes(body[:head_bytes]))  # of whose length there is no checksum
    except ValueError:
        return None
    key = head.get("key") if isinstance(head, dict) else None
    if not isinstance(key, dict) or not {"backend", "graph"} <= key.keys():
        return None
    return Artifact(path, head, bytes(body[head_bytes:]))


def named_artifact(path: Path, content: bytes) -> Artifact:
    """What the content of a file of another cache's holds.

    :raises ValueError: it isn't as it was written, or the file is called otherwise.
    """
    found = whole_artifact(path, content)
    if found is None:
        raise ValueError("it is damaged")
    if not _NAME.fullmatch(path.name) or not path.name.startswith(Key(found.head["key"]).stem):
        raise ValueError("its name isn't that of its key")
    return found


def head_in(path: Path) -> Mapping[str, Any] | None:
    """The head of a file without the artifact, unchecked; None where it makes no sense."""
    try:
        with path.open("rb") as file:
            head_bytes, _ = _sizes(start := file.read(_HEAD_AT))
            head = json.loads(file.read(head_bytes)) if len(start) == _HEAD_AT else None
    except (OSError, ValueError):
        return None  # whoever needs the artifact reads it whole and tells
    return head if isinstance(head, dict) and isinstance(head.get("key"), dict) else None


def pieces_of(head: Mapping[str, Any], data: bytes) -> tuple[bytes, ...]:
    """What a file holds, one after the other."""
    encoded = json.dumps(head).encode()
    checksum = hashlib.sha256(encoded)
    checksum.update(data)
    length = len(encoded).to_bytes(_LENGTH_BYTES, "little")
    return _MAGIC, length, checksum.digest(), encoded, data


def is_of_another_version(content: bytes) -> bool:
    """Whether a file is an artifact's, in a format of which nothing is known here."""
    return content.startswith(_FORMAT) and content[: len(_MAGIC)] != _MAGIC[: len(content)]


def _sizes(content: bytes) -> tuple[int, bytes | None]:
    """The head's length and the checksum that a file's start tells of; None if it is no start."""
    if len(content) < _HEAD_AT or not content.startswith(_MAGIC):
        return 0, None
    at = len(_MAGIC) + _LENGTH_BYTES
    return int.from_bytes(content[len(_MAGIC) : at], "little"), content[at:_HEAD_AT]


def digest(value: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
