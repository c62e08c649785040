"""One cost database for threads, forked children, and processes that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fuseboard.profile.costs.database import CostDatabase
from tests.support.costs import decision, files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "costs"


def test_threads_share_a_database(path):
    """Each finds what it recorded, at once."""
    costs = CostDatabase(path)
    lost = []

    def work(number: int) -> None:
        for step in range(10):
            own = decision(f"{number}/{step}")
            costs.record(own)
            if costs.find(own.key) != own:
                lost.append(own)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert costs.problem == ""
    assert len(CostDatabase(path).decisions()) == 80


FORKING = """
import os, sys, threading
from pathlib import Path
from fuseboard.profile.costs.database import CostDatabase
from tests.support.costs import decision
costs = CostDatabase(Path(sys.argv[1]))
costs.record(decision("before"))
ended = False
def busy():
    step = 0
    while not ended:
        costs.record(decision(f"thread/{step}"))
        step += 1
thread = threading.Thread(target=busy)
thread.start()
children = []
for number in range(10):
    child = os.fork()
    if not child:
        for step in range(5):
            costs.record(decision(f"{number}/{step}"))
        os._exit(0 if costs.find(decision("before").key) and not costs.problem else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
ended = True
thread.join()
assert codes == [0] * 10, codes
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_it(path):
    """While another thread of its parent is writing: no lock is inherited, nothing is lost."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = {d.parts["graph"] for d in CostDatabase(path).decisions()}
    assert {f"{number}/{step}" for number in range(10) for step in range(5)} <= found


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_twenty_processes_of_which_five_are_killed(path):
    """Whatever one of them has recorded is there, whole, also of those that were killed."""
    draw = random.Random(0)
    killed = set(draw.sample(range(20), 5))
    running = []
    for number in range(20):
        # Those that will be killed go on until then.
        count = 100_000 if number in killed else 12
        command = [sys.executable, "-m", "tests.support.costs", str(path), f"{number}", f"{count}"]
        out = path.with_name(f"out-{number}")
        out.parent.mkdir(exist_ok=True)
        with out.open("w") as file:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file))
    for number in killed:
        # One that hasn't begun would prove nothing.
        while not path.with_name(f"out-{number}").read_text():
            time.sleep(0.01)
    for number in sorted(killed):
        time.sleep(draw.uniform(0, 0.3))
        running[number].send_signal(signal.SIGKILL)
    codes = {number: process.wait(120) for number, process in enumerate(running)}
    told = {number: path.with_name(f"out-{number}").read_text() for number in range(20)}
    for number, code in codes.items():
        assert code == (-signal.SIGKILL if number in killed else 0), told[number]

    costs = CostDatabase(path)
    found = {d.parts["graph"]: d for d in costs.decisions()}
    for number, lines in told.items():
        graphs = [json.loads(line) for line in lines.splitlines()]
        assert len(graphs) == 12 or number in killed
        for graph in graphs:
            assert found[graph] == decision(graph, created=float(graph.partition("/")[2]))
    assert costs.problem == ""
    assert not any("damaged" in name for name in files(path))
