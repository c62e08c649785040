"""Trips as events of spans."""

from __future__ import annotations

from opentelemetry import trace

import fuseboard


def show(event: fuseboard.Event) -> None:
    """Add a trip to the span that is current in this thread, if there is one."""
    told = ("plugin", "stage", "region", "error", "instead", "source")
    attributes = {f"fuseboard.{name}": str(event.details[name]) for name in told}
    trace.get_current_span().add_event(
        "fuseboard.trip", {**attributes, "fuseboard.graph": event.graph}
    )
