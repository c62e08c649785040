"""Sampling sessions: when they start, what they keep, and that the work is never in danger."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

import fuseboard
from fuseboard import SampledProfile, SamplingError, SamplingOptions, SamplingProfiler
from fuseboard.board.registry import board
from fuseboard.config import resolve
from fuseboard.profile.choose.stored_decision import _settings
from fuseboard.profile.observe import sampling, session
from fuseboard.profile.observe.sampling_process import SamplerProcess
from fuseboard.torch_api.compiles import watched_compilations
from tests.support.backends import observing
from tests.support.samplers import WORK, FakeSampler, sampling_with


@pytest.fixture(autouse=True)
def _told_nothing_yet(monkeypatch):
    """Each warning is given once a process; each test is a process in that respect."""
    monkeypatch.setattr(sampling, "_told", set())
    monkeypatch.setattr(session, "POLL_S", 0.001)
    monkeypatch.setattr(session, "RESULT_S", 0.001)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_free() -> None:
    """No session is left open: another one can start."""
    sampler = FakeSampler()
    with sampling_with(sampler, name="next"):
        SamplingProfiler(sampler="next", stop_at_error=True).profile(int)
    assert sampler.calls == ["start", "stop", "results"]


# --- a session that goes well ---------------------------------------------------------------------


def test_profile_returns_what_the_work_returns_and_keeps_the_samples():
    """The sampler is started on this process, stopped and read; the run has an id."""
    sampler = FakeSampler(starting=3, processing=2)
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(
            sampler=name, sample_each=0.02, max_profile_duration_sec=30, sample_tags=["a", "b"]
        )
        assert profiler.profile(lambda x, *, y: x + y, 2, y=3) == 5
    pid, run_id, options = sampler.asked
    assert pid == os.getpid()
    assert options == SamplingOptions(50.0, 30.0, ("a", "b"))
    assert sampler.calls == ["start", "stop", "results", "results", "results"]
    result = profiler.result
    assert isinstance(result, SampledProfile)
    assert (result.run_id, result.sampler, result.tags) == (run_id, "fake", ("a", "b"))
    assert result.samples == (WORK,)
    assert result.sample_each == 0.02
    assert 0 <= result.duration_s < 30


def test_a_decorated_function_is_profiled_in_each_call():
    """It keeps its name and its arguments; each call has a run of its own."""
    samplers = [FakeSampler(), FakeSampler()]
    with sampling_with(*samplers) as name:
        profiler = SamplingProfiler(sampler=name)

        @profiler
        def double(x: int) -> int:
            """Twice."""
            return 2 * x

        assert (double.__name__, double.__doc__) == ("double", "Twice.")
        assert [double(1), double(x=2)] == [2, 4]
    runs = [sampler.asked[1] for sampler in samplers]
    assert len(set(runs)) == 2
    assert profiler.result.run_id == runs[1]


def test_a_with_block_is_a_session():
    """The profile is there after the block, not in it."""
    with sampling_with(FakeSampler()) as name:
        with SamplingProfiler(sampler=name) as profiler:
            assert profiler.result is None
        assert profiler.result.samples == (WORK,)


def test_the_log_tells_of_the_run(caplog):
    """Start and end are logged with the run's id, as information."""
    caplog.set_level(logging.INFO, "fuseboard")
    with sampling_with(FakeSampler()) as name:
        profiler = SamplingProfiler(sampler=name, sample_tags=["nightly"])
        profiler.profile(int)
    own = [r.getMessage() for r in caplog.records if profiler.result.run_id in r.getMessage()]
    assert "fake samples process" in own[0]
    assert "tags nightly" in own[0]
    assert "1 samples of fake" in own[1]
    assert warnings(caplog) == []


def test_samples_of_the_session_s_own_code_are_left_out():
    """Polling and stopping happen under the sampler, and aren't the user's work."""
    own = fuseboard.StackSample((fuseboard.StackFrame("_finish", session.__file__, 1),))
    with sampling_with(FakeSampler((own, WORK, own))) as name:
        profiler = SamplingProfiler(sampler=name)
        profiler.profile(int)
    assert profiler.result.samples == (WORK,)


def test_what_the_sampler_has_to_say_is_in_the_notes():
    """Such as that native frames had to be left out, or that time was up before the work."""
    with sampling_with(FakeSampler(detail="without native frames", ended=True)) as name:
        profiler = SamplingProfiler(sampler=name, max_profile_duration_sec=5)
        profiler.profile(int)
    assert profiler.result.notes == (
        "without native frames",
        "sampled for 5 s of 0.0 s: max_profile_duration_sec",
    )


# --- the work's own exceptions --------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_the_work_s_exception_passes_and_the_profile_is_discarded(error):
    """The same object arrives; the sampler is ended at once, its results are not asked for."""
    sampler = FakeSampler()

    def work():
        raise error

    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(sampler=name, stop_at_error=True)
        with pytest.raises(type(error)) as caught:
            profiler.profile(work)
    assert caught.value is error
    assert sampler.calls == ["start", "stop", "stop"]
    assert profiler.result is None
    assert_free()


def test_ctrl_c_while_the_sampler_starts():
    """It is stopped, the work doesn't begin, the interrupt passes."""

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    sampler = FakeSampler(raises={"status": interrupt})
    with sampling_with(sampler) as name, pytest.raises(KeyboardInterrupt):
        SamplingProfiler(sampler=name).profile(pytest.fail, "the work began")
    assert sampler.calls == ["start", "stop", "stop"]
    assert_free()


def test_ctrl_c_while_results_are_waited_for():
    """The results are given up, and no sampler stays behind."""
    sampler = FakeSampler(raises={"results": lambda: signal.raise_signal(signal.SIGINT)})
    with sampling_with(sampler) as name, pytest.raises(KeyboardInterrupt):
        SamplingProfiler(sampler=name).profile(int)
    assert sampler.calls == ["start", "stop", "results", "stop", "stop"]
    assert_free()


# --- one session a process ------------------------------------------------------------------------


def test_a_second_session_runs_the_work_unprofiled_and_warns_once(caplog):
    """Nested or in another thread; the first session is not disturbed."""
    first = FakeSampler()
    results = []
    with sampling_with(first) as name, SamplingProfiler(sampler=name) as outer:
        inner = SamplingProfiler(sampler=name)
        results += [inner.profile(lambda: 1), inner.profile(lambda: 2)]
        thread = threading.Thread(target=lambda: results.append(inner.profile(lambda: 3)))
        thread.start()
        thread.join()
    assert results == [1, 2, 3]
    assert inner.result is None
    assert outer.result.samples == (WORK,)
    (warning,) = warnings(caplog)
    assert "another sampling session runs in this process" in warning


def test_a_second_session_raises_with_stop_at_error():
    """Before the work starts."""
    with sampling_with(FakeSampler()) as name, SamplingProfiler(sampler=name):
        second = SamplingProfiler(sampler=name, stop_at_error=True)
        with pytest.raises(SamplingError, match="another sampling session runs"):
            second.profile(pytest.fail, "the work began")
    assert_free()


def test_one_profiler_in_nested_blocks():
    """The outer block has the session, the inner one none, whichever ends first."""
    sampler = FakeSampler()
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(sampler=name)
        with profiler:
            with profiler:
                pass
            assert sampler.calls == ["start"]
    assert profiler.result.samples == (WORK,)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_inside_of_a_session_leaves_the_parent_s_sampler_alone():
    """The child leaves the block without stopping it, and can have a session of its own."""
    sampler, own = FakeSampler(), FakeSampler()
    with sampling_with(sampler, own) as name:
        profiler = SamplingProfiler(sampler=name, stop_at_error=True)
        profiler.__enter__()
        child = os.fork()
        if child == 0:
            profiler.__exit__(None, None, None)
            profiler.profile(int)
            wrong = sampler.calls != ["start"] or own.calls != ["start", "stop", "results"]
            os._exit(int(wrong))
        _, status = os.waitpid(child, 0)
        profiler.__exit__(None, None, None)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sampler.calls == ["start", "stop", "results"]


# --- samplers that are missing, refused, or broken ------------------------------------------------


def test_without_a_sampler_the_work_runs_and_one_warning_says_what_to_install(caplog):
    """The reasons of plugins that are unavailable are in it."""
    missing = fuseboard.BackendInfo(
        "missing", wraps_only=True, available=False, reason="not there: pip install missing"
    )
    with fuseboard.settings(block=["pyspy", "perf"]):
        hooks = {"backend": lambda: missing, "sampler": lambda: None}
        with observing("missing", **hooks):
            profiler = SamplingProfiler()
            assert [profiler.profile(lambda: 1), SamplingProfiler().profile(lambda: 2)] == [1, 2]
            with pytest.raises(SamplingError, match="not there: pip install missing"):
                SamplingProfiler(stop_at_error=True).profile(pytest.fail, "the work began")
    (warning,) = warnings(caplog)
    assert warning == (
        "fuseboard: the work runs unprofiled: no sampler can be used. "
        "missing: not there: pip install missing"
    )


def test_without_any_plugin_the_warning_names_py_spy(caplog):
    """And so does the error for a sampler by name that nobody has; what is blocked is said."""
    with fuseboard.settings(block=["pyspy", "perf"]):
        SamplingProfiler().profile(int)
        with pytest.raises(SamplingError, match="no plugin 'pref' with a sampler is installed"):
            SamplingProfiler(sampler="pref", stop_at_error=True).profile(int)
    (warning,) = warnings(caplog)
    assert "none is installed (the setting 'block' keeps out " in warning
    assert warning.endswith("): pip install 'fuseboard[pyspy]'")


def test_a_sampler_by_name_that_is_blocked_is_said_to_be():
    """With the place where it was blocked."""
    with fuseboard.settings(block=["perf"]):
        profiler = SamplingProfiler(sampler="perf", stop_at_error=True)
        with pytest.raises(SamplingError, match="perf: named by the setting 'block', set in"):
            profiler.profile(int)


def test_settings_that_are_wrong_do_not_stop_the_work(caplog):
    """What is wrong with them is in the warning."""
    with fuseboard.settings(backends=["nonsuch"]):
        assert SamplingProfiler().profile(lambda: 1) == 1
    (warning,) = warnings(caplog)
    assert "no plugin named 'nonsuch'" in warning


def blocks() -> None:
    time.sleep(30)


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        (FakeSampler(raises={"start": OSError("no such file")}), "no such file"),
        (FakeSampler(raises={"status": ValueError("odd")}), "odd"),
        (FakeSampler(starting=10**9), "doesn't say that it runs after"),
        (FakeSampler(raises={"start": blocks}), r"its start\(\) took longer than 0.2 s"),
        (FakeSampler(raises={"status": blocks}), r"its status\(\) took longer than 0.2 s"),
        (FakeSampler(raises={"start": OSError("a"), "stop": OSError("b")}), "a"),
    ],
    ids=["start raises", "status raises", "starts forever", "start hangs", "status hangs", "both"],
)
def test_a_sampler_that_does_not_start(sampler, problem, monkeypatch, caplog):
    """The work runs unprofiled, the sampler is ended, and it isn't tried again by this profiler."""
    monkeypatch.setattr(session, "METHOD_LIMIT_S", 0.2)
    monkeypatch.setattr(session, "START_TRIES", 10)
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(sampler=name)
        assert [profiler.profile(lambda: 1), profiler.profile(lambda: 2)] == [1, 2]
        profiler.stop_at_error = True
        with pytest.raises(SamplingError, match=problem):
            profiler.profile(pytest.fail, "the work began")
    assert sampler.calls == ["start", "stop", "stop"]
    told = [text for text in warnings(caplog) if "unprofiled" in text]
    assert len(told) == 1
    assert_free()


def test_a_sampler_that_fails_while_it_starts_says_why():
    """Its detail is the error's text: what was missing and how to get it."""
    sampler = FakeSampler(dies=True)
    sampler.was_running = True
    with sampling_with(sampler) as name, pytest.raises(SamplingError, match="it was killed"):
        SamplingProfiler(sampler=name, stop_at_error=True).profile(int)


def test_the_next_sampler_is_tried_and_that_is_noted():
    """Those with Python frames come first."""
    native, refused, works = (
        FakeSampler(python_frames=False),
        FakeSampler(raises={"start": OSError("not permitted")}),
        FakeSampler(),
    )
    with (
        fuseboard.settings(block=["pyspy", "perf"]),
        sampling_with(native, name="a-native"),
        sampling_with(refused, name="b-refused"),
        sampling_with(works, name="c-works"),
    ):
        profiler = SamplingProfiler(stop_at_error=True)
        profiler.profile(int)
    assert profiler.result.sampler == "c-works"
    assert profiler.result.notes == ("not sampled by b-refused: not permitted",)
    assert native.calls == []


@pytest.fixture
def decides(monkeypatch):
    """Makes a function what ``stages.sampler`` names; returns the path."""

    def named(function):
        module = types.ModuleType("mysamplers")
        module.chosen = function
        monkeypatch.setitem(sys.modules, "mysamplers", module)
        return "mysamplers:chosen"

    return named


def test_the_sampler_that_the_settings_name_comes_first():
    """Native as it is; a session that names another gets that one."""
    native, works, second = FakeSampler(python_frames=False), FakeSampler(), FakeSampler()
    with (
        sampling_with(native, name="a-native"),
        sampling_with(works, second, name="b-works"),
        fuseboard.settings(stages={"sampler": "a-native"}),
    ):
        profiler = SamplingProfiler(stop_at_error=True)
        profiler.profile(int)
        assert profiler.result.sampler == "a-native"
        profiler = SamplingProfiler(sampler="b-works", stop_at_error=True)
        profiler.profile(int)
        assert profiler.result.sampler == "b-works"
    assert native.calls == second.calls == ["start", "stop", "results"]
    assert works.calls == []


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda: None, None),
        (lambda: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda: "perf", "it has no method start"),
        (lambda: FakeSampler(raises={"start": OSError("no leave")}), "no leave"),
    ],
    ids=["declines", "raises", "no sampler", "does not start"],
)
def test_where_the_settings_function_has_no_sampler_the_plugins_are_asked(function, note, decides):
    path = decides(function)
    with (
        sampling_with(FakeSampler(), name="works"),
        fuseboard.settings(stages={"sampler": path}, block=["pyspy", "perf"]),
    ):
        profiler = SamplingProfiler(stop_at_error=True)
        assert profiler.profile(int, "7") == 7
    assert profiler.result.sampler == "works"
    told = " ".join(profiler.result.notes)
    assert (path in told and note in told) if note else not told


def test_a_sampler_of_the_settings_changes_no_decision(decides):
    """Nor does it keep the work of a graph within the process, as other paths of one would."""
    plain = resolve()
    with fuseboard.settings(stages={"sampler": decides(FakeSampler)}):
        session_ = board.session(resolve())
        assert session_.override_homes() == {}
        assert session_.override_of_this_process() == ""
        assert _settings(session_) == _settings(board.session(plain))


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        (FakeSampler(dies=True), "it was killed"),
        (FakeSampler(raises={"stop": OSError("gone")}), "gone"),
        (FakeSampler(raises={"results": blocks}), r"its results() took longer than 0.2 s"),
        (FakeSampler(processing=10**9), "its results aren't there after"),
        (FakeSampler({"a": 1}), "its results are a dict, not a list of StackSamples"),
        (FakeSampler((WORK, "text")), "its results hold a str, not StackSamples alone"),
    ],
    ids=["dies", "stop raises", "results hang", "never ready", "no list", "no samples"],
)
def test_a_sampler_that_goes_wrong_later_does_not_touch_the_work(
    sampler, problem, monkeypatch, caplog
):
    """The result is the work's, even with stop_at_error; the log says why there is no profile."""
    monkeypatch.setattr(session, "METHOD_LIMIT_S", 0.2)
    monkeypatch.setattr(session, "RESULT_TRIES", 5)
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(sampler=name, stop_at_error=True)
        assert profiler.profile(lambda: 1) == 1
    assert profiler.result is None
    assert sampler.calls[-1] == "stop"
    assert any("no profile from fake" in text and problem in text for text in warnings(caplog))
    assert_free()


# --- beside torch.compile -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["decorator", "profile", "with"])
def test_a_session_inside_of_compiled_code_is_not_compiled(way):
    """It is a graph break: only the user's functions are compiled, and results are right."""
    frames = []
    with sampling_with(FakeSampler(), FakeSampler()) as name:
        profiler = SamplingProfiler(sampler=name, stop_at_error=True)

        def wave(x):
            return x.sin() + 1

        decorated = profiler(wave)

        def model(x):
            x = x * 2
            if way == "decorator":
                return decorated(x).sum()
            if way == "profile":
                return profiler.profile(wave, x).sum()
            with profiler:
                x = wave(x)
            return x.sum()

        x = torch.ones(3)
        with watched_compilations(lambda began: frames.append(began.frame), lambda failed: None):
            compiled = torch.compile(model, backend="eager")
            expected = ((2 * x).sin() + 1).sum()
            torch.testing.assert_close([compiled(x), compiled(x)], [expected, expected])
    assert profiler.result.samples == (WORK,)
    assert frames
    assert [frame for frame in frames if session.__file__ in frame or "/board/" in frame] == []
    assert len(frames) <= 4


def test_a_sampler_is_stopped_where_the_process_itself_ignores_ctrl_c(tmp_path):
    """As under nohup: a child would ignore SIGINT too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = SamplerProcess(["sleep", "60"], tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    end = time.monotonic() + 60
    while process.returncode is None and time.monotonic() < end:
        process.interrupt()
        time.sleep(0.05)
    status = process.returncode
    process.kill()
    assert status == -signal.SIGINT


def test_sessions_work_in_any_thread():
    """Not on the main one alone."""
    sampler = FakeSampler(starting=2, processing=1)
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(sampler=name, stop_at_error=True)
        results = []
        thread = threading.Thread(target=lambda: results.append(profiler.profile(lambda: 5)))
        thread.start()
        thread.join()
    assert results == [5]
    assert profiler.result.samples == (WORK,)


@pytest.mark.thorough
def test_nothing_of_it_is_loaded_where_it_is_not_used():
    """Compiling and calling doesn't import the profiler; the profiler doesn't import Dynamo."""
    program = """
import sys
import fuseboard
fuseboard.SamplingProfiler(enabled=False).profile(int)
assert "torch._dynamo" not in sys.modules
assert "fuseboard_pyspy" not in sys.modules
for name in [name for name in sys.modules if name.startswith("fuseboard.profile.observe.sampling")]:
    del sys.modules[name]
import torch
f = torch.compile(lambda x: x + 1, backend="fuseboard", options={"backends": ["eager"]})
f(torch.ones(3))
loaded = [name for name in sys.modules if "sampling" in name and name.startswith("fuseboard")]
assert loaded == [], loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# --- parameters -----------------------------------------------------------------------------------


def test_a_disabled_profiler_does_nothing():
    """A decorator gives the function itself back; a call and a block are just that."""
    off = SamplingProfiler(enabled=False, sampler="nonsuch", stop_at_error=True)
    assert off(int) is int
    assert off.profile(lambda x: x, 4) == 4
    with off:
        pass
    assert off.result is None


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"sample_each": 1e7}, "sample_each = 10000000.0: the seconds between two samples"),
        ({"sample_each": 0}, "from 0.001 to 1"),
        ({"sample_each": float("nan")}, "sample_each = nan"),
        ({"max_profile_duration_sec": 0}, "max_profile_duration_sec = 0"),
        ({"max_profile_duration_sec": float("inf")}, "a finite number of seconds above 0"),
        ({"sample_tags": "nightly"}, r"a list of strings, such as \['nightly'\]"),
        ({"sample_tags": [3]}, r"sample_tags = \[3\]"),
    ],
)
def test_parameters_out_of_range_are_errors(parameters, problem):
    """What was given and what is allowed."""
    with pytest.raises(SamplingError, match=problem):
        SamplingProfiler(**parameters)


def test_functions_that_return_before_their_work_is_done_are_refused():
    """Coroutines and generators: there would be nothing to sample."""

    async def coroutine():
        pass

    def generator():
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="use `with profiler:` inside of it"):
            SamplingProfiler()(function)


@pytest.mark.parametrize("stop_at_error", [False, True])
def test_an_output_that_cannot_be_written_is_an_error_before_the_work(tmp_path, stop_at_error):
    """A file stands where the folder would be."""
    (tmp_path / "taken").write_text("")
    sampler = FakeSampler()
    with sampling_with(sampler) as name:
        profiler = SamplingProfiler(
            sampler=name, output=tmp_path / "taken" / "out", stop_at_error=stop_at_error
        )
        with pytest.raises(SamplingError, match="profiles can't be written there"):
            profiler.profile(pytest.fail, "the work began")
    assert sampler.calls == []
    assert_free()


def test_output_gets_each_profile_in_three_forms(tmp_path):
    """The folder is made; files are named by the run."""
    with sampling_with(FakeSampler()) as name:
        profiler = SamplingProfiler(sampler=name, output=tmp_path / "new" / "out")
        profiler.profile(int)
    run = profiler.result.run_id
    names = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert names == [f"{run}.folded.txt", f"{run}.html", f"{run}.speedscope.json"]
    written = Path(tmp_path / "new" / "out" / f"{run}.speedscope.json").read_text()
    assert json.loads(written) == profiler.result.as_speedscope()


def test_a_profile_that_can_no_longer_be_written_does_not_touch_the_work(
    tmp_path, monkeypatch, caplog
):
    """The disk is full by the end: the work's result counts, and the profile is in memory."""

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SampledProfile, "save_folded", full)
    with sampling_with(FakeSampler()) as name:
        profiler = SamplingProfiler(sampler=name, output=tmp_path)
        assert profiler.profile(lambda: 1) == 1
    assert profiler.result.samples == (WORK,)
    (warning,) = warnings(caplog)
    assert "No space left on device" in warning
