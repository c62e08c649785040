"""Cyclic garbage collection while graphs are partitioned, and calls timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing is collected inside.

    A quarter of the time of partitioning, on graphs of tens of thousands of ops: what the stage
    makes lives on, so the collector would walk all of it again and again and find nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
