"""The policy ``measured``: what is right is timed, the fastest runs, and later processes know."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref

import pytest
import torch

import fuseboard
from fuseboard.contracts import Measurement
from fuseboard.lower.caching import Cache
from fuseboard.profile.choose.winner import choose
from fuseboard.run import kept_inputs
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    forget_other_graphs,
    last_graph,
    ledger,
    observing,
    plugged,
)
from tests.support.own_op import doubled
from tests.support.values import assert_same

QUICK = {"compiles_quickly": True}


@pytest.fixture(autouse=True)
def _measured(monkeypatch, tmp_path):
    """Each test with a cost database of its own."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    forget_other_graphs(monkeypatch)


def slept(seconds: float):
    """A fake's callable that takes this much longer than eager does."""

    def call(eager_call, region):
        def run(args):
            time.sleep(seconds)
            return eager_call(args)

        return run

    return call


def wrong(eager_call, region):
    """One element of the first output is off."""

    def run(args):
        results = list(eager_call(args))
        results[0] = results[0].clone()
        results[0].view(-1)[3] += 0.01
        return results

    return run


def states() -> dict[str, str]:
    return {told.name: told.state for told in last_graph().candidates}


def timed_as(**latencies_us: float):
    """A measuring hook by which candidates take so long, in their order."""
    return observing(
        "stopwatch",
        measure=lambda calls: [
            Measurement(us, us, us, 1) for us, _ in zip(latencies_us.values(), calls, strict=True)
        ],
    )


def f(x):
    return (x.exp() + 1).sum(-1)


X = torch.linspace(-1, 1, 24).reshape(4, 6)


# --- which one wins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latencies", "winner"),
    [([10.0], 0), ([10.0, 9.9], 0), ([10.0, 9.0], 1), ([10.0, 9.0, 8.9], 1), ([9.0, 10.0], 0)],
)
def test_a_later_candidate_has_to_win_by_the_margin(latencies, winner):
    assert choose([Measurement(us, us, us, 5) for us in latencies], margin=0.03) == winner


def test_what_a_loser_told_when_it_was_lowered_is_kept():
    """The winner's notes are in the graph's regions, the losers' in their rows."""

    def lower(region):
        call = slept(0.02)(fuseboard.lower_eagerly(region).call, region)
        return fuseboard.LoweredRegion(call=call, notes=("an op fell back",))

    with plugged("brisk", info=QUICK), plugged("slow", lower=lower, info=QUICK):
        fn = compiled(f, "slow", "brisk", measure_s=0.2)
        with torch.no_grad():
            fn(X)
    notes = {told.name: told.notes for told in last_graph().candidates}
    assert "an op fell back" in notes["slow"]
    assert notes["brisk"] == []


def test_what_aotautograd_captures_wrongly_runs_as_dynamos_graph():
    """Torch takes resizing apart with other coordinates than its kernel's."""

    def resized(x):
        return torch.nn.functional.interpolate(x, scale_factor=1.3, mode="nearest")

    x = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)
    with plugged("brisk", info=QUICK), timed_as(brisk=1.0, eager=9.0):
        fn = compiled(resized, "brisk", "eager")
        with torch.no_grad():
            for _ in range(3):
                assert_same(fn(x), resized(x))
    assert states() == {"brisk": "failed", "eager": "chosen"}
    assert not last_graph().notes
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == (
        "AOTAutograd",
        "capture",
        "Dynamo's own graph",
    )


def test_the_faster_of_two_backends_runs():
    with plugged("brisk", info=QUICK), plugged("slow", call=slept(0.02), info=QUICK):
        fn = compiled(f, "slow", "brisk", measure_s=0.2)
        with torch.no_grad():
            torch.testing.assert_close(fn(X), f(X))
            torch.testing.assert_close(fn(X), f(X))
    assert states() == {"slow": "slower", "brisk": "chosen"}
    graph = last_graph()
    assert graph.settled
    assert [region.backend for region in graph.regions] == ["brisk"]
    assert {node.backend for node in graph.nodes} == {"brisk"}
    slow, brisk = graph.candidates
    assert slow.latency_us > 20_000 > brisk.latency_us
    assert slow.peak_bytes == brisk.peak_bytes >= 2 * X.nbytes  # exp's and the sum's operand


def test_eager_is_a_candidate_where_it_is_named():
    with plugged("slow", call=slept(0.02), info=QUICK):
        fn = compiled(f, "slow", "eager", measure_s=0.1)
        with torch.no_grad():
            fn(X)
    assert states() == {"eager": "chosen", "slow": "slower"}


def test_a_backend_named_alone_runs_and_is_not_timed():
    with plugged("slow", call=slept(0.02), info=QUICK):
        fn = compiled(f, "slow")
        with torch.no_grad():
            torch.testing.assert_close(fn(X), f(X))
    graph = last_graph()
    assert graph.candidates == []
    assert [region.backend for region in graph.regions] == ["slow"]


def test_what_measures_decides():
    """The hook's answer is what counts."""
    with timed_as(a=30.0, b=20.0), plugged("a", info=QUICK), plugged("b", info=QUICK):
        fn = compiled(f, "a", "b")
        with torch.no_grad():
            fn(X)
    assert states() == {"a": "slower", "b": "chosen"}


def test_forward_and_backward_are_chosen_apart():
    x = X.clone().requires_grad_()
    with plugged("slow", call=slept(0.02), info=QUICK), plugged("brisk", info=QUICK):
        fn = compiled(lambda x: x.exp().sin().sum(), "slow", "brisk", measure_s=0.1)
        fn(x).backward()
        got, x.grad = x.grad, None
        x.exp().sin().sum().backward()
        torch.testing.assert_close(got, x.grad)
    for kind in ("forward", "backward"):
        assert [r.backend for r in last_graph(kind).regions] == ["brisk"]


# --- what is wrong --------------------------------------------------------------------------------


def test_a_wrong_candidate_is_out_however_fast(caplog):
    caplog.set_level(logging.WARNING, "fuseboard")
    with plugged("wrong", call=wrong, info=QUICK), plugged("slow", call=slept(0.01), info=QUICK):
        fn = compiled(lambda x: x.exp() + 1, "wrong", "slow", measure_s=0.1)
        with torch.no_grad():
            torch.testing.assert_close(fn(X), X.exp() + 1)
            torch.testing.assert_close(fn(X), X.exp() + 1)
    assert states() == {"wrong": "failed", "slow": "chosen"}
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("wrong", "profile", "the other candidates")
    assert "output 0" in trip.error
    assert "aten.exp.default" in trip.error  # the first op whose output is wrong
    assert len(caplog.records) == 1


def test_a_wrong_backend_alone_is_replaced_by_eager():
    with plugged("wrong", call=wrong, info=QUICK):
        fn = compiled(lambda x: x.exp() + 1, "wrong")
        with torch.no_grad():
            torch.testing.assert_close(fn(X), X.exp() + 1)
            torch.testing.assert_close(fn(X), X.exp() + 1)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("wrong", "profile", "eager")


def test_all_candidates_wrong_leaves_eager():
    with plugged("wrong", call=wrong, info=QUICK), plugged("worse", call=wrong, info=QUICK):
        fn = compiled(lambda x: x.exp() + 1, "wrong", "worse")
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fn(X), X.exp() + 1)
    assert states() == {"wrong": "failed", "worse": "failed"}


def test_raising_is_the_policy():
    with plugged("wrong", call=wrong, info=QUICK), plugged("good", info=QUICK):
        fn = compiled(lambda x: x.exp() + 1, "wrong", "good", on_failure="raise")
        with torch.no_grad(), pytest.raises(fuseboard.RegionError, match=r"'wrong'.*output 0"):
            fn(X)


def test_one_element_in_ten_thousand_is_caught():
    """Off by 100 times eager's own largest error."""
    x = torch.rand(100, 100, generator=torch.Generator().manual_seed(1)) + 1
    error = (x.sin().double() - x.double().sin()).abs().max().item()

    def call(eager_call, region):
        def run(args):
            (result,) = eager_call(args)
            result = result.clone()
            result[47, 11] += 100 * error
            return (result,)

        return run

    with plugged("off", call=call, info=QUICK):
        fn = compiled(torch.sin, "off")
        with torch.no_grad():
            torch.testing.assert_close(fn(x), x.sin(), rtol=0, atol=0)
    (trip,) = all_trips()
    assert "[47, 11]" in trip.error or "(47, 11)" in trip.error


def test_strides_are_eagers_where_fake_ones_are_not():
    """torch's fake log_sigmoid of a transposed tensor has other strides than eager's."""
    x = torch.rand(2, 5, 4, 3).transpose(1, 2)
    eager = torch.nn.functional.logsigmoid(x)
    with plugged("other", call=restrided, info=QUICK):
        fn = compiled(torch.nn.functional.logsigmoid, "other", "eager", measure_s=0.1)
        with torch.no_grad():
            assert fn(x).stride() == eager.stride() == (60, 15, 3, 1)
            assert fn(x).stride() == eager.stride()
    assert states() == {"eager": "chosen", "other": "failed"}
    (trip,) = all_trips()
    assert "output 0 has strides (60, 3, 12, 1), expected (60, 15, 3, 1)" in trip.error


def test_strides_as_eagers_are_right_in_the_calls_after_the_choice_too():
    """Where fake ones are others, of a region whose values aren't judged again."""
    x = torch.rand(2, 5, 4, 3).transpose(1, 2)
    function = torch.nn.functional.logsigmoid
    with plugged("brisk", info=QUICK), plugged("slow", call=slept(0.02), info=QUICK):
        for decided in ("measured in a call", "taken from the cost database"):
            torch._dynamo.reset()
            fn = compiled(function, "brisk", "slow", measure_s=0.1)
            with torch.no_grad():
                for _ in range(3):
                    assert_same(fn(x), function(x))
            assert last_graph().decided == decided
    assert states() == {"brisk": "chosen", "slow": "slower"}
    assert not all_trips()


def test_strides_between_regions_may_be_the_fake_ones():
    """The next region was compiled for them; the caller doesn't see them."""
    x = torch.rand(2, 5, 4, 3).transpose(1, 2)

    def function(x):
        return torch.nn.functional.logsigmoid(x).contiguous().sin()

    with (
        plugged("other", call=restrided, claim=claim_ops("log_sigmoid_forward")),
        plugged("next", claim=claim_ops("sin", "clone")),
    ):
        fn = compiled(function, "other", "next", policy="priority", min_region_us=0.0)
        with torch.no_grad():
            assert_same(fn(x), function(x))
    assert [region.backend for region in last_graph().regions] == ["other", "next"]
    assert not all_trips()


def test_strides_of_the_graph_are_eagers_whatever_its_regions_read():
    """A region of eager's lays its results out as what it reads, here as the fake values say."""
    x = torch.rand(2, 5, 4, 3).transpose(1, 2)

    def function(x):
        return torch.nn.functional.logsigmoid(x).sin().exp()

    other = plugged("other", call=restrided, claim=claim_ops("log_sigmoid_forward"), info=QUICK)
    with other, timed_as(eager=10.0, other=5.0):
        fn = compiled(function, "other", "eager", measure_s=0.1, min_region_us=0.0)
        with torch.no_grad():
            eager = function(x)
            assert fn(x).stride() == eager.stride() == (60, 15, 3, 1)
            assert fn(x).stride() == eager.stride()
    assert states()["eager"] == "chosen"
    (trip,) = all_trips()
    assert "output 0 of the whole graph has strides (60, 3, 12, 1)" in trip.error


def restrided(eager_call, region):
    """Laid out as the fake values say."""
    fake = [node.meta["val"] for node in region.graph.graph.find_nodes(op="output")[0].args[0]]

    def run(args):
        results = eager_call(args)
        empty = [torch.empty_strided(like.shape, like.stride()) for like in fake]
        return [out.copy_(result) for out, result in zip(empty, results, strict=True)]

    return run


def test_the_users_own_error_blames_nobody():
    def gather(x, index):
        return x[index] * 2

    with plugged("a", info=QUICK), plugged("b", info=QUICK):
        fn = compiled(gather, "a", "b", measure_s=0.05)
        with torch.no_grad():
            with pytest.raises(IndexError, match="out of"):
                fn(X, torch.tensor([9]))
            index = torch.tensor([1, 3, 2])
            torch.testing.assert_close(fn(X, index[:1]), X[index[:1]] * 2)
    assert all_trips() == []
    assert set(states().values()) == {"chosen", "slower"}


# --- random numbers, writes, effects --------------------------------------------------------------


def test_random_numbers_are_drawn_once():
    """However many candidates were run: the seed's numbers are eager's, then and after."""

    def g(x):
        return x + torch.rand_like(x)

    with plugged("a", info=QUICK), plugged("b", info=QUICK):
        fn = compiled(g, "a", "b", measure_s=0.05)
        torch.manual_seed(3)
        with torch.no_grad():
            got = [fn(X), fn(X)]
        torch.manual_seed(3)
        torch.testing.assert_close(got, [g(X), g(X)], rtol=0, atol=0)
    assert set(states().values()) == {"chosen", "slower"}


def test_inputs_are_written_once():
    def g(x):
        return x.mul_(2) + 1

    with plugged("a", info=QUICK), plugged("b", info=QUICK):
        fn = compiled(g, "a", "b", measure_s=0.05)
        x = X.clone()
        with torch.no_grad():
            torch.testing.assert_close(fn(x), X * 2 + 1)
    torch.testing.assert_close(x, X * 2)


# --- what takes long ------------------------------------------------------------------------------


def test_what_only_this_process_can_compile_waits_for_a_later_call():
    lowered = []

    def call(eager_call, region):
        lowered.append(region.backend)
        return eager_call

    with plugged("quick", call=slept(0.02), info=QUICK), plugged("long", call=call):
        fn = compiled(f, "quick", "long", measure_s=0.1)
        with torch.no_grad():
            fn(X)
            assert states() == {"quick": "chosen", "long": "waiting"}
            assert lowered == []
            assert not last_graph().settled
            torch.testing.assert_close(fn(X), f(X))
    assert states() == {"quick": "slower", "long": "chosen"}
    assert last_graph().settled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "here"),
    [
        (lambda x: torch.nn.functional.max_pool2d(x, 2).exp(), False),
        (lambda x: doubled(x).exp(), True),
    ],
    ids=["op of Inductor's own", "op of this program"],
)
def test_ops_that_a_child_process_may_not_have(function, here, monkeypatch):
    """Inductor's own are there; what the user's program defines is compiled in this process."""
    lowered = []
    session = "fuseboard.lower.caching.Cache._ask"
    ask = Cache._ask
    monkeypatch.setattr(
        session, lambda self, task: lowered.append(task.region.backend) or ask(self, task)
    )
    fn = compiled(function, "mkldnn", "inductor", "eager", measure_s=0.1)
    x = torch.rand(1, 2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fn(x), function(x))
        assert fuseboard.wait(progress=False)
        torch.testing.assert_close(fn(x), function(x))
    assert not all_trips()
    assert last_graph().settled
    assert set(states().values()) <= {"chosen", "slower"}
    assert "inductor" in states()
    assert ("inductor" in lowered) == here


def test_waiting_settles_without_a_call():
    with plugged("quick", call=slept(0.02), info=QUICK), plugged("long"):
        fn = compiled(f, "quick", "long", measure_s=0.1)
        with torch.no_grad():
            fn(X)
            assert fuseboard.wait(progress=False)
            assert states() == {"quick": "slower", "long": "chosen"}
            torch.testing.assert_close(fn(X), f(X))


def test_inputs_that_are_too_large_are_not_kept(monkeypatch):
    monkeypatch.setattr(kept_inputs, "why_too_large", lambda size, device: "no room")
    with plugged("quick", info=QUICK), plugged("long"):
        fn = compiled(f, "quick", "long", measure_s=0.05)
        with torch.no_grad():
            fn(X)
            assert not fuseboard.wait(progress=False)
            fn(X)
            assert fuseboard.wait(progress=False)


def test_everything_may_be_tried_before_the_first_answer():
    with plugged("quick", call=slept(0.02), info=QUICK), plugged("long"):
        fn = compiled(f, "quick", "long", measure_s=0.1, settle="first_call")
        with torch.no_grad():
            fn(X)
    assert states() == {"quick": "slower", "long": "chosen"}


def test_dynamic_graphs_are_settled_in_their_first_call():
    with plugged("quick", call=slept(0.02), info=QUICK), plugged("long"):
        fn = compiled(f, "quick", "long", measure_s=0.1, dynamic=True)
        with torch.no_grad():
            fn(X)
            assert states() == {"quick": "slower", "long": "chosen"}
            torch.testing.assert_close(fn(X[:2]), f(X[:2]))


def test_what_waits_for_a_child_lives_as_long_as_the_code(monkeypatch):
    """Garbage is collected while a candidate is compiled: it is compared all the same."""
    sent = []

    def compile_for(graph, *job):
        sent.append(weakref.ref(graph))

    monkeypatch.setattr("fuseboard.lower.background.compile_for", compile_for)
    with plugged("quick", info=QUICK):
        fn = compiled(f, "quick", "inductor", measure_s=0.05)
        with torch.no_grad():
            fn(X)
    gc.collect()
    assert states() == {"quick": "chosen", "inductor": "waiting"}
    assert sent[0]() is not None
    assert not fuseboard.wait(timeout_s=0, progress=False)
    del fn
    torch._dynamo.reset()
    gc.collect()
    assert sent[0]() is None


def test_losers_and_kept_inputs_are_let_go():
    alive = []

    def call(eager_call, region):
        def run(args):
            return eager_call(args)

        alive.append(weakref.ref(run))
        return run

    with plugged("slow", call=slept(0.02), info=QUICK), plugged("brisk", info=QUICK):
        fn = compiled(f, "slow", "brisk", measure_s=0.1)
        x = X.clone()
        with torch.no_grad():
            fn(x)
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


# --- another process, other threads ---------------------------------------------------------------


def again(fn_of):
    """The graphs of a fresh compile of the same function."""
    torch._dynamo.reset()
    ledger.clear()
    return fn_of()


def test_a_decision_is_taken_over_without_measuring():
    measured = []

    def measure(calls):
        measured.append(len(calls))
        return [Measurement(us, us, us, 1) for us in (30.0, 20.0)]

    with (
        observing("stopwatch", measure=measure),
        plugged("a", info=QUICK),
        plugged("b", info=QUICK),
    ):
        for _ in range(2):
            fn = again(lambda: compiled(f, "a", "b"))
            with torch.no_grad():
                torch.testing.assert_close(fn(X), f(X))
            assert states() == {"a": "slower", "b": "chosen"}
    assert measured == [2]
    assert last_graph().decided == "taken from the cost database"
    assert last_graph().candidates[0].latency_us == 30.0


def test_another_shape_is_another_decision():
    with plugged("a", info=QUICK), plugged("b", info=QUICK):
        with torch.no_grad():
            compiled(f, "a", "b", measure_s=0.05)(X)
            again(lambda: compiled(f, "a", "b", measure_s=0.05))(X[:2])
    assert last_graph().decided == "measured in a call"


def test_threads_meet_one_choice():
    with plugged("slow", call=slept(0.01), info=QUICK), plugged("brisk", info=QUICK):
        fn = compiled(f, "slow", "brisk", measure_s=0.1)
        with torch.no_grad():
            fn(X[:3])  # so that Dynamo's own work is done for one shape
        results, errors = [], []

        def run():
            try:
                with torch.no_grad():
                    results.append(fn(X[:3]))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for result in results:
        torch.testing.assert_close(result, f(X[:3]))


def test_an_interrupt_leaves_something_to_run():
    """Ctrl-C while candidates are timed: the one that was verified first runs."""
    interrupts = iter([True])

    def measure(calls):
        if next(interrupts, False):
            raise KeyboardInterrupt
        return [Measurement(1.0, 1.0, 1.0, 1) for _ in calls]

    with (
        observing("stopwatch", measure=measure),
        plugged("a", info=QUICK),
        plugged("b", info=QUICK),
    ):
        fn = compiled(f, "a", "b")
        with torch.no_grad():
            with pytest.raises(KeyboardInterrupt):
                fn(X)
            torch.testing.assert_close(fn(X), f(X))
    assert states()["a"] == "chosen"
    assert [region.backend for region in last_graph().regions] == ["a"]


# --- later calls ----------------------------------------------------------------------------------


def wrong_from(rows: int):
    """Right for fewer rows only."""

    def call(eager_call, region):
        def run(args):
            results = list(eager_call(args))
            if results[0].shape[0] >= rows:
                results[0] = results[0] + 0.01
            return results

        return run

    return call


def test_a_backend_wrong_for_a_later_shape_is_caught_there():
    """Each power of two of sizes is checked on its first call."""
    with plugged("short", call=wrong_from(9), info=QUICK):
        fn = compiled(torch.sin, "short", dynamic=True)
        with torch.no_grad():
            for rows in (4, 5, 7, 6, 16, 17, 4):
                x = torch.rand(rows, 3)
                torch.testing.assert_close(fn(x), x.sin())
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("short", "profile", "eager")


def test_a_new_size_in_a_known_bucket_is_not_checked():
    looked = []

    def verify(region, result):
        looked.append(result[0].shape[0])
        return fuseboard.Verdict(True)

    with observing("looker", verify=verify), plugged("good", info=QUICK):
        fn = compiled(torch.sin, "good", dynamic=True)
        with torch.no_grad():
            for rows in (4, 5, 7, 9, 15, 4, 33):
                fn(torch.rand(rows, 3))
    assert looked == [4, 9, 33]


def test_every_so_many_calls_are_checked():
    looked = []

    def verify(region, result):
        looked.append(float(result[0][0]))
        return fuseboard.Verdict(True)

    with observing("looker", verify=verify), plugged("good", info=QUICK):
        fn = compiled(lambda x: x * 1, "good", verify="always:3")
        with torch.no_grad():
            for number in range(8):
                fn(torch.full((2,), float(number)))
    assert looked == [0.0, 3.0, 6.0]


def test_code_that_turns_wrong_is_caught_by_a_later_check():
    calls = iter(range(100))

    def call(eager_call, region):
        def run(args):
            (result,) = eager_call(args)
            return (result + 1 if next(calls) > 3 else result,)

        return run

    with plugged("aging", call=call, info=QUICK):
        fn = compiled(torch.sin, "aging", verify="always:2")
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fn(X), X.sin())
            fn(X), fn(X), fn(X)
            torch.testing.assert_close(fn(X), X.sin())
    (trip,) = all_trips()
    assert trip.plugin == "aging"


def test_quick_regions_beside_slow_ones_postpone_nothing():
    """A candidate of a slow backend with regions of eager's waits for the slow ones alone."""
    from tests.support.backends import claim_ops

    lowered = []

    def lower(region):
        lowered.append(region.name)
        return fuseboard.lower_eagerly(region)

    with plugged("part", claim=claim_ops("mm"), info=QUICK, lower=lower), plugged("long"):
        fn = compiled(lambda x: (x @ x.t()).exp() @ x, "part", "eager", "long", measure_s=0.05)
        with torch.no_grad():
            fn(X)
    assert len(lowered) == 2
    assert last_graph().settled


def test_a_choice_under_a_profiler_is_not_kept():
    from torch.profiler import ProfilerActivity, profile

    with plugged("a", info=QUICK), plugged("b", info=QUICK), torch.no_grad():
        with profile(activities=[ProfilerActivity.CPU]):
            compiled(f, "a", "b", measure_s=0.05)(X)
        assert last_graph().decided == "measured in a call"
        again(lambda: compiled(f, "a", "b", measure_s=0.05))(X)
    assert last_graph().decided == "measured in a call"
