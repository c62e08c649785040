"""Locks that a forked child finds free.

A lock that another thread holds when a process forks stays locked in the child, where that thread
isn't: whoever takes it waits for ever. What such a thread was doing to what the lock protects must
leave it usable at any moment.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """A lock that only the thread that forks may hold in the child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def make_fork_safe(lock: Any) -> None:
    """Let a forked child find a lock of somebody else's free, a ``threading.RLock``, too."""
    _locks.add(lock)


def _after_fork() -> None:
    for lock in list(_locks):  # what CPython's own modules do with theirs has no public name
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
