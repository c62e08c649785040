"""OpenTelemetry metrics of what a process is doing, and trips in traces.

Needs the ``opentelemetry`` extra. Options: ``[tool.fuseboard.plugins.opentelemetry]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

import fuseboard

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    global_provider: bool = Field(
        False,
        description="Make the instruments with the global meter provider once something happens to "
        "a graph, so that the program needn't.",
    )
    spans: bool = Field(
        True,
        description="Add an event to the current span where something is contained: a request's "
        "trace shows what failed in its call.",
    )


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Ready where OpenTelemetry's API is installed; it runs no ops."""
    api = fuseboard.Engine("opentelemetry-api", at_least="1.20")
    reason = fuseboard.why_unavailable(api, install="pip install 'fuseboard[opentelemetry]'")
    return fuseboard.BackendInfo(
        name="opentelemetry",
        wraps_only=True,
        available=not reason,
        reason=reason,
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_event(event: fuseboard.Event, options: Any) -> None:
    """Show a trip in the span of the call, and make the instruments if the options want it."""
    if options.global_provider:
        register()
    if options.spans and event.name == "trip" and event.process == "user":
        from fuseboard_opentelemetry._spans import show

        show(event)


def register(provider: MeterProvider | None = None) -> None:
    """Make the instruments of this process with a meter provider, unless they are made.

    :param provider: None: the global one, also where it is set later.
    """
    from fuseboard_opentelemetry._instruments import make_with

    make_with(provider)
