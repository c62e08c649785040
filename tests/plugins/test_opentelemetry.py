"""The OpenTelemetry exporter: instruments, and trips in the spans of calls."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fuseboard
import fuseboard_opentelemetry
from fuseboard.board import board
from fuseboard_opentelemetry import _instruments
from tests.support.backends import plugged, registered

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import metrics, trace  # once it is known to be there
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

README = Path(__file__).parents[2] / "plugins" / "opentelemetry" / "README.md"


@pytest.fixture(autouse=True)
def _on_the_board():
    """The plugin on the board, where it isn't installed with an entry point."""
    known = "opentelemetry" in board.names()
    with nullcontext() if known else registered(fuseboard_opentelemetry, "opentelemetry"):
        yield


def boom(*args):
    raise ValueError("no such kernel")


def fail():
    """Contain a failure of the plugin ``boom``, where a call is compiled."""
    torch._dynamo.reset()
    with plugged("boom", call=boom), torch.no_grad():
        run = torch.compile(torch.relu, backend="fuseboard", options={"backends": ["boom"]})
        run(torch.randn(4))


def observed(reader):
    """Name of a metric → (unit, values by attributes)."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    return {
        metric.name: (
            metric.unit,
            {tuple(sorted(p.attributes.items())): p.value for p in metric.data.data_points},
        )
        for metric in scope.metrics
    }


def test_the_status_is_observed_by_each_provider():
    """Once, however often the instruments were made; the names are those of the README."""
    fail()
    readers = [InMemoryMetricReader() for _ in range(2)]
    providers = [MeterProvider([reader]) for reader in readers]
    for provider in [*providers, *providers]:
        fuseboard_opentelemetry.register(provider)
    status = fuseboard.status()
    for reader in readers:
        found = observed(reader)
        trips = {
            (("fuseboard.plugin", one.plugin), ("fuseboard.stage", one.stage)): one.count
            for one in status.trips
        }
        assert found["fuseboard.trips"] == ("1", trips)
        assert found["fuseboard.compile"][0] == "s"
        assert found["fuseboard.cache_limit"] == ("By", {(): status.cache.limit_bytes})
    table = README.read_text().partition("| counters |")[2].partition("##")[0]
    assert {f"fuseboard.{one.name}" for one in status.metrics()} == set(
        re.findall(r"`(fuseboard\.\w+)`", table)
    )


def test_instruments_that_failed_to_be_made_are_made_later(monkeypatch):
    """And once where a provider is named and is the global one as well."""
    reader, made = InMemoryMetricReader(), []
    provider = MeterProvider([reader])
    get_meter = provider.get_meter
    monkeypatch.setattr(_instruments, "_is_global", False)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(provider, "get_meter", lambda name: made.append(1) or get_meter(name))
    monkeypatch.setenv("FUSEBOARD_POLICY", "nonsense")
    for one in (provider, None):
        with pytest.raises(fuseboard.SettingsError):
            fuseboard_opentelemetry.register(one)
    monkeypatch.delenv("FUSEBOARD_POLICY")
    for one in (provider, None, provider, None):
        fuseboard_opentelemetry.register(one)
    assert len(made) == 1
    assert observed(reader)["fuseboard.compile"][0] == "s"


@pytest.mark.parametrize("spans", [True, False])
def test_a_trip_is_an_event_of_the_calls_span(spans):
    """A request's trace shows what failed in its call, unless that isn't wanted."""
    tracer = TracerProvider().get_tracer("tests")
    with fuseboard.settings(plugins={"opentelemetry": {"spans": spans}}):
        with tracer.start_as_current_span("request") as span:
            fail()
    trips = [event for event in span.events if event.name == "fuseboard.trip"]
    assert len(trips) == spans
    for trip in trips:
        assert trip.attributes["fuseboard.plugin"] == "boom"
        assert "no such kernel" in trip.attributes["fuseboard.error"]
    assert trace.get_current_span() is not span
