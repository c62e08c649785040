"""Work beside calls: it pauses for them, and gets a share after them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fuseboard.torch_api.internals import watch_dynamo
from fuseboard.workshop import slices as module
from fuseboard.workshop.slices import Slices


class Worker:
    """A thread that counts in Python code as fast as it is let."""

    def __init__(self, slices: Slices) -> None:
        self.count = 0
        self.started = threading.Event()
        self.stop = False
        self.thread = threading.Thread(target=self._work, args=(slices,), daemon=True)

    def _work(self, slices: Slices) -> None:
        self.started.set()
        with slices.work():
            while not self.stop:
                self._step()

    def _step(self) -> None:
        self.count += 1

    def __enter__(self) -> Worker:
        self.thread.start()
        assert self.started.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def goes_on(worker: Worker) -> bool:
    """Whether it counts on, however busy the machine is."""
    before, end = worker.count, time.monotonic() + 30
    while worker.count == before and time.monotonic() < end:
        time.sleep(0.001)
    return worker.count > before


def stands_still(worker: Worker, slices: Slices) -> bool:
    """Whether it comes to a pause that lasts."""
    end = time.monotonic() + 30
    while not slices._waiting and time.monotonic() < end:
        time.sleep(0.001)
    before = worker.count
    time.sleep(0.05)
    return worker.count == before


@pytest.fixture
def _long_pauses(monkeypatch):
    """However long a call takes, the work gets nothing meanwhile."""
    monkeypatch.setattr(module, "PAUSE_S", 3600.0)


def test_work_goes_on_between_calls():
    """Without calls nothing holds it up for long."""
    slices = Slices()
    with Worker(slices) as worker:
        assert goes_on(worker)


@pytest.mark.usefixtures("_long_pauses")
def test_work_pauses_while_a_call_is_under_way():
    """Also where the call began before the work did."""
    slices = Slices()
    began = slices.enter()
    with Worker(slices) as worker:
        assert stands_still(worker, slices)
        slices.leave(began)
        assert goes_on(worker)


def test_work_isnt_held_up_for_ever_by_a_long_call():
    """It may hold a lock that the call waits for."""
    slices = Slices()
    with Worker(slices) as worker:
        began = slices.enter()
        assert goes_on(worker)
        slices.leave(began)


def test_calls_without_a_pause_between_them_leave_it_a_share():
    """A loop that does nothing else doesn't starve it."""
    slices = Slices()
    with Worker(slices) as worker:
        before, end = worker.count, time.monotonic() + 1.0
        while time.monotonic() < end:
            began = slices.enter()
            time.sleep(0.005)
            slices.leave(began)
        assert worker.count > before


def test_what_calls_waited_for_too_long_is_made_up_for(monkeypatch):
    """They wait for no more than their share, whatever holds Python's lock throughout a slice."""
    now, late_s, waits = 0.0, 0.0, []

    def sleep(seconds):
        nonlocal now
        waits.append(seconds + late_s)
        now += waits[-1]

    def call(seconds=0.04):
        nonlocal now
        began = slices.enter()
        now += seconds
        slices.leave(began)

    monkeypatch.setattr(module, "_clock", lambda: now)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    slices, share_s = Slices(), module.SHARE * 0.04
    slices._workers = slices._waiting = 1
    late_s = 3 * share_s
    call()
    late_s = 0.0
    for _ in range(3):
        call()
    assert waits == pytest.approx([4 * share_s])
    call()
    assert waits[1:] == pytest.approx([share_s])
    late_s = 3600.0  # as where the machine slept
    for _ in range(40):
        call()
    assert len(waits) > 3


def test_calls_wait_for_no_work_that_needs_no_slice(monkeypatch):
    """Kernels run without Python's lock, as does an engine that makes a session."""
    slices, asleep = Slices(), []
    inside, leave = threading.Event(), threading.Event()

    def work():
        with slices.work():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=asleep.append))
    for _ in range(30):
        slices.leave(slices.enter() - 1.0)
    assert not asleep
    leave.set()
    thread.join(30)


def test_the_call_after_a_trace_waits_a_share_of_it(monkeypatch):
    """It is one of seconds, in which an earlier process's program is loaded."""
    now, waits = 10.0, []
    monkeypatch.setattr(module, "_clock", lambda: now)
    slices = Slices()
    slices.trace_begins()
    now = 14.0
    slices.trace_ends()
    slices.pay_for_trace(waits.append)
    slices.pay_for_trace(waits.append)
    assert waits == pytest.approx([4.0 * module.TRACE_SHARE, 0.0])


def test_work_doesnt_pause_while_the_call_after_a_trace_waits():
    """Nobody else needs Python's lock then."""
    slices, pauses = Slices(), []
    pause = slices._pause
    slices._pause = lambda: pauses.append(pause())
    with Worker(slices):
        time.sleep(0.05)
        assert pauses
        slices._traced_s = 60.0

        def wait(seconds):
            time.sleep(0.05)
            pauses.clear()
            time.sleep(0.05)
            assert not pauses

        slices.pay_for_trace(wait)


def test_a_trace_in_which_a_process_is_forked_owes_the_child_nothing():
    """The child has no worker."""
    slices, waits = module.slices, []
    slices.trace_begins()
    try:
        module._after_fork()
        slices.trace_ends()
        slices.pay_for_trace(waits.append)
        assert waits == [0.0]
    finally:
        module._after_fork()


@pytest.mark.usefixtures("_long_pauses")
def test_calls_of_several_threads_are_counted():
    """One that ends doesn't let the work go on while another one is under way."""
    slices = Slices()
    one, other = slices.enter(), slices.enter()
    slices.leave(one)
    with Worker(slices) as worker:
        assert stands_still(worker, slices)
        slices.leave(other)
        assert goes_on(worker)


def test_a_forked_child_waits_for_no_thread_of_its_parent():
    """Calls and work that were counted there are nobody's here."""
    slices = module.slices
    slices._workers += 1
    began = slices.enter()
    try:
        module._after_fork()
        slices.leave(began)
        assert (slices._calls, slices._workers) == (0, 0)
        assert slices._open.is_set()
    finally:
        module._after_fork()


def test_the_profile_function_of_the_thread_is_put_back():
    """Somebody may profile the board's own threads."""

    def profile(*arguments):
        """Nothing."""

    found = []

    def work():
        sys.setprofile(profile)
        with Slices().work():
            pass
        found.append(sys.getprofile())
        sys.setprofile(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [profile]


@pytest.mark.usefixtures("_long_pauses")
def test_work_pauses_while_dynamo_traces(monkeypatch):
    """The trace itself doesn't wait for it when it ends."""
    slices, traces, asleep = Slices(), threading.current_thread(), []

    def sleep(seconds):
        if threading.current_thread() is traces:
            asleep.append(seconds)
        else:
            time.sleep(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    slices.trace_begins()
    with Worker(slices) as worker:
        assert stands_still(worker, slices)
        slices.trace_ends()
        assert not asleep
        assert goes_on(worker)


def test_dynamo_tells_when_it_traces(monkeypatch):
    """Of each function that it compiles, also after a reset, once for each."""
    told = []
    monkeypatch.setattr("torch._dynamo.callback.callback_handler.start_callbacks", [])
    monkeypatch.setattr("torch._dynamo.callback.callback_handler.end_callbacks", [])

    def begins(_):
        told.append("begins")

    def ends(_):
        told.append("ends")

    for _ in range(2):
        torch._dynamo.reset()
        for _ in range(2):
            watch_dynamo(begins, ends)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert told == ["begins", "ends"] * 2


def test_a_trace_that_wasnt_seen_to_begin_ends_nothing_else():
    """As where torch was reset before it, or a process was forked in it."""
    slices = Slices()
    slices.enter()
    slices.trace_ends()
    assert slices._calls == 1


ENDS = """
import time
import torch
from fuseboard.workshop.desk import desk

class Order:
    limit_s = 60.0
    def compare(self):
        x = torch.randn(1000, 1000, dtype=torch.float64)
        print("begun", flush=True)
        while True:
            torch.ops.aten.mm.default(x, x)

order = Order()
desk().compare(order)
time.sleep(0.5)
"""


def test_a_process_may_end_while_work_is_in_a_kernel():
    """A thread that came back from C++ code after the interpreter's end would abort it."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")
