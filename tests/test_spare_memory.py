"""What is prepared from weights is a second copy of them: it is made only where there is room."""

from __future__ import annotations

import pytest
import torch

from fuseboard import spare_memory
from fuseboard.contracts import Measurement
from fuseboard.errors import RegionError
from fuseboard.spare_memory import left_in_container, why_no_room
from tests.support.backends import (
    all_trips,
    compiled,
    last_graph,
    observing,
    pack_linears,
    plugged,
)
from tests.support.values import assert_same
from tests.support.weights import Linear, assert_equal, hoisting_by, overwrite

GIB = 2**30


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free."""

    def set_free(size: int) -> None:
        monkeypatch.setattr(spare_memory, "free_bytes", lambda device: size)

    return set_free


# --- how much there is ----------------------------------------------------------------------------


def test_what_is_free_is_told():
    assert 0 < spare_memory.free_bytes(torch.device("cpu")) < 2**50
    assert spare_memory.free_bytes(torch.device("meta")) is None


def test_a_containers_limit_counts(tmp_path):
    """Version 2: what is used, less the files that would be given back."""
    assert left_in_container(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert left_in_container(tmp_path) == 3 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert left_in_container(tmp_path) is None


def test_a_containers_limit_of_version_1(tmp_path):
    own = tmp_path / "memory"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text(f"{2 * GIB}")
    (own / "memory.usage_in_bytes").write_text(f"{3 * GIB}")
    (own / "memory.stat").write_text("cache 1\ntotal_inactive_file 0\n")
    assert left_in_container(tmp_path) == 0


def test_a_share_of_what_is_free_may_be_taken(free):
    weights = [torch.empty(1000), torch.empty(500)]
    free(12_000)
    assert why_no_room(0.5, weights) == ""
    assert why_no_room(0.49, weights).endswith("of the 0 MiB that are free (prepare_memory)")
    assert why_no_room(0.5, [*weights, weights[0]]) == "", "tied weights are there once"
    assert why_no_room(0.0, []) == ""


# --- what becomes of a backend that needs more ----------------------------------------------------


def test_by_measurement_it_is_left_out_and_the_report_says_so(free, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    free(100)
    with hoisting_by("packed") as (_, backend):
        model = Linear()
        fn = compiled(model, backend, "eager", policy="measured")
        with torch.no_grad():
            assert_same(fn(model.inputs()), model(model.inputs()))
            assert_same(fn(model.inputs()), model(model.inputs()))
    told = {one.name: one for one in last_graph().candidates}
    assert told["eager"].state == "chosen"
    assert told["packer"].state == "untried"
    assert "prepare_memory" in told["packer"].problem
    assert last_graph().settled
    assert not all_trips()


def test_candidates_that_have_no_room_beside_others_are_tried_after_them(
    free, tmp_path, monkeypatch
):
    """What lost lets go of its values first."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    model = Linear()
    x = model.inputs()
    held = []

    def why(share, weights):
        return "no room" if len(held) else held.append(1) or ""

    monkeypatch.setattr("fuseboard.run.weights.why_no_room", why)
    us = {"eager": 100.0, "first": 120.0, "second": 50.0}
    seen = []

    def measure(calls):
        names = ("eager", "first") if not seen else ("eager", "second")
        seen.append(len(calls))
        held.clear()
        return [Measurement(us[name], us[name], us[name], 9) for name in names]

    packing = {"fuse": pack_linears, "info": {"compiles_quickly": True}}
    with (
        plugged("first", **packing),
        plugged("second", **packing),
        observing("stopwatch", measure=measure),
    ):
        fn = compiled(model, "first", "second", "eager", policy="measured")
        with torch.no_grad():
            for _ in range(3):
                assert_equal(fn(x), model(x))
    assert seen == [2, 2]
    states = {one.name: one.state for one in last_graph().candidates}
    assert states == {"eager": "slower", "first": "slower", "second": "chosen"}


def test_by_priority_its_regions_run_in_eager(free):
    free(100)
    with hoisting_by("packed") as (_, backend):
        model = Linear()
        fn = compiled(model, backend)
        with torch.no_grad():
            for _ in range(3):
                assert_same(fn(model.inputs()), model(model.inputs()))
    (trip,) = all_trips()
    assert "prepare_memory" in trip.error
    assert [(r.backend, r.hoisted) for r in last_graph().regions] == [("eager", 0)]


def test_where_failures_are_raised_so_is_this(free):
    free(100)
    with hoisting_by("packed") as (_, backend):
        model = Linear()
        fn = compiled(model, backend, on_failure="raise")
        with torch.no_grad(), pytest.raises(RegionError, match="prepare_memory"):
            fn(model.inputs())


def test_weights_that_change_while_memory_is_short(free):
    """Calls run in eager; when there is room, they are prepared again."""
    with hoisting_by("packed") as (_, backend):
        model = Linear()
        fn = compiled(model, backend)
        x = model.inputs()
        with torch.no_grad():
            for _ in range(2):
                assert_equal(fn(x), model(x))
            free(100)
            overwrite(model)
            for _ in range(20):
                assert_same(fn(x), model(x))
            free(GIB)
            for _ in range(20):
                assert_equal(fn(x), model(x))
    assert not all_trips()
