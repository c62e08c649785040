"""Many processes with one cache, some of which are killed: none of the others notices."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuseboard.workshop import process

ROOT = Path(__file__).parents[1]

#: Calls a model until all is decided, or for so many seconds; prints the largest error.
PROGRAM = """
import sys, time, warnings
import torch
import fuseboard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
options = {"backends": ["mkldnn", "onnxruntime", "eager"], "measure_s": 0.01}
run = torch.compile(model, backend="fuseboard", options=options)
x = torch.randn(8, 64)
worst, end = 0.0, time.monotonic() + float(sys.argv[1])
with torch.no_grad():
    print("begins", flush=True)
    while time.monotonic() < end:
        worst = max(worst, float((run(x) - model(x)).abs().max()))
        if fuseboard.settled():
            break
        time.sleep(0.01)
trips = [trip for graph in fuseboard.last_report().graphs for trip in graph.trips]
print(worst, fuseboard.settled(), trips, flush=True)
"""


def _started(environment, seconds=150):
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, f"{seconds}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _first_line(started):
    """Not a byte more, as `readline` might: `communicate` sees none of what was read ahead."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(started.stdout.fileno(), 1)):
        line += byte
    return line


def _with_variable(value):
    """Processes whose environment has this in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if value.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_processes_that_are_killed_harm_no_other(tmp_path):
    """No orphan, no damaged entry, no wrong answer, and a later process loads what was decided."""
    cache = tmp_path / "cache"
    environment = {**os.environ, "FUSEBOARD_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    for name in ("FUSEBOARD_SETTLE", "FUSEBOARD_POLICY"):
        environment.pop(name, None)
    choose, numbers = random.Random(0), []
    for batch in range(5):
        running = [_started(environment) for _ in range(4)]
        numbers += [one.pid for one in running]
        for one in running:
            assert _first_line(one) == b"begins\n", one.stderr.read()
        time.sleep(choose.uniform(0.0, 6.0))
        victim = running[batch % 4]
        if batch % 2:  # its workshop, rather than the process itself
            children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        else:
            victim.kill()
        for one in running:
            out, err = one.communicate(timeout=200)
            if one is victim and not batch % 2:
                continue
            assert one.returncode == 0, err
            worst, settled, trips = out.split(maxsplit=2)
            assert float(worst) < 1e-5
            assert settled == "True"
            assert trips.strip() == "[]"
    later = _started(environment)
    out, err = later.communicate(timeout=200)
    assert later.returncode == 0, err
    assert out.splitlines()[-1].endswith("True []")
    assert "cache" not in err
    deadline = time.monotonic() + 60
    while (left := _with_variable(str(cache))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    with process.request_directory(0) as directory:  # which removes what killed ones left
        parent = directory.parent
        assert [path for n in numbers for path in parent.glob(f"fuseboard-{n}-*")] == []
