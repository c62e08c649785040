"""Rewrites of whole graphs: right ones stay, wrong ones are told of and dropped."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from fuseboard.profile.judge.rewrites import changed, judge_rewrites, peak_bytes
from fuseboard.report.data import ledger
from fuseboard.torch_api.copies import copy_graph
from tests.support.backends import all_trips, compiled, observing
from tests.support.values import assert_same, rnd

aten = torch.ops.aten


def rewriting(target, change, kind=None):
    """A hook that offers a rewrite of each call of an op in whole graphs."""

    def fuse(graph, kind, region):
        if region is not None or kind not in kinds:
            return None
        nodes = graph.graph.find_nodes(op="call_function", target=target)
        return [fuseboard.Fusion("r", (n.name,), lambda n=n: change(graph, n)) for n in nodes]

    kinds = (kind,) if kind else ("inference", "joint")
    return fuse


def instead(make):
    """Put what ``make(graph, node)`` adds before a node in its place."""

    def change(graph, node):
        with graph.graph.inserting_before(node):
            new = make(graph.graph, node)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)

    return change


def call(target, *args, **kwargs):
    return instead(lambda graph, node: graph.call_function(target, args or node.args, kwargs))


def fused(x, w):
    """``x @ w + x * 0.5``, and its sine."""
    return torch.sin(torch.mm(x, w) + x * 0.5)


def trained(fn, x, w):
    own = [value.detach().clone().requires_grad_() for value in (x, w)]
    fn(*own).square().sum().backward()
    return [value.grad for value in own]


X, W = rnd(6, 6), rnd(6, 6, seed=1)


def told():
    return [(trip.plugin, trip.stage, trip.instead) for trip in all_trips()]


def halved(graph, node):
    """``x / 2`` for ``x * 0.5``."""
    if node.args[1] == 0.5:
        call(aten.div.Tensor, node.args[0], 2.0)(graph, node)


RIGHT = {
    "another op": (aten.mul.Tensor, halved),
    "nothing": (aten.mul.Tensor, lambda graph, node: None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rewrites_stay(name):
    with observing("good", fuse=rewriting(*RIGHT[name])):
        with torch.no_grad():
            torch.testing.assert_close(compiled(fused)(X, W), fused(X, W))
        torch.testing.assert_close(trained(compiled(fused), X, W), trained(fused, X, W))
    done = [one for graph in ledger.graphs() for one in graph.fusions if one.plugin == "good"]
    assert done
    assert all(one.applied for one in done)
    assert not all_trips()


WRONG = {
    "another function": (
        aten.sin.default,
        instead(lambda g, n: g.call_function(aten.tanh.default, n.args)),
    ),
    "another constant": (
        aten.mul.Tensor,
        instead(lambda g, n: g.call_function(aten.mul.Tensor, (n.args[0], 0.5001))),
    ),
    "arguments the other way": (
        aten.mm.default,
        instead(lambda g, n: g.call_function(aten.mm.default, n.args[::-1])),
    ),
    "left out": (aten.mul.Tensor, lambda g, n: n.replace_all_uses_with(n.args[0])),
    "changed in place": (aten.mul.Tensor, lambda g, n: n.update_arg(1, 0.25)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewrite_of_an_inference_graph(name):
    with observing("bad", fuse=rewriting(*WRONG[name])):
        with torch.no_grad():
            torch.testing.assert_close(compiled(fused)(X, W), fused(X, W))
    assert told() == [("bad", "fuse", "the graph without its rewrites")]
    assert "what takes the place of" in all_trips()[0].error


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewrite_of_a_joint_graph(name):
    with observing("bad", fuse=rewriting(*WRONG[name], kind="joint")):
        torch.testing.assert_close(trained(compiled(fused), X, W), trained(fused, X, W))
    assert told() == [("bad", "fuse", "the graph without its rewrites")]


def test_a_wrong_gradient():
    """The rewrite touches the backward alone."""
    wrong = rewriting(
        aten.cos.default, instead(lambda g, n: g.call_function(aten.sin.default, n.args)), "joint"
    )
    with observing("bad", fuse=wrong):
        torch.testing.assert_close(trained(compiled(fused), X, W), trained(fused, X, W))
    assert told() == [("bad", "fuse", "the graph without its rewrites")]


def test_only_the_wrong_plugins_rewrites_are_dropped():
    with (
        observing("good", fuse=rewriting(*RIGHT["another op"])),
        observing("bad", fuse=rewriting(*WRONG["another function"])),
        torch.no_grad(),
    ):
        torch.testing.assert_close(compiled(fused)(X, W), fused(X, W))
    assert {plugin for plugin, _, _ in told()} == {"bad"}
    (graph,) = ledger.graphs()
    assert [one.plugin for one in graph.fusions] == ["good"]


def test_symbolic_sizes():
    """They have the example's numbers."""
    with observing("bad", fuse=rewriting(*WRONG["another function"])):
        fn = compiled(lambda x: torch.sin(x) * x.shape[0], dynamic=True)
        for rows in (4, 7):
            x = rnd(rows, 3)
            assert_same(fn(x), torch.sin(x) * rows)
            own = x.clone().requires_grad_()
            fn(own).sum().backward()
            torch.testing.assert_close(own.grad, torch.cos(x) * rows)
    assert set(told()) == {("bad", "fuse", "the graph without its rewrites")}


def test_random_numbers_before_the_rewrite_are_the_same_for_both():
    def draws(x):
        return torch.sin(torch.nn.functional.dropout(x, 0.5)) + 1

    change = instead(lambda g, n: g.call_function(aten.tanh.default, n.args))
    with observing("bad", fuse=rewriting(aten.sin.default, change, "joint")):
        results = []
        for fn in (compiled(draws), draws):
            torch.manual_seed(3)
            results.append(fn(X.clone().requires_grad_()))
    torch.testing.assert_close(*results)
    assert told() == [("bad", "fuse", "the graph without its rewrites")]


def test_a_draw_that_was_rewritten_is_not_judged():
    def draws(x):
        return torch.rand_like(x) + x

    def other(graph, node):
        return graph.call_function(aten.rand.default, (list(node.meta["val"].shape),))

    with observing("odd", fuse=rewriting(aten.rand_like.default, instead(other))):
        with torch.no_grad():
            compiled(draws)(X)
    assert not all_trips()


def test_verify_off_judges_nothing():
    with observing("bad", fuse=rewriting(*WRONG["another function"])), torch.no_grad():
        torch.testing.assert_close(
            compiled(fused, verify="off", backends=["eager"])(X, W),
            torch.tanh(torch.mm(X, W) + X * 0.5),
        )


def test_the_policy_may_be_to_raise():
    with observing("bad", fuse=rewriting(*WRONG["another function"])), torch.no_grad():
        with pytest.raises(
            BackendCompilerFailed, match=r"plugin 'bad' failed in stage 'fuse'.*sin"
        ):
            compiled(fused, on_failure="raise")(X, W)


def test_what_eager_raises_is_the_users():
    def out_of_range(x, i):
        return torch.sin(x)[i]

    change = WRONG["another function"]
    with observing("bad", fuse=rewriting(*change)), torch.no_grad():
        with pytest.raises(IndexError):
            compiled(out_of_range)(X, torch.tensor([9]))


def test_inputs_that_are_not_known_are_told():
    before, after = both(fused, X, W)
    call(aten.cos.default)(after, first(after, aten.sin.default))
    answer = judge_rewrites(before, after, None)
    assert answer == "the values of its inputs aren't known when it is compiled"


def test_what_would_take_too_much_memory_is_told(monkeypatch):
    """Eager's activations may not fit where a memory budget is set."""
    before, after = both(fused, X, W)
    call(aten.cos.default)(after, first(after, aten.sin.default))
    monkeypatch.setattr("fuseboard.profile.judge.rewrites.free_bytes", lambda device: 500)
    answer = judge_rewrites(before, after, [X, W])
    assert answer.startswith("running what comes before them would take 0 MiB")


def test_the_peak_of_a_graph():
    """36 floats each: the product and ``x * 0.5`` at once, then their sum beside both."""
    graph, _ = both(fused, X, W)
    assert peak_bytes(graph) == 3 * 36 * 4
    graph, _ = both(lambda x: torch.relu(x.t().view(-1).view(6, 6).t() + 1).t() * 2, X.t())
    assert peak_bytes(graph) == 2 * 36 * 4


# --- what differs ---------------------------------------------------------------------------------


def both(function, *inputs):
    """A graph, and a copy of it to rewrite."""
    graph = make_fx(lambda *args: (function(*args),), tracing_mode="fake")(*inputs)
    return graph, copy_graph(graph)


def first(graph, target):
    return graph.graph.find_nodes(op="call_function", target=target)[0]


def test_a_copy_differs_in_nothing():
    assert changed(*both(fused, X, W)) is None


def test_only_the_part_that_was_changed_is_run():
    before, after = both(fused, X, W)
    call(aten.div.Tensor)(after, first(after, aten.mul.Tensor))
    change = changed(before, after)
    assert [node.name for node in change.outputs] == ["mul"]
    targets = [n.target for n in change.before.graph.nodes if n.op == "call_function"]
    assert targets == [aten.mul.Tensor]


def test_items_of_a_tuple_come_with_what_makes_it():
    before, after = both(lambda x: torch.split(x, 2)[1] * 2, X)
    item = next(n for n in after.graph.nodes if n.target is operator.getitem and n.users)
    item.update_arg(1, 0)
    assert not judge_rewrites(before, after, [X]).ok


def test_other_outputs_are_no_rewrite():
    before, after = both(fused, X, W)
    end = after.graph.output_node()
    end.args = ((*end.args[0], end.args[0][0]),)
    assert judge_rewrites(before, after, [X, W]).problem == "the rewritten graph has other outputs"


def test_a_new_input_is_no_rewrite():
    before, after = both(fused, X, W)
    with after.graph.inserting_before(first(after, aten.mm.default)):
        after.graph.placeholder("seed")
    problem = judge_rewrites(before, after, [X, W]).problem
    assert problem.startswith("the rewritten graph has the inputs")


def test_what_the_rewrite_made_raises():
    before, after = both(fused, X, W)
    call(aten.view.default, first(after, aten.mm.default), [5])(
        after, first(after, aten.sin.default)
    )
    problem = judge_rewrites(before, after, [X, W]).problem
    assert problem.startswith("what was rewritten raises RuntimeError: ")
