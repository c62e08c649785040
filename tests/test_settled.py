"""Who waits for graphs to settle is told: a callback, and a line in a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

import pytest
import torch

import fuseboard
from fuseboard.report.data import GraphReport
from fuseboard.report.settled import tell_settled
from tests.support.backends import compiled


@pytest.fixture
def told():
    """Reports that a callback got, and an event for the first."""
    reports, came = [], threading.Event()

    def note(report):
        reports.append(report)
        came.set()

    end = fuseboard.on_settled(note)
    yield reports, came
    end()


def report_of(name: str) -> GraphReport:
    return GraphReport(name, "inference", "f", 0)


def test_a_callback_is_told_of_a_graph_once_it_has_settled(told):
    """With the report, in which the winner stands."""
    reports, came = told
    options = {"policy": "measured", "settle": "in_calls", "min_region_us": 0}
    x, w = torch.randn(37, 64), torch.randn(64, 19)
    run = compiled(lambda x: torch.relu(x @ w).sum(1), "mkldnn", "eager", **options)
    with torch.no_grad():
        run(x)
    assert fuseboard.wait(100, progress=False)
    assert came.wait(10)
    (report,) = reports
    assert report.settled
    assert report in fuseboard.last_report().graphs
    assert sum(one.state == "chosen" for one in report.candidates) == 1


def test_it_is_called_by_a_thread_of_its_own_and_others_after_it(told, caplog):
    """One that raises is logged, and stands in nobody's way."""
    reports, came = told
    threads = []

    def fails(report):
        threads.append(threading.current_thread())
        raise ValueError("mine")

    end = fuseboard.on_settled(fails)
    fuseboard.on_settled(reports.append)()  # ended at once
    try:
        tell_settled(report_of("one"))
        assert came.wait(10)
        tell_settled()
        came.clear()
        tell_settled(report_of("two"))
        assert came.wait(10)
        for thread in threads:
            thread.join(10)
    finally:
        end()
        end()
    assert [report.name for report in reports] == ["one", "two"]
    assert threading.current_thread() not in threads
    assert "ValueError: mine" in caplog.text


WAITS = """
import fuseboard
from fuseboard.lower import background

class Graph:
    name, looks = "graph", 0
    @property
    def waiting(self):
        self.looks += 1
        return 1
    @property
    def settled(self): return self.looks > 10

graph = Graph()
background.add(graph)
assert fuseboard.wait()
"""


def on_screen(written: str) -> list[str]:
    """What a terminal shows after that was written to it."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line for line in lines if line.strip()]


@pytest.mark.thorough
def test_a_terminal_shows_one_line_while_it_waits_and_nothing_after():
    """The line is written to standard error, and taken back."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # Linux's end of a terminal that nobody writes to any more
                break
            if not read:
                break
            written += read
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(ours)
    text = written.decode()
    assert process.returncode == 0, text
    shown = text.index("0 of 1 graphs settled") + len("0 of 1 graphs settled")
    assert len(on_screen(text[:shown])) == 1
    assert on_screen(text) == []


@pytest.mark.thorough
def test_nothing_is_written_where_standard_error_is_no_terminal():
    """Logs stay clean."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
