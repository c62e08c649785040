"""A child that was forked while another thread was at work goes on by itself."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from fuseboard import forks
from fuseboard.torch_api.compiling import compile_lock
from fuseboard_inductor import _freeze
from fuseboard_mkldnn import _pack

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

#: A child that waits for a lock is ended after so many seconds.
STUCK_S = 60


@contextmanager
def held_elsewhere(locks: Sequence[Any]) -> Iterator[None]:
    """Another thread holds the locks for the block."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(STUCK_S)
        yield
    finally:
        over.set()
        thread.join()


def in_a_child(work) -> int:
    """The exit status of a forked child that does some work."""
    child = os.fork()
    if not child:
        signal.alarm(STUCK_S)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_locks_that_another_thread_held_are_free():
    """Of what prepares weights, runs graphs, knows plugins, compiles, and chooses kernels."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    options = {"backends": ["mkldnn"], "policy": "priority"}
    fn, x = torch.compile(model, backend="fuseboard", options=options), torch.randn(32, 64)
    with torch.no_grad():
        fn(x), fn(x)
    locks = [*forks._locks, compile_lock, _pack._lock, _freeze._lock]

    def work():
        with torch.no_grad():
            model[0].weight.mul_(2)
            assert torch.allclose(fn(x), model(x), atol=1e-5)
        for lock in locks:
            with lock:
                pass

    with held_elsewhere(locks):
        assert in_a_child(work) == 0
