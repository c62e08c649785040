"""How reports tell the choice among candidates: as text, and in torch's structured trace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fuseboard
from fuseboard.cli.main import app
from fuseboard.contracts import Measurement, Trip
from fuseboard.explanations.bars import chart
from fuseboard.explanations.text import as_text
from fuseboard.profile.choose.stored_decision import _cost
from fuseboard.profile.choose.winner import choose, note_times
from fuseboard.report import choices
from fuseboard.report.data import CandidateReport
from fuseboard.report.elsewhere import elsewhere, foremost
from tests.support.backends import compiled, last_graph, ledger, observing, plugged
from tests.support.explanations import chosen, node

QUICK = {"compiles_quickly": True}


def told(*candidates: CandidateReport, **more):
    """The explanation of a graph with these candidates."""
    return chosen(list(candidates), **more)


def candidate(name: str, us: float | None = None, state: str = "slower", **more) -> CandidateReport:
    """One whose quartiles are a tenth to either side, in the first comparison."""
    if us is not None:
        more = {"low_us": 0.9 * us, "high_us": 1.1 * us, "comparison": 1, **more}
    return CandidateReport(name, state, us, **more)


# --- in words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (0.4, "0.40 µs"),
        (12.34, "12.3 µs"),
        (999.4, "999 µs"),
        (999.9, "1.00 ms"),
        (8423.9, "8.42 ms"),
        (99_960, "100 ms"),
        (1_500_000, "1.50 s"),
        (90e6, "90.0 s"),
    ],
)
def test_times_have_three_digits_and_the_unit_that_suits(us, words):
    """Never 1000 of a unit."""
    assert choices.duration(us) == words


def test_the_fastest_is_told_with_its_lead_and_against_eager():
    graph = told(
        candidate("eager", 3000),
        candidate("mkldnn", 2000),
        candidate("inductor", 1000, "chosen"),
    ).graphs[0]
    assert choices.why(graph) == (
        "inductor is the fastest: 1.00 ms a call, 50 % less than mkldnn "
        "and 3.00 times as fast as eager"
    )


def test_a_close_call_is_called_one():
    graph = told(candidate("eager", 1000), candidate("mkldnn", 950, "chosen")).graphs[0]
    assert choices.why(graph) == (
        "mkldnn is the fastest: 950 µs a call, 5.0 % less than eager; their quartiles overlap"
    )


def test_who_comes_first_is_kept_within_the_margin():
    graph = told(candidate("eager", 1000, "chosen"), candidate("mkldnn", 990)).graphs[0]
    assert choices.why(graph).startswith(
        "eager is preferred: mkldnn takes 1.0 % less, which is not"
    )


@pytest.mark.parametrize(
    ("candidates", "why"),
    [
        ([candidate("eager", state="chosen")], "eager is the only candidate"),
        (
            [candidate("eager", state="chosen"), candidate("x", state="failed")],
            "eager is the only candidate that was right",
        ),
        (
            [candidate("eager", state="chosen"), candidate("x", state="waiting")],
            "eager runs until others have been tried",
        ),
        (
            [candidate("x", state="failed"), candidate("y", state="failed")],
            "no candidate was right: eager runs",
        ),
        ([candidate("x"), candidate("y")], ""),
    ],
)
def test_without_a_rival_the_sentence_claims_no_victory(candidates, why):
    assert choices.why(told(*candidates).graphs[0]) == why


def test_where_an_earlier_comparisons_loser_is_faster_nobody_is_called_the_fastest():
    """Margins add up over comparisons: the winner of the last may be more than one behind."""
    rows = [candidate("long", 1030, "chosen", comparison=2), candidate("eager", 970)]
    assert choices.why(told(*rows).graphs[0]) == (
        "long won the last comparison: 1.03 ms a call; eager, which took 5.8 % less, had lost an "
        "earlier one to what is simpler or comes first (the setting margin)"
    )


# --- times of several comparisons -----------------------------------------------------------------


def times(*us: float) -> list[Measurement]:
    return [Measurement(each, 0.9 * each, 1.2 * each, 5) for each in us]


def test_times_of_an_earlier_comparison_are_told_in_terms_of_the_last_one():
    """Between two comparisons the machine became four times slower: nobody's gain or loss."""
    rows = [CandidateReport("eager"), CandidateReport("mkldnn"), CandidateReport("inductor")]
    note_times(list(zip(rows[:2], times(3000.0, 2000.0), strict=True)), 1, rows)
    note_times(list(zip(rows[1:], times(8000.0, 4000.0), strict=True)), 2, rows)
    assert [row.latency_us for row in rows] == [12000.0, 8000.0, 4000.0]
    assert (rows[0].low_us, rows[0].high_us) == pytest.approx((10800.0, 14400.0))
    assert [row.comparison for row in rows] == [1, 2, 2]
    graph = told(*rows).graphs[0]
    assert [row.factor for row in choices.rows(graph)] == ["1.00", "1.50", "3.00"]
    assert choices.scaled(graph).startswith("the times of eager are of an earlier comparison")


def test_without_anything_in_both_comparisons_the_earlier_times_go():
    """They can't be held against the new ones; as where the winner so far raised in the second."""
    rows = [CandidateReport("eager"), CandidateReport("mkldnn"), CandidateReport("inductor")]
    note_times(list(zip(rows[:2], times(3000.0, 2000.0), strict=True)), 1, rows)
    note_times(list(zip(rows[2:], times(4000.0), strict=True)), 2, rows)
    assert [row.latency_us for row in rows] == [None, None, 4000.0]
    assert [row.factor for row in choices.rows(told(*rows).graphs[0])] == ["-", "-", "-"]


def test_without_eager_nothing_is_related_to_it():
    row = CandidateReport("mkldnn")
    note_times([(row, Measurement(9.0, 8.0, 10.0, 5))], 1, [row])
    assert (row.latency_us, row.low_us, row.high_us) == (9.0, 8.0, 10.0)
    graph = told(row).graphs[0]
    assert graph.speedup(row) is None
    assert [found.factor for found in choices.rows(graph)] == ["-"]


def in_us(text: str) -> float:
    """A printed time."""
    number, unit = text.split()
    return float(number) * {"µs": 1.0, "ms": 1e3, "s": 1e6}[unit]


#: Times of a call on a machine at ease, and how slow the machine is in each comparison.
@settings(max_examples=50, deadline=None)
@given(
    truth=st.lists(st.floats(10.0, 1e6), min_size=2, max_size=6),
    pace=st.lists(st.floats(0.2, 5.0), min_size=6, max_size=6),
    shares=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    margin=st.sampled_from([0.0, 0.03]),
)
def test_every_printed_ratio_is_the_quotient_of_the_printed_times(truth, pace, shares, margin):
    """Whatever was compared when: in the text, the JSON, the page and the cost database."""
    rows = [CandidateReport(f"b{i}" if i else "eager") for i in range(len(truth))]
    left, best, comparison = list(range(len(rows))), None, 0
    while left:
        due, left = left[: shares[comparison]], left[shares[comparison] :]
        due += [best] if best is not None else []
        due.sort()
        took = times(*(truth[i] * pace[comparison] for i in due))
        comparison += 1
        note_times([(rows[i], one) for i, one in zip(due, took, strict=True)], comparison, rows)
        best = due[choose(took, margin)]
        for row in rows:
            row.state = "slower" if row.latency_us else "waiting"
        rows[best].state = "chosen"
    explanation = told(*rows)
    graph = explanation.graphs[0]
    base = in_us(choices.rows(graph)[0].latency)
    text, page = (
        as_text(explanation),
        " ".join(re.sub("<[^>]*>", " ", explanation.to_html()).split()),
    )
    as_json = explanation.as_dict()["graphs"][0]["candidates"]
    database = [_cost(row, False) for row in rows]
    for i, shown in enumerate(choices.rows(graph)):
        ratio = float(shown.factor)
        quotient = base / in_us(shown.latency)
        # The ratio has two decimals, and each of the two times three digits.
        assert abs(ratio - quotient) <= 0.0051 + 0.011 * quotient
        assert ratio == pytest.approx(truth[0] / truth[i], abs=0.0051)
        assert as_json[i]["speedup"] == pytest.approx(
            as_json[0]["latency_us"] / as_json[i]["latency_us"]
        )
        assert as_json[i]["speedup"] == pytest.approx(ratio, abs=0.0051)
        assert database[0].latency_us / database[i].latency_us == pytest.approx(truth[0] / truth[i])
        (line,) = [one for one in text.splitlines() if one.split()[:1] == [shown.name]]
        assert f"{shown.latency} " in line
        assert shown.factor in line.split()
        assert f"{shown.latency} ({shown.quartiles}) {shown.factor} × eager" in page
    drawn = chart(graph)
    for bar, us in zip(drawn.bars, truth, strict=True):
        assert bar.length / drawn.eager == pytest.approx(us / truth[0])
    told_factor = re.search(r"(\S+) times as fast as eager", choices.why(graph))
    if told_factor:
        assert told_factor[1] == choices.rows(graph)[best].factor


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "0.00 kB"),
        (4, "0.00 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (45_600_000, "45.6 MB"),
        (1_234_000_000_000, "1234 GB"),
    ],
)
def test_sizes_have_the_unit_that_suits(number, told):
    assert choices.size(number) == told


# --- the text -------------------------------------------------------------------------------------


def test_the_text_has_a_table_of_candidates_and_what_was_not_tried():
    """At 80 columns; a problem that a trip tells isn't told twice."""
    explanation = told(
        candidate("eager", 3000, compile_s=0.01),
        candidate("mkldnn+eager", 2000, "chosen", compile_s=0.25, peak_bytes=12_345_678),
        candidate("liar", state="failed", problem="ValueError: told below"),
        candidate("old", state="failed", problem="wrong values in an earlier process"),
        candidate("other", 4000, notes=["not in the cache"]),
        candidate("inductor by blocks", state="waiting"),
        settled=False,
        decided="measured in a call",
        left_out={"tvm": "it runs only where the setting backends names it"},
    )
    graph = explanation.graphs[0]
    graph.trips = [Trip("liar", "profile", "r", "ValueError: told below", "the others")]
    graph.backends = ("mkldnn", "picky", "liar", "old", "inductor", "eager")
    text = as_text(explanation, 80)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for wanted in (
        "candidate a call quartiles × eager compile peak",
        "eager slower 3.00 ms 2.70-3.30 ms 1.00 10.0 ms -",
        "mkldnn+eager chosen 2.00 ms 1.80-2.20 ms 1.50 250 ms 12.3 MB",
        "inductor by blocks waiting - - - - -",
        "old failed: wrong values in an earlier process",
        "other: not in the cache",
        "tvm it runs only where the setting backends names it",
        "picky it took no op",
    ):
        assert wanted in lines, wanted
    folded = " ".join(text.split())
    assert "choice: mkldnn+eager is the fastest: 2.00 ms a call, 33 % less than eager" in folded
    assert "(measured in a call)" in folded
    assert "not settled yet: inductor by blocks waits to be tried; fuseboard.wait() waits" in folded
    assert text.count("told below") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_where_nothing_was_compared_nothing_is_told_of_it():
    explanation = told(left_out={"tvm": "it waits"})
    assert "candidate" not in as_text(explanation)
    assert "tvm" not in as_text(explanation)


# --- of real graphs -------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Choices are measured, and kept in a cost database of the test's own."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ledger.clear()


def f(x):
    return (x.exp() + 1).sum(-1)


X = torch.linspace(-1, 1, 24).reshape(4, 6)


def test_a_graph_knows_which_backends_had_no_part_in_it(measured):
    with plugged("brisk", info=QUICK), plugged("shy", info={**QUICK, "by_request": True}):
        with plugged("gone", info={"available": False, "reason": "no such engine"}):
            with torch.no_grad():
                compiled(f, "brisk", "eager", measure_s=0.05)(X)
                named = last_graph().left_out
    assert named["shy"] == "the setting backends doesn't name it, or names it after eager"
    assert named["gone"] == "unavailable: no such engine"
    assert "brisk" not in named
    assert "eager" not in named
    assert "attention" not in named  # it rewrites, and is no backend
    graph = last_graph()
    assert graph.seconds["profile"] > 0
    assert {row.comparison for row in graph.candidates} == {1}


def test_what_was_not_timed_is_not_called_measured(measured):
    """One candidate is all there is so far: it was verified."""
    with plugged("sluggish"), torch.no_grad():
        compiled(f, "sluggish", "eager")(X)
        assert last_graph().decided == "verified in a call"


def test_a_machine_that_becomes_slower_between_comparisons_changes_no_ratio(measured):
    """In the report of this process, in the database, and in the report of a later one."""
    clock = iter([(300.0, 200.0), (800.0, 400.0)])

    def measure(calls):
        return [Measurement(us, us, us, 1) for us in next(clock)]

    with (
        observing("stopwatch", measure=measure),
        plugged("brisk", info=QUICK),
        plugged("long"),
        torch.no_grad(),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            ledger.clear()
            fn = compiled(f, "brisk", "long", "eager")
            fn(X)
            fuseboard.wait()
            rows = {row.name: row for row in choices.rows(last_graph())}
            assert {name: row.latency for name, row in rows.items()} == {
                "eager": "1.20 ms",
                "brisk": "800 µs",
                "long": "400 µs",
            }
            assert [row.factor for row in rows.values()] == ["1.00", "1.50", "3.00"]
            key = CliRunner().invoke(app, ["costs", "list", "--json"])
            (decision,) = [
                one for one in json.loads(key.stdout)["decisions"] if one["level"] == "graph"
            ]
            shown = CliRunner().invoke(app, ["costs", "show", decision["key"]]).stdout
            cells = [line.split("│")[1:3] for line in shown.splitlines() if "│" in line]
            printed = {cell.strip(): us.strip() for cell, us in reversed(cells)}
            assert {name: printed[name] for name in rows} == {n: r.latency for n, r in rows.items()}
    assert last_graph().decided == "taken from the cost database"


def test_what_is_on_another_backend_by_choice_is_not_excused():
    """Reasons are those of the winner's own backend, not of the first in the order."""
    graph = told(candidate("first", 3.0), candidate("second+eager", 2.0, "chosen")).graphs[0]
    graph.backends = ("first", "second", "eager")
    graph.regions[0].backend = "second"
    graph.nodes = [
        node("exp", "x", region=graph.regions[0].name, backend="second"),
        node("sort", "exp", backend="eager", declined={"first": "a", "second": "no sort"}),
    ]
    assert foremost(graph) == "second"
    assert [(group.backend, group.reason) for group in elsewhere(graph)] == [("eager", "no sort")]
    graph.candidates = []
    assert foremost(graph) == "first"


SCRIPT = """
import torch
def small():
    return torch.nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),)
"""


def test_the_command_waits_until_all_is_decided(measured, tmp_path):
    """With --wait, what compiles slowly has been tried; without, it waits."""
    (tmp_path / "small.py").write_text(SCRIPT)
    outcomes, whys = {}, {}
    with plugged("sluggish"):
        for flag in ("--no-wait", "--wait"):
            result = CliRunner().invoke(
                app,
                ["explain", "small.py:small", "--json", flag],
                env={"FUSEBOARD_BACKENDS": "sluggish,eager"},
            )
            assert result.exit_code == 0, result.output
            graph = json.loads(result.stdout)["graphs"][0]
            outcomes[flag] = {row["name"]: row["state"] for row in graph["candidates"]}
            whys[flag] = graph["why"]
    assert whys["--no-wait"] == "eager runs until others have been tried"
    assert "call" in whys["--wait"] or "is preferred" in whys["--wait"]
    assert outcomes["--no-wait"]["sluggish"] == "waiting"
    assert "waiting" not in outcomes["--wait"].values()


# --- torch's structured trace ---------------------------------------------------------------------

TRACED = """
import torch
fn = torch.compile(lambda x: x.exp() + 1, backend="fuseboard",
                   options={"backends": ["eager"]})
with torch.no_grad():
    fn(torch.ones(3))
"""


def artifacts(path: Path) -> list[tuple[dict, str]]:
    """The records of a trace that are fuseboard's, with their payloads."""
    found: list[tuple[dict, list[str]]] = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            found.append((json.loads(line[line.index("{") :]), []))
    return [
        (record, "\n".join(lines))
        for record, lines in found
        if record.get("artifact", {}).get("name", "").startswith("fuseboard_")
    ]


@pytest.mark.thorough
def test_reports_are_in_torchs_structured_trace(tmp_path):
    """As JSON and as text, under Dynamo's compile id: tlparse lists them beside torch's own."""
    script = tmp_path / "traced.py"
    script.write_text(TRACED)
    logs = tmp_path / "logs"
    environment = {**os.environ, "TORCH_TRACE": str(logs)}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, cwd=tmp_path)
    (log,) = logs.iterdir()
    (as_json, payload), (text, words) = artifacts(log)
    assert as_json["artifact"] == {"name": "fuseboard_inference0", "encoding": "json"}
    assert text["artifact"] == {"name": "fuseboard_inference0", "encoding": "string"}
    assert (as_json["frame_id"], as_json["frame_compile_id"]) == (0, 0)
    graph = json.loads(payload)
    assert graph["name"] == "inference0"
    assert [node["op"] for node in graph["nodes"]] == ["aten.exp.default", "aten.add.Tensor"]
    assert "inference graph inference0" in words


COMPARED = """
import torch, fuseboard
model = torch.nn.Linear(8, 8).requires_grad_(False)
with torch.no_grad():
    for _ in range(2):
        fn = torch.compile(model, backend="fuseboard",
                           options={"backends": ["mkldnn", "eager"], "measure_s": 0.05})
        fn(torch.ones(3, 8))
        model = torch.nn.Linear(8, 4).requires_grad_(False)
"""


@pytest.mark.thorough
def test_each_comparison_is_in_the_structured_trace(tmp_path):
    """It is made in a call, when no compile is under way; its record has the compile's id still."""
    pytest.importorskip("fuseboard_mkldnn")
    script = tmp_path / "compared.py"
    script.write_text(COMPARED)
    environment = {
        **os.environ,
        "TORCH_TRACE": str(tmp_path / "logs"),
        "FUSEBOARD_POLICY": "measured",
        "FUSEBOARD_CACHE_DIR": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, str(script)], env=environment, check=True, cwd=tmp_path)
    (log,) = (tmp_path / "logs").iterdir()
    told = [
        (record["frame_id"], record["frame_compile_id"], json.loads(payload)["decided"])
        for record, payload in artifacts(log)
        if record["artifact"]["encoding"] == "json"
    ]
    first, second = told[0][:2], told[2][:2]
    assert first != second
    assert told == [
        (*first, ""),
        (*first, "measured in a call"),
        (*second, ""),
        (*second, "measured in a call"),
    ]


def test_nobody_pays_for_a_trace_that_is_off(monkeypatch):
    """No report is written down where no handler listens."""
    from fuseboard.report import structured_trace
    from fuseboard.torch_api import traces as torch_traces

    monkeypatch.setattr(torch_traces, "traces_structured", lambda: False)
    report = told(candidate("eager", 10.0)).graphs[0]
    monkeypatch.setattr(report, "as_dict", pytest.fail)
    structured_trace.emit(report)
