"""What tuning and the runner cost: the calls that are timed, and the verdicts on them."""

from __future__ import annotations

import pytest
import torch

import fuseboard
from benchmarks import tuning
from benchmarks.models import MODELS
from fuseboard.report.data import ledger
from tests.support.backends import compiled, plugged

QUICK = {"compiles_quickly": True}


def values(beside: float, settled: float = 0.01, eager: float = 0.02) -> dict:
    return {
        "seconds": {
            "first": [1.0],
            "beside": [beside] * 3,
            "comparing": [0.5, 0.7],
            "settled": [settled] * 30,
        },
        "settle_s": 2.0,
        "eager_s": eager,
        "eager_peak_bytes": 500 * 2**20,
        "peak_bytes": 700 * 2**20,
        "child_peak_bytes": 300 * 2**20,
    }


def test_the_models_are_registered():
    assert {*tuning.MODELS, tuning.RUNNER_MODEL} <= set(MODELS)


@pytest.mark.parametrize(("beside", "holds"), [(0.015, "yes"), (0.02, "yes"), (0.021, "no")])
def test_calls_beside_the_worker_may_take_twice_as_long(beside, holds):
    finding = tuning.tuning_finding("claim", values(beside))
    assert finding.holds == holds
    assert finding.measured.startswith(f"{beside / 0.01:.2f} (")


def test_it_is_told_when_tuning_has_paid_for_itself_and_what_it_took():
    told = tuning.tuning_finding("claim", values(0.01)).measured
    # 2 s instead of 6 calls of 20 ms in eager: 1.88 s, made up for by 10 ms a call
    assert "settled after 2 s and 6 calls, of which 2 compare, at most 0.7 s" in told
    assert "pays after 194 calls" in told
    assert "eager 500 MiB, tuning 700 MiB, its child 300 MiB" in told
    assert "never pays" in tuning.tuning_finding("claim", values(0.01, eager=0.01)).measured


def test_without_calls_beside_the_worker_none_was_slow():
    found = values(0.01)
    found["seconds"]["beside"] = []
    finding = tuning.tuning_finding("claim", found)
    assert finding.holds == "yes"
    assert finding.measured.startswith("no call was made beside the worker")


@pytest.mark.parametrize(
    ("runner", "again", "holds"), [(1.0, 1.0, "yes"), (1.04, 1.05, "yes"), (1.04, 1.0, "no")]
)
def test_the_runner_is_held_against_the_winner_twice(runner, again, holds):
    process = {"winner": [0.01] * 20, "winner again": [0.01 * again] * 20}
    process["runner"] = [0.01 * runner] * 20
    assert tuning.runner_finding("claim", [process]).holds == holds


def test_settling_is_watched(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SETTLED_CALLS", 3)
    ledger.clear()
    with plugged("one", info=QUICK), plugged("two", info=QUICK), torch.no_grad():
        run = compiled(lambda x: x.exp() + 1, "one", "two", measure_s=0.05)
        found = tuning.watch_settling(run, [(torch.ones(4),)])
    assert len(found["seconds"]["settled"]) == 3
    assert found["seconds"]["comparing"] == []  # the first call has compared
    assert found["settle_s"] == found["seconds"]["first"][0] > 0


def test_the_winner_is_called_without_the_runner(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "RUNNER_ROUNDS", 4)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.ones(3, 8)
    with torch.no_grad(), tuning.runners() as (made, given):
        run = compiled(model, "mkldnn", "eager", policy="priority")
        expected = run(x)
        fuseboard.wait()
        seconds = tuning.time_runner(run, [(x,)], made, given)
        (result,) = tuning.directly(made[0], given[0])()
    torch.testing.assert_close(result, expected)
    assert {kind: len(taken) for kind, taken in seconds.items()} == dict.fromkeys(
        tuning.RUNNER_KINDS, 4
    )
