"""The plan: policies, what a plan may say, and what becomes of one that lies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard import Claim, Decline
from fuseboard.errors import ContractError, PatternError, RegionError
from fuseboard.partition import plan as plan_module
from fuseboard.report.data import ledger
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    last_graph,
    op_name,
    plugged,
)
from tests.support.values import assert_same, rnd


class Chain(nn.Module):
    """Two chains that cross: sin → cos → exp, tanh → neg, and a norm of several results."""

    def forward(self, x):
        a = x.sin().cos().exp()
        b = x.tanh()
        return nn.functional.layer_norm(a * b.neg(), (8,))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x):
        return self.chain(x)


LOWERED: list[str] = []


@pytest.fixture(autouse=True)
def _backends():
    """``first`` takes everything, ``picky`` takes ``sin`` alone."""
    ledger.clear()
    LOWERED.clear()

    def note(call, region):
        LOWERED.append(region.name)
        return call

    with plugged("first", call=note), plugged("picky", claim=claim_ops("sin"), call=note):
        yield


def planned(name, **options):
    path = f"tests.support.liars:{name}"
    return compiled(Model(), "first", "picky", "eager", stages={"plan": path}, **options)


# --- lies ----------------------------------------------------------------------------------------

LIES = [
    (
        "unclaimed",
        "node 'cos' of chain is placed on 'picky', which didn't claim it (another op). "
        "It is claimed by first, eager.",
    ),
    ("unknown_node", "node 'nonsuch' isn't in the graph"),
    ("unknown_backend", "node 'cos' is placed on 'tvm', not on one of ['eager', 'first', 'picky']"),
    ("no_placement", "1 nodes have no placement: 'cos' of chain."),
    ("no_reason", "node 'cos' has no reason"),
    ("empty_reason", "node 'cos' of chain has a placement and no reason."),
    ("reason_of_no_text", "an item of reasons is 3 of type int, not str"),
    ("placement_of_no_text", "an item of placements is ['eager'] of type list, not str"),
    ("name_of_no_text", "node 3 isn't in the graph"),
    ("placements_as_list", "of type list, not Mapping"),
    ("regions_as_list", "regions is [('sin',)] of type list, not tuple"),
    ("region_as_set", "regions[0] is {'sin'} of type set, not tuple"),
    ("region_of_numbers", "an item of regions[0] is 3 of type int, not str"),
    ("empty_region", "regions[0] is empty"),
    ("region_of_unknown", "node 'nonsuch' isn't in the graph"),
    ("region_of_input", "isn't in the graph"),
    (
        "overlapping",
        "node 'cos' of chain is in regions[1] and in regions[0]: planned regions are disjoint.",
    ),
    ("named_twice", "node 'sin' of chain is in regions[0] twice"),
    (
        "not_convex",
        "regions[0] ('sin' of chain, 'exp' of chain) would wait for what waits for it, "
        "by way of 'cos' of chain: a planned region must be convex",
    ),
    (
        "mixed",
        "regions[0] is on eager and first, for instance 'cos' of chain, 'sin' of chain: "
        "a region has one backend.",
    ),
    ("item_alone", "regions[0] has 'getitem' of chain without 'native_layer_norm'"),
    ("notes_as_text", "notes is 'fine' of type str, not tuple"),
    ("not_a_plan", "it isn't a Plan"),
    ("raises", "it raised ValueError: no idea"),
]


@pytest.mark.parametrize(("lie", "problem"), LIES, ids=[lie for lie, _ in LIES])
def test_a_plan_that_lies_is_replaced_by_the_default_plan(lie, problem):
    """The report says who lied, what about, and where it was set; the answer is right."""
    fn, x = planned(lie), rnd(5, 8)
    with torch.no_grad():
        assert_same(fn(x), Model()(x))
    (trip,) = all_trips()
    assert (trip.stage, trip.instead) == ("plan", "the default plan")
    assert trip.plugin == f"tests.support.liars:{lie}"
    assert problem in trip.error
    assert trip.error.endswith(
        f"It decides the plan by stages.plan = 'tests.support.liars:{lie}', "
        "set in torch.compile(options=)."
    )
    assert {node.backend for node in last_graph().nodes} == {"first"}


@pytest.mark.parametrize(("lie", "problem"), LIES, ids=[lie for lie, _ in LIES])
def test_a_plan_that_lies_is_caught_before_anything_is_lowered(lie, problem):
    """With the policy to raise it is an error that says the same."""
    fn = planned(lie, on_failure="raise")
    with torch.no_grad(), pytest.raises(Exception, match="RegionError") as caught:
        fn(rnd(5, 8))
    assert problem in str(caught.value)
    assert f"plugin 'tests.support.liars:{lie}' failed in stage 'plan'" in str(caught.value)
    assert not LOWERED
    error = caught.value.inner_exception
    assert isinstance(error, RegionError)
    cause = error.__cause__
    assert isinstance(cause, fuseboard.PluginError)
    assert isinstance(cause, ContractError) or lie == "raises"
    assert "set in torch.compile(options=)" in str(cause)


def test_regions_that_wait_for_each_other_are_a_lie():
    """Each alone is convex."""

    def crossing(x, y):
        a, b = x.sin(), y.cos()
        return a.exp() + b, a * b.tanh()

    def plan(graph, claims, backends):
        names = {op_name(node): node.name for node in graph.graph.nodes}
        places = {n: "first" for c in claims["eager"] if isinstance(c, Claim) for n in c.nodes}
        groups = ((names["sin"], names["mul"]), (names["cos"], names["add"]))
        return fuseboard.Plan(places, dict.fromkeys(places, "mine"), regions=groups)

    with plugged("planner", plan=plan, claim=None, lower=None):
        fn = compiled(crossing, "planner", "first", "eager", stages={"plan": "planner"})
        with torch.no_grad():
            assert_same(fn(rnd(4), rnd(4, seed=1)), crossing(rnd(4), rnd(4, seed=1)))
    (trip,) = all_trips()
    assert trip.plugin == "planner"
    assert "regions[0] and regions[1] (" in trip.error
    assert "by way of " in trip.error
    assert "stages.plan = 'planner', set in torch.compile(options=)" in trip.error


def test_a_plan_cant_harm_the_boards_graph():
    """It is given a copy."""
    fn, x = planned("changes_the_graph"), rnd(5, 8)
    with torch.no_grad():
        assert_same(fn(x), Model()(x))
    assert len(last_graph().nodes) > 5


def test_an_honest_plan_is_followed():
    """Its regions, its reasons, its notes."""
    fn, x = planned("one_region"), rnd(5, 8)
    with torch.no_grad():
        assert_same(fn(x), Model()(x))
    assert not all_trips()
    report = last_graph()
    assert "mine" in report.notes
    homes = {node.name: node.region for node in report.nodes}
    assert homes["sin"] == homes["cos"] != homes["exp"]
    assert homes["tanh"] == homes["neg"] != homes["sin"]
    assert {node.reason for node in report.nodes} == {"a test placed it"}


def test_a_plan_must_follow_the_pins():
    """Whoever made it."""
    fn, x = planned("honest", pin={"aten.sin": "picky"}), rnd(5, 8)
    with torch.no_grad():
        assert_same(fn(x), Model()(x))
    (trip,) = all_trips()
    assert "node 'sin' of chain is placed on 'first' and pinned to 'picky'" in trip.error
    assert {n.name: n.backend for n in last_graph().nodes}["sin"] == "picky"


def test_the_plan_is_deterministic():
    """Twice the same plan, in the same order."""
    seen = []

    def plan(graph, kind, claims, backends, pins, policy, min_region_us, repeats):
        for _ in range(2):
            seen.append(
                plan_module.make_plan(
                    graph=graph,
                    kind=kind,
                    claims=claims,
                    backends=backends,
                    pins=pins,
                    min_region_us=min_region_us,
                    repeats=repeats,
                )
            )
        return None

    with plugged("planner", plan=plan, claim=None, lower=None):
        fn = compiled(Model(), "planner", "first", "picky", "eager", stages={"plan": "planner"})
        with torch.no_grad():
            fn(rnd(5, 8))
    one, two = seen
    assert one == two
    assert list(one.placements.items()) == list(two.placements.items())


# --- claims that are taken all or none -----------------------------------------------------------


def claims_pairs(*pairs, loose=()):
    """A claim hook: each pair of op names together, further ops one by one."""

    def claim(graph):
        names = {op_name(node): node.name for node in graph.graph.nodes}
        every = {n.name for n in graph.graph.nodes if n.op == "call_function"}
        groups = [frozenset(names[op] for op in pair) for pair in pairs]
        answers = [Claim(group, group, together=True) for group in groups]
        alone = frozenset(names[op] for op in loose)
        if alone:
            answers.append(Claim(alone, alone))
        taken = alone.union(*groups)
        return [*answers, *(Decline(name, "not mine") for name in every - taken)]

    return claim


def placed(claim, *order, target=None, **options):
    """Node → backend, with ``pairs`` claiming so; eager's values are checked."""
    with plugged("pairs", claim=claim):
        model = target or Model()
        fn = compiled(model, *order, "eager", min_region_us=0, **options)
        with torch.no_grad():
            assert_same(fn(rnd(5, 8)), model(rnd(5, 8)))
    return {node.name: node.backend for node in last_graph().nodes}


def test_nodes_that_are_claimed_together_go_together():
    """To the backend, where it gets all of them."""
    homes = placed(claims_pairs(("sin", "cos")), "pairs", "first")
    assert homes["sin"] == homes["cos"] == "pairs"
    assert homes["exp"] == "first"
    assert not all_trips()


def test_a_claim_falls_whole_where_another_backend_has_a_part_of_it():
    """The part that is left goes to the next in order, and says why it isn't here."""
    homes = placed(claims_pairs(("sin", "cos")), "picky", "pairs", "first")
    assert homes["sin"] == "picky"
    assert homes["cos"] == "first"
    assert "pairs" not in homes.values()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"exclude": {"pairs": ["aten.cos"]}},
            "claimed together with 'cos': excluded by exclude.pairs",
        ),
        ({}, "claimed together, though 'cos' reads one of them and another one reads it"),
    ],
)
def test_a_claim_falls_whole_with_any_node_of_it(options, reason):
    """What the board or the user declines, or what isn't convex."""
    pair = ("sin", "cos") if options else ("sin", "exp")
    homes = placed(claims_pairs(pair), "pairs", "first", **options)
    assert homes["sin"] == "first"
    (sin,) = [node for node in last_graph().nodes if node.name == "sin"]
    assert reason in sin.declined["pairs"]


def early_and_late(x):
    """``neg`` is read by ``abs``; ``mul`` waits for ``exp``."""
    a = x.neg()
    return a.abs(), a * x.exp()


def test_a_claim_is_one_region_even_where_a_part_could_run_earlier():
    """By stage alone, ``neg`` would be a region before ``exp``, and ``mul`` one after it."""
    loose = claims_pairs(loose=("neg", "mul"))
    homes = placed(loose, "pairs", "first", target=early_and_late)
    regions = {node.name: node.region for node in last_graph().nodes}
    assert regions["neg"] != regions["mul"]
    torch._dynamo.reset()
    homes = placed(claims_pairs(("neg", "mul")), "pairs", "first", target=early_and_late)
    assert homes["neg"] == homes["mul"] == "pairs"
    regions = {node.name: node.region for node in last_graph().nodes}
    assert regions["neg"] == regions["mul"]


class Stack(nn.Module):
    """Six blocks that repeat, and would be cut before their matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.exp().neg().exp()).sin().tanh().sin().tanh().sin().tanh().relu()
        return x


def test_repeated_blocks_dont_tear_a_claim():
    """Where a block would begin in the middle of one."""

    def claim(graph):
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        pairs = [
            frozenset({n.name, user.name})
            for n in nodes
            for user in n.users
            if (op_name(n), op_name(user)) == ("exp", "addmm")
        ]
        rest = frozenset(n.name for n in nodes).difference(*pairs)
        return [Claim(rest, rest), *(Claim(pair, pair, together=True) for pair in pairs)]

    homes = placed(claim, "pairs", target=Stack(), repeats="always")
    assert not all_trips()
    assert set(homes.values()) == {"pairs"}
    regions = {node.name: node.region for node in last_graph().nodes}
    for number in range(6):
        addmm = f"addmm_{number}" if number else "addmm"
        assert regions[addmm] == regions[f"exp_{2 * number + 1}"]


def test_claims_that_cant_be_regions_side_by_side_arent_both_taken():
    """The first is; the other's nodes go on in the order."""

    class Crossing(nn.Module):
        def forward(self, x):
            a, b = x.sin(), x.cos()
            return a.exp() + b, a * b.tanh()

    claim = claims_pairs(("sin", "mul"), ("cos", "add"))
    homes = placed(claim, "pairs", "first", target=Crossing())
    assert homes["sin"] == homes["mul"] == "pairs"
    assert homes["cos"] == homes["add"] == "first"
    assert not all_trips()


def test_overlapping_claims_are_taken_in_order():
    """A node is part of one pattern only."""
    homes = placed(claims_pairs(("sin", "cos"), ("cos", "exp"), ("exp", "mul")), "pairs", "first")
    assert {n for n, b in homes.items() if b == "pairs"} == {"sin", "cos", "exp", "mul"}


def test_a_pin_takes_the_rest_of_the_claim_along():
    """What the backend takes as one isn't torn by a pin of a part."""
    claim = claims_pairs(("sin", "cos"))
    homes = placed(claim, "first", "pairs", pin={"aten.sin": "pairs"})
    assert homes["sin"] == homes["cos"] == "pairs"
    reason = {node.name: node.reason for node in last_graph().nodes}["cos"]
    assert reason == "part of what pairs takes as one, with 'sin'"
    torch._dynamo.reset()
    pins = {"aten.sin": "pairs", "aten.cos": "first"}
    homes = placed(claim, "first", "pairs", pin=pins)
    assert homes["sin"] == homes["cos"] == "first"
    reason = {node.name: node.reason for node in last_graph().nodes}["sin"]
    assert "pairs takes it as one with 'cos', which is pinned elsewhere" in reason


def test_a_plan_that_tears_a_claim_is_a_lie():
    """Half of it on the backend that takes all or none; or all of it, in two regions."""

    def tears(graph, claims, backends):
        places = {n: "first" for c in claims["eager"] if isinstance(c, Claim) for n in c.nodes}
        places["sin"] = "pairs"
        return fuseboard.Plan(places, dict.fromkeys(places, "mine"))

    def cuts(graph, claims, backends):
        places = {n: "first" for c in claims["eager"] if isinstance(c, Claim) for n in c.nodes}
        places["neg"] = places["mul"] = "pairs"
        return fuseboard.Plan(places, dict.fromkeys(places, "mine"))

    for plan, pair in ((tears, ("sin", "cos")), (cuts, ("neg", "mul"))):
        ledger.clear()
        torch._dynamo.reset()
        with plugged("planner", plan=plan, claim=None, lower=None):
            order = ("planner", "first", "pairs")
            target = Model() if plan is tears else early_and_late
            placed(claims_pairs(pair), *order, target=target, stages={"plan": "planner"})
        (trip,) = all_trips()
        assert "which takes it only together with others" in trip.error


# --- patterns ------------------------------------------------------------------------------------


def swish(x):
    return x * torch.sigmoid(x)


def test_patterns_are_claimed_wherever_they_occur():
    """All their nodes or none; everything else is declined with a reason."""

    def f(x, y):
        a = swish(x) + swish(y)
        gate = torch.sigmoid(a)
        return a * gate + gate  # the gate is read elsewhere: no match

    def claim(graph):
        return fuseboard.claim_patterns(graph, [(swish, [torch.empty(2)])])

    with plugged("pairs", claim=claim):
        fn = compiled(f, "pairs", "eager", min_region_us=0)
        with torch.no_grad():
            assert_same(fn(rnd(5, 8), rnd(5, 8, seed=1)), f(rnd(5, 8), rnd(5, 8, seed=1)))
    homes = {node.name: node.backend for node in last_graph().nodes}
    assert {n for n, b in homes.items() if b == "pairs"} == {"sigmoid", "mul", "sigmoid_1", "mul_1"}
    (gate,) = [node for node in last_graph().nodes if node.name == "sigmoid_2"]
    assert gate.declined == {"pairs": "in none of 1 patterns"}


def pattern_graph():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.exp.default, (x,)))
    return graph


@pytest.mark.parametrize("as_module", [False, True])
def test_a_pattern_may_be_a_graph(as_module):
    """Of ATen ops."""
    pattern = pattern_graph()
    if as_module:
        pattern = torch.fx.GraphModule(nn.Module(), pattern)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.exp().sin().exp())(rnd(2))
    claims = fuseboard.claim_patterns(graph, [pattern])
    assert [c.nodes for c in claims if isinstance(c, Claim)] == [{"exp"}, {"exp_1"}]
    assert all(c.together for c in claims if isinstance(c, Claim))
    assert [c.node for c in claims if isinstance(c, Decline)] == ["sin"]


def test_a_pattern_of_an_op_with_several_results_takes_all_its_items():
    """The getitems that the pattern doesn't name come along."""

    def norm(x):
        return nn.functional.layer_norm(x, (8,))

    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: norm(x).sin())(rnd(5, 8))
    claims = fuseboard.claim_patterns(graph, [(norm, [rnd(5, 8)])])
    (claim,) = [c for c in claims if isinstance(c, Claim)]
    names = {n.name for n in graph.graph.nodes if n.op == "call_function"}
    assert claim.nodes == names - {"sin"}


def test_the_first_of_several_patterns_gets_a_node():
    """In the order in which they are given."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().exp())(rnd(2))
    both = (lambda x: x.sin().exp(), [rnd(2)])
    one = (lambda x: x.exp(), [rnd(2)])
    sizes = [
        [len(c.nodes) for c in fuseboard.claim_patterns(graph, patterns) if isinstance(c, Claim)]
        for patterns in ([both, one], [one, both])
    ]
    assert sizes == [[2], [1]]


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("sin", r"patterns\[0\] is a str; allowed: a Pattern, a tuple"),
        (torch.sin, r"patterns\[0\] is a builtin_function_or_method"),
        ((lambda x: x, [rnd(2)]), r"pattern 'patterns\[0\]', .*: search has no op"),
        (torch.fx.Graph(), r"patterns\[0\] has no op"),
    ],
)
def test_a_pattern_that_is_none_is_an_error(pattern, error):
    """It says which one."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin())(rnd(2))
    with pytest.raises((TypeError, ValueError, PatternError), match=error):
        fuseboard.claim_patterns(graph, [pattern])


# --- views ---------------------------------------------------------------------------------------


def test_a_view_goes_where_it_cuts_nothing():
    """``first`` takes views and ``sin``; between two products of ``second`` a view is second's."""

    def f(x, w):
        return ((x @ w).view(4, 16).t() @ (x @ w).view(4, 16)).sin()

    with (
        plugged("views", claim=claim_ops("view", "t", "permute", "sin")),
        plugged("products", claim=claim_ops("mm", "view", "t", "permute")),
        torch.no_grad(),
    ):
        fn = compiled(f, "views", "products", min_region_us=0.0)
        x, w = rnd(8, 8), rnd(8, 8, seed=1)
        assert_same(fn(x, w), f(x, w))
    homes = {node.op.split(".")[1]: node.backend for node in last_graph().nodes}
    assert homes["mm"] == homes["view"] == "products"
    assert homes["sin"] == "views"
    assert [region.backend for region in last_graph().regions] == ["products", "views"]


def test_a_pinned_view_stays():
    """What the user said counts more."""

    def f(x, w):
        return (x @ w).t() @ w

    with (
        plugged("views", claim=claim_ops("t", "permute")),
        plugged("products", claim=claim_ops("mm", "t", "permute")),
        torch.no_grad(),
    ):
        fn = compiled(
            f,
            "views",
            "products",
            min_region_us=0.0,
            pin={"aten.t": "views", "aten.permute": "views"},
        )
        x, w = rnd(8, 8), rnd(8, 8, seed=1)
        assert_same(fn(x, w), f(x, w))
    homes = [node.backend for node in last_graph().nodes if "mm" not in node.op]
    assert homes == ["views"]
