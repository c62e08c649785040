"""How files are written: whole or not at all, and in directories that are their owner's alone."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

#: How the names of files end that somebody has begun to write.
TEMPORARY = ".tmp"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside a file's, which nobody can guess; at the end it takes the file's place.

    Readers see what was there before or what is there then, from however many processes. Where the
    block raises, what it wrote is removed.

    :raises OSError: it can't be moved there.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        # It is there only if something came in between, Ctrl-C included. A disk that is read-only
        # refuses to remove what isn't there, too, and the error that matters is the first one.
        with contextlib.suppress(OSError):
            unfinished.unlink()


def make_private(directory: Path, mode: int = 0o700) -> None:
    """Make a directory for its owner alone, and so each one on the way that isn't there.

    :param mode: another one, for a directory that others read.

    ``Path.mkdir`` gives its mode to the last part only, and whoever can write to a part before it
    can put something else in its place.

    :raises OSError: it can't be made.
    """
    try:
        directory.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        if directory.parent == directory:
            raise
        make_private(directory.parent, mode)
        directory.mkdir(mode, exist_ok=True)


def allow_owner_alone(path: Path) -> None:
    """Let nobody but its owner write a file: what it holds is code, and is refused otherwise."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
