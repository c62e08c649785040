"""Graphs that are beyond a budget when they are narrowed as a whole: the largest part within it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.fuse import narrow
from fuseboard.pipeline import mixing, narrowing
from fuseboard.pipeline.mixing import JUDGINGS, largest_part
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.judge.accuracy import Metric
from fuseboard.report.data import ledger
from fuseboard.torch_api import formats
from tests.support import narrowing as narrowing_plugin
from tests.support.backends import registered
from tests.support.narrowing import compiled, report, rows

TOLERANCES = {"bfloat16": 1e-2, "int8": 3e-2}


@pytest.fixture(autouse=True)
def _measured(policy_measured):
    """Choices are measured, within calls."""


@pytest.fixture(params=TOLERANCES)
def number_format(request, monkeypatch):
    """One format alone is offered; what the processor hasn't is computed all the same."""
    wanted = torch.bfloat16 if request.param == "bfloat16" else None
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == wanted)
    if wanted is not None:
        monkeypatch.setattr(narrow, "narrowing_to_int8", lambda graph: None)
    return request.param


class Layer(nn.Module):
    """A residual layer. Where ``shift`` is large, what it multiplies has few digits left of x."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.linear = nn.Linear(64, 64)
        with torch.no_grad():
            self.linear.weight -= self.linear.weight.mean(1, keepdim=True)

    def forward(self, x):
        return x + self.linear(nn.functional.layer_norm(x, (64,)) + self.shift).tanh()


def model(*shifts: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, shifts)).eval()


def error(got: torch.Tensor, module: nn.Module, x: torch.Tensor) -> float:
    return Metric("norm").distance(got, copy.deepcopy(module).double()(x.double()))


# --- the search -----------------------------------------------------------------------------------


def found(errors: list[float], limit: float = 1.0) -> tuple[mixing.Part, list[set[int]]]:
    """What is found where squares of errors add up, and which places were run together."""
    places = [(str(number),) for number in range(len(errors))]
    judged = []

    def error_of(some) -> float:
        judged.append({int(name) for (name,) in some})
        return sum(errors[number] ** 2 for number in judged[-1]) ** 0.5

    return largest_part(places, error_of, limit), judged


@pytest.mark.parametrize("culprit", [0, 17, 46, 63])
def test_one_culprit_among_many_is_left_out_wherever_it_is(culprit):
    """With little besides it, in as many runs as are allowed; what is kept was run as it is."""
    part, judged = found([5.0 if number == culprit else 0.05 for number in range(64)])
    kept = {int(name) for (name,) in part.places}
    assert culprit not in kept
    assert len(kept) >= 56
    assert kept in judged
    assert part.error == pytest.approx(0.05 * len(kept) ** 0.5)
    assert part.judged == len(judged) + 1 <= JUDGINGS


def test_places_that_come_first_are_kept_where_all_add_up():
    """Half of them are too many, or nearly."""
    part, _ = found([0.2] * 40)
    assert {int(name) for (name,) in part.places} >= set(range(20))
    assert part.error <= 1


def test_what_is_known_to_be_too_much_is_not_run_again():
    """Nor what holds it."""
    _, judged = found([0.1, 0.1, 0.1, 3.0])
    assert judged == [{0, 1}, {0, 1, 2}]


def test_own_errors_tell_how_many_to_try_first():
    """One run is enough where they are what comes out, but for a factor; without them half are."""
    errors = [0.1] * 60 + [0.5, 2.0, 3.0, 4.0]
    places = [(str(number),) for number in range(len(errors))]
    known = dict(zip(places, errors, strict=True))
    whole = 2 * sum(error**2 for error in errors) ** 0.5
    assert mixing.expected_within(places, known, whole, 2.0) == 61
    assert mixing.expected_within(places, known, whole, 1e-9) == 1
    assert mixing.expected_within(places, known, float("nan"), 2.0) is None
    assert mixing.expected_within(places, {}, whole, 2.0) is None
    judged = []

    def error_of(some) -> float:
        judged.append(len(some))
        return 2 * sum(known[place] ** 2 for place in some) ** 0.5

    part = largest_part(places, error_of, 2.0, 61)
    assert len(part.places) == judged[0] == 61


def test_nothing_may_be_within_a_budget():
    part, judged = found([2.0] * 4)
    assert part.places == ()
    assert part.error is None
    assert len(judged) == 6


# --- errors of each place -------------------------------------------------------------------------


@pytest.fixture
def bfloat16(monkeypatch):
    """Every processor is said to have bfloat16, and no integers."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == torch.bfloat16)
    monkeypatch.setattr(narrow, "narrowing_to_int8", lambda graph: None)


@pytest.mark.usefixtures("bfloat16")
def test_the_error_of_a_place_is_that_of_exact_inputs():
    """What layers before it did isn't counted."""
    net, x = model(0.0, 1000.0, 0.0), torch.randn(8, 64)
    with torch.no_grad():
        compiled(net, tolerance=1e-2)(x)
        for place, layer in zip(report().parts[0].places, net, strict=True):
            given = nn.functional.layer_norm(x, (64,)) + layer.shift
            operands = given, layer.linear.weight, layer.linear.bias
            rough = nn.functional.linear(*(one.bfloat16() for one in operands))
            want = nn.functional.linear(*operands)
            assert place.error == pytest.approx(Metric("norm").distance(rough, want), rel=1e-2)
            x = layer(x)


@pytest.mark.usefixtures("bfloat16")
def test_products_with_nothing_exact_between_them_have_one_error():
    """What attention reads in the narrower type is judged by what comes out of attention."""

    def heads(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).flatten(-2).sin()

    with torch.no_grad():
        compiled(heads, tolerance=1e-6)(torch.randn(2, 16, 64), torch.randn(64, 192))
    errors = [place.error for place in report().parts[0].places]
    assert len(errors) == 2
    assert errors[0] == errors[1] > 1e-3


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_model_with_one_bad_layer_gets_the_rest_narrowed(bad, number_format):
    """That layer stays exact; results are within the budget, also on other inputs."""
    net, x = model(*(1000.0 if number == bad else 0.0 for number in range(5))), torch.randn(16, 64)
    tolerance = TOLERANCES[number_format]
    whole, part = f"eager in {number_format}", f"eager partly in {number_format}"
    with torch.no_grad():
        run = compiled(net, tolerance=tolerance)
        got = run(x)
        assert rows()[whole].state == "inexact"
        assert rows()[whole].error > tolerance
        assert rows()[part].state == "chosen"
        assert rows()[part].error == pytest.approx(error(got, net, x), rel=1e-4)
        assert rows()[part].error <= tolerance
        exact = {place.module for place in report().parts[0].places if place.exact}
        assert f"{bad}.linear" in exact
        assert len(exact) <= 2
        assert len(rows()[part].exact) == len(exact)
        assert got.dtype == torch.float32
        assert error(run(-x), net, -x) <= 1.5 * tolerance
    assert not report().trips


def test_what_is_within_the_budget_as_a_whole_is_left_whole(number_format):
    with torch.no_grad():
        compiled(model(0.0, 0.0), tolerance=TOLERANCES[number_format])(torch.randn(16, 64))
    assert [name for name in rows() if number_format in name] == [f"eager in {number_format}"]
    assert not report().parts


def test_where_no_part_is_within_it_all_is_exact(number_format):
    """And what was tried is told."""
    net, x = model(0.0, 0.0, 0.0), torch.randn(16, 64)
    with torch.no_grad():
        assert torch.equal(compiled(net, tolerance=1e-6)(x), net(x))
    (part,) = report().parts
    assert part.error is None
    assert 1 < part.judged <= JUDGINGS
    assert all(place.exact for place in part.places)
    assert not [name for name in rows() if "partly" in name]


def test_what_stays_exact_is_told(number_format):
    """In text, as data, and on the page."""
    with torch.no_grad():
        compiled(model(0.0, 1000.0, 0.0), tolerance=TOLERANCES[number_format])(torch.randn(16, 64))
    explanation = fuseboard.last_report()
    (part,) = report().parts
    told = f"{part.error:.2g} with 2 of 3 places (found in {part.judged} runs)"
    for text in (str(explanation), explanation.to_html()):
        assert f"error {part.whole_error:.2g} in {number_format} as a whole" in text
        assert told in text
    worst = max(part.places, key=lambda place: place.error)
    assert f"exact: 1.linear ({worst.error:.2g} by itself)" in str(explanation)
    (graph,) = explanation.as_dict()["graphs"]
    assert graph["parts"][0]["error"] == part.error
    assert [one["exact"] for one in graph["parts"][0]["places"]] == [False, True, False]
    assert graph["candidates"][-1]["exact"] == rows()[f"eager partly in {number_format}"].exact


def test_a_later_process_takes_the_part_that_was_found(number_format, monkeypatch):
    """It is kept with the decision, and nothing is run to find it."""
    net, x = model(0.0, 1000.0, 0.0), torch.randn(16, 64)
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        ledger.clear()
        with torch.no_grad():
            results.append(compiled(net, tolerance=TOLERANCES[number_format])(x))
        assert rows()[f"eager partly in {number_format}"].state == "chosen"
        assert len(rows()[f"eager partly in {number_format}"].exact) == 1
        monkeypatch.setattr(narrowing, "Judge", _never)
    assert torch.equal(*results)
    assert report().decided == "taken from the cost database"
    assert "2 of 3 places, as an earlier process found" in str(fuseboard.last_report())


@pytest.mark.usefixtures("bfloat16")
def test_a_decision_on_another_part_is_none_on_this_one(monkeypatch):
    """As where two processes look for it at once: what runs here is verified here."""
    net, x = model(0.0, 1000.0, 0.0), torch.randn(16, 64)
    monkeypatch.setattr(narrowing, "expected_within", lambda *_: 1)
    for runs, exact in ((JUDGINGS, 1), (2, 2)):
        torch._dynamo.reset()
        ledger.clear()
        monkeypatch.setattr(mixing, "JUDGINGS", runs)
        with torch.no_grad():
            compiled(net, tolerance=TOLERANCES["bfloat16"])(x)
        assert len(rows()["eager partly in bfloat16"].exact) == exact
        assert report().decided != "taken from the cost database"
        monkeypatch.setattr(StoredDecision, "exact_places", lambda self: None)


def _never(*args: Any) -> Any:
    raise AssertionError("nothing is to be judged")


def test_modules_that_must_be_exact_stay_so(number_format):
    """The part is one of what the budget's table allows."""
    net, x = model(0.0, 1000.0, 0.0, 0.0), torch.randn(16, 64)
    with torch.no_grad():
        compiled(net, tolerance={"[012]": TOLERANCES[number_format]})(x)
    (part,) = report().parts
    assert [place.module for place in part.places] == ["0.linear", "1.linear", "2.linear"]
    assert rows()[f"eager partly in {number_format}"].state == "chosen"


@pytest.mark.thorough
def test_a_part_is_found_beside_the_calls(monkeypatch, as_users_run_it, chosen):
    """In the workshop, on the inputs of the first call; it answers calls here."""
    monkeypatch.setenv("FUSEBOARD_BLOCK", '["narrow"]')
    net, x = model(0.0, 1000.0, 0.0), torch.randn(16, 64)
    with registered(narrowing_plugin, narrowing_plugin.NAME), torch.no_grad():
        run = compiled(net, tolerance=1e-2)
        run(x)
        assert fuseboard.wait(120)
        got = run(x)
        assert not torch.equal(got, net(x))
        assert error(got, net, x) <= 1e-2
    part = rows()["eager partly in bf16"]
    assert part.state == "chosen"
    assert len(part.exact) == 1
    assert not report().trips
