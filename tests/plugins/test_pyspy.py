"""py-spy as a sampler: real runs, and what is said where it can't run."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest
import torch

import fuseboard
from fuseboard import (
    CompileProfiler,
    SampledProfile,
    SamplingError,
    SamplingOptions,
    SamplingProfiler,
    StackFrame,
    StackSample,
)
from fuseboard.profile.observe import sampling, sampling_process, session
from fuseboard_pyspy import _executable
from fuseboard_pyspy._sampler import PySpy, read_speedscope
from tests.support.backends import compiled

RUN = SamplingOptions(100.0, 60.0)


def spin(seconds: float) -> str:
    end = time.process_time() + seconds  # py-spy leaves out who waits for a core
    while time.process_time() < end:
        sum(range(2000))
    return "spun"


@pytest.fixture
def tracing():
    """py-spy, where it may trace this process."""
    executable = _executable.find()
    if executable is None:
        pytest.skip("needs py-spy: pip install 'fuseboard[pyspy]'")
    sampler = PySpy(executable, native=False)
    sampler.start(os.getpid(), "probe", RUN)
    status = settled(sampler)
    sampler.stop()
    sampler.stop()
    if status.state == "failed" and "no permission" in status.detail:
        pytest.skip(f"needs leave to trace a process: {status.detail}")
    return executable


def settled(sampler, *, while_="starting"):
    """The first other status, within a minute."""
    end = time.monotonic() + 60
    while (status := sampler.status()).state == while_ and time.monotonic() < end:
        time.sleep(0.02)
    return status


def here(profile: SampledProfile) -> list[StackSample]:
    """The samples of this thread: py-spy takes threads that wait for a pipe for busy at times."""
    return [sample for sample in profile.samples if '"MainThread"' in sample.thread]


def fake(tmp_path: Path, text: str) -> str:
    """An executable that behaves as this Python program does."""
    path = tmp_path / "bin" / "py-spy"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# --- real runs ------------------------------------------------------------------------------------


def test_a_real_session_sees_the_function_that_spins(tracing):
    """Most samples are in it, at its lines; the rate is about what was asked for."""
    profiler = SamplingProfiler(sampler="pyspy", stop_at_error=True)
    start = time.perf_counter()
    assert profiler.profile(spin, 0.6) == "spun"
    seconds = time.perf_counter() - start
    samples = here(profiler.result)
    inside = [s for s in samples if any(f.name == "spin" for f in s.stack)]
    assert 10 <= len(inside) <= 150 * seconds  # 60 on a machine that is free
    assert len(inside) > 0.5 * len(samples)
    frame = next(f for f in inside[0].stack if f.name == "spin")
    first = spin.__code__.co_firstlineno
    assert frame.file == __file__
    assert first < frame.line <= first + 3


def test_a_real_session_tells_regions_apart(tracing):
    """Sorting, kept on eager, takes nearly all of the time; the other region takes little."""
    x = torch.randn(200_000)
    model = compiled(
        lambda x: (x.exp() @ torch.ones(200_000)) + x.sort()[0],
        *("mkldnn", "eager"),
        **{"pin": {"aten.sort": "eager"}},
    )
    with torch.no_grad():
        for _ in range(3):
            model(x)
        profiler = SamplingProfiler(sampler="pyspy", stop_at_error=True)

        def work():
            end = time.perf_counter() + 0.6
            while time.perf_counter() < end:
                model(x)

        profiler.profile(work)
    shares = profiler.result.region_shares()
    report = fuseboard.last_report().graphs[0]
    sorting = [r.name for r in report.regions if "aten.sort.default" in r.ops]
    assert [shares[0].region] == sorting
    assert shares[0].backend == "eager"
    assert shares[0].samples > 0.5 * len(here(profiler.result))
    assert sum(share.share for share in shares) == pytest.approx(1)


def test_a_compilation_is_seen_in_dynamo_and_in_the_backend(tracing):
    """The user's function is named, and the samples show who compiled it."""

    def slow_backend(graph, inputs):
        spin(0.3)
        return graph.forward

    with CompileProfiler(sampler="pyspy", frames=r"\brise ", stop_at_error=True) as profiler:

        def rise(x):
            return x + 1

        torch.compile(rise, backend=slow_backend)(torch.ones(3))
    (compiled_,) = profiler.profiles
    assert compiled_.duration_s >= 0.3
    seen = [{frame.name for frame in sample.stack} for sample in compiled_.profile.samples]
    assert sum("spin" in names and "compile_inner" in str(names) for names in seen) >= 5


def test_native_frames_are_asked_for_by_the_option(tracing):
    """With them, or else without and with a note that says why."""
    with fuseboard.settings(plugins={"pyspy": {"native": True}}):
        profiler = SamplingProfiler(sampler="pyspy", stop_at_error=True)
        profiler.profile(spin, 0.3)
    frames = {frame for sample in profiler.result.samples for frame in sample.stack}
    native = [f for f in frames if f.file and not f.file.endswith(".py")]
    assert native or "without native frames" in " ".join(profiler.result.notes)
    assert any(frame.name == "spin" for frame in frames)


def test_sampling_ends_by_itself_after_its_longest_duration(tracing):
    """The work goes on; the profile says how much of it was sampled."""
    profiler = SamplingProfiler(sampler="pyspy", max_profile_duration_sec=1, stop_at_error=True)
    profiler.profile(spin, 2.2)
    assert any("max_profile_duration_sec" in note for note in profiler.result.notes)
    assert 0 < len(here(profiler.result)) <= 130


def test_a_killed_sampler_does_not_touch_the_work(tracing, caplog):
    """What py-spy had is lost, and the log says so."""
    profiler = SamplingProfiler(sampler="pyspy", stop_at_error=True)
    with profiler:
        (child,) = [
            pid for pid in children() if "py-spy" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(child, 9)
        assert spin(0.1) == "spun"
    assert profiler.result is None
    assert "no profile from pyspy" in caplog.text


def children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_leave_to_trace_is_given_to_the_profiler_alone(tracing, monkeypatch):
    """Where the kernel asks for it, the process waits until its pid has leave, and is traced."""
    given = []
    monkeypatch.setattr(sampling_process, "_needs_leave", lambda: True)
    monkeypatch.setattr(sampling_process, "_give_leave", given.append)
    profiler = SamplingProfiler(sampler="pyspy", stop_at_error=True)
    profiler.profile(spin, 0.3)
    assert any(f.name == "spin" for s in profiler.result.samples for f in s.stack)
    child, none = given
    assert child > 0
    assert none == 0


# --- where it can't run ---------------------------------------------------------------------------


def test_without_py_spy_the_plugin_says_what_to_install(monkeypatch):
    """Neither on PATH nor beside this Python."""
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    assert _executable.why_unavailable() == (
        "py-spy isn't installed: pip install 'fuseboard[pyspy]'"
    )


def test_it_is_found_beside_a_python_that_is_not_on_the_path(tmp_path, monkeypatch):
    """An environment is often used without being activated."""
    executable = fake(tmp_path, "")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(Path(executable).parent))
    assert _executable.find() == executable
    assert _executable.why_unavailable() == ""


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (
            "print('Permission Denied: Try running again with elevated permissions')\nexit(1)",
            "no permission to trace this process (Permission Denied: Try running again with "
            "elevated permissions). ",
        ),
        (
            "print('Error: Failed to suspend process\\nReason: EPERM: Operation not permitted')\n"
            "exit(1)",
            "no permission to trace this process (Error: Failed to suspend process). ",
        ),
        ("print('Error: no Python here\\nhint')\nexit(1)", "py-spy failed: Error: no Python here"),
        ("import os; os.kill(os.getpid(), 9)", "py-spy failed: it ended with status -9"),
    ],
    ids=["refused", "ptrace refused", "error", "killed"],
)
def test_why_it_did_not_run(tmp_path, text, detail):
    """The profiler's own words; and where it may not trace, what helps."""
    sampler = PySpy(fake(tmp_path, text), native=False)
    sampler.start(os.getpid(), "run", RUN)
    status = settled(sampler)
    assert status.state == "failed"
    assert status.detail.startswith(detail)
    if "permission" in detail:
        assert "SYS_PTRACE" in status.detail or sys.platform == "darwin"
    with pytest.raises(SamplingError, match="py-spy: "):
        sampler.results()


WITHOUT_NATIVE = """
import json, signal, sys, time
if "--native" in sys.argv:
    print("Error: Native stack traces aren't supported here")
    sys.exit(1)
try:
    print("py-spy> Sampling process 100 times a second. Press Control-C to exit.", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("py-spy> 1.20s behind in sampling, results may be inaccurate.")
    document = {"shared": {"frames": []}, "profiles": []}
    json.dump(document, open(sys.argv[sys.argv.index("--output") + 1], "w"))
"""


def test_native_frames_that_are_refused_are_left_out(tmp_path):
    """It is run again without, and the reason is a note; as is that samples were late."""
    sampler = PySpy(fake(tmp_path, WITHOUT_NATIVE), native=True)
    sampler.start(os.getpid(), "run", RUN)
    assert settled(sampler).state == "running"
    sampler.stop()
    assert settled(sampler, while_="processing").state == "finished"
    assert sampler.results() == []
    assert sampler.status().detail == (
        "without native frames: Error: Native stack traces aren't supported here; "
        "py-spy: 1.20s behind in sampling, results may be inaccurate."
    )


@pytest.mark.parametrize(
    ("options", "flags"),
    [({}, ["--nonblocking"]), ({"blocking": True}, []), ({"native": True}, ["--native"])],
)
def test_options_reach_the_command_line(options, flags, tmp_path, monkeypatch):
    """The rate, the longest duration and how samples are taken."""
    told = "import json, sys, os\nprint('Sampling process', json.dumps(sys.argv[1:]), flush=True)\n"
    executable = fake(tmp_path, told + "import time; time.sleep(60)")
    monkeypatch.setattr(_executable, "find", lambda: executable)
    with fuseboard.settings(plugins={"pyspy": options}):
        (found,), _ = session.find_samplers("pyspy")
    found.sampler.start(41, "run", SamplingOptions(250.0, 2.5))
    assert settled(found.sampler).state == "running"
    arguments = json.loads(found.sampler._process.output.partition("process ")[2])
    assert arguments[:8] == "record --pid 41 --rate 250 --duration 3 --format".split()
    assert [flag for flag in ("--nonblocking", "--native") if flag in arguments] == flags
    found.sampler.stop()
    found.sampler.stop()


def test_a_py_spy_that_hangs_is_killed(tmp_path):
    """It ignores SIGINT; the second stop ends it."""
    sampler = PySpy(
        fake(
            tmp_path,
            "import signal, time\nsignal.signal(2, signal.SIG_IGN)\n"
            "print('Sampling process', flush=True)\ntime.sleep(60)",
        ),
        native=False,
    )
    sampler.start(os.getpid(), "run", RUN)
    assert settled(sampler).state == "running"
    sampler.stop()
    assert sampler.results() is None
    sampler.stop()
    assert sampler._process.returncode == -9


def test_a_whole_session_without_permission(tmp_path, monkeypatch, caplog):
    """The work runs; one warning says what was refused and what to do."""
    executable = fake(tmp_path, "print('Permission Denied: Try again')\nexit(1)")
    monkeypatch.setattr(_executable, "find", lambda: executable)
    monkeypatch.setattr(sampling, "_told", set())
    profiler = SamplingProfiler(sampler="pyspy")
    assert [profiler.profile(lambda: 1), profiler.profile(lambda: 2)] == [1, 2]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no permission to trace this process" in warning


def test_samples_of_several_threads_are_put_into_one_order():
    """By time: thread B's first sample comes right after thread A's first. Waiting is left out."""
    document = {
        "shared": {
            "frames": [
                {"name": "main", "file": "/a.py", "line": 1},
                {"name": "memcpy", "file": None, "line": None},
                {"name": "Condition.wait", "file": "/lib/threading.py", "line": 320},
            ]
        },
        "profiles": [
            {"name": "A", "samples": [[0], [0, 1]], "weights": [0.01, 0.01], "startValue": 0.0},
            {"name": "B", "samples": [[1], [0, 2]], "weights": [0.01, 0.01]},
        ],
    }
    main, memcpy = StackFrame("main", "/a.py", 1), StackFrame("memcpy")
    assert read_speedscope(json.loads(json.dumps(document))) == [
        StackSample((main,), "A"),
        StackSample((memcpy,), "B"),
        StackSample((main, memcpy), "A"),
    ]
