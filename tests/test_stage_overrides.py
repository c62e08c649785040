"""``stages.fuse``, ``lower``, ``verify``, ``measure``: functions of the user's decide a stage."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fuseboard
from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.errors import SettingsError
from fuseboard.profile.choose.stored_decision import _settings
from fuseboard.report.data import ledger
from fuseboard.workshop.admission import why_in_calls
from tests.support import stages
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged
from tests.support.eager_loses import MEASURE
from tests.support.stages import path
from tests.support.values import rnd

X, W = rnd(6, 6), rnd(6, 6, seed=1)


@pytest.fixture(autouse=True)
def _clear():
    ledger.clear()
    stages.calls.clear()


def fused(x, w):
    """``x @ w + x * 0.5``, and its sine."""
    return torch.sin(torch.mm(x, w) + x * 0.5)


def agrees(*backends, **options):
    """Two inference calls give eager's values."""
    run = compiled(fused, *backends, **options)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(X, W), fused(X, W))


def trains(*backends, **options):
    """A training step gives eager's gradients."""
    run = compiled(fused, *backends, **options)
    grads = []
    for function in (run, fused):
        own = [value.detach().clone().requires_grad_() for value in (X, W)]
        function(*own).square().sum().backward()
        grads.append([value.grad for value in own])
    torch.testing.assert_close(*grads)


def deciding(stage, function):
    return {"stages": {stage: path(function)}}


def ops(kind="inference"):
    return {op for region in last_graph(kind).regions for op in region.ops}


def told():
    return [(trip.plugin, trip.stage, trip.instead) for trip in all_trips()]


# --- fuse -----------------------------------------------------------------------------------------


def test_rewrites_of_whole_graphs():
    """They are in what runs, under the function's name."""
    agrees(**deciding("fuse", stages.halves_graph))
    assert "aten.div.Tensor" in ops()
    (one,) = last_graph().fusions
    assert (one.name, one.plugin, one.applied) == ("r", path(stages.halves_graph), True)
    assert told() == []


def test_a_graph_that_is_written_to_when_it_is_asked_for():
    """Only what is offered is applied."""
    agrees(**deciding("fuse", stages.writes_when_asked))
    assert (last_graph().fusions, told()) == ([], [])


def test_rewrites_of_joint_graphs():
    """Forward and backward have them; gradients are eager's."""
    trains(**deciding("fuse", stages.halves_graph))
    assert "aten.div.Tensor" in ops("forward")
    assert len(last_graph("joint").fusions) == 2
    assert told() == []


def test_who_answers_decides_alone():
    """Plugins are asked only where the function leaves it to them."""
    with observing("other", fuse=stages.halves_graph):
        agrees(**deciding("fuse", stages.none_graph))
        assert (last_graph().fusions, "aten.mul.Tensor" in ops()) == ([], True)
        agrees(**deciding("fuse", stages.halves_region))
        assert [one.plugin for one in last_graph().fusions] == ["other"]


@pytest.mark.parametrize("backend", ["eager", "fake"])
def test_rewrites_of_regions(backend):
    """In the place of the backend's own, on eager's regions too."""
    with plugged(fuse=lambda graph, region: pytest.fail("it was asked") if region else None):
        names = [backend] if backend != "eager" else []
        agrees(*names, **deciding("fuse", stages.halves_region))
    (region,) = last_graph().regions
    assert [one.plugin for one in region.fusions] == [path(stages.halves_region)]
    assert told() == []


def test_switched_off_by_number():
    """``fuse_limit`` counts them."""
    agrees(fuse_limit=0, **deciding("fuse", stages.halves_graph))
    assert "aten.mul.Tensor" in ops()
    assert [one.applied for one in last_graph().fusions] == [False]


BAD = [stages.wrong_graph, stages.fuse_raises, stages.fuse_answers_one, stages.fuse_exits]


@pytest.mark.parametrize("function", BAD)
def test_misbehaving_rewrites_of_whole_graphs(function):
    """A trip that names the function and where it was set; the plugins' rewrites are used."""
    with observing("other", fuse=stages.halves_graph):
        agrees(**deciding("fuse", function))
    assert ("other", True) in [(one.plugin, one.applied) for one in last_graph().fusions]
    assert told()[0] == (path(function), "fuse", "the graph without its rewrites")
    assert "set in torch.compile(options=)" in all_trips()[0].error


@pytest.mark.parametrize("backend", ["eager", "fake"])
def test_wrong_rewrites_of_regions(backend):
    """They are found in the first call, and blamed on the function; eager answers."""
    with plugged():
        names = [backend] if backend != "eager" else []
        agrees(*names, **deciding("fuse", stages.wrong_region))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == (path(stages.wrong_region), "profile")
    assert "aten.sin.default" in trip.error


def test_rewrites_of_a_region_that_raise():
    """The backend's own are used."""
    with plugged(fuse=lambda graph, region: stages.halves_region(graph, "inference", region)):
        agrees("fake", **deciding("fuse", stages.fuse_raises))
    (region,) = last_graph().regions
    assert [one.plugin for one in region.fusions] == ["fake"]
    assert told()[-1] == (path(stages.fuse_raises), "fuse", "fake without it")


def test_a_function_that_changes_the_process():
    """It is put back."""
    before = torch.get_num_threads()
    agrees(**deciding("fuse", stages.fuse_changes_threads))
    assert torch.get_num_threads() == before
    assert told()[0][:2] == (path(stages.fuse_changes_threads), "fuse")


def test_failures_raise_if_the_policy_says_so():
    """With the function's name."""
    with pytest.raises(BackendCompilerFailed, match="no rewrite found"), torch.no_grad():
        compiled(fused, on_failure="raise", **deciding("fuse", stages.fuse_raises))(X, W)


def test_a_plugin_can_decide_the_rewrites():
    """By its name; of regions of other backends, too."""
    with plugged("other"), plugged("mine", fuse=stages.halves_region):
        agrees("other", stages={"fuse": "mine"})
    (region,) = last_graph().regions
    assert (region.backend, [one.plugin for one in region.fusions]) == ("other", ["mine"])


# --- lower ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "fake"])
def test_code_of_the_users(backend):
    """It runs in the place of the backend's, which isn't asked; it is judged as any."""
    with plugged(call=lambda call, region: pytest.fail("it was asked")):
        names = [backend] if backend != "eager" else []
        agrees(*names, **deciding("lower", stages.lowers))
    (name,) = stages.calls
    assert stages.calls[name] == 4  # two calls, of which the first is checked by two more
    (region,) = last_graph().regions
    assert region.backend == backend
    assert f"lowered by {path(stages.lowers)}, as stages.lower says" in region.notes
    assert "counted" in region.notes
    assert told() == []


def test_code_of_the_users_in_training():
    """Forward and backward."""
    trains(**deciding("lower", stages.lowers))
    assert len(stages.calls) == 2
    assert set(stages.calls.values()) == {3}  # one call, checked by two more


def test_code_of_the_users_is_compared():
    """Under the policy ``measured`` it is in each candidate but Dynamo's own graph."""
    with plugged():
        options = {"policy": "measured", "stages": {"measure": MEASURE}}
        options["stages"] |= deciding("lower", stages.lowers)["stages"]
        agrees("fake", "eager", **options)
    assert [(row.name, row.state) for row in last_graph().candidates] == [
        ("eager", "slower"),
        ("fake", "chosen"),
    ]
    assert sum(stages.calls.values()) > 2


def test_not_me():
    """None leaves a region to its backend."""
    with plugged():
        agrees("fake", **deciding("lower", stages.lowers_none))
    (region,) = last_graph().regions
    assert (region.backend, region.notes, told()) == ("fake", [], [])


@pytest.mark.parametrize("function", [stages.lowers_raise, stages.lowers_nothing])
def test_code_that_cant_be_had(function):
    """The region's own backend lowers it."""
    with plugged():
        agrees("fake", **deciding("lower", function))
    (region,) = last_graph().regions
    assert (region.backend, region.notes) == ("fake", [])
    assert told() == [(path(function), "lower", "fake without it")]
    assert "set in torch.compile(options=)" in all_trips()[0].error


BAD_CODE = {
    stages.lowers_wrong_values: "profile",
    stages.lowers_other_strides: "run",
    stages.lowers_what_raises: "run",
    stages.lowers_what_writes: "run",
}


@pytest.mark.parametrize("function", BAD_CODE)
@pytest.mark.parametrize("backend", ["eager", "fake"])
def test_code_that_misbehaves(function, backend):
    """It is found in the first call, and blamed on the function; eager answers."""
    with plugged():
        agrees(backend, **deciding("lower", function))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == (path(function), BAD_CODE[function], "eager")


def test_code_that_misbehaves_when_compared():
    """Whatever it is part of is out; Dynamo's own graph runs."""
    with plugged():
        agrees("fake", "eager", policy="measured", **deciding("lower", stages.lowers_wrong_values))
    assert [row.state for row in last_graph().candidates] == ["chosen", "failed"]
    assert told() == [(path(stages.lowers_wrong_values), "profile", "eager")]


def test_a_plugin_can_lower_what_others_got():
    """By its name, with its own options."""
    seen = []

    def lower(region):
        seen.append(region.backend)
        return fuseboard.lower_eagerly(region)

    with plugged("mine", lower=lower), plugged("other"):
        agrees("other", stages={"lower": "mine"})
    (region,) = last_graph().regions
    assert (seen, region.backend) == (["mine"], "other")
    assert "lowered by mine, as stages.lower says" in region.notes


def test_a_plugin_lowers_at_its_own_level():
    """It is given ops as it decomposes them; the region's backend isn't."""
    seen = {}

    def decompositions():
        return {torch.ops.aten.sin.default: lambda x: torch.cos(x - torch.pi / 2)}

    def lower(region):
        seen[region.backend] = {node.name for node in region.graph.graph.nodes}
        return fuseboard.lower_eagerly(region) if region.backend == "other" else None

    with (
        plugged("mine", decompositions=decompositions, lower=lower),
        plugged("other", lower=lower),
    ):
        agrees("other", stages={"lower": "mine"})
    assert told() == []
    assert "cos" in seen["mine"]
    assert "sin" not in seen["mine"]
    assert "sin" in seen["other"]


# --- verify, measure ------------------------------------------------------------------------------


def test_a_verdict_of_the_users():
    """Code that it rejects doesn't run."""
    with plugged():
        agrees("fake", **deciding("verify", stages.verify_rejects))
    assert told() == [("fake", "profile", "eager")]
    assert "it isn't wanted" in all_trips()[0].error


def test_a_judge_that_raises():
    """The default checks."""
    with plugged():
        agrees("fake", **deciding("verify", stages.verify_raises))
    assert told() == [(path(stages.verify_raises), "profile", "the default check")]


def test_a_measurement_of_the_users():
    """The fastest by it runs."""
    with plugged():
        agrees("fake", "eager", policy="measured", stages={"measure": MEASURE})
    rows = {row.name: row.state for row in last_graph().candidates}
    assert rows == {"eager": "slower", "fake": "chosen"}


def test_a_measurement_that_isnt_one():
    """The default measures."""
    with plugged():
        agrees("fake", "eager", policy="measured", **deciding("measure", stages.measure_none))
    assert told()[0] == (path(stages.measure_none), "profile", "the default measuring")
    assert {row.state for row in last_graph().candidates} == {"chosen", "slower"}


# --- settings, keys, other processes --------------------------------------------------------------


def takes_too_much(graph, region, speed):
    return None


@pytest.mark.parametrize("stage", ["fuse", "lower"])
def test_a_wrong_signature_is_an_error_at_once(stage):
    """With the place where it was set; nothing is compiled."""
    with pytest.raises(
        SettingsError, match=r"it takes '(graph|speed)', which isn't passed"
    ) as raised:
        board.session(resolve(deciding(stage, takes_too_much)))
    assert "set in torch.compile(options=)" in str(raised.value)


def test_decisions_depend_on_the_functions_code(tmp_path, monkeypatch):
    """One that was measured with another version of the file isn't found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "placement_for_a_test.py"
    file.write_text("def fuse(graph): return None\n")
    session = board.session(resolve({"stages.fuse": "placement_for_a_test:fuse"}))
    before = _settings(session)
    assert _settings(copy.copy(session)) == before
    file.write_text("def fuse(graph): return []\n")
    assert _settings(session) != before


def test_a_function_that_another_process_cant_import(monkeypatch):
    """What it decides is tried within calls."""
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    session = board.session(resolve(deciding("fuse", stages.halves)))
    assert why_in_calls(session, [X]) == ""
    made = types.ModuleType("made_here")
    made.fuse = stages.halves
    monkeypatch.setitem(sys.modules, "made_here", made)
    session = board.session(resolve({"stages.fuse": "made_here:fuse"}))
    told = "made_here:fuse, a function of the settings, can't be imported"
    assert told in why_in_calls(session, [X])
