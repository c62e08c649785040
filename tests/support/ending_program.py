"""A program that ends, or forks, while a child process compiles for it; run by tests.

``python -m tests.support.ending_program HOW FOLDER`` compiles a function with a backend that never
comes back and has started a process of its own (but where it forks); it prints the child's id.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fuseboard
from fuseboard.lower import background
from fuseboard.report.data import ledger
from tests.support import crashing_plugin

#: If the end of the process waits for a thread, the test waits in vain.
background._END_S = 3600.0


def main(how: str, folder: Path) -> None:
    fuseboard.register(crashing_plugin, "crashing")
    forks = how.startswith("fork")
    settings = {
        "backends": ["crashing", "eager"],
        "measure_s": 0.05,
        "cache_dir": str(folder / "cache"),
        "plugins.crashing.how": "works" if forks else "has a child",
        "plugins.crashing.log": str(folder / "log"),
    }
    fn = torch.compile(function, backend="fuseboard", options=settings)
    x = torch.linspace(0, 1, 3)
    with torch.no_grad():
        fn(x)
        child = child_of(background.worker)
        if forks:
            fork(fn, x)
            return
    wait_for(lambda: (folder / "grandchild").exists() and (folder / "grandchild").read_text())
    print(child, flush=True)
    end(how)


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def child_of(worker: background.Worker) -> int:
    wait_for(lambda: worker._child is not None)
    assert worker._child is not None
    return worker._child


def wait_for(condition: Any) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happens")


def end(how: str) -> None:
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how == "killed":
        with background.worker.paused():
            os.kill(os.getpid(), signal.SIGKILL)


def fork(fn: Any, x: torch.Tensor) -> None:
    """The forked child ends as any process does; then the parent lets the function settle."""
    forked = os.fork()
    if forked == 0:
        assert fuseboard.wait(progress=False)
        torch.testing.assert_close(fn(x), function(x))
        told = {one.name: one.state for one in ledger.graphs()[-1].candidates}
        assert told == {"crashing": "untried", "eager": "chosen"}, told
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert fuseboard.wait(progress=False)
    report = ledger.graphs()[-1]
    assert not report.trips, report.trips
    states = {one.name: one.state for one in report.candidates}
    assert "slower" in states.values(), states  # both were timed


if __name__ == "__main__":
    way, place = sys.argv[1], Path(sys.argv[2])
    if way == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=main, args=(way, place))
        process.start()
        process.join()
    else:
        main(way, place)
