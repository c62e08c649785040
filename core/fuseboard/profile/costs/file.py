"""Files of decisions, one each: a line with the format and a checksum, then JSON.

Files are written beside their place and moved into it, so that readers see whole ones only, from
however many processes, and a process that is killed leaves what was there before. The checksum
tells what was damaged since.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fuseboard.files import replacing
from fuseboard.profile.costs.rows import Damaged, Decision, decode, encode

#: How the files' names end, with the format's version: files of another one are left alone.
ENDING = ".1.json"
_FORMAT = b"fuseboard decision 1 "


def content_of(decision: Decision) -> bytes:
    """What a decision's file holds."""
    body = json.dumps(encode(decision), sort_keys=True).encode()
    return _head(body) + b"\n" + body


def read_decision(path: Path) -> Decision | None:
    """The decision in a file; None where there is none.

    :raises Damaged: it isn't what was written.
    :raises OSError: it can't be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decision_in(path.name, content)


def decision_in(name: str, content: bytes) -> Decision:
    """The decision in what a file of this name holds.

    :raises Damaged: it isn't what was written.
    """
    head, _, body = content.partition(b"\n")
    if head != _head(body):
        raise Damaged("it has another checksum")
    decision = decode(body)
    if name != decision.key + ENDING:
        raise Damaged("it is another decision's")
    return decision


def _head(body: bytes) -> bytes:
    return _FORMAT + hashlib.sha256(body).hexdigest().encode()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there.

    :raises OSError: it can't be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)
