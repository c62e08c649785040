"""Rewrites of Dynamo's graph: right ones stay, wrong ones are told of and dropped."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fuseboard
from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.profile.choose.stored_decision import _rewriters
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing
from tests.support.values import rnd

X = rnd(5, 7)


@pytest.fixture(autouse=True)
def _clear_ledger():
    ledger.clear()


def program(x, kept):
    """It writes to an input as well, which no rewrite may lose."""
    kept.add_(1.0)
    return torch.sin(x * 0.5).neg()


def instead(function, *args):
    """A hook that puts a call in the place of the sine."""

    def fuse(graph):
        (node,) = graph.graph.find_nodes(op="call_function", target=torch.sin)

        def rewrite():
            given = [node.args[0], *args]
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(function, tuple(given))
            new.meta["val"] = function(node.args[0].meta["val"], *args)
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)

        return [fuseboard.Fusion("sine", (node.name,), rewrite)]

    return fuse


def agrees(grad, **options):
    """A call gives eager's results, gradients and writes."""
    run = compiled(program, **options)
    found = []
    for function in (run, program):
        x, kept = X.clone().requires_grad_(grad), torch.zeros(3)
        result = function(x, kept)
        if grad:
            result.cos().sum().backward()
        found.append([result.detach(), kept, x.grad])
    torch.testing.assert_close(*found)


def as_cosine(x):
    return torch.cos(x - torch.pi / 2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_right_rewrite_is_what_is_captured(grad):
    """Autograd makes its backward."""
    with observing("good", fuse_dynamo=instead(as_cosine)):
        agrees(grad)
    graph = last_graph("joint" if grad else "inference")
    assert [(one.plugin, one.applied) for one in graph.fusions] == [("good", True)]
    ran = {op for one in ledger.graphs() for region in one.regions for op in region.ops}
    assert "aten.cos.default" in ran
    assert not all_trips()


def without_gradient(x):
    return torch.sin(x.detach())


WRONG = {
    "another function": (instead(torch.tanh), "what takes the place of"),
    "other strides": (instead(lambda x: torch.sin(x).t().contiguous().t()), "strides"),
    "raises": (lambda graph: 1 // 0, "ZeroDivisionError"),
    "answers one": (lambda graph: fuseboard.Fusion("r", (), lambda: None), "it isn't a list"),
    "erases too much": (
        lambda graph: [
            fuseboard.Fusion("r", (), lambda: graph.graph.output_node().update_arg(0, ()))
        ],
        "other outputs",
    ),
}


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_rewrite(which, grad):
    """It trips by its plugin's name, and the graph before it is captured."""
    hook, said = WRONG[which]
    with observing("bad", fuse_dynamo=hook), observing("good", fuse_dynamo=instead(as_cosine)):
        agrees(grad)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("bad", "fuse")
    assert trip.instead == "the graph without its rewrites"
    assert said in trip.error
    applied = [one.plugin for graph in ledger.graphs() for one in graph.fusions if one.applied]
    assert applied == ["good"]


def test_a_wrong_gradient():
    """Values are right: it is found when what was captured is held against Dynamo's own graph."""
    with observing("bad", fuse_dynamo=instead(without_gradient)):
        agrees(True)
    assert {(trip.plugin, trip.stage, trip.instead) for trip in all_trips()} == {
        ("bad", "fuse", "Dynamo's graph without its rewrites")
    }
    assert not last_graph("joint").fusions


def test_a_wrong_rewrite_raises_if_the_policy_says_so():
    """With the plugin's name."""
    with observing("bad", fuse_dynamo=instead(torch.tanh)), torch.no_grad():
        with pytest.raises(BackendCompilerFailed, match="plugin 'bad' failed in stage 'fuse'"):
            compiled(program, on_failure="raise")(X, torch.zeros(3))


def test_inputs_are_not_written_to_when_it_is_judged():
    """What comes before a rewrite runs on copies."""

    def writes(x):
        x.mul_(2.0)
        return torch.sin(x) * 1.0

    x, y = X.clone(), X.clone()
    with observing("good", fuse_dynamo=instead(as_cosine)), torch.no_grad():
        torch.testing.assert_close(compiled(writes)(x), writes(y))
    torch.testing.assert_close(x, y)
    assert last_graph().fusions
    assert not all_trips()


def test_a_decision_depends_on_who_rewrites():
    """Also where that is no backend."""
    before = _rewriters(board.session(resolve()))
    assert any(text.startswith("attention ") for text in before)
    without = _rewriters(board.session(resolve({"block": ["attention"]})))
    with observing("good", fuse_dynamo=instead(as_cosine)):
        more = _rewriters(board.session(resolve()))
    assert len(without) + 2 == len(before) + 1 == len(more)


def test_the_hook_by_name():
    """A module or object needs nothing else to be a plugin."""

    class Halved:
        @fuseboard.hookimpl
        def fuseboard_fuse_dynamo(self, graph):
            products = graph.graph.find_nodes(op="call_function", target=operator.mul)
            return [fuseboard.Fusion("halved", (n.name,), lambda: None) for n in products]

    fuseboard.register(Halved(), "halved")
    try:
        agrees(False)
    finally:
        fuseboard.unregister("halved")
    assert [one.plugin for one in last_graph().fusions] == ["halved"]
