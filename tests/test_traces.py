"""Regions in traces of torch's profilers: their names, what is inside, and what is left behind."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from fuseboard.run.codegen import Source
from fuseboard.run.weights import WeightSets
from fuseboard.torch_api import profiler as torch_profiler
from tests.support.backends import compiled, last_graph, plugged
from tests.support.values import assert_same, rnd
from tests.support.weights import hoisting_by, overwrite, preparing_is_worth_it

CPU = [ProfilerActivity.CPU]


class Blocks(nn.Module):
    """Blocks of the same ops, enough of them for their regions to share code."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.ReLU, nn.Softplus)
        ops = [op for kind in kinds for op in (nn.Linear(8, 8), kind())]
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(ops)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spans(trace: Any) -> list[str]:
    """The names of fuseboard's spans in a finished profile, in order."""
    found = [e for e in trace.profiler.kineto_results.events() if "fuseboard::" in e.name()]
    return [event.name() for event in sorted(found, key=lambda event: event.start_ns())]


def exported(trace: Any, folder: Path) -> list[dict[str, Any]]:
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and (
        inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] and inner["tid"] == outer["tid"]
    )


def test_a_region_is_named_with_backend_and_module():
    """A profiler that starts after the compile shows each region of each call."""
    fn = compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with torch.no_grad():
        x = rnd(3, 4)
        fn(x), fn(x)
        name = last_graph().name
        with profile(activities=CPU) as trace:
            fn(x), fn(x)
    assert spans(trace) == [f"fuseboard::{name}.region0 [eager] 0..1"] * 2


def test_regions_that_share_code_have_names_of_their_own():
    """Isomorphic blocks are lowered once, and traced by their own modules."""
    with plugged() as backend, torch.no_grad():
        fn = compiled(Blocks(), backend, "eager", repeats="always")
        x = rnd(3, 8)
        fn(x), fn(x)
        graph = last_graph()
        assert [bool(region.same_as) for region in graph.regions] == [False, True, True, True]
        with profile(activities=CPU) as trace:
            fn(x)
    assert spans(trace) == [
        f"fuseboard::{graph.name}.region{i} [fake] blocks.{i}" for i in range(4)
    ]


def test_ops_are_inside_of_their_region(tmp_path):
    fn = compiled(nn.Linear(4, 4))
    with torch.no_grad():
        fn(rnd(3, 4)), fn(rnd(3, 4))
        with profile(activities=CPU) as trace:
            fn(rnd(3, 4))
    events = exported(trace, tmp_path)
    (region,) = [e for e in events if e["name"].startswith("fuseboard::inference")]
    (matmul,) = [e for e in events if e["name"] == "aten::addmm"]
    assert inside(matmul, region)


def test_forward_and_backward_are_linked(tmp_path):
    """torch draws an arrow from the op that holds the forward's region to the backward's."""
    fn = compiled(nn.Linear(4, 4))
    for _ in range(2):
        fn(rnd(3, 4)).sum().backward()
    with profile(activities=CPU) as trace:
        fn(rnd(3, 4)).sum().backward()
    events = exported(trace, tmp_path)

    def around(kind: str) -> dict[str, Any]:
        (region,) = [e for e in events if e["name"].startswith(f"fuseboard::{kind}")]
        holders = [e for e in events if e.get("ph") == "X" and "Sequence number" in e["args"]]
        return min((e for e in holders if inside(region, e)), key=lambda event: event["dur"])

    forward, backward = around("forward"), around("backward")
    assert forward["name"] == "CompiledFunction"
    assert forward["args"]["Sequence number"] == backward["args"]["Sequence number"]
    starts = {e["id"] for e in events if e["ph"] == "s" and e["ts"] == forward["ts"]}
    ends = {e["id"] for e in events if e["ph"] == "f" and e["ts"] == backward["ts"]}
    assert starts & ends


STAGES = ("fuse", "partition", "partition", "lower")


def test_a_first_call_shows_stages_and_checks():
    """Compiled under the profiler: the region thrice inside of its verification, then by itself."""
    with plugged() as backend, profile(activities=CPU) as trace, torch.no_grad():
        fn = compiled(torch.sin, backend, "eager")
        fn(rnd(3)), fn(rnd(3))
    graph = last_graph().name
    region = f"{graph}.region0 [fake]"
    stages = [f"{stage} {graph}" for stage in (*STAGES, "capture")]
    expected = [*stages, f"verify {region}", *[region] * 4]
    assert spans(trace) == [f"fuseboard::{name}" for name in expected]


def test_measuring_is_a_span_of_its_own():
    """What is compared is inside of it; what is timed isn't slowed down by spans."""
    quick = {"compiles_quickly": True}
    with plugged(info=quick) as backend, profile(activities=CPU) as trace, torch.no_grad():
        fn = compiled(torch.sin, backend, "eager", policy="measured", cache=False)
        fn(rnd(3)), fn(rnd(3))
    graph = last_graph().name
    names = [name.removeprefix("fuseboard::") for name in spans(trace)]
    stages = [name for name in names if name.endswith(f" {graph}")]
    assert stages == [f"{stage} {graph}" for stage in (*STAGES, "capture", "profile")]
    compared = names[names.index(f"profile {graph}") + 1 :]
    assert set(compared[:2]) == {f"{graph}.region0 [eager]", f"{graph}.region0 [fake]"}
    # Two trials that were verified, and the calls; many more were timed.
    assert len(compared) <= 2 + 2 * 3


def test_weights_are_prepared_in_a_span(monkeypatch):
    """After a change of the weights, before the regions that use them."""
    preparing_is_worth_it(monkeypatch)
    with hoisting_by("generic") as (kind, backend), torch.no_grad():
        model = kind()
        fn = compiled(model, backend)
        fn(model.inputs()), fn(model.inputs())
        with profile(activities=CPU) as trace:
            fn(model.inputs())
            overwrite(model)
            fn(model.inputs())
    region, prepare, again = spans(trace)
    assert region.startswith(f"fuseboard::{last_graph().name}.region0 [")
    assert prepare == f"fuseboard::prepare {last_graph().name}"
    assert again == region


def test_calls_without_prepared_weights_are_in_a_span(monkeypatch):
    monkeypatch.setattr(WeightSets, "_waits_on", lambda *_: True)
    with hoisting_by("generic") as (kind, backend), torch.no_grad():
        model = kind()
        fn = compiled(model, backend)
        fn(model.inputs()), fn(model.inputs())
        overwrite(model)
        with profile(activities=CPU) as trace:
            fn(model.inputs())
    assert spans(trace) == [f"fuseboard::{last_graph().name} [eager]"]


# --- off ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    """Before, between and after profiles the generated function finds the code itself."""
    source = Source()
    name = source.bind_apart(len, "len")
    source.spans[name] = lambda: "a region"
    source.line(f"return {name}(args)")
    function = source.function("f", "args")
    assert function.__globals__[name] is len
    for _ in range(2):
        with profile(activities=CPU):
            assert function.__globals__[name] is not len
            assert function([1, 2]) == 2
        assert function.__globals__[name] is len


def test_a_function_made_while_profiling_is_in_spans_and_out_again():
    with profile(activities=CPU):
        source = Source()
        name = source.bind_apart(len, "len")
        source.spans[name] = lambda: "a region"
        source.line(f"return {name}(args)")
        function = source.function("f", "args")
        assert function.__globals__[name] is not len
    assert function.__globals__[name] is len


def test_the_profiler_holds_no_function():
    source = Source()
    name = source.bind_apart(len, "len")
    source.spans[name] = lambda: "a region"
    source.line(f"return {name}(args)")
    watched = weakref.ref(source.function("f", "args"))
    del source
    with profile(activities=CPU):
        gc.collect()
        assert watched() is None


def test_an_error_passes_through_a_span():
    """The user's own exception, unchanged; and the profile is whole."""

    def call(eager_call, region):
        return eager_call

    with plugged(call=call) as backend, torch.no_grad():
        fn = compiled(lambda x, i: x[i], backend, "eager")
        fn(rnd(3), torch.tensor([1])), fn(rnd(3), torch.tensor([1]))
        with profile(activities=CPU) as trace:
            with pytest.raises(IndexError):
                fn(rnd(3), torch.tensor([7]))
            fn(rnd(3), torch.tensor([2]))
    assert len(spans(trace)) == 2


# --- other ways to profile ------------------------------------------------------------------------


def test_a_schedule_shows_its_active_steps():
    fn = compiled(torch.sin)
    seen: list[list[str]] = []
    with torch.no_grad():
        fn(rnd(3)), fn(rnd(3))
        plan = schedule(wait=1, warmup=1, active=2, repeat=2)
        ready = lambda trace: seen.append(spans(trace))  # noqa: E731
        with profile(activities=CPU, schedule=plan, on_trace_ready=ready) as trace:
            for _ in range(8):
                fn(rnd(3))
                trace.step()
    name = f"fuseboard::{last_graph().name}.region0 [eager]"
    assert seen == [[name] * 2] * 2


def test_the_autograd_profiler_shows_regions():
    fn = compiled(torch.sin)
    with torch.no_grad():
        fn(rnd(3)), fn(rnd(3))
        with torch.autograd.profiler.profile() as trace:
            fn(rnd(3))
    names = [event.name for event in trace.function_events]
    assert f"fuseboard::{last_graph().name}.region0 [eager]" in names


def test_profiles_start_and_stop_while_other_threads_call():
    """Values stay right, and nothing is left behind."""
    fn = compiled(Blocks())
    x = rnd(3, 8)
    with torch.no_grad():
        fn(x)
        expected = fn(x)
        problems: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            try:
                with torch.no_grad():
                    while not stop.is_set():
                        assert_same(fn(x), expected)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            with profile(activities=CPU):
                fn(x)
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems


def test_without_the_hooks_of_torch_there_are_no_spans(monkeypatch, caplog):
    """A torch that doesn't say when a profiler starts: said once, in the log, at level INFO."""
    monkeypatch.delattr(torch.autograd.profiler, "_run_on_profiler_start")
    registry = torch_profiler._Traceable()
    with caplog.at_level("INFO", "fuseboard"):
        for _ in range(2):
            registry.add(lambda args: args, {})
    assert [record.message for record in caplog.records] == [
        "traces won't show regions: this torch doesn't say when a profiler starts"
    ]
