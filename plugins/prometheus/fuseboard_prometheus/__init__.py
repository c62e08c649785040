"""Prometheus metrics of what a process is doing. Needs the ``prometheus`` extra.

Options: ``[tool.fuseboard.plugins.prometheus]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

import fuseboard

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    default_registry: bool = Field(
        False,
        description="Add the metrics to prometheus_client's own registry once something happens to "
        "a graph, so that the program needn't.",
    )


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Ready where prometheus_client is installed; it runs no ops."""
    client = fuseboard.Engine("prometheus-client", at_least="0.16")
    reason = fuseboard.why_unavailable(client, install="pip install 'fuseboard[prometheus]'")
    return fuseboard.BackendInfo(
        name="prometheus",
        wraps_only=True,
        available=not reason,
        reason=reason,
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_event(options: Any) -> None:
    """Add the metrics, if nobody has and the options want it."""
    if options.default_registry:
        register()


def register(registry: CollectorRegistry | None = None) -> None:
    """Add the metrics of this process to a registry, unless they are there.

    :param registry: of prometheus_client; None: its own, the one that its servers show.
    """
    import prometheus_client

    from fuseboard_prometheus._collector import add_to

    add_to(prometheus_client.REGISTRY if registry is None else registry)
