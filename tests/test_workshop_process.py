"""The workshop's process: what comes of a request whose answer never comes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading

import pytest

from fuseboard.workshop.process import Workshop


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_a_request_ends_with_the_process_that_made_it(after_s, tmp_path, monkeypatch):
    """Nobody waits for its answer any more, so that the end is no failure to tell of."""
    workshop = Workshop()

    def running():
        workshop._output = tempfile.TemporaryFile()
        child = workshop._child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        timer.start()
        return child

    timer = threading.Timer(after_s, workshop.end)
    monkeypatch.setattr(workshop, "_running", running)
    assert workshop.ask("a request", tmp_path, 100.0, lambda: True) is None
    timer.join(10)
    assert workshop._child is None
    with pytest.raises(Exception, match="this process ends"):
        Workshop._running(workshop)
