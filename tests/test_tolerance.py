"""A budget of accuracy: what loses some is offered, held against float64, and may be refused."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.config import resolve
from fuseboard.contracts import Fusion, Narrowing
from fuseboard.errors import SettingsError
from fuseboard.fuse import narrow
from fuseboard.living import Living
from fuseboard.lower import background
from fuseboard.profile.choose.whole_calls import WholeCalls
from fuseboard.profile.judge.accuracy import Metric
from fuseboard.report.data import ledger
from fuseboard.run import proof
from fuseboard.run.proof import FURTHER_CALLS
from fuseboard.torch_api import formats
from fuseboard.totals import totals
from tests.support import narrowing
from tests.support.backends import observing, plugged, registered
from tests.support.beside import compare_all, life
from tests.support.eager_loses import MEASURE
from tests.support.narrowing import compiled, report

METRICS = "tests.support.narrowing"

#: Of a backend that a graph's first call tries.
QUICK = {"compiles_quickly": True}


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    """Choices are measured, within calls, and no format is offered, whatever the CPU has."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, device_type: False)
    monkeypatch.setattr(narrow, "narrowing_to_int8", lambda graph: None)


@pytest.fixture
def has_bfloat16(monkeypatch):
    """The processor is said to have bfloat16; where it hasn't, torch computes it all the same."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == torch.bfloat16)


def row(name="eager in bfloat16"):
    return next(one for one in report().candidates if one.name == name)


def mlp(size=64, seed=0):
    torch.manual_seed(seed)
    layers = (nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size), nn.Linear(size, size))
    return nn.Sequential(*layers).eval()


def error(got, model, x):
    with torch.no_grad():
        want = _double(model)(x.double())
    return float((got.double() - want).norm() / want.norm())


def _double(model):
    return copy.deepcopy(model).double()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tolerance", -1e-3),
        ("tolerance", 1.0),
        ("tolerance", math.nan),
        ("tolerance", "much"),
        ("tolerance.lm_head", 7),
        ("tolerance_metric", "nrom"),
    ],
)
def test_a_wrong_budget_is_told_with_the_place_where_it_was_set(key, value):
    """What was given, what is allowed, and where."""
    with pytest.raises(SettingsError) as caught:
        resolve({key: value})
    assert str(caught.value).startswith(f"{key} = {value!r}: allowed: ")
    assert "Set in torch.compile(options=)" in str(caught.value)


def test_a_table_may_come_from_the_environment(monkeypatch):
    """As a number, as JSON, or key by key."""
    monkeypatch.setenv("FUSEBOARD_TOLERANCE", "1e-2")
    assert resolve().tolerance == 1e-2
    monkeypatch.setenv("FUSEBOARD_TOLERANCE", '{"layers.*": 0.01}')
    assert resolve().tolerance == {"layers.*": 0.01}
    assert resolve().origin("tolerance.layers.*") == "environment FUSEBOARD_TOLERANCE"


def test_a_pattern_that_matches_nothing_is_an_error():
    """With the modules that there are."""
    run = compiled(mlp(), tolerance={"lm_head": 0.0, "0": 1e-2})
    with pytest.raises(Exception, match=r"tolerance.lm_head = 0, set in torch.compile") as caught:
        run(torch.randn(2, 64))
    assert "matches no module and no op. Nearest module paths: 0, 1, 2, 3" in str(caught.value)


def test_a_metric_must_be_there():
    """A path is imported before anything is compiled, and its arguments are looked at."""
    with pytest.raises(Exception, match=r"has no 'agrement'. Did you mean 'agreement'"):
        compiled(mlp(), tolerance_metric=f"{METRICS}:agrement")(torch.randn(2, 64))


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float16])
@pytest.mark.parametrize("shape", [(37, 199), (0, 3), (1,), ()])
def test_metrics_are_what_they_are_called(shape, dtype):
    """Of the difference of a result and its float64 value, relative to that."""
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(shape, dtype=torch.float32, generator=generator).to(dtype)
    got = (want * (1 + 0.01 * torch.randn(shape, generator=generator))).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    one, other = got.to(wide).flatten(), want.to(wide).flatten()
    if not want.numel():
        assert {Metric(name).distance(got, want) for name in ("norm", "max", "cosine")} == {0.0}
        return
    norm = (one - other).norm() / other.norm()
    assert Metric("norm").distance(got, want) == pytest.approx(float(norm), rel=1e-9)
    cosine = torch.vdot(one, other).real / (one.norm() * other.norm())
    assert Metric("cosine").distance(got, want) == pytest.approx(1 - float(cosine), abs=1e-12)
    if not dtype.is_complex:
        largest = (one - other).abs().max() / other.abs().max()
        assert Metric("max").distance(got, want) == pytest.approx(float(largest), rel=1e-9)


@pytest.mark.parametrize("name", ["norm", "max", "cosine"])
def test_what_is_not_finite_must_be_so_on_both_sides(name):
    """NaN and infinities count as right where float64 has the same, and as endless errors else."""
    special = torch.tensor([1.0, math.nan, math.inf, -2.0])
    assert Metric(name).distance(special, special.double()) == 0
    assert Metric(name).distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf])) > 0.9
    assert Metric(name).distance(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert Metric(name).distance(torch.ones(3), torch.zeros(3)) == math.inf


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("has_bfloat16")
def test_nothing_that_loses_accuracy_is_offered_by_default(monkeypatch):
    """No plugin is asked, nothing is measured, and results are eager's, bit by bit."""
    asked = []
    model, x = mlp(), torch.randn(8, 64)
    with observing(narrow=lambda graph: asked.append(graph)), torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
    assert not asked
    assert not report().tolerance
    assert all(one.error is None and one.tolerance is None for one in report().candidates)


@pytest.mark.usefixtures("has_bfloat16")
def test_what_is_within_the_budget_may_win():
    """Its error is measured and told; results keep their dtype."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        got = compiled(model, tolerance=1e-2)(x)
    assert got.dtype == torch.float32
    assert row().state == "chosen"
    assert row().tolerance == 1e-2
    assert 1e-4 < row().error <= 1e-2
    assert row().error == pytest.approx(error(got, model, x), rel=1e-6)
    assert row("eager").error < 1e-6
    assert {one.value.split("[")[0] for one in report().nodes if "addmm" in one.op} == {"bfloat16"}
    assert {one.value.split("[")[0] for one in report().nodes if "gelu" in one.op} == {"float32"}


@pytest.mark.usefixtures("has_bfloat16")
def test_the_budget_and_errors_are_told():
    """In text, as data, and on the page."""
    with torch.no_grad():
        compiled(mlp(), tolerance=1e-2)(torch.randn(8, 64))
    explanation = fuseboard.last_report()
    shown = f"{row().error:.2g}"
    for text in (str(explanation), explanation.to_html()):
        assert "tolerance" in text
        assert "0.01 (norm)" in text
        assert shown in text
    (graph,) = explanation.as_dict()["graphs"]
    assert graph["tolerance"] == "0.01 (norm)"
    assert [one["error"] for one in graph["candidates"]][1] == row().error


@pytest.mark.usefixtures("has_bfloat16")
def test_what_is_beyond_the_budget_is_refused_with_its_error():
    """Results are exact."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(compiled(model, tolerance=1e-4)(x), model(x))
    assert row().state == "inexact"
    text = f"its error against float64 is {row().error:.2g} (norm), tolerance allows 0.0001"
    assert row().problem == text
    assert not report().trips
    assert row("eager").state == "chosen"


@pytest.mark.usefixtures("has_bfloat16")
def test_what_hardly_is_within_the_budget_is_refused():
    """Other inputs have other errors, and one beyond the budget would end it for good."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        compiled(model, tolerance=1e-2)(x)
        error = row().error
        assert row().state != "inexact"
        compiled(model, tolerance=error / 0.9)(x)  # by a part of it, if at all
    assert (row().state, row().error) == ("inexact", error)
    assert "more than 0.75 of the tolerance" in row().problem
    with torch.no_grad():
        compiled(model, tolerance=error / 0.7)(x)
    assert (row().state != "inexact", row().error) == (True, error)


@pytest.mark.usefixtures("has_bfloat16")
def test_each_result_is_held_to_the_budget():
    """A small result with a large error isn't hidden by a large one with a small error."""

    def both(x, w):
        return x @ w, (x @ w).sum(-1) - (x @ w).sum(-1).mean()

    x, w = torch.randn(64, 64), torch.eye(64) + 1e-3
    x = x - x.mean(-1, keepdim=True)
    with torch.no_grad():
        compiled(both, tolerance=1e-2)(x, w)
    assert row().state == "inexact"


@pytest.mark.usefixtures("has_bfloat16")
def test_integers_that_floats_reach_count_by_their_share():
    """Where one in a hundred is another, the budget has to allow one in a hundred."""
    model, x = mlp(), torch.randn(1000, 64)
    with torch.no_grad():
        got = compiled(lambda x: model(x).argmax(-1), tolerance=0.2)(x)
        wrong = float((got != _double(model)(x.double()).argmax(-1)).double().mean())
    assert row().error == pytest.approx(wrong)
    assert 0 < wrong < 0.2


@pytest.mark.usefixtures("has_bfloat16")
def test_a_users_metric_measures():
    """By a path; here the share of rows whose largest element is another."""
    model, x = mlp(), torch.randn(1000, 64)
    with torch.no_grad():
        got = compiled(model, tolerance=0.2, tolerance_metric=f"{METRICS}:agreement")(x)
        wrong = narrowing.agreement(got, _double(model)(x.double()))
    assert row().error == pytest.approx(wrong)
    assert row().state == "chosen"


@pytest.mark.usefixtures("has_bfloat16")
@pytest.mark.parametrize(
    ("metric", "told"), [("failing", "raised ArithmeticError: of (8, 64)"), ("negative", "-1.0")]
)
def test_a_metric_that_fails_makes_all_exact_and_is_told_once(metric, told):
    """It is the user's, so no plugin trips."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        got = compiled(model, tolerance=0.2, tolerance_metric=f"{METRICS}:{metric}")(x)
        assert torch.equal(got, model(x))
    assert row().state == "inexact"
    assert sum(told in note for note in report().notes) == 1
    assert not report().trips


@pytest.mark.usefixtures("has_bfloat16")
def test_modules_may_be_left_exact():
    """What no pattern matches is exact, and so is what a more specific one allows no error."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.lm_head = nn.Linear(64, 64)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return self.lm_head(x)

    allowed = {"layers.*": 1e-2, "layers.1": 0}
    with torch.no_grad():
        compiled(Model().eval(), tolerance=allowed)(torch.randn(8, 64))
    found = {one.module: one.value.split("[")[0] for one in report().nodes if "addmm" in one.op}
    wide, narrow = "float32", "bfloat16"
    assert found == {"layers.0": narrow, "layers.1": wide, "layers.2": narrow, "lm_head": wide}
    assert report().tolerance == "0.01 in layers.*, 0 in layers.1 (norm)"


@pytest.mark.usefixtures("has_bfloat16")
def test_modules_with_different_budgets_are_different_candidates():
    """One narrows what is allowed most, the next one less as well, and is held to less."""
    with torch.no_grad():
        compiled(mlp(), tolerance={"0": 1e-2, "3": 1e-4})(torch.randn(8, 64))
    rows = {one.name: one for one in report().candidates}
    assert rows["eager in bfloat16"].tolerance == 1e-2
    assert rows["eager in bfloat16 for 0.0001"].state == "inexact"
    assert rows["eager in bfloat16"].state == "chosen"


def test_a_processor_without_the_format_says_so():
    """Nothing is emulated."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(compiled(model, tolerance=1e-2)(x), model(x))
    for name in ("bfloat16", "float16"):
        assert (
            f"{name} isn't offered by narrow: the CPU has no instructions for it" in report().notes
        )


@pytest.mark.parametrize(("size", "state"), [(1.0, "chosen"), (1e5, "inexact")])
def test_what_a_format_cannot_hold_is_an_endless_error(size, state, monkeypatch):
    """Half types with few bits for exponents are more exact, and overflow."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == torch.float16)
    model, x = mlp(), size * torch.randn(8, 64)
    with torch.no_grad():
        compiled(model, tolerance=1e-2)(x)
    assert row("eager in float16").state == state
    assert (row("eager in float16").error < 1e-3) == (state == "chosen")


@pytest.mark.usefixtures("has_bfloat16")
def test_training_is_exact_unless_it_is_told_otherwise():
    """With ``tolerance_training`` gradients are held against float64 as well."""
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    for training in (False, True):
        model = mlp()
        torch._dynamo.reset()
        run = compiled(model, tolerance=1e-2, tolerance_training=training)
        run(x).square().mean().backward()
        own = _double(model)
        own(x.double()).square().mean().backward()
        kinds = {one.kind: one for one in fuseboard.last_report().graphs}
        for kind in ("forward", "backward"):
            names = [one.name for one in kinds[kind].candidates]
            assert ("eager in bfloat16" in names) == training
        for mine, exact in zip(model.parameters(), own.parameters(), strict=True):
            limit = 3e-2 if training else 1e-5
            assert float((mine.grad - exact.grad).norm() / exact.grad.norm()) < limit


# --- plugins --------------------------------------------------------------------------------------


def test_a_backend_gets_the_narrower_graph():
    """It claims and lowers it as any other, and is judged by what that computes."""
    seen = []

    def lower(region):
        seen.append(_dtypes(region.graph))
        return fuseboard.lower_eagerly(region)

    model, x = mlp(), torch.randn(8, 64)
    with (
        registered(narrowing, narrowing.NAME),
        plugged(lower=lower, info=QUICK) as name,
        torch.no_grad(),
    ):
        got = compiled(model, name, tolerance=1e-2)(x)
        assert row(f"{name} in bf16").state == "chosen"
    assert seen == [{torch.float32}, {torch.bfloat16}]
    assert error(got, model, x) <= 1e-2


def _dtypes(graph):
    """Those of linear layers."""
    nodes = [node for node in graph.graph.nodes if "addmm" in str(node.target)]
    return {node.meta["val"].dtype for node in nodes}


def test_wrong_code_for_the_narrower_graph_is_a_failure_within_any_budget():
    """A region has to compute what its graph does; the budget is for narrower numbers alone."""

    def wrong(call, region):
        def run(args):
            return [value * 1.2 for value in call(args)]

        return run if _dtypes(region.graph) == {torch.bfloat16} else call

    model, x = mlp(), torch.randn(8, 64)
    with (
        registered(narrowing, narrowing.NAME),
        plugged(call=wrong, info=QUICK) as name,
        torch.no_grad(),
    ):
        compiled(model, name, tolerance=0.5)(x)
        assert row(f"{name} in bf16").state == "failed"
        assert [one.plugin for one in report().trips] == [name]


@pytest.mark.parametrize(
    ("apply", "told"),
    [("other dtype", "is torch.bfloat16 of"), ("raises", "raised ZeroDivisionError")],
)
def test_a_plugin_that_narrows_wrongly_trips(apply, told):
    """Its rewrites are dropped, and the graph runs in its own numbers."""

    def narrow(graph):
        result = graph.graph.output_node().args[0][0]

        def cast():
            if apply == "raises":
                raise ZeroDivisionError
            with graph.graph.inserting_after(result):
                made = graph.graph.call_function(
                    torch.ops.aten._to_copy.default, (result,), {"dtype": torch.bfloat16}
                )
            made.meta["val"] = result.meta["val"].to(torch.bfloat16)
            result.replace_all_uses_with(made, lambda user: user is not made)

        return [Narrowing("half", "all", (Fusion("cast", (result.name,), cast),))]

    model, x = mlp(), torch.randn(8, 64)
    with observing(narrow=narrow) as name, torch.no_grad():
        assert torch.equal(compiled(model, tolerance=0.5)(x), model(x))
    (trip,) = report().trips
    assert trip.plugin == name
    assert told in trip.error


@pytest.mark.usefixtures("has_bfloat16")
def test_products_of_all_kinds_are_narrowed():
    """Convolutions, products of batches and attention; what moves results needs no cast again."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 4, 4)
            self.heads = nn.Linear(64, 192)

        def forward(self, x, mask):
            x = self.conv(x).flatten(2).transpose(1, 2)
            q, k, v = (
                y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.heads(x).split(64, -1)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
            return y.transpose(1, 2).flatten(2) @ x.transpose(1, 2)

    model = Model().eval()
    x, mask = torch.randn(2, 3, 36, 20), torch.randn(2, 1, 45, 45)
    with torch.no_grad():
        got = compiled(model, tolerance=2e-2)(x, mask)
    assert row().state == "chosen"
    ops = [one.op for one in report().nodes]
    products = [o for o in ops if any(p in o for p in ("convolution", "mm", "attention"))]
    assert len(products) == 4  # none is left beside what took its place
    values = {one.value for one in report().nodes if one.op in products}
    assert all("bfloat16" in value for value in values)
    assert got.dtype == torch.float32


# --- later calls ----------------------------------------------------------------------------------


class Sum(nn.Module):
    """A product that cancels where the rows of its input have no sum: its error is large there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 8))

    def forward(self, x):
        return x @ self.weight.exp()  # ones, and nothing that is rounded to integers


def benign(seed=0):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) + 1


def cancelling():
    x = benign()
    return x - x.mean(-1, keepdim=True)


@pytest.mark.usefixtures("has_bfloat16")
@pytest.mark.parametrize(
    ("verify", "calls"),
    [("choice", 1), ("choice", FURTHER_CALLS - 1), ("always:2", FURTHER_CALLS + 4)],
)
def test_a_later_call_beyond_the_budget_ends_it_for_good(verify, calls, caplog):
    """It is answered exactly, told once, and later processes are told as well."""
    model = Sum().eval()
    options = {"tolerance": 1e-2, "verify": verify}
    with torch.no_grad():
        run = compiled(model, **options)
        run(benign())
        assert row().state == "chosen"
        for seed in range(calls):
            run(benign(seed))
        for _ in range(2 if verify != "choice" else 1):  # every second one is looked at
            got = run(cancelling())
        assert torch.equal(got, model(cancelling()))
        assert torch.equal(run(benign(7)), model(benign(7)))
        assert row().state == "failed"
        assert "its error against float64" in row().problem
        assert len(report().trips) == 1
        assert caplog.text.count("tolerance allows") == 1
        torch._dynamo.reset()
        ledger.clear()
        again = compiled(model, **options)
        assert torch.equal(again(benign()), model(benign()))
        assert row().state == "failed"
        assert report().decided == "taken from the cost database"


@pytest.mark.usefixtures("has_bfloat16")
def test_calls_after_the_proof_are_not_looked_at(monkeypatch):
    """So many are held against float64, and then nothing but the program runs."""
    made = []
    real = proof.float64_run
    monkeypatch.setattr(proof, "float64_run", lambda *args: made.append(1) or real(*args))
    with torch.no_grad():
        run = compiled(Sum().eval(), tolerance=1e-2)
        for seed in range(FURTHER_CALLS + 5):
            run(benign(seed))
    assert len(made) == FURTHER_CALLS
    assert row().state == "chosen"


@pytest.mark.usefixtures("has_bfloat16")
def test_another_budget_is_another_decision():
    """A decision holds for the budget, the metric and its code that it was made under."""
    model, x = mlp(), torch.randn(8, 64)
    decided = []
    for options in ({"tolerance": 1e-2}, {"tolerance": 1e-2}, {"tolerance": 2e-2}, {}):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(model, **options)(x)
        decided.append(report().decided)
        if len(decided) == 2:
            assert row().error > 1e-4  # as it was measured then
    recalled = "taken from the cost database"
    assert [one == recalled for one in decided] == [False, True, False, False]


# --- beside the calls -----------------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch, as_users_run_it, chosen):
    """Graphs are tried in the workshop, where one plugin alone narrows, whatever the CPU has."""
    monkeypatch.setenv("FUSEBOARD_BLOCK", '["narrow"]')
    monkeypatch.setattr(background, "_unsettled", Living())
    with registered(narrowing, narrowing.NAME):
        yield


def _until(happened):
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("beside")
@pytest.mark.thorough
def test_what_is_proven_on_further_calls_answers_them():
    """In each process, and Dynamo's graph until then; an error within the budget is no trip."""
    model = Sum().eval()
    for _ in range(2):
        torch._dynamo.reset()
        background._unsettled.clear()
        with torch.no_grad():
            run = compiled(model, tolerance=1e-2)
            run(benign())
            _until(lambda: life()._proving is not None)
            calls = 0
            while (proving := life()._proving) is not None:
                x, is_last = benign(calls), proving.left <= 1
                assert torch.equal(run(x), model(x)) or is_last
                calls += 1
            assert fuseboard.wait(120)
            got = run(benign(3))
        assert calls >= FURTHER_CALLS
        assert row("eager in bf16").state == "chosen"
        assert not torch.equal(got, model(benign(3)))
        assert error(got, model, benign(3)) <= 1e-2
        assert not report().trips


@pytest.mark.usefixtures("beside")
def test_a_further_call_beyond_the_budget_leaves_dynamos_graph():
    """It was right on the first call's inputs alone; no call was answered by it."""
    before = totals.read().exceeded
    model = Sum().eval()
    with torch.no_grad():
        run = compiled(model, tolerance=1e-2)
        run(benign())
        _until(lambda: life()._chosen is not None)
        while not life().settled:
            assert torch.equal(run(cancelling()), model(cancelling()))
        assert torch.equal(run(benign()), model(benign()))
    _until(lambda: totals.read().exceeded > before)  # told in a thread, after it was decided
    assert totals.read().exceeded == before + 1
    (trip,) = report().trips
    assert "its error against float64" in trip.error


@pytest.mark.usefixtures("beside")
def test_who_waits_has_further_calls_compared_within_them():
    """There are no other inputs than the first call's by then."""
    before = totals.read().exceeded
    model = Sum().eval()
    with torch.no_grad():
        run = compiled(model, tolerance=1e-2)
        run(benign())
        assert fuseboard.wait(120)
        assert not torch.equal(run(benign()), model(benign()))
        assert torch.equal(run(cancelling()), model(cancelling()))
        assert torch.equal(run(benign()), model(benign()))
        (trip,) = report().trips
        assert "its error against float64" in trip.error
        assert totals.read().exceeded == before + 1
        torch._dynamo.reset()
        again = compiled(model, tolerance=1e-2)  # as in a later process
        again(benign())
        assert fuseboard.wait(120)
        assert torch.equal(again(benign()), model(benign()))


@pytest.mark.usefixtures("beside")
def test_calls_of_other_sizes_are_held_to_the_budget():
    """The program answers them once it was compared on some of their size."""
    model = Sum().eval()
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(
            model,
            backend="fuseboard",
            dynamic=True,
            options={
                "backends": ["eager"],
                "margin": 0.0,
                "stages": {"measure": MEASURE},
                "tolerance": 1e-2,
            },
        )
        run(benign())
        assert fuseboard.wait(120)
        assert not torch.equal(run(benign()), model(benign()))
        many = benign().repeat(40, 1)
        run(many)
        compare_all()
        got = run(many)
    assert not torch.equal(got, model(many))
    assert error(got, model, many) <= 1e-2
    assert not report().trips


@pytest.mark.usefixtures("beside")
def test_a_table_of_modules_holds_in_the_workshop():
    """What no pattern matches stays exact: casts are in the first layer alone."""
    model, x = mlp(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model, tolerance={"0": 1e-2})
        assert torch.equal(run(x), model(x))
        assert fuseboard.wait(120)
        got = run(x)
    assert not torch.equal(got, model(x))
    assert error(got, model, x) <= 1e-2
    narrowed = [node for node in report().nodes if "bfloat16" in node.value and "mm" in node.op]
    assert len(narrowed) == 1
    assert not any("within calls" in note for note in report().notes)


class Cache(nn.Module):
    """Writes its result to an input, so Dynamo's own graph isn't among the candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x, cache):
        cache.copy_(self.layers(x))
        return cache + 1


@pytest.mark.usefixtures("has_bfloat16")
def test_whole_calls_are_timed_once_none_is_held_against_float64(monkeypatch):
    """Else the comparison with Dynamo's graph would time the float64 runs."""
    decide, proving = WholeCalls._decide, []

    def noting(self, args):
        proving.append([runner.is_proving for runner in self._runners])
        return decide(self, args)

    monkeypatch.setattr(WholeCalls, "_decide", noting)
    run = compiled(Cache().eval(), tolerance=1e-2)
    with torch.no_grad():
        for seed in range(FURTHER_CALLS + 3):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
            run(x, torch.ones(3, 64))
    assert row().state == "chosen"
    assert proving == [[False]]
