"""Graphs compiled beside their calls, by a workshop that is a process of its own."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard.capture.comparison import CaptureCheck
from fuseboard.config import resolve
from fuseboard.report.data import ledger
from fuseboard.workshop import life as lives_module
from fuseboard.workshop import process
from fuseboard.workshop.chosen import Chosen
from fuseboard.workshop.loading import NotLoaded
from fuseboard.workshop.request import Answer
from fuseboard.workshop.slices import Slices
from fuseboard.workshop.states import GraphState
from tests.support.beside import compiled, life, lives, loaded, mlp, pinned
from tests.support.eager_loses import MEASURE

pytestmark = pytest.mark.usefixtures("as_users_run_it")

ROOT = Path(__file__).parents[1]


def test_the_first_call_is_eagers_and_later_ones_are_what_was_chosen():
    """Both are right, and the report of what was chosen comes from the workshop."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model, margin=1.0)
        assert torch.equal(run(x), model(x))
        assert life().state in (GraphState.WATCHING, GraphState.LOADING)
        assert not fuseboard.settled()
        (report,) = fuseboard.last_report().graphs
        assert not report.settled
        assert report.notes[-1] == life().state.value
        assert fuseboard.wait(120)
        assert fuseboard.settled()
        torch.testing.assert_close(run(x), model(x))
    (report,) = fuseboard.last_report().graphs
    assert {row.name for row in report.candidates} >= {"eager"}
    assert all(row.state in ("chosen", "slower", "failed") for row in report.candidates)
    assert report.settled


@pytest.mark.usefixtures("chosen")
def test_what_a_rewritten_graph_was_before_is_read_where_it_is_needed():
    """As where a call fails, which runs op by op then. A mode of the user's sees nothing of it."""

    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            pytest.fail("it was read in the mode")

    model, x = torch.nn.Sequential(mlp(), torch.nn.Dropout(), mlp()).eval(), torch.randn(8, 64)
    with torch.no_grad():
        run = pinned(model)
        run(x)
        graph = life()
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
        (captured,) = graph._chosen.compiled.call.captured_graphs
        assert "graph" not in vars(captured)
        with Nothing():
            captured.graph  # noqa: B018  # it is read
        ops = [len(one.graph.nodes) for one in (captured.graph, captured.compiled_graph)]
        assert ops[0] > ops[1]
        weight, bias, *others = model.parameters()
        inputs = [weight, bias, x, *others]
        torch.testing.assert_close(captured.eager(inputs)[0], model(x))


@pytest.mark.usefixtures("chosen")
def test_what_was_chosen_is_made_again_without_a_trace(traced):
    """torch's tracers change the whole process: none may run in a thread of the user's."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = pinned(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert traced == []
    (report,) = loaded()
    assert [region.backend for region in report.regions] == ["mkldnn"]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(("stage", "function"), [("lower", "lowers"), ("fuse", "halves_region")])
def test_functions_that_decide_a_stage_go_along(stage, function):
    """They are asked in the workshop, and again where what was chosen is made once more."""
    target = f"tests.support.stages:{function}"
    model, x = torch.nn.Sequential(mlp(), Half()), torch.randn(8, 64)
    stages = {"measure": MEASURE, stage: target}
    with torch.no_grad():
        run = compiled(model, stages=stages, margin=0.0)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    (report,) = loaded()
    told = [note for region in report.regions for note in region.notes]
    told += [f"rewritten by {one.plugin}" for r in report.regions for one in r.fusions]
    assert any(target in note for note in told)


class Half(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x * 0.5)


def test_what_is_traced_in_a_call_doesnt_hinder_other_threads(monkeypatch):
    """Torch lets compiled functions be called meanwhile, and Dynamo waits for its lock."""
    answer = Answer(problem="it can't be sent", only_here=True)
    monkeypatch.setattr("fuseboard.workshop.life.make_request", lambda *arguments: answer)
    found, trace = [], torch.fx.Tracer.trace

    def watched(*arguments):
        found.append((torch.compiler.is_compiling(), convert_frame.compile_lock._is_owned()))
        return trace(*arguments)

    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model)
        run(x)
        monkeypatch.setattr(torch.fx.Tracer, "trace", watched)
        end = time.monotonic() + 60
        while not found and time.monotonic() < end:
            run(x)
    assert set(found) == {(True, True)}


def test_who_waits_and_a_call_compile_a_graph_once(monkeypatch):
    """Where only this process can compile it: whoever is second finds what the first one made."""
    answer = Answer(problem="it can't be sent", only_here=True)
    monkeypatch.setattr("fuseboard.workshop.life.make_request", lambda *arguments: answer)
    began, compiles, compile_here = threading.Event(), [], lives_module.compile_here

    def slow(*arguments):
        compiles.append(threading.current_thread().name)
        began.set()
        time.sleep(0.3)
        return compile_here(*arguments)

    monkeypatch.setattr(lives_module, "compile_here", slow)
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model)
        run(x)
        graph, end = life(), time.monotonic() + 60
        while graph.waiting:
            assert time.monotonic() < end
            time.sleep(0.01)
        waits = threading.Thread(target=graph.settle, name="waits")
        waits.start()
        assert began.wait(60)
        torch.testing.assert_close(run(x), model(x))
        waits.join()
    assert compiles == ["waits"]
    assert graph.settled


def test_a_later_compile_tells_what_lost_before(monkeypatch):
    """Where Dynamo's own graph won: the report of the workshop is kept with the decision."""

    def winner(trial):
        return 0 if trial.calls == 8 else None

    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", winner)
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            run = compiled(model)
            run(x)
            assert fuseboard.wait(120)
            (report,) = fuseboard.last_report().graphs
            assert {row.name for row in report.candidates} >= {"eager"}
            assert "Dynamo's own graph runs" in report.instead
            torch.testing.assert_close(run(x), model(x))


@pytest.mark.usefixtures("chosen")
def test_another_compile_finds_what_the_workshop_answered(monkeypatch):
    """As a later process does: nobody asks the workshop."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        pinned(model)(x)
        assert fuseboard.wait(120)
        torch._dynamo.reset()
        monkeypatch.setattr(process.Workshop, "ask", lambda *a: pytest.fail("it was asked"))
        run = pinned(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert loaded()


@pytest.fixture
def wins_after_four(monkeypatch):
    """What was compiled beside the calls wins the trial, with pairs of calls to tell of."""

    def winner(trial):
        return 1 if trial.calls == 8 else None

    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", winner)


@pytest.mark.usefixtures("wins_after_four")
def test_what_won_the_trial_needs_none_in_a_later_process(monkeypatch):
    """It takes the place of Dynamo's own graph as soon as it is loaded, for which the first call
    waits a share of its trace."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        pinned(model)(x)
        assert fuseboard.wait(120)
        torch._dynamo.reset()
        monkeypatch.setattr(Chosen, "in_turn_with", lambda *a: pytest.fail("there is a trial"))
        monkeypatch.setattr(Slices, "pay_for_trace", lambda self, wait: wait(120))
        run = pinned(model)
        run(x)
        assert fuseboard.settled()
        torch.testing.assert_close(run(x), model(x))
    (report,) = loaded()
    assert any("us as Dynamo's own graph" in note for note in report.notes)
    assert report.settled


def test_a_trial_that_no_calls_decide_isnt_held_again(monkeypatch):
    """Later processes take over that what won in the workshop stays, as long as it is kept."""
    monkeypatch.setattr("fuseboard.workshop.trial.MOST_CALLS", 2)
    model, x = mlp(), torch.randn(8, 64)
    notes = []
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            run = pinned(model)
            run(x)
            assert fuseboard.wait(120)
            torch.testing.assert_close(run(x), model(x))
            notes += [note for note in loaded()[-1].notes if note.startswith("undecided")]
            monkeypatch.setattr(Chosen, "in_turn_with", lambda *a: pytest.fail("there is a trial"))
    assert "in 2 calls" in notes[0]
    assert "in an earlier process's calls" in notes[1]


@pytest.mark.usefixtures("chosen")
@pytest.mark.thorough
def test_a_program_that_is_kept_but_whose_code_is_gone_is_tried_anew(tmp_path):
    """As after the cache made room."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        pinned(model, "inductor")(x)
        assert fuseboard.wait(120)
        assert [region.backend for region in loaded()[0].regions] == ["inductor"]
        store = fuseboard.lower.artifacts.store_at(resolve())
        store.clear(lambda row: row.parts.get("backend") == "inductor")
        torch._dynamo.reset()
        run = pinned(model, "inductor")
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert [region.backend for region in loaded()[0].regions] == ["inductor"]


@pytest.mark.usefixtures("chosen")
def test_what_can_not_be_loaded_is_tried_anew_once(monkeypatch):
    """Then a call compiles it: another answer of the workshop's would be no better."""
    model, x = mlp(), torch.randn(8, 64)
    request, asked = lives_module.Life.request, []

    def noted(life, directory):
        asked.append(life)
        return request(life, directory)

    def load(*arguments):
        raise NotLoaded("an op is missing")

    with torch.no_grad():
        pinned(model)(x)
        assert fuseboard.wait(120)
        torch._dynamo.reset()
        monkeypatch.setattr(lives_module.Life, "request", noted)
        monkeypatch.setattr("fuseboard.workshop.life.load", load)
        run = pinned(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert len(asked) == 1
    assert any("an op is missing" in note for note in fuseboard.last_report().graphs[-1].notes)


class Net(torch.nn.Module):
    """Running statistics, dropout, a branch that shares memory."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last(self.drop(h)), h.view(-1)


@pytest.mark.usefixtures("chosen")
def test_training_goes_on_as_eager_would():
    """Outputs, gradients, statistics and random numbers, before and after the swap."""
    torch.manual_seed(1)
    model = Net()
    same = Net()
    same.load_state_dict(model.state_dict())
    run = pinned(model, "inductor")
    steps = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (model, same)]
    for number in range(6):
        if number == 2:
            assert fuseboard.wait(200)
        x = torch.randn(9, 3)
        for one, step in zip((run, same), steps, strict=True):
            torch.manual_seed(number)
            step.zero_grad()
            out, flat = one(x)
            (out.square().mean() + flat.mean()).backward()
            step.step()
        for mine, eagers in zip(
            model.state_dict().values(), same.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, eagers)
    assert loaded()


@pytest.mark.usefixtures("chosen")
@pytest.mark.thorough
def test_a_checkpoints_call_is_made_again_by_what_made_it():
    """Its forward was Dynamo's graph's, which saves other tensors than what is chosen since."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    run = pinned(model, "inductor")
    x = torch.randn(8, 64, requires_grad=True)
    before = checkpoint(run, x, use_reentrant=False)
    run(x).sum().backward()  # the workshop is asked about a call that has a backward
    assert fuseboard.wait(120)
    (graph, *_) = [graph for graph in loaded() if graph.kind == "forward"]
    assert [region.backend for region in graph.regions] == ["inductor"]
    for result in (before, checkpoint(run, x, use_reentrant=False)):
        grads = torch.autograd.grad(result.square().sum(), [x, *model.parameters()])
        wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        torch.testing.assert_close(grads, wanted)


@pytest.mark.usefixtures("chosen")
def test_writes_views_and_identities_are_eagers_after_the_swap():
    """AOTAutograd's wrappers come along."""

    def step(x, cache):
        cache[1:3] += x[:2]
        return x.view(-1), cache, cache.sum()

    run = pinned(step)
    for number in range(3):
        x, cache = torch.randn(4, 4), torch.zeros(4, 4)
        other = cache.clone()
        got, want = run(x, cache), step(x, other)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(cache, other)
        assert got[1] is cache
        assert got[0].data_ptr() == x.data_ptr()
        if number == 0:
            assert fuseboard.wait(120)


VIEWS = {
    "of one that isn't there": lambda: ((base := torch.arange(24.0)), base[:2], base[1:4])[1:],
    "of rows": lambda: (torch.arange(24.0).reshape(4, 6).t()[:2]).unbind(),
    "of each other": lambda: ((base := torch.arange(12.0).reshape(3, 4)), base[0]),
}


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_inputs_that_are_views_of_one_are_so_in_the_workshop(views):
    """What it captured has the memory that they share as a value, of the shape that it has here."""

    def step(left, right):
        left.mul_(3)
        right.add_(1)
        return left * 2

    run = pinned(step)
    for number in range(3):
        own, others = views(), views()
        torch.testing.assert_close(run(*own), step(*others))
        torch.testing.assert_close(own, others)
        if number == 0:
            assert fuseboard.wait(120)
    assert not [trip for graph in fuseboard.last_report().graphs for trip in graph.trips]


@pytest.mark.usefixtures("wins_after_four")
def test_what_trips_after_the_swap_isnt_swapped_in_by_a_later_process():
    """Dynamo's own graph runs there from the first call on, though it had lost the trial."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = pinned(model)
        run(x)
        graph = life()
        assert fuseboard.wait(120)
        run(x)
        (runner,) = graph._chosen.compiled.runners
        (site,) = runner.program.sites
        runner._contain(site.lowered, ValueError("the engine exploded"), "eager")
        torch.testing.assert_close(run(x), model(x))
        ledger.clear()
        torch._dynamo.reset()
        run = pinned(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    (report,) = fuseboard.last_report().graphs
    assert report.instead.startswith("Dynamo's own graph runs")
    assert "the engine exploded" in report.instead
    assert not report.regions


def penalised(run, x):
    """The gradient of a loss that holds the square of its gradient."""
    loss = run(x).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + first.square().sum(), x)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("first", [False, True], ids=["later", "from the start"])
@pytest.mark.thorough
def test_gradients_of_gradients_after_the_swap(first):
    """AOTAutograd would drop them: of ``softmax`` the backward saves the result alone."""
    model, x = mlp(), torch.randn(8, 64, requires_grad=True)
    run = pinned(model, "inductor")
    if first:
        torch.testing.assert_close(penalised(run, x), penalised(model, x))
    else:
        run(x).sum().backward()
    assert fuseboard.wait(200)
    assert [one.kind for one in loaded()] == ["forward", "backward"]
    for _ in range(2):
        torch.testing.assert_close(penalised(run, x), penalised(model, x))


class Counts(torch.nn.Module):
    """Writes to a buffer that is too large to be copied in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1 << 19))

    def forward(self, x):
        self.count.add_(1)
        return x.sigmoid()


@pytest.mark.usefixtures("chosen")
@pytest.mark.thorough
def test_what_has_no_second_gradient_isn_t_swapped_in_where_one_is_asked_for():
    """It would refuse what went well before."""
    model = torch.nn.Sequential(mlp(), Counts())
    x = torch.randn(8, 64, requires_grad=True)
    run = pinned(model, "inductor")
    for _ in range(2):
        torch.testing.assert_close(penalised(run, x), penalised(model, x))
        fuseboard.wait(200)
    assert any("differentiated twice" in one.instead for one in fuseboard.last_report().graphs)


@pytest.mark.usefixtures("chosen")
def test_results_made_in_an_inference_mode_inside_are_inference_tensors():
    """Before the swap and after it, and the mode is left."""
    model, x = mlp(), torch.randn(8, 64)

    def program(x):
        with torch.inference_mode():
            return model(x)

    run = pinned(program)
    for number in range(3):
        result = run(x)
        torch.testing.assert_close(result, program(x))
        assert result.is_inference()
        assert not torch.is_inference_mode_enabled()
        if number == 0:
            assert fuseboard.wait(120)
    assert loaded()


def test_random_numbers_of_the_user_are_left_alone():
    """The threads draw none, and put no generator back."""
    model, x = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.5)), torch.randn(8, 64)

    def drawn(run):
        torch.manual_seed(3)
        found = []
        with torch.no_grad():
            for _ in range(60):
                found.append(torch.cat([run(x).flatten(), torch.randn(5)]))
                time.sleep(0.01)
        return torch.stack(found)

    torch.testing.assert_close(drawn(compiled(model)), drawn(model))


def test_a_first_call_that_raises_isnt_the_last_word():
    """The next one that doesn't raise is tried in its place."""
    table = torch.nn.Embedding(10, 64)
    model = torch.nn.Sequential(table, mlp())
    run, good, bad = compiled(model), torch.arange(8), torch.full((8,), 99)
    with torch.no_grad():
        with pytest.raises(IndexError):
            run(bad)
        assert not fuseboard.wait(120)
        torch.testing.assert_close(run(good), model(good))
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(good), model(good))
        with pytest.raises(IndexError):
            run(bad)
    (report,) = fuseboard.last_report().graphs
    assert report.candidates


def test_a_graph_that_another_process_cant_read_is_compiled_in_a_call():
    """An op that the program defines; the report says so."""
    with torch.library._scoped_library("workshoptest", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        x = torch.randn(8, 64)
        model = mlp()

        def program(x):
            return model(torch.ops.workshoptest.twice(x))

        with torch.no_grad():
            run = compiled(program)
            for _ in range(3):
                torch.testing.assert_close(run(x), program(x))
                fuseboard.wait(120)
        (report,) = fuseboard.last_report().graphs
        assert report.candidates
        assert any("another process can't read the graph" in note for note in report.notes)


def test_a_freed_module_is_nobodys_business():
    """Nothing holds it, and nobody waits for it."""
    model = mlp()
    run = compiled(model)
    with torch.no_grad():
        run(torch.randn(8, 64))
    del model, run
    torch._dynamo.reset()
    import gc

    gc.collect()
    end = time.monotonic() + 60
    while lives() and time.monotonic() < end:
        time.sleep(0.1)
        gc.collect()
    assert lives() == []


def test_calls_of_several_threads_while_it_settles():
    """Each gets its own answer, whoever answers it."""
    model, wrong = mlp(), []
    run = compiled(model)
    with torch.no_grad():
        run(torch.randn(8, 64))

    def calls(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            while not stop.is_set():
                x = torch.randn(8, 64, generator=generator)
                if not torch.allclose(run(x), model(x), rtol=1e-4, atol=1e-5):
                    wrong.append(seed)

    stop = threading.Event()
    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    fuseboard.wait(60)
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"on_failure": "raise"}, "failures may be raised"),
        ({"backends": ["mkldnn"]}, "as eager isn't among it"),
    ],
)
def test_what_stays_within_calls_says_why(options, why):
    """In the report of the graph."""
    with torch.no_grad():
        compiled(mlp(), **options)(torch.randn(8, 64))
    (report,) = fuseboard.last_report().graphs
    assert lives() == []
    assert any(why in note for note in report.notes)


@pytest.mark.parametrize(
    "options", [{"cache": False}, {"cache_dir": "/proc/nowhere/cache"}], ids=["off", "unwritable"]
)
@pytest.mark.usefixtures("chosen")
def test_without_a_cache_one_that_goes_with_the_process_serves(options):
    """What the workshop compiled arrives all the same; no call compiles."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = torch.compile(
            model,
            backend="fuseboard",
            options={
                "backends": ["mkldnn", "eager"],
                "stages": {"measure": MEASURE},
                "margin": 0.0,
                **options,
            },
        )
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    (report,) = loaded()
    assert [region.backend for region in report.regions] == ["mkldnn"]
    assert not report.trips


@pytest.mark.usefixtures("chosen")
def test_what_computes_otherwise_here_is_tried_anew_and_then_refused(monkeypatch):
    """A trip of whose code it is; a later compile doesn't load it again."""
    model, x = mlp(), torch.randn(8, 64)
    loads = []

    def other(check, inputs, spreads):
        loads.append(spreads)
        return "output 0 is 1 at [0, 0], Dynamo's graph gives 2"

    monkeypatch.setattr("fuseboard.capture.comparison.CaptureCheck.difference_as_it_runs", other)
    for expected in (1, 1):
        torch._dynamo.reset()
        with torch.no_grad():
            run = pinned(model)
            run(x)
            assert fuseboard.wait(120)
            assert torch.equal(run(x), model(x))
        assert len(loads) == expected
    first = fuseboard.last_report()
    (trip,) = {trip for graph in first.graphs for trip in graph.trips}
    assert (trip.plugin, trip.stage) == ("mkldnn", "lower")
    assert "Dynamo's graph gives 2" in trip.error


@pytest.mark.usefixtures("chosen")
def test_who_judges_by_the_settings_is_asked_in_the_workshop_alone():
    """Here it could change what the program's own threads run under."""
    model, x = mlp(), torch.randn(8, 64)
    stages = {"measure": MEASURE, "verify": "tests.support.stages:verify_in_float64"}
    with torch.no_grad():
        run = compiled(model, backends=["mkldnn", "eager"], stages=stages, margin=0.0)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("chosen")
def test_weights_that_change_while_it_is_compared_are_no_fault_of_its(monkeypatch):
    """A cache that calls write to, say: it isn't judged here then, and nobody is blamed."""
    model, x = mlp(), torch.randn(8, 64)
    eager = CaptureCheck._eager
    with torch.no_grad():

        def eager_then_changing(check, inputs):
            results = eager(check, inputs)
            model[0].weight.mul_(1.5)
            return results

        monkeypatch.setattr(CaptureCheck, "_eager", eager_then_changing)
        run = pinned(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    (report,) = loaded()
    assert not report.trips
    assert any("its inputs changed meanwhile" in note for note in report.notes)


# --- when the workshop fails ----------------------------------------------------------------------


def test_a_workshop_that_cant_be_started(monkeypatch, own_desk):
    """Calls go on; the graph is compiled within them."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model)
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
            fuseboard.wait(60)
    (report,) = fuseboard.last_report().graphs
    assert any("it can't be started" in note for note in report.notes)
    assert report.candidates


@pytest.mark.parametrize("missing", ["it", "room in it"])
@pytest.mark.thorough
def test_without_shared_memory_files_serve(monkeypatch, own_desk, tmp_path, missing):
    """Where there is no /dev/shm, or little, as in a container."""
    if missing == "it":
        monkeypatch.setattr(process, "_SHARED_MEMORY", tmp_path / "nowhere")
    else:
        monkeypatch.setattr(process, "_FURTHER_BYTES", 2**60)
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model)
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.thorough
def test_a_workshop_that_dies_ends_nothing_else(own_desk, plugin_module, caplog):
    """Dynamo's own graph answers, the report says what happened, and the next graph is served."""
    name = plugin_module("dies_in_lower", "os.kill(os.getpid(), signal.SIGSEGV)").__name__
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model, backends=[name, "eager"], min_region_us=0.0)
        run(x)
        assert fuseboard.wait(120)
        assert torch.equal(run(x), model(x))
        (report,) = fuseboard.last_report().graphs
        problem = "the workshop failed: it ended with SIGSEGV"
        assert problem in report.instead
        assert problem in str(fuseboard.last_report()).replace("\n ", "")
        assert caplog.text.count(problem) == 1
        other = compiled(model)
        other(x)
        assert fuseboard.wait(120)
    (report,) = fuseboard.last_report().graphs
    assert report.candidates


@pytest.mark.thorough
def test_a_workshop_that_hangs_is_ended(own_desk, plugin_module):
    """At the limit of the hook, by the workshop itself: the plugin trips there."""
    name = plugin_module("hangs_in_lower", "time.sleep(1000)").__name__
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model, backends=[name, "eager"], min_region_us=0.0, hook_limit_s=1.0)
        run(x)
        assert fuseboard.wait(120)
        assert torch.equal(run(x), model(x))
    trips = [trip for graph in fuseboard.last_report().graphs for trip in graph.trips]
    assert [trip.plugin for trip in trips] == [name]


PROGRAM = """
import os, sys, time
import torch
import fuseboard
from fuseboard.workshop.desk import desk
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
run = torch.compile(model, backend="fuseboard")
with torch.no_grad():
    run(torch.randn(8, 64))
while desk().workshop._child is None:
    time.sleep(0.01)
print(desk().workshop._child.pid, flush=True)
time.sleep({seconds})
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
@pytest.mark.thorough
def test_the_workshop_ends_with_the_program(tmp_path, end):
    """However that ends, and whatever the workshop is doing; files in shared memory go, too."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(end=end, seconds=0.5)))
    env = {**os.environ, "FUSEBOARD_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, cwd=ROOT, env=env
    )
    number = int(child.stdout.readline())
    assert child.wait(120) in (3, -9)
    end_s = time.monotonic() + 60
    while alive(number) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not alive(number)
    killed = end != "sys.exit(3)"
    assert killed or files_of(child.pid) == []
    with process.request_directory(0):  # which removes what killed ones left
        assert files_of(child.pid) == []


def files_of(number):
    """What a process has in shared memory."""
    with process.request_directory(0) as directory:
        parent = directory.parent
    return list(parent.glob(f"fuseboard-{number}-*"))


def alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{number}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.thorough
def test_a_forked_child_begins_anew():
    """It has neither the threads nor the workshop; its calls are answered all the same."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model)
        want = run(x)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            good = False
            try:
                good = torch.equal(run(x), want) and life().state is GraphState.WATCHING
                good = good and fuseboard.wait(120)
            finally:
                os.write(write, b"y" if good else b"n")
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"y"
        os.close(read)
        os.close(write)
        assert fuseboard.wait(120)


@pytest.mark.usefixtures("chosen")
@pytest.mark.thorough
def test_an_optimizer_steps_once_a_call():
    """Its graph holds the weights that it writes to, and is given them to be tried elsewhere."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    step = compiled(lambda: optimizer.step())
    for value in (0.9, 0.75, 0.575, 0.3875):
        weight.grad = torch.ones(4)
        step()
        assert fuseboard.wait(120)
        torch.testing.assert_close(weight.detach(), torch.full((4,), value))
    assert not [note for graph in ledger.graphs() for note in graph.notes if "within" in note]


@pytest.mark.usefixtures("chosen")
@pytest.mark.thorough
def test_the_state_of_an_optimizer_is_the_user_s():
    """Steps after the swap go on from those before it, with what was loaded into it meanwhile."""
    models = [mlp(), mlp()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    steps = optimizers[0].step, pinned(lambda: optimizers[1].step(), "inductor")
    for number in range(6):
        x = torch.randn(8, 64)
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
        if number in (1, 4):
            assert fuseboard.wait(120)
        if number == 3:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(own, other)
    assert loaded()
