"""The collector: it keeps nothing, and asks the process for its status when it is scraped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import fuseboard

log = logging.getLogger("fuseboard")

_registries: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()
_lock = fuseboard.fork_safe_lock()


def add_to(registry: CollectorRegistry) -> None:
    """Add the metrics to a registry once."""
    with _lock:
        if registry not in _registries:
            registry.register(StatusCollector())
            _registries.add(registry)


class StatusCollector(Collector):
    """May be in several registries, and in processes that are forked afterwards."""

    def collect(self) -> Iterator[Metric]:
        """The metrics; none where there is no status, so that the others' are shown."""
        try:
            status = fuseboard.status()
        except fuseboard.FuseboardError as error:  # such as settings that are wrong
            log.warning("fuseboard: there are no metrics for Prometheus: %s", error)
            return
        for metric in status.metrics():
            kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
            name = "_".join(filter(None, ("fuseboard", metric.name, metric.unit)))
            family = kind(name, metric.help, labels=metric.labels)
            for labels, value in metric.samples.items():
                family.add_metric(labels, value)
            yield family

    def describe(self) -> list[Metric]:
        """Nothing: a registry that asks needs no status to add it."""
        return []
