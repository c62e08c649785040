"""From what workers bring back to records, means, verdicts and files. Nothing is timed here."""

import json

import pytest
from rich.console import Console

from benchmarks import claims, pairs, results, suite
from benchmarks.arms import ARMS
from benchmarks.models import MODELS, select_models
from benchmarks.processes import Outcome
from benchmarks.protocol import QUICK
from benchmarks.stats import Estimate

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": ["python", "-m", "benchmarks"],
    "commit": "0123456789abcdef",
    "modified": False,
    "cpu": "A CPU [of sorts]",
    "cpu_flags": ["avx2"],
    "cores": 2,
    "load": 0.0,
    "system": "Linux",
    "python": "3.11",
    "versions": {"torch": "2.13.0"},
}
WARM = Outcome({"first_s": 2.0, "peak_bytes": 2**28, "model_peak_bytes": 2**27, "load": 0.0})


def full(speedup=2.0, **changes):
    """What a cold worker brings back whose arm has this speedup over eager."""
    values = {
        "eager_first_s": 0.5,
        "first_s": 10.5,
        "reference": "float64",
        "problem": "",
        "steady": True,
        "eager_s": [1.0] * 30,
        "arm_s": [1.0 / speedup] * 30,
        "guards_s": 0.25,
        "load": 0.0,
        "dynamo": {"graphs": 1, "graph_breaks": 0},
    }
    return Outcome(values | changes, during="rounds")


def record(arm="inductor", model="mlp-b1", outcome=None, warm=WARM):
    case = suite.Case(MODELS[model], ARMS[arm], 1)
    return suite.record_of(case, full() if outcome is None else outcome, warm)


def test_a_record_holds_every_figure():
    """Speedup, both first calls, break-even, memory and graphs of a case that went well."""
    r = record()
    assert (r.status, r.speedup, r.speedup_of_medians) == ("ok", Estimate(2.0, 2.0, 2.0), 2.0)
    assert (r.counted, r.eager_ms, r.arm_ms) == (2.0, 1000.0, 500.0)
    assert r.guards_ms == 250.0
    assert (r.cold_first_s, r.warm_first_s, r.break_even_calls) == (10.5, 2.0, 20)
    assert (r.peak_bytes, r.graphs, r.graph_breaks) == (2**28, 1, 0)
    assert len(r.samples["arm_s"]) == 30


@pytest.mark.parametrize("during", ["inductor, first call", "warm-up", "rounds"])
def test_an_arm_that_fails_counts_as_one_and_is_named(during):
    """The failure's text is kept, and there is no speedup."""
    r = record(outcome=Outcome(failure="RuntimeError: no", during=during))
    assert (r.status, r.counted, r.speedup) == ("failed", 1.0, None)
    assert r.notes == ["RuntimeError: no"]


@pytest.mark.parametrize("during", ["start", "model", "eager, first call"])
def test_a_broken_model_is_not_the_arms_fault(during):
    """A failure before the arm had its turn is not counted at all."""
    r = record(outcome=Outcome(failure="ImportError: no transformers", during=during))
    assert (r.status, r.counted) == ("not measured", None)


def test_a_wrong_result_counts_as_one():
    """However fast it was."""
    r = record(outcome=full(9.0, problem="output 0: off by 1 from float64, allowed is 1e-5"))
    assert (r.status, r.counted) == ("wrong", 1.0)
    assert "off by 1" in r.notes[0]


@pytest.mark.parametrize(("speedup", "counted"), [(1.3, 1.0), (0.7, 0.7)])
def test_a_fallback_counts_as_one_at_most(speedup, counted):
    """All ops on eager is no success of the arm's; a fallback's overhead isn't forgiven."""
    board = {"ops": {"eager": 5, "board": 2}, "trips": ["mkldnn in lower: boom"]}
    r = record("fuseboard-mkldnn", outcome=full(speedup, board=board))
    assert (r.status, r.counted) == ("fell back", pytest.approx(counted))
    assert "trip: mkldnn in lower: boom" in r.notes


def test_one_compiled_op_is_no_fallback():
    """An arm that compiled something is measured as it is, its trips named."""
    board = {"ops": {"eager": 5, "mkldnn": 1}, "trips": ["mkldnn in lower: boom"]}
    r = record("fuseboard-mkldnn", outcome=full(1.3, board=board))
    assert (r.status, r.counted, r.ops) == ("ok", pytest.approx(1.3), board["ops"])
    assert r.notes == ["trip: mkldnn in lower: boom"]


def test_the_board_alone_is_meant_to_run_on_eager():
    """What is a fallback elsewhere is the purpose of this arm."""
    board = {"ops": {"eager": 5}, "trips": []}
    assert record("fuseboard-eager", outcome=full(0.9, board=board)).status == "ok"


def test_a_failing_warm_process_is_noted():
    """The rounds of the cold process still count."""
    r = record(warm=Outcome(failure="ended with code -11", during="calls"))
    assert (r.status, r.counted, r.peak_bytes) == ("ok", 2.0, None)
    assert r.notes == ["warm process: ended with code -11"]


def test_arms_for_inference_are_left_out_of_training():
    """They mean nothing there, so they are neither run nor counted."""
    cases = suite.plan(select_models(["mlp-b1", "train-nanogpt"]), list(ARMS.values()), [1, 2])
    pairs_of = {(c.model.name, c.arm.name) for c in cases}
    assert ("mlp-b1", "inductor-freezing") in pairs_of
    assert ("train-nanogpt", "inductor-freezing") not in pairs_of
    for_both = [arm for arm in ARMS.values() if arm.training]
    assert 4 <= len(for_both) < len(ARMS)
    assert len(cases) == 2 * (len(ARMS) + len(for_both))


def test_means_count_failures_as_one_and_name_them():
    """Two models: a speedup of 4 and a failure make 2."""
    failed = Outcome(failure="RuntimeError: no", during="rounds")
    records = [record(outcome=full(4.0)), record(model="mlp-b64", outcome=failed)]
    (summary,) = suite.summarise(records)
    assert (summary.models, summary.speedup) == (2, pytest.approx(2.0))
    assert summary.failures == ("mlp-b64 failed",)


def test_an_arm_is_compared_with_the_best_rival_and_the_oracle():
    """Inductor is best over all; the oracle takes freezing where that was faster."""
    records = [
        record("inductor", "mlp-b1", full(4.0)),
        record("inductor", "mlp-b64", full(1.0)),
        record("inductor-freezing", "mlp-b1", full(1.0)),
        record("inductor-freezing", "mlp-b64", full(2.0)),
        record("fuseboard", "mlp-b1", full(4.0)),
        record("fuseboard", "mlp-b64", full(2.0)),
        record("eager-again", "mlp-b1", full(9.0)),  # a control is nobody's rival
    ]
    ours = next(s for s in suite.summarise(records) if s.arm == "fuseboard")
    assert ours.best == "inductor"
    assert ours.against_best == pytest.approx(2**0.5)
    assert ours.against_oracle == pytest.approx(1.0)


class FakeSession:
    """Answers in turn with what it was given, like a session whose workers are done at once."""

    protocol = QUICK

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.asked = []

    def measure(self, model, arm, threads, phase, caches=None):
        self.asked.append((model, arm, phase))
        outcome = self.outcomes(arm, phase)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_an_interrupt_keeps_what_was_measured():
    """The records before Ctrl-C are there after it."""
    answers = iter([full(), WARM, KeyboardInterrupt()])
    session, records = FakeSession(lambda arm, phase: next(answers)), []
    cases = suite.plan(select_models(["mlp*"]), [ARMS["inductor"]], [1])
    with pytest.raises(KeyboardInterrupt):
        suite.run(session, cases, records)
    assert [r.model for r in records] == ["mlp-b1"]


def test_a_pair_takes_turns_and_compares_speedups():
    """A, B, A, B; the ratio is of speedups over eager, so a slow process cancels out."""
    slow = iter([1.0, 3.0, 1.0, 3.0])  # every process of B runs on a machine three times slower

    def outcome(arm, phase):
        scale = next(slow)
        gain = {"fuseboard": 2.0, "inductor": 1.6}[arm]
        return full(eager_s=[scale] * 30, arm_s=[scale / gain] * 30)

    session = FakeSession(outcome)
    pair = pairs.run(session, pairs.Pair("mlp-b1", "fuseboard", "inductor", 1), repeats=2)
    assert [arm for _, arm, _ in session.asked] == ["fuseboard", "inductor"] * 2
    assert pair.speed.value == pytest.approx(2.0 / 1.6)
    assert pair.latency.value == pytest.approx(3.0 * 2.0 / 1.6)


def test_a_wrong_arm_loses_its_pair():
    """No figure, and the claim that rests on it doesn't hold."""
    session = FakeSession(lambda arm, phase: full(problem="output 0: off by 1"))
    (finding,) = claims.select_checks(["mlp-call"])[0].run(session, claims.QUICK)
    assert finding.holds == "no"
    assert "wrong result: output 0: off by 1" in finding.measured


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate(1.02, 0.99, 1.05), "yes"),
        (Estimate(0.99, 0.97, 1.01), "within the interval"),
        (Estimate(0.95, 0.93, 0.97), "no"),
    ],
)
def test_verdicts(estimate, verdict):
    """A figure that falls short passes only where its interval reaches the limit, and says so."""
    assert claims.judge_at_least(estimate, 1.0) == verdict


@pytest.mark.parametrize(("ours", "holds"), [(2.5, "yes"), (2.6, "no")])
def test_the_cold_first_call_is_judged_by_a_quarter(ours, holds, tmp_path):
    """Against Inductor's with nothing cached; those with headers kept are printed beside."""
    firsts = iter([ours, 1.0, 10.0, 4.0])
    session = FakeSession(lambda arm, phase: Outcome({"first_s": next(firsts)}))
    (finding,) = claims.select_checks(["resnet-cold"])[0].run(session, claims.QUICK)
    assert finding.holds == holds
    assert "inductor, headers kept 4.00 s" in finding.measured


@pytest.mark.parametrize(("ours", "holds"), [(105, "yes"), (106, "no")])
def test_memory_is_judged_in_warm_processes(ours, holds):
    """The first process of each arm fills the caches and doesn't count."""
    seen = set()

    def outcome(arm, phase):
        cold = arm not in seen
        seen.add(arm)
        peak = 999 if cold else {"fuseboard": ours, "inductor-freezing": 100}[arm]
        return Outcome({"first_s": 1.0, "peak_bytes": peak * 2**20})

    finding = claims._memory_of(FakeSession(outcome), claims.QUICK, "minilm-8x64")
    assert finding.holds == holds


@pytest.mark.parametrize(
    ("graphs", "breaks", "holds"),
    [([1, 2, 2, 2], 0, "yes"), ([1, 2, 3, 3], 0, "no"), ([1, 2, 2, 2], 1, "no")],
)
def test_recompiles_and_graph_breaks_are_judged_beside_inductor(graphs, breaks, holds):
    """No more of either than plain Inductor at any batch size."""

    def outcome(arm, phase):
        ours = arm == "fuseboard"
        counts = {"graphs": 2, "graph_breaks": breaks if ours else 0}
        after = graphs if ours else [1, 2, 2, 2]
        return Outcome({"batches": [4, 3, 2, 1], "graphs_after": after, "dynamo": counts})

    (finding,) = claims.select_checks(["graphs"])[0].run(FakeSession(outcome), claims.QUICK)
    assert finding.holds == holds


HEAD = {"schema", "kind", "complete", "confidence", "machine", "protocol", "results", "summary"}


def test_a_result_file_reads_back(tmp_path):
    """Strict JSON with the documented head, records as plain data, and the samples."""
    records = [record(), record(outcome=Outcome(failure="boom", during="rounds"))]
    content = results.document(
        "suite", MACHINE, QUICK, records, summary=suite.summarise(records), complete=False
    )
    path = results.write(tmp_path / "new", content)
    read = json.loads(path.read_text())
    assert path.name == "suite-20260102T030405.json"
    assert set(read) == HEAD
    assert (read["schema"], read["complete"]) == (results.SCHEMA, False)
    assert read["results"][0]["speedup"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert read["results"][1]["status"] == "failed"
    assert len(read["results"][0]["samples"]["eager_s"]) == 30
    assert read["summary"][0]["arm"] == "inductor"


def test_findings_and_pairs_become_json(tmp_path):
    """The data behind a verdict is in the file too."""
    session = FakeSession(lambda arm, phase: full())
    findings = claims.select_checks(["mlp-call"])[0].run(session, claims.QUICK)
    path = results.write(
        tmp_path, results.document("check", MACHINE, QUICK, findings, complete=True)
    )
    (read,) = json.loads(path.read_text())["results"]
    assert read["holds"] == "yes"
    assert read["data"]["pair"]["processes"][0]["arm_s"] == [0.5] * 30


def test_tables_show_every_record_and_failure():
    """Also text in brackets, which rich would take for markup."""
    console = Console(record=True, width=150)
    bad = record("fuseboard", outcome=Outcome(failure="KeyError: [x]", during="rounds"))
    records = [record(), bad]
    results.print_machine(console, MACHINE)
    results.print_records(console, records)
    console.print(results.summary_table(suite.summarise(records)))
    text = console.export_text()
    for part in ("A CPU [of sorts]", "2.000 [2.000, 2.000]", "KeyError: [x]", "mlp-b1 failed"):
        assert part in text
