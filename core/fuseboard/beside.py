"""Whether code of the board runs beside the user's calls, in a thread of its own.

What belongs to the whole process, such as the state of a generator of random numbers, the user's
own threads read and change meanwhile. So nothing of it is put back to what it was a while ago.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_beside: ContextVar[bool] = ContextVar("beside the user's calls", default=False)


def is_beside() -> bool:
    """Whether this thread is one of the board's, beside those that call compiled code."""
    return _beside.get()


@contextmanager
def beside() -> Iterator[None]:
    """Mark the block as running beside the user's calls."""
    token = _beside.set(True)
    try:
        yield
    finally:
        _beside.reset(token)
