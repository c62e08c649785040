"""Workers as processes: environment, failures, time limit. They are told what to do, not timed."""

import dataclasses
import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import processes, spans
from benchmarks.processes import Caches, empty_caches, worker_environment
from benchmarks.protocol import QUICK
from tests.support.values import rnd


def test_threads_are_pinned_and_settings_cleared(monkeypatch, tmp_path):
    """What the caller's shell sets doesn't reach a worker; the thread count does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("FUSEBOARD_BACKENDS", '["eager"]')
    environment = worker_environment(2, Caches(tmp_path))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert not {"TORCHINDUCTOR_MAX_AUTOTUNE", "FUSEBOARD_BACKENDS"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]


def test_every_cache_lies_in_the_folder():
    """Two folders share nothing: neither Inductor's cache nor its headers under TMPDIR."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME")
    with empty_caches() as one, empty_caches() as other:
        first, second = (caches.environment() for caches in (one, other))
        assert all(first[name].startswith(str(one.folder)) for name in names)
        assert not set(first.values()) & set(second.values())
    assert not one.folder.exists()


def test_graphs_can_be_forgotten_without_the_headers():
    """What is left is what a machine makes once."""
    with empty_caches() as caches:
        environment = caches.environment()
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
            (caches.folder / environment[name] / "file").write_text("x")
        caches.forget_graphs()
        left = [path.parent.name for path in caches.folder.rglob("file")]
    assert left == ["tmp"]


def worker(monkeypatch, code, timeout_s=60.0):
    """The outcome of a worker that runs ``code`` in place of a measurement."""
    real = subprocess.Popen

    def fake(command, **arguments):
        return real([sys.executable, "-c", code, *command[3:]], **arguments)

    monkeypatch.setattr(processes.subprocess, "Popen", fake)
    steps = []
    protocol = dataclasses.replace(QUICK, timeout_s=timeout_s)
    with empty_caches() as caches:
        outcome = processes.measure("mlp-b1", "inductor", 1, "full", protocol, caches, steps.append)
    return outcome, steps


def test_steps_are_passed_on_and_a_result_comes_back(monkeypatch):
    """A model's own prints are no steps."""
    code = (
        "import sys; print('hello'); print('@step model'); print('@step rounds');"
        "open(sys.argv[2], 'w').write('{\"first_s\": 1.5}')"
    )
    outcome, steps = worker(monkeypatch, code)
    assert steps == ["model", "rounds"]
    assert (outcome.values, outcome.failure) == ({"first_s": 1.5}, "")


def test_a_crash_says_code_step_and_last_line(monkeypatch):
    """Also where the process died without a word of its own, as in a segmentation fault."""
    code = (
        "import os, signal, sys; print('@step warm-up', flush=True);"
        "print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    outcome, _ = worker(monkeypatch, code)
    assert outcome.failure == "ended with code -11 during 'warm-up': last words"
    assert outcome.blames_arm


@pytest.mark.thorough
def test_a_worker_that_hangs_is_killed(monkeypatch):
    """With its helpers, at the limit, and the step in which it hung is named."""
    code = (
        "import subprocess, sys, time; print('@step rounds', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "time.sleep(600)"
    )
    outcome, _ = worker(monkeypatch, code, timeout_s=2.0)
    assert outcome.failure == "ran out of time during 'rounds'"


@pytest.mark.thorough
def test_an_exception_in_the_arm_is_its_failure(tmp_path):
    """Worker and parent together, with a model that doesn't exist: the text comes through."""
    with empty_caches() as caches:
        outcome = processes.measure("nope", "eager", 1, "full", QUICK, caches, lambda step: None)
    assert outcome.failure == "KeyError: 'nope'"
    assert not outcome.blames_arm


def test_the_parent_never_imports_torch():
    """Its memory would show in its children's peak, and its threads would disturb them."""
    code = "import sys, benchmarks.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=processes.ROOT, check=True)


@pytest.mark.thorough
def test_a_real_worker_measures():
    """One small model through a real worker: as many times for eager as for the arm."""
    protocol = dataclasses.replace(QUICK, warmup_s=0.1, rounds=5, max_rounds=5, fill_s=0.0)
    with empty_caches() as caches:
        outcome = processes.measure(
            "mlp-b1", "eager-again", 1, "full", protocol, caches, lambda step: None
        )
    assert outcome.failure == ""
    assert len(outcome.values["eager_s"]) == len(outcome.values["arm_s"]) == 5
    assert outcome.values["problem"] == ""
    assert outcome.values["guards_s"] == 0.0  # nothing is compiled


def test_the_time_of_guards():
    """It is within that of the calls."""
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    x = rnd(2, 4)
    compiled(x)
    start = time.perf_counter()
    found = spans.guards_s(lambda number: compiled(x), 5)
    assert 0.0 < 5 * found < time.perf_counter() - start
