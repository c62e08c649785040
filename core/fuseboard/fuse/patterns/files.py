"""Traced patterns as files, so that no program traces them at its start.

One text file for each pattern. It is used as long as the functions and examples are those that it
was written for, by the same torch but for its patch releases; else the pattern is traced.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fuseboard.fuse.patterns.form import form_as_text, forms_from_text
from fuseboard.fuse.patterns.pattern import Pattern

_HEADER = "# Written by `fuseboard patterns --write`; edit the pattern instead.\n"


class PatternFiles:
    """The files of one plugin's patterns.

    :param directory: need not be there yet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: set[Pattern] = set()

    def load(self, pattern: Pattern) -> None:
        """Give a pattern its forms, where its file is for it; once."""
        if pattern in self._seen:
            return
        self._seen.add(pattern)
        path = self._path(pattern)
        if not path.is_file():
            return
        text = path.read_text()
        if _stamp(text) != stamp(pattern):
            return
        try:
            forms = forms_from_text(text)
        except (ValueError, SyntaxError, AttributeError):  # traced then; `problems` says so
            return
        for kind in pattern.kinds:
            if kind in forms:
                pattern.give_form(kind, forms[kind])

    def write(self, pattern: Pattern) -> bool:
        """Write a pattern's file anew; whether it has changed.

        :raises PatternError: it can't be traced, or written.
        """
        path, text = self._path(pattern), _text(pattern)
        if path.is_file() and path.read_text() == text:
            return False
        self.directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return True

    def problems(self, patterns: tuple[Pattern, ...]) -> Iterator[str]:
        """What is out of date for the installed torch, a line each.

        :raises PatternError: a pattern can't be traced.
        """
        known = {self._path(pattern) for pattern in patterns}
        for pattern in patterns:
            path = self._path(pattern)
            if not path.is_file():
                yield f"{path}: not there; pattern {pattern.name!r} is traced at each start"
            elif _stamp(path.read_text()) != stamp(pattern):
                yield f"{path}: written for other functions or examples, or another torch"
            elif path.read_text() != _text(pattern):
                yield f"{path}: this torch traces pattern {pattern.name!r} otherwise"
        for path in sorted(self.directory.glob("*.pattern")):
            if path not in known:
                yield f"{path}: of no pattern"

    def _path(self, pattern: Pattern) -> Path:
        return self.directory / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', pattern.name)}.pattern"


def stamp(pattern: Pattern) -> str:
    """What a pattern's forms depend on: its function, its examples, torch."""
    release = ".".join(torch.__version__.split(".")[:2])
    try:
        source = inspect.getsource(pattern.search)
    except (OSError, TypeError):
        source = f"{getattr(pattern.search, '__qualname__', type(pattern.search))}"
    parts = [source, repr(list(map(_described, pattern.examples))), repr(pattern.kinds)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"torch {release}, {digest}"


def _described(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        return example.dtype, str(example.device), list(example.shape), list(example.stride())
    return example


def _stamp(text: str) -> str:
    found = re.search(r"^# For (.*)\.$", text, re.M)
    return found[1] if found else ""


def _text(pattern: Pattern) -> str:
    """A pattern's file, traced now.

    :raises PatternError: it can't be traced, or written.
    """
    traced = pattern.traced_anew()
    try:
        forms = "\n\n".join(form_as_text(traced.form(k, {}), k) for k in traced.kinds)
    except ValueError as error:
        raise pattern.error(str(error)) from error
    return f"{_HEADER}# For {stamp(pattern)}.\n\n{forms}"
