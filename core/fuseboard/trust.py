"""Whether what a file holds may run here: who else may write it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def why_not_trusted(path: Path, state: os.stat_result) -> str:
    """Who else may write a file or directory, or put another one in its place; "" if nobody may."""
    if os.name != "posix":  # there is no such thing to look at
        return ""
    if problem := _writers(state):
        return f"{str(path)!r} {problem}"
    for place in _way_to(path):
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode):  # its owner may turn it elsewhere, whatever its mode is
            if found.st_uid not in (os.geteuid(), 0):
                return f"{str(path)!r} is reached by the link {str(place)!r} of another user"
            continue
        # In a directory with the sticky bit nobody removes the files of others.
        if (problem := _writers(found)) and not found.st_mode & stat.S_ISVTX:
            return f"{str(path)!r} is in {str(place)!r}, which {problem}"
    return ""


def _way_to(path: Path) -> Iterator[Path]:
    """Each directory and each link on the way to a file that is there, and the file."""
    rest, place = [*reversed(path.absolute().parts)], Path()
    while rest:
        part = rest.pop()
        following = place.parent if part == ".." else place / part  # "/" is where it begins anew
        yield following
        if following.is_symlink():
            rest.extend(reversed(following.readlink().parts))
        else:
            place = following


def _writers(state: os.stat_result) -> str:
    if state.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({state.st_uid})"
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(state.st_mode):o})"
    return ""
