"""Processes that compile in the background end at once, leave nothing, and may be forked."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseboard
from fuseboard.lower import background
from fuseboard.profile.costs.database import CostDatabase, Decision
from fuseboard.profile.costs.rows import NOT_TRIED
from fuseboard.torch_api.compiling import compile_lock
from tests.support import crashing_plugin
from tests.support.backends import (
    all_trips,
    compiled,
    forget_other_graphs,
    last_graph,
    registered,
)
from tests.support.ending_program import child_of, function

ROOT = Path(__file__).parents[1]
X = torch.linspace(0, 1, 3)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def ends(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program, with a folder of its own for temporary files."""
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CRASHING_GRANDCHILD": str(folder / "grandchild"),
        "FUSEBOARD_POLICY": "measured",
    }
    command = [sys.executable, "-m", "tests.support.ending_program", how, str(folder)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def gone(process: int) -> bool:
    """Whether a process has ended, soon."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # whoever adopted it hasn't asked for it yet
            return True
        time.sleep(0.05)
    return False


def kept(folder: Path) -> Decision:
    """The decision in the cost database."""
    costs = CostDatabase(folder / "cache" / "costs")
    (found,) = (decision for decision in costs.decisions() if decision.level == "graph")
    return found


# --- the end of a process -------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code"), [("interrupted", -2), ("multiprocessing", 0)])
@needs_fork
@pytest.mark.thorough
def test_nothing_is_left_of_what_was_being_compiled(how, code, tmp_path):
    """Neither the child, nor what it started, nor their files."""
    done = ends(how, tmp_path)
    assert done.returncode == code, done.stderr
    assert gone(int(done.stdout))
    assert gone(int((tmp_path / "grandchild").read_text()))
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a stopped child")
@pytest.mark.thorough
def test_a_killed_process_takes_its_stopped_child_along(tmp_path):
    """Killed while it measures, which is when the child is stopped."""
    done = ends("killed", tmp_path)
    assert done.returncode == -9, done.stderr
    assert gone(int(done.stdout))


def test_an_idle_worker_isnt_waited_for(monkeypatch):
    """Its thread waits for jobs, and would do so for ever."""
    monkeypatch.setattr(background, "_END_S", 3600.0)
    worker, asked = background.Worker(), threading.Event()
    worker.submit(job(asked))
    assert asked.wait(60)
    worker.end()


def test_nothing_is_begun_at_the_end_of_a_process():
    """What handlers at exit call may still be compiled first."""
    worker, asked = background.Worker(), threading.Event()
    worker.end()
    worker.submit(job(asked))
    assert worker._thread is None
    assert not asked.is_set()


def job(asked: threading.Event) -> background.Job:
    """One that nobody waits for, as the thread that is to do it finds out."""
    request: Any = None
    return background.Job(("b", "s"), request, 1.0, "", lambda *told: None, asked.set)


# --- a fork ---------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.thorough
def test_a_forked_childs_end_leaves_the_parents_compile_alone(tmp_path):
    """Both backends are timed then; the fork knows that nothing comes to it."""
    done = ends("fork", tmp_path)
    assert done.returncode == 0, done.stderr
    decision = kept(tmp_path)
    assert decision.settled
    assert all(cost.latency_us for cost in decision.candidates)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_compiles():
    """The lock isn't held for ever in the child, which doesn't have that thread."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with compile_lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)  # a lock that stays held ends the child by a signal
        try:
            with compile_lock:
                os._exit(0)
        finally:
            os._exit(1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- a child process that ends --------------------------------------------------------------------


@pytest.fixture
def _measured(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    forget_other_graphs(monkeypatch)
    crashing_plugin.here.append("tests")
    yield
    crashing_plugin.here.clear()


def run(folder: Path, how: str) -> Any:
    """Compile as a process does that knows nothing but what is on disk."""
    torch._dynamo.reset()
    settings = {"plugins.crashing.how": how, "plugins.crashing.log": str(folder / "log")}
    fn = torch.no_grad()(compiled(function, "crashing", "eager", measure_s=0.05, **settings))
    torch.testing.assert_close(fn(X), function(X))
    return fn


def state() -> str:
    return next(told.state for told in last_graph().candidates if told.name == "crashing")


@pytest.mark.usefixtures("_measured")
@pytest.mark.thorough
def test_a_death_by_signal_is_no_verdict(tmp_path):
    """This process does without the backend and says so; the next one tries it again."""
    how = "SIGSEGV"
    with registered(crashing_plugin, "crashing"):
        run(tmp_path, how)
        assert fuseboard.wait(progress=False)
        (trip,) = all_trips()
        assert f"it ended with {how}" in trip.error
        assert state() == "failed"
        decision = kept(tmp_path)
        assert not decision.settled
        assert [c.problem for c in decision.candidates if c.name == "crashing"] == [NOT_TRIED]
        fn = run(tmp_path, how)
        fuseboard.wait(progress=False)
        fn(X)  # the call that compares
        assert state() in ("chosen", "slower")
        assert kept(tmp_path).settled


@pytest.mark.usefixtures("_measured")
@pytest.mark.thorough
def test_what_a_backend_says_for_good_is_kept(tmp_path):
    """The next process doesn't try again."""
    with registered(crashing_plugin, "crashing"):
        run(tmp_path, "raises")
        assert fuseboard.wait(progress=False)
        run(tmp_path, "raises")
        assert last_graph().settled
        assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.usefixtures("_measured")
def test_nothing_is_compiled_for_a_graph_that_is_gone(tmp_path):
    """The child that has begun with it is ended, and nobody is blamed."""
    with registered(crashing_plugin, "crashing"):
        fn = run(tmp_path, "sleeps")
        child = child_of(background.worker)
        del fn
        torch._dynamo.reset()
        gc.collect()
        assert gone(child)
        assert not all_trips()
