"""Objects that are alive, to be looked through by any thread at any moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Living(Generic[_T]):
    """A set of weak references, by identity.

    Unlike a ``weakref.WeakSet`` it may be iterated over while another thread adds to it. It takes
    no lock: each step is one that the interpreter doesn't interrupt.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[_T]] = {}

    def add(self, value: _T) -> None:
        number, references = id(value), self._references
        references[number] = weakref.ref(value, lambda _: references.pop(number, None))

    def discard(self, value: object) -> None:
        self._references.pop(id(value), None)

    def clear(self) -> None:
        self._references.clear()

    def __iter__(self) -> Iterator[_T]:
        """Those that are alive now; one that is added meanwhile isn't among them."""
        found = (reference() for reference in list(self._references.values()))
        return iter([value for value in found if value is not None])

    def __len__(self) -> int:
        return len(self._references)
