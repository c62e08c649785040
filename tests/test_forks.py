"""A child that was forked while another thread was at work goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PROGRAM = textwrap.dedent(
    """
    import importlib, os, signal, sys, threading, warnings
    import torch
    from fuseboard import forks
    from fuseboard.lower.specialise import compile_lock

    warnings.simplefilter("ignore", DeprecationWarning)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    options = {"backends": ["mkldnn"], "policy": "priority"}
    fn, x = torch.compile(model, backend="fuseboard", options=options), torch.randn(32, 64)
    with torch.no_grad():
        fn(x), fn(x)
    module = importlib.import_module(sys.argv[1])
    locks = {
        "weights": [lock for lock in forks._locks if lock is not compile_lock],
        "plugin": [getattr(module, "_lock", compile_lock)],
    }[sys.argv[2]]
    assert locks
    held, over = threading.Event(), threading.Event()

    def work():
        for lock in locks:
            lock.acquire()
        held.set()
        over.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        with torch.no_grad():
            model[0].weight.mul_(2)
            assert torch.allclose(fn(x), model(x), atol=1e-5)
            for lock in locks:
                with lock:
                    pass
        os._exit(0)
    _, status = os.waitpid(child, 0)
    over.set()
    print(os.waitstatus_to_exitcode(status))
    """
)


@pytest.mark.parametrize(
    ("module", "locks"),
    [
        ("fuseboard.forks", "weights"),
        ("fuseboard.lower.specialise", "plugin"),
        ("fuseboard_mkldnn._pack", "plugin"),
        ("fuseboard_inductor._freeze", "plugin"),
    ],
)
def test_a_lock_that_another_thread_held_is_free(module, locks, tmp_path):
    """Of what prepares weights, runs graphs, knows plugins, compiles, and chooses kernels."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, locks],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FUSEBOARD_CACHE_DIR": str(tmp_path)},
    )
    assert done.stdout.strip() == "0", done.stderr
