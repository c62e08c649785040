"""Profiles of compilations: which are kept, and that compiling is never in danger."""

from __future__ import annotations

import pytest
import torch

from fuseboard import CompileProfiler, SamplingError, SamplingProfiler
from fuseboard.profile.observe import sampling
from tests.support.samplers import WORK, FakeSampler, sampling_with


@pytest.fixture(autouse=True)
def _told_nothing_yet(monkeypatch):
    monkeypatch.setattr(sampling, "_told", set())


def wave(x):
    return x.sin().sum()


def ramp(x):
    return x.relu().sum()


def broken(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos().sum()


def run(function, x=None, backend="aot_eager"):
    return torch.compile(function, backend=backend)(torch.ones(3) if x is None else x)


def names(profiler: CompileProfiler) -> list[str]:
    return [compiled.frame.partition(" ")[0] for compiled in profiler.profiles]


def test_each_compilation_has_a_profile_of_its_own():
    """The parts of a function that a graph break cuts are compilations; a cached call is none."""
    samplers = [FakeSampler() for _ in range(3)]
    with sampling_with(*samplers) as name, CompileProfiler(sampler=name) as profiler:
        run(wave)
        compiled = torch.compile(broken, backend="aot_eager")
        assert compiled(torch.zeros(3)).item() == 3.0
        compiled(torch.zeros(3))
    wave_, broken_, resumed = profiler.profiles
    assert names(profiler)[:2] == ["wave", "broken"]
    assert "broken" in resumed.frame
    assert __file__ in wave_.frame
    assert [p.compile_id for p in profiler.profiles] == ["0/0", "1/0", "2/0"]
    assert {p.kind for p in profiler.profiles} == {"dynamo"}
    assert wave_.profile.samples == (WORK,)
    assert wave_.profile.tags == (f"0/0 {wave_.frame}",)
    assert broken_.duration_s > 0
    assert [sampler.calls for sampler in samplers] == 3 * [["start", "stop", "results"]]


def test_a_backward_that_is_compiled_when_it_runs_is_a_compilation():
    """With its own kind, and the function that it belongs to."""
    samplers = [FakeSampler() for _ in range(2)]
    with sampling_with(*samplers) as name, CompileProfiler(sampler=name) as profiler:
        run(wave, torch.ones(3, requires_grad=True)).backward()
    assert [(p.kind, p.compile_id) for p in profiler.profiles] == [
        ("dynamo", "0/0"),
        ("lazy_backward", "0/0"),
    ]
    assert names(profiler) == ["wave", "wave"]


def test_only_frames_that_match_are_profiled():
    """For others no sampler is started."""
    sampler = FakeSampler()
    with (
        sampling_with(sampler) as name,
        CompileProfiler(sampler=name, frames=r"^ramp \(.*test_sampling_compile") as profiler,
    ):
        run(wave)
        run(ramp)
    assert names(profiler) == ["ramp"]
    assert sampler.calls == ["start", "stop", "results"]


def test_short_compilations_are_dropped():
    """They are sampled, since nobody knows beforehand, but not read."""
    sampler = FakeSampler()
    with (
        sampling_with(sampler) as name,
        CompileProfiler(sampler=name, min_duration_sec=600) as profiler,
    ):
        run(wave)
    assert profiler.profiles == []
    assert sampler.calls == ["start", "stop", "stop"]


def test_a_compilation_that_raises_leaves_no_profile():
    """Its exception is the user's; the next compilation is profiled again."""

    def refuse(graph, inputs):
        raise ValueError("not today")

    samplers = [FakeSampler(), FakeSampler()]
    with sampling_with(*samplers) as name, CompileProfiler(sampler=name) as profiler:
        with pytest.raises(Exception, match="not today"):
            run(wave, backend=refuse)
        try:
            raise KeyError("handled by the user, who compiles meanwhile")
        except KeyError:
            run(ramp)
    assert names(profiler) == ["ramp"]
    assert samplers[0].calls == ["start", "stop", "stop"]


def test_nothing_is_profiled_after_the_block():
    """The hook is taken out."""
    with sampling_with() as name, CompileProfiler(sampler=name, enabled=True):
        pass
    run(wave)  # would fail with an IndexError: there is no sampler left


def test_a_reset_in_the_block_is_told_of(caplog):
    """torch forgets all callbacks then."""
    with sampling_with(FakeSampler()) as name, CompileProfiler(sampler=name) as profiler:
        run(wave)
        torch._dynamo.reset()
        run(ramp)
    assert names(profiler) == ["wave"]
    assert "torch._dynamo.reset() was called while compilations were profiled" in caplog.text


def test_a_sampler_that_fails_does_not_touch_compilations(caplog):
    """One warning; what was compiled is right."""
    broken_one = FakeSampler(raises={"start": OSError("no such file")})
    with sampling_with(broken_one) as name, CompileProfiler(sampler=name) as profiler:
        assert run(ramp).item() == 3.0
        assert run(broken, torch.zeros(3)).item() == 3.0
    assert profiler.profiles == []
    told = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert "no such file" in told[0].getMessage()


def test_stop_at_error_raises_before_anything_is_compiled():
    """A session is tried at the beginning of the block; where it works, it is discarded."""
    bad, good, used = FakeSampler(raises={"start": OSError("gone")}), FakeSampler(), FakeSampler()
    with sampling_with(bad, good, used) as name:
        with pytest.raises(SamplingError, match="gone"):
            CompileProfiler(sampler=name, stop_at_error=True).__enter__()
        with CompileProfiler(sampler=name, stop_at_error=True) as profiler:
            run(wave)
    assert good.calls == ["start", "stop", "stop"]
    assert names(profiler) == ["wave"]


def test_a_session_of_the_user_s_keeps_the_only_place(caplog):
    """Compilations inside of one are seen by that session, and not by one of their own."""
    with sampling_with(FakeSampler()) as name, CompileProfiler(sampler=name) as compilations:
        with SamplingProfiler(sampler=name, stop_at_error=True) as profiler:
            run(wave)
    assert compilations.profiles == []
    assert profiler.result.samples == (WORK,)
    assert "another sampling session runs" in caplog.text


def test_profiles_are_written_where_they_are_wanted(tmp_path):
    """In the forms of a session, and with the compilation's name in them."""
    with (
        sampling_with(FakeSampler()) as name,
        CompileProfiler(sampler=name, output=tmp_path / "out") as profiler,
    ):
        run(wave)
    run_id = profiler.profiles[0].profile.run_id
    assert "0/0 wave" in (tmp_path / "out" / f"{run_id}.speedscope.json").read_text()


def test_a_disabled_profiler_watches_nothing():
    """Not even a hook is set."""
    with sampling_with() as name, CompileProfiler(sampler=name, enabled=False) as profiler:
        run(wave)
    assert profiler.profiles == []


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"frames": "("}, "a regular expression, such as"),
        ({"min_duration_sec": -1}, "min_duration_sec = -1: a number from 0"),
        ({"sample_each": 5}, "sample_each = 5"),
    ],
)
def test_parameters_out_of_range_are_errors(parameters, problem):
    """What was given and what is allowed."""
    with pytest.raises(SamplingError, match=problem):
        CompileProfiler(**parameters)
