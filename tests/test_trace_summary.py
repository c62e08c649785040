"""What is read in a trace: on small synthetic ones, with and without an accelerator."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from fuseboard.profile.observe.trace import Trace, annotate, read_trace, write_trace
from fuseboard.profile.observe.trace_summary import DeviceTime, Summary, advise, summarise
from fuseboard.report.data import Break, GraphReport, RegionReport

MAIN = {"pid": 1, "tid": 10}
GPU = {"pid": 0, "tid": 7}


def span(name: str, start: float, dur: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    place = {key: more.pop(key) for key in ("pid", "tid") if key in more}
    event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "args": more}
    return {**event, **MAIN, **place}


def region(name: str, start: float, dur: float, **more: Any) -> dict[str, Any]:
    return span(f"fuseboard::{name}", start, dur, "user_annotation", **more)


def call(start: float, dur: float, number: str = "0/0") -> dict[str, Any]:
    return span(f"Torch-Compiled Region: {number}", start, dur)


def kernel(start: float, dur: float, correlation: int, tid: int = 7) -> dict[str, Any]:
    more = {"device": 0, "correlation": correlation}
    return span("gemm", start, dur, "kernel", **more, pid=0, tid=tid)


def launch(start: float, correlation: int, dur: float = 5.0) -> dict[str, Any]:
    return span("cudaLaunchKernel", start, dur, "cuda_runtime", correlation=correlation)


def trace_of(*events: dict[str, Any]) -> Trace:
    return Trace({"traceEvents": list(events)})


def arrow(phase: str, number: int, event: dict[str, Any]) -> dict[str, Any]:
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "ts": event["ts"], **MAIN}


# --- reading ------------------------------------------------------------------------------------


def test_a_region_is_read_from_its_name():
    trace = trace_of(region("inference0.region2 [mkldnn] layers.0.mlp", 5, 10))
    (found,) = trace.of_kind("region")
    assert found.parts == {
        "region": "inference0.region2",
        "backend": "mkldnn",
        "modules": "layers.0.mlp",
    }
    assert (found.start_us, found.us) == (5, 10)


@pytest.mark.parametrize(
    "event",
    [
        span("fuseboard::something else", 0, 1),
        span("my fuseboard::inference0.region0 [eager]", 0, 1),
        span("fuseboard::inference0.region0 [eager]", 0, 1, "gpu_user_annotation", **GPU),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "ts": 3},
    ],
)
def test_other_events_tell_nothing(event):
    assert trace_of(event).spans == []


def test_spans_know_what_they_are_in():
    """Of one thread; what ends where another begins isn't in it."""
    trace = trace_of(
        region("inference0.region0 [eager]", 10, 20),
        call(10, 30),
        region("inference0.region1 [eager]", 40, 5),
        region("inference1.region0 [eager]", 12, 5, tid=11),
    )
    inner, after, elsewhere = (
        next(s for s in trace.spans if name in s.name)
        for name in ("0.region0 [", "region1", "inference1")
    )
    assert [around.name for around in inner.around()] == ["Torch-Compiled Region: 0/0"]
    assert after.parent is None
    assert elsewhere.parent is None


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_is_read_as_it_was_written(tmp_path, name):
    path = tmp_path / name
    write_trace(trace_of(region("inference0.region0 [eager]", 1, 2)), path)
    assert [span.us for span in read_trace(path).spans] == [2]
    raw = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    assert len(json.loads(raw)["traceEvents"]) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"traceEvents|Expecting"):
        read_trace(path)


# --- adding -------------------------------------------------------------------------------------


def report(name: str, sources: list[str], kind: Any = "inference") -> GraphReport:
    graph = GraphReport(name, kind, frame="0/0 f (m.py:1)")
    for number, source in enumerate(sources):
        graph.regions.append(
            RegionReport(f"{name}.region{number}", "eager", {"aten.mm.default": 1}, (source,))
        )
    return graph


def test_regions_get_their_sources():
    trace = trace_of(region("inference0.region0 [eager] a", 0, 1, External=3))
    annotate(trace, [report("inference0", ["m.py:5"])], [])
    assert trace.events[0]["args"] == {
        "External": 3,
        "backend": "eager",
        "module": "a",
        "source": ["m.py:5"],
        "ops": {"aten.mm.default": 1},
        "frame": "0/0 f (m.py:1)",
    }
    assert trace.data["fuseboard"]["graphs"][0]["regions"][0]["source"] == ["m.py:5"]


def test_memory_becomes_a_counter():
    """Per device, in order; the events stay."""

    def change(ts: float, total: int, kind: int = 0, device: int = -1) -> dict[str, Any]:
        args = {"Device Type": kind, "Device Id": device, "Bytes": 1, "Total Allocated": total}
        return {"ph": "i", "name": "[memory]", "ts": ts, **MAIN, "args": args}

    trace = trace_of(change(3, 300), change(1, 100), change(2, 5, kind=1, device=0), change(4, 0))
    annotate(trace, [], [])
    counters = [e for e in trace.events if e["ph"] == "C"]
    assert [(e["name"], e["ts"], e["args"]) for e in counters] == [
        ("memory allocated, cpu", 1, {"bytes": 100}),
        ("memory allocated, cpu", 3, {"bytes": 300}),
        ("memory allocated, cpu", 4, {"bytes": 0}),
        ("memory allocated, device 0", 2, {"bytes": 5}),
    ]
    assert summarise(trace).peak_bytes == {"cpu": 300, "device 0": 5}


def test_arrows_lead_from_forward_to_backward():
    """By module; else by source lines; none where nothing is in common."""
    forward = span("CompiledFunction", 0, 50)
    backward = span("CompiledFunctionBackward", 100, 50)
    trace = trace_of(
        forward,
        backward,
        arrow("s", 4, forward),
        arrow("f", 4, backward),
        region("forward0.region0 [eager] a", 1, 10),
        region("forward0.region1 [eager] b", 20, 10),
        region("backward0.region0 [eager] b", 101, 10),
        region("backward0.region1 [eager] b..a", 115, 10),
        region("backward0.region2 [eager]", 130, 10),
        region("forward0.region0 [eager] a", 300, 10),
    )
    graphs = [
        report("forward0", ["m.py:1", "m.py:2"], "forward"),
        report("backward0", ["m.py:2", "m.py:1", "m.py:9"], "backward"),
    ]
    annotate(trace, graphs, [])
    arrows = [e for e in trace.events if e.get("cat") == "fuseboard_fwdbwd"]
    assert [(e["ph"], e["id"], e["ts"]) for e in arrows] == [
        ("s", 1, 20),
        ("f", 1, 101),
        ("s", 2, 1),
        ("f", 2, 115),
    ]


# --- numbers ------------------------------------------------------------------------------------


def test_times_of_regions():
    """Total, mean and share over the calls; the largest first; what is outside is told."""
    trace = trace_of(
        call(0, 100),
        region("inference0.region0 [mkldnn] a", 10, 20),
        region("inference0.region1 [eager] b", 40, 50),
        call(200, 100),
        region("inference0.region0 [mkldnn] a", 210, 30),
        region("inference0.region1 [eager] b", 250, 40),
    )
    summary = summarise(trace)
    assert (summary.calls, summary.calls_us, summary.outside_us) == (2, 200, 60)
    rows = [(r.region, r.backend, r.modules, r.calls, r.total_us) for r in summary.regions]
    assert rows == [
        ("inference0.region1", "eager", "b", 2, 90),
        ("inference0.region0", "mkldnn", "a", 2, 50),
    ]
    assert [row.share for row in summary.regions] == [0.45, 0.25]
    assert [row.mean_us for row in summary.regions] == [45, 25]


@pytest.mark.parametrize(
    "inside",
    [
        span("fuseboard::verify inference0.region0 [eager] a", 10, 90, "user_annotation"),
        span("fuseboard::profile inference0", 10, 90, "user_annotation"),
        span("entire_backward_compile", 10, 90),
    ],
)
def test_calls_that_compile_or_check_are_counted_apart(inside):
    """Their regions aren't in the table."""
    trace = trace_of(
        call(0, 1_000_000),
        inside,
        region("inference0.region0 [eager] a", 20, 10),
        call(2_000_000, 100),
        region("inference0.region0 [eager] a", 2_000_010, 40),
    )
    summary = summarise(trace)
    assert (summary.first_calls, summary.first_s, summary.calls) == (1, 1.0, 1)
    assert [(row.calls, row.total_us) for row in summary.regions] == [(1, 40)]


def test_nested_compiled_regions_are_one_call():
    """After a graph break Dynamo runs the rest inside of the first piece."""
    trace = trace_of(
        call(0, 100, "0/0"),
        region("inference0.region0 [eager]", 5, 10),
        call(40, 50, "1/0"),
        region("inference1.region0 [eager]", 45, 30),
    )
    summary = summarise(trace)
    assert (summary.calls, summary.resumed, summary.outside_us) == (1, 1, 60)


def test_compilations_by_stage():
    """Seconds of each graph's stages; a stage within itself is counted once."""
    trace = trace_of(
        span("entire_frame_compile", 0, 3_000_000),
        span("entire_frame_compile", 1_000, 2_000),  # one within another
        region("fuse inference0", 100_000, 500_000),
        region("lower inference0", 1_000_000, 1_000_000),
        region("verify inference0.region0 [eager] a", 4_000_000, 250_000),
        region("verify inference0.region1 [eager] b", 5_000_000, 250_000),
    )
    summary = summarise(trace)
    assert (summary.compilations, summary.compile_s) == (1, 3.0)
    assert summary.stages == {
        ("inference0", "fuse"): 0.5,
        ("inference0", "lower"): 1.0,
        ("inference0", "verify"): 0.5,
    }


def test_guards_are_counted_beside_the_calls():
    trace = trace_of(span("TorchDynamo Cache Lookup", 0, 30), call(40, 10))
    summary = summarise(trace)
    assert (summary.guards, summary.guards_us, summary.calls_us) == (1, 30, 10)


def test_kernels_belong_to_the_region_that_launched_them():
    """However late they run. Gaps are those between the first and the last kernel of a call."""
    trace = trace_of(
        call(0, 100),
        region("inference0.region0 [triton] a", 10, 30),
        launch(12, 1),
        launch(20, 2),
        region("inference0.region1 [eager] b", 50, 20),
        launch(55, 3),
        kernel(30, 50, 1),
        kernel(90, 10, 2),  # 10 us after the one before
        kernel(95, 25, 3, tid=8),  # on another stream, overlapping
        call(1000, 100),
        region("inference0.region0 [triton] a", 1010, 30),
        launch(1012, 4),
        kernel(1040, 60, 4),
        kernel(5000, 70, 99),  # nobody's
    )
    summary = summarise(trace)
    times = {row.region: row.device_us for row in summary.regions}
    assert times == {"inference0.region0": 120, "inference0.region1": 25}
    assert summary.devices == [
        DeviceTime("0", kernels=4, busy_us=140, idle_us=10, gaps=1, gap_us=10)
    ]


def test_an_empty_trace_has_a_summary():
    summary = summarise(trace_of())
    assert (summary.calls, summary.regions, summary.compile_s) == (0, [], 0)
    assert summary.advice == ["Nothing compiled by torch.compile ran while this was traced."]


# --- advice -------------------------------------------------------------------------------------


def told(**values: Any) -> str:
    """The advice on calls that have nothing else to be said of, in one text."""
    rows = summarise(trace_of(call(0, 100), region("inference0.region0 [mkldnn]", 0, 100))).regions
    given = {"calls": 10, "calls_us": 1000.0, "regions": rows, **values}
    return " ".join(advise(Summary(**given)))


def test_no_advice_without_need():
    assert told() == ""


def test_advice_where_nothing_ran_twice():
    assert "call the compiled code several times" in told(calls=0, first_calls=2, regions=[])


def test_advice_where_another_backend_ran():
    assert "Was another backend used" in told(regions=[])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"calls_us": 1000.0, "outside_us": 500.0}, "larger batches"),
        ({"calls_us": 1e6, "outside_us": 5e5}, "the board keeps for itself"),
        ({"outside_us": 500.0, "resumed": 10}, "With graph breaks"),
    ],
)
def test_advice_on_time_outside_of_regions(values, word):
    text = told(**values)
    assert "50% of the calls' time" in text
    assert word in text


def test_advice_on_graph_breaks():
    """Counted in calls from Python, with the most frequent reason."""
    breaks = [{"reason": "print", "count": 1}, {"reason": "a tensor's value", "count": 3}]
    text = told(calls=10, backwards=5, resumed=10, breaks=breaks)
    assert "2 further compiled pieces ran in each call" in text
    assert "most often: a tensor's value" in text


@pytest.mark.parametrize(
    ("gap_us", "word", "other"),
    [(8.0, "reduce-overhead", ".item()"), (900.0, ".item()", "reduce-overhead")],
)
def test_advice_on_an_idle_accelerator(gap_us, word, other):
    text = told(devices=[DeviceTime("0", 40, 600.0, 400.0, 30, gap_us)])
    assert "idle for 40%" in text
    assert word in text
    assert other not in text


def test_a_busy_accelerator_needs_no_advice():
    assert told(devices=[DeviceTime("0", 40, 950.0, 50.0, 30, 8.0)]) == ""


def test_advice_on_regions_left_to_eager():
    """Where other backends run something as well."""
    trace = trace_of(
        call(0, 100),
        region("inference0.region0 [mkldnn]", 0, 50),
        region("inference0.region1 [eager]", 50, 50),
    )
    assert any(
        "50% of the calls' time is in regions on eager" in s for s in advise(summarise(trace))
    )


def test_breaks_come_from_the_annotation():
    trace = trace_of(call(0, 10))
    annotate(trace, [], [Break("print", "", (), "f", "m.py:3", count=2)])
    assert summarise(trace).breaks == [
        {"reason": "print", "function": "f", "source": "m.py:3", "count": 2}
    ]


def test_a_summary_goes_into_json():
    summary = summarise(trace_of(call(0, 10), region("fuse inference0", 20, 5)))
    assert json.loads(json.dumps(summary.as_dict()))["stages"] == [
        {"graph": "inference0", "stage": "fuse", "seconds": 5e-6}
    ]
