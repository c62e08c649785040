"""The Prometheus exporter: names, registries, forks, and scrapes in which something is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import fuseboard
import fuseboard_prometheus
from fuseboard.totals import totals
from tests.support.backends import plugged, registered

prometheus_client = pytest.importorskip("prometheus_client")
ROOT = Path(__file__).parents[2]


def boom(*args):
    raise ValueError("no such kernel")


def fail():
    """Contain a failure of the plugin ``boom``, where a call is compiled."""
    torch._dynamo.reset()
    with plugged("boom", call=boom), torch.no_grad():
        run = torch.compile(torch.relu, backend="fuseboard", options={"backends": ["boom"]})
        run(torch.randn(4))


def shown(registry):
    return prometheus_client.generate_latest(registry).decode()


def trips(registry):
    labels = {"plugin": "boom", "stage": "lower"}
    return registry.get_sample_value("fuseboard_trips_total", labels) or 0.0


def test_a_trip_is_shown_in_each_registry():
    """The same numbers, however often the metrics were added."""
    registries = [prometheus_client.CollectorRegistry() for _ in range(2)]
    for registry in [*registries, *registries]:
        fuseboard_prometheus.register(registry)
    before = trips(registries[0])
    fail()
    assert [trips(registry) for registry in registries] == [before + 1] * 2
    assert shown(registries[0]).count("# TYPE fuseboard_trips_total counter") == 1
    status = fuseboard.status()
    for state, count in status.graphs.items():
        assert registries[0].get_sample_value("fuseboard_graphs", {"state": state}) == count


def test_every_metric_has_its_line_in_the_readme():
    """And each line is one of the metrics."""
    registry = prometheus_client.CollectorRegistry()
    fuseboard_prometheus.register(registry)
    named = set(re.findall(r"^# TYPE (\w+)", shown(registry), re.M))
    readme = (ROOT / "plugins" / "prometheus" / "README.md").read_text()
    rows = [row for row in readme.splitlines() if re.match(r"\| `fuseboard_\w+", row)]
    told = {name for row in rows for name in re.findall(r"`(fuseboard_\w+)", row)}
    assert named == told
    rules = (ROOT / "docs" / "production.md").read_text()
    assert set(re.findall(r"\b(fuseboard_(?!prometheus|opentelemetry|event)\w+)", rules)) <= named


def test_the_option_registers_with_the_first_event(monkeypatch):
    """Without it prometheus_client's own registry has no metric of these."""
    own = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", own)
    for wanted in (False, True):
        with (
            registered_plugin(),
            fuseboard.settings(plugins={"prometheus": {"default_registry": wanted}}),
        ):
            fail()
        assert ("fuseboard_graphs" in shown(own)) is wanted


def registered_plugin():
    """The plugin on the board, where it isn't installed with an entry point."""
    from fuseboard.board import board

    if "prometheus" in board.names():
        from contextlib import nullcontext

        return nullcontext()
    return registered(fuseboard_prometheus, "prometheus")


def test_wrong_settings_hide_no_metric_of_others(monkeypatch, caplog):
    """A scrape that finds no status shows the rest, and the log says why."""
    registry = prometheus_client.CollectorRegistry()
    fuseboard_prometheus.register(registry)
    prometheus_client.Gauge("others", "Of the program's own", registry=registry).set(3)
    monkeypatch.setenv("FUSEBOARD_POLICY", "nonsense")
    assert "others 3.0" in shown(registry)
    assert "no metrics for Prometheus" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_worker_shows_its_own_numbers():
    """From zero on, in a registry that it has inherited."""
    registry = prometheus_client.CollectorRegistry()
    fuseboard_prometheus.register(registry)
    event = fuseboard.Event("trip", "g", 0.0, {"plugin": "boom", "stage": "lower", "region": "r"})
    for told in ("error", "instead", "source"):
        event.details[told] = ""
    totals.happened(event)
    here = trips(registry)
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            before = trips(registry)
            totals.happened(event)
            os.write(writes, f"{before} {trips(registry)}".encode())
        finally:
            os._exit(0)
    os.wait()
    assert os.read(reads, 100) == b"0.0 1.0"
    assert trips(registry) == here >= 1
