"""Callbacks for graphs that have settled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from fuseboard.report.data import GraphReport

log = logging.getLogger("fuseboard")

Callback = Callable[[GraphReport], object]

_callbacks: list[Callback] = []


def on_settled(callback: Callback) -> Callable[[], None]:
    """Have a function called with each graph's report, once nothing is left to try for it.

    It is called in a thread of its own, so that neither the calls nor what is still being decided
    waits for it. An exception in it is logged. A training graph has two reports, of its forward and
    its backward. Graphs for which there was nothing to try tell nobody.

    :returns: what ends it.
    """
    _callbacks.append(callback)

    def end() -> None:
        if callback in _callbacks:
            _callbacks.remove(callback)

    return end


def tell_settled(*reports: GraphReport) -> None:
    """Call what waits for it; returns at once."""
    callbacks = tuple(_callbacks)
    if callbacks and reports:
        thread = threading.Thread(
            target=_call, args=(callbacks, reports), name="fuseboard settled", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # at the end of the process, where nobody waits any more
            log.debug("fuseboard: no thread can be started to tell that a graph has settled")


def _call(callbacks: Sequence[Callback], reports: Sequence[GraphReport]) -> None:
    for report in reports:
        for callback in callbacks:
            try:
                callback(report)
            except Exception:  # the user's code may raise anything
                log.exception("fuseboard: a callback for graphs that have settled failed")
