"""What a process tells operators of itself, and what its workshop tells it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import fuseboard
from fuseboard.contracts import Event
from fuseboard.living import Living
from fuseboard.report.data import ledger
from fuseboard.totals import OTHERS, Missed, Totals, totals
from fuseboard.workshop.happenings import Happenings, sent_through
from tests.support.backends import registered
from tests.support.beside import mlp, pinned


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch, tmp_path):
    """Counts of the test's own."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(totals, "_counts", Totals()._counts)


def trip(plugin="p", stage="lower", process="user", **details):
    told = {"region": "r", "error": "e", "instead": "i", "source": "", "exceeded": False}
    return Event("trip", "g0", 0.0, {"plugin": plugin, "stage": stage, **told, **details}, process)


def test_a_process_in_which_nothing_was_compiled_says_so(tmp_path):
    """All is zero, the workshop isn't at work since there is none, and it is JSON."""
    told = subprocess.run(
        [sys.executable, "-c", "import fuseboard; print(fuseboard.status().model_dump_json())"],
        env={**os.environ, "FUSEBOARD_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    status = json.loads(told)
    states = ("watching", "loading", "trialling", "settled", "refused")
    assert status["graphs"] == dict.fromkeys(states, 0)
    assert (status["trips"], status["latest_trip"], status["candidates"]) == ([], None, {})
    assert status["compile_s"] == {"user": 0.0, "workshop": 0.0}
    assert [status[name] for name in ("swaps", "budgets_exceeded", "prepared_bytes")] == [0, 0, 0]
    assert status["workshop"]["alive"] is False
    assert status["workshop"]["why_not"] == "there is nothing to do for it"
    assert status["cache"]["size_bytes"] == 0
    assert status["cache"]["directory"] == str(tmp_path / "artifacts")


#: A plugin that another process finds as well.
LISTENER = """
import os
import fuseboard

heard = []

@fuseboard.hookimpl
def fuseboard_event(event):
    heard.append(event)
    with open({path!r}, "a") as file:
        print(os.getpid(), file=file)
"""


@pytest.fixture
def listener(tmp_path, monkeypatch):
    (tmp_path / "listens.py").write_text(LISTENER.format(path=str(tmp_path / "listeners")))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("listens")
    with registered(module, "listens"):
        yield module
    sys.modules.pop("listens")


@pytest.mark.usefixtures("as_users_run_it", "chosen")
def test_what_happens_in_the_workshop_is_told_here(own_desk, plugin_module, listener, tmp_path):
    """Observers hear each event once and in order, trips are counted, and no ledger bounds that."""
    plugin_module("boom", "raise ValueError('no such op')")
    before, heard = fuseboard.status(), listener.heard
    with torch.no_grad():
        run = pinned(mlp(), backends=["boom", "mkldnn", "eager"])
        run(torch.randn(8, 64))
        assert fuseboard.wait(120)
    assert (tmp_path / "listeners").read_text().split() == [f"{os.getpid()}"] * len(heard)
    there = [event for event in heard if event.process == "workshop"]
    assert heard[: len(there)] == there
    assert {event.graph for event in there} == {heard[-1].graph}  # the last tells of the swap
    names = [event.name for event in there]
    assert names.index("trip") < names.index("choose")
    trips = [event for event in there if event.name == "trip"]
    assert {event.details["plugin"] for event in trips} == {"boom"}
    ledger.clear()
    status = fuseboard.status()
    assert [(t.plugin, t.stage, t.count) for t in status.trips] == [("boom", "lower", len(trips))]
    assert status.latest_trip.process == "workshop"
    assert "no such op" in status.latest_trip.error
    assert status.graphs["settled"] - before.graphs["settled"] == 1
    assert status.candidates["failed"] - before.candidates.get("failed", 0) == 1
    assert status.swaps == 1
    assert status.compile_s["workshop"] > 0
    assert status.compile_s["user"] == pytest.approx(sum(status.stage_s.values()))
    assert (status.workshop.alive, status.workshop.why_not) == (True, "")
    assert status.workshop.graphs_asked == 1
    assert status.cache.size_bytes > 0
    del run
    torch._dynamo.reset()


def test_graphs_that_are_compiled_within_calls_are_counted_while_they_can_be_called():
    """A training graph is one, with the prepared values of none; an inference graph has some."""
    before = fuseboard.status()
    with torch.no_grad():
        run = torch.compile(mlp(), backend="fuseboard", options={"backends": ["mkldnn"]})
        run(torch.randn(8, 64))
    after = fuseboard.status()
    assert after.graphs["settled"] == before.graphs["settled"] + 1
    # two weights of 64 x 64, which oneDNN keeps in a form of at least their size
    assert after.prepared_bytes - before.prepared_bytes >= 2 * 64 * 64 * 4


def test_counts_dont_grow_with_names():
    """Beyond a hundred pairs of plugin and stage others are counted together."""
    for number in range(300):
        totals.happened(trip(f"plugin{number}"))
    trips = fuseboard.status().trips
    assert sum(one.count for one in trips) == 300
    assert len(trips) == 101
    assert next(one for one in trips if one.plugin == OTHERS).count == 200


def test_what_the_workshop_exceeds_or_chooses_is_none_of_the_users():
    """Only calls of the user's can exceed a budget, or go over to another program."""
    for process in ("user", "workshop"):
        totals.happened(trip(process=process, exceeded=True))
        totals.happened(Event("choose", "g0", 0.0, {"winner": "mkldnn"}, process))
    totals.happened(Event("choose", "g0", 0.0, {"winner": "eager"}))
    status = fuseboard.status()
    assert (status.budgets_exceeded, status.swaps, status.trips[0].count) == (1, 1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_begins_at_zero():
    """The sum over processes is what has happened."""
    totals.happened(trip())
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            status = fuseboard.status()
            told = f"{status.trips} {status.latest_trip} {status.pid == os.getpid()}"
            os.write(writes, told.encode())
        finally:
            os._exit(0)
    os.wait()
    assert os.read(reads, 1000).decode() == "() None True"
    assert fuseboard.status().trips[0].count == 1


def test_living_objects_are_looked_through_while_others_come_and_go():
    """As a thread that asks for the status does, while calls compile."""
    living, kept = Living(), []
    ends = threading.Event()

    class One:
        pass

    def come_and_go():
        while not ends.is_set():
            some = [One() for _ in range(50)]
            for one in some:
                living.add(one)
            kept[:] = some[:5]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    try:
        thread.start()
        for _ in range(2000):
            assert all(isinstance(one, One) for one in living)
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(list(living)) == 5


def test_happenings_arrive_once_in_order_and_whole(tmp_path):
    """Whatever is half written, as when the workshop is killed, isn't read."""
    taken = []
    happenings = Happenings(tmp_path, taken.append)
    happenings.read()  # the workshop hasn't begun
    with sent_through(tmp_path):
        totals.looked_up("hits")
        happenings.read()
        totals.happened(trip())
        missed = Missed.of({"backend": "b", "torch": "2"}, {"backend": "b", "torch": "1"})
        totals.looked_up("misses", missed)
    totals.sent_to = None
    with (tmp_path / "happenings").open("ab") as file:
        file.write(b'{"lookup": "da')
    happenings.read()
    happenings.read()
    assert taken == [
        {"lookup": "hits", "missed": None},
        {"event": vars(trip())},
        {"lookup": "misses", "missed": {"what": "b", "differs": {"torch": ["2", "1"]}}},
    ]
    assert fuseboard.status().cache.hits == 0  # they were sent, not counted
