"""perf as a sampler: a real run where it may sample, and an executable that only acts like it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest

from fuseboard import SamplingError, SamplingOptions, SamplingProfiler, StackFrame, StackSample
from fuseboard_perf import fuseboard_backend
from fuseboard_perf._sampler import Perf
from fuseboard_perf._script import read_script

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="perf is Linux's")

RUN = SamplingOptions(100.0, 60.0)
SCRIPT = """\
python 41  1000.100000:
\t          24a4a1 builtin_sum+0x4d1 (/usr/lib/libpython3.11.so.1.0)
\t    7fd750e5b000 [unknown] ([unknown])

pt main thread 42  1000.110000:
\t    7f00 py::inference0:<fuseboard:inference0:3>+0x1a (/tmp/perf-41.map)
\t    7f01 py::main:/a b/app.py+0x2 (/tmp/perf-41.map)

"""
PERF = """
import os, sys, time
if sys.argv[1] == "script":
    sys.stdout.write({script!r})
    sys.exit({script_status})
assert sys.argv[1] == "record", sys.argv
told, acknowledge = map(int, sys.argv[sys.argv.index("--control") + 1][3:].split(","))
assert os.read(told, 16) == b"enable\\n"
{before}
try:
    os.write(acknowledge, b"ack\\n\\0")
    time.sleep({seconds})
except KeyboardInterrupt:
    pass
"""


def fake(tmp_path: Path, before="", script=SCRIPT, script_status=0, seconds=60) -> str:
    path = tmp_path / "bin" / "perf"
    path.parent.mkdir()
    text = PERF.format(before=before, script=script, script_status=script_status, seconds=seconds)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def settled(sampler: Perf, while_: str):
    """The first other status, within a minute."""
    end = time.monotonic() + 60
    while (status := sampler.status()).state == while_ and time.monotonic() < end:
        time.sleep(0.02)
    return status


def test_a_session_with_an_executable_that_acts_like_perf(tmp_path, monkeypatch):
    """Told to enable, acknowledged, interrupted, read by perf script."""
    executable = fake(tmp_path)
    monkeypatch.setenv("PATH", str(Path(executable).parent), prepend=os.pathsep)
    profiler = SamplingProfiler(sampler="perf", stop_at_error=True)
    assert profiler.profile(lambda: 7) == 7
    assert profiler.result.samples == tuple(read_script(SCRIPT.splitlines()))


def test_a_real_session(monkeypatch):
    """Each thread's native calls; samples are there if this process was busy."""
    if shutil.which("perf") is None:
        pytest.skip("needs perf")
    profiler = SamplingProfiler(sampler="perf", stop_at_error=True)

    def spin():
        end = time.process_time() + 0.4  # perf's clock stands still while others have the core
        while time.process_time() < end:
            sum(range(2000))

    try:
        profiler.profile(spin)
    except SamplingError as error:
        if "no permission" not in str(error):
            raise
        pytest.skip(f"needs leave to sample: {error}")
    assert profiler.result.total >= 10
    assert any(sample.stack for sample in profiler.result.samples)


def test_stacks_are_read_outermost_call_first():
    """Names of threads may hold spaces; Python's calls are told by their prefix."""
    runner = StackFrame("inference0", "<fuseboard:inference0:3>")
    assert read_script(SCRIPT.splitlines(keepends=True)) == [
        StackSample(
            (
                StackFrame("[unknown]", "[unknown]"),
                StackFrame("builtin_sum", "/usr/lib/libpython3.11.so.1.0"),
            ),
            "python 41",
        ),
        StackSample((StackFrame("main", "/a b/app.py"), runner), "pt main thread 42"),
    ]


@pytest.mark.parametrize(
    ("before", "detail"),
    [
        (
            "print('Error:\\nNo permission to enable cycles event.'); sys.exit(255)",
            "no permission to sample this process (No permission to enable cycles event.). "
            "Run as root, or: "
            "sudo sysctl kernel.perf_event_paranoid=1",
        ),
        ("print('unknown option `control'); sys.exit(129)", "perf failed: unknown option `control"),
        ("sys.exit(3)", "perf failed: it ended with status 3"),
    ],
    ids=["refused", "old", "silent"],
)
def test_why_it_did_not_run(tmp_path, before, detail):
    """Its own words; and where it may not sample, what helps."""
    sampler = Perf(fake(tmp_path, before), "fp")
    sampler.start(os.getpid(), "run", RUN)
    status = settled(sampler, "starting")
    assert status.state == "failed"
    assert status.detail.startswith(detail)
    sampler.stop()
    sampler.stop()


def test_symbols_that_cannot_be_read_are_an_error(tmp_path):
    """perf script's failure is told, not an empty profile."""
    sampler = Perf(fake(tmp_path, script="bad data\n", script_status=2, seconds=0), "fp")
    sampler.start(os.getpid(), "run", RUN)
    settled(sampler, "starting")
    settled(sampler, "running")
    settled(sampler, "processing")
    with pytest.raises(SamplingError, match="perf: perf failed: bad data"):
        sampler.results()
    sampler.stop()
    sampler.stop()


def test_no_descriptor_is_left_open(tmp_path):
    """Two pipes a run would end a long program."""
    before = len(os.listdir("/proc/self/fd"))
    sampler = Perf(fake(tmp_path), "fp")
    sampler.start(os.getpid(), "run", RUN)
    assert settled(sampler, "starting").state == "running"
    sampler.stop()
    assert settled(sampler, "processing").state == "finished"
    assert len(sampler.results()) == 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_perf_the_plugin_says_what_to_install(monkeypatch):
    """It is the system's package manager that has it."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    info = fuseboard_backend()
    assert not info.available
    assert info.reason.startswith("perf isn't on PATH: install it with the system's package")
