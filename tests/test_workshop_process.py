"""The workshop's process: what comes of a request whose answer never comes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading

import pytest

from fuseboard.workshop import desk as desks
from fuseboard.workshop import process
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


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_is_written_as_the_process_ends_fails_in_silence(own_desk, caplog, ends):
    """The files of requests go with the process, also from under one that is being written."""

    class Asks:
        limit_s, bytes_to_send, problem = 10.0, 0, ""

        def recall(self):
            return desks.Next.ASK

        def request(self, directory):
            if ends:
                own_desk.end()
            else:
                process.remove_directories()
            (directory / "request").write_bytes(b"")

        def fail(self, problem):
            self.problem = problem

    order = Asks()
    own_desk.submit(order)
    own_desk._loading.wait(10.0)
    if ends:
        own_desk._asking._thread.join(10.0)
    else:
        own_desk._asking.wait(10.0)
    assert ("work beside calls failed" in caplog.text) is not ends
    assert ("FileNotFoundError" in order.problem) is not ends
