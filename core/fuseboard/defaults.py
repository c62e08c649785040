"""The default stages: a plugin like any other, asked last.

``fuseboard_on_failure`` has none here: the setting of that name answers, and settings are the
session's.
"""

from __future__ import annotations

import logging

from fuseboard.contracts import Event
from fuseboard.hookspecs import hookimpl
from fuseboard.partition.joint import split_joint
from fuseboard.partition.plan import make_plan
from fuseboard.profile.choose.measure import measure_calls
from fuseboard.profile.judge.verify import verify

__all__ = ["fuseboard_event", "make_plan", "measure_calls", "split_joint", "verify"]

log = logging.getLogger("fuseboard")


@hookimpl
def fuseboard_event(event: Event) -> None:
    """Log each event at level DEBUG of the logger ``fuseboard``."""
    log.debug("%s: %s in %.3f s, %s", event.graph, event.name, event.seconds, dict(event.details))
