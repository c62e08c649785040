"""Observable instruments: they keep nothing, and ask the process for its status when observed."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

import fuseboard

log = logging.getLogger("fuseboard")

#: The instruments are observed one after the other; within this time they show one status.
_SAME_S = 0.5
#: What UCUM calls the units.
_UNITS = {"seconds": "s", "bytes": "By"}

_providers: weakref.WeakSet[MeterProvider] = weakref.WeakSet()
#: Whether the global provider has them: before it is set another object stands for it.
_is_global = False
_lock = fuseboard.fork_safe_lock()


def make_with(provider: MeterProvider | None) -> None:
    """Make the instruments once for each provider."""
    global _is_global
    with _lock:
        if _is_global if provider is None else provider in _providers:
            return
        known = fuseboard.status().metrics()  # where it raises nothing counts as made
        is_global = provider is None
        if provider is None:
            provider = metrics.get_meter_provider()
        if provider not in _providers:
            meter, latest = provider.get_meter("fuseboard"), _Latest()
            for metric in known:
                make = (
                    meter.create_observable_counter
                    if metric.counts
                    else meter.create_observable_gauge
                )
                name = f"fuseboard.{metric.name}"
                unit = _UNITS.get(metric.unit, "1")
                make(name, [latest.observing(metric.name)], unit, metric.help)
            _providers.add(provider)
        _is_global = _is_global or is_global


class _Latest:
    """The status of the moment, taken once for all instruments."""

    def __init__(self) -> None:
        self._metrics: Mapping[str, Any] = {}
        self._at = float("-inf")

    def observing(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """What a metric's instrument calls."""

        def observe(options: CallbackOptions) -> list[Observation]:
            if time.monotonic() - self._at > _SAME_S:
                try:
                    self._metrics = {one.name: one for one in fuseboard.status().metrics()}
                except fuseboard.FuseboardError as error:  # such as settings that are wrong
                    log.warning("fuseboard: there are no metrics for OpenTelemetry: %s", error)
                    self._metrics = {}
                self._at = time.monotonic()
            metric = self._metrics.get(name)
            if metric is None:
                return []
            keys = [f"fuseboard.{label}" for label in metric.labels]
            return [
                Observation(value, dict(zip(keys, labels, strict=True)))
                for labels, value in metric.samples.items()
            ]

        return observe
