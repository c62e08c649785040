"""The partitioner on random graphs with random claims: whatever a plan says, its cut is sound.

Graphs go through the pipeline as AOTAutograd's do; what is looked at is what the runner gets.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule, Interpreter, Node

from fuseboard import Claim, Decline
from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.ops.effects import keeps_order
from fuseboard.pipeline import stages
from fuseboard.pipeline.stages import Pipeline
from fuseboard.report.data import GraphReport, ledger
from fuseboard.run.captured_graph import CapturedGraph
from fuseboard.run.runner import Runner
from fuseboard.run.sites import Site
from tests.support.backends import plugged
from tests.support.graphs import Recipe, inputs_for, logged, recipes
from tests.support.values import assert_same

aten = torch.ops.aten

BACKENDS = ("first", "second")


@dataclass(frozen=True)
class Claims:
    """What a backend claims: each op with a probability, as one or several stretches."""

    seed: int
    share: float
    native: float
    stretches: int

    def hook(self, graph: GraphModule) -> list[Claim | Decline]:
        chance = random.Random(self.seed)
        taken: list[list[str]] = [[] for _ in range(self.stretches)]
        answers: list[Claim | Decline] = []
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if chance.random() < self.share:
                chance.choice(taken).append(node.name)
            else:
                answers.append(Decline(node.name, "not drawn"))
        for names in filter(None, taken):
            own = frozenset(name for name in names if chance.random() < self.native)
            answers.append(Claim(frozenset(names), own))
        return answers


@st.composite
def claims(draw: Any) -> Claims:
    shares = st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0])
    return Claims(draw(st.integers(0, 99)), draw(shares), draw(shares), draw(st.integers(1, 3)))


@dataclass
class Partitioned:
    """What the runner got, and what it answers with."""

    graph: GraphModule
    sites: list[Site]
    kept: list[Node]
    report: GraphReport
    call: Any

    def homes(self) -> dict[Node, int]:
        """Node → the number of its region."""
        return {node: i for i, site in enumerate(self.sites) for node in site.cut.nodes}


@contextmanager
def recorded() -> Iterator[list[Runner]]:
    """The runners that are made meanwhile."""
    runners: list[Runner] = []

    class Recorder(Runner):
        def __init__(self, *args: Any) -> None:
            runners.append(self)
            super().__init__(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "Runner", Recorder)
        yield runners


def partition(recipe: Recipe, first: Claims, second: Claims, **options: Any) -> Partitioned:
    """A graph through the pipeline, with two backends that run as eager does."""
    graph = recipe.make()
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    mode = next(v.fake_mode for v in values if isinstance(v, torch.Tensor))
    ledger.clear()
    hooks = [(lambda graph, own=own: own.hook(graph)) for own in (first, second)]
    with plugged("first", claim=hooks[0]), plugged("second", claim=hooks[1]):
        session = board.session(resolve({"backends": [*BACKENDS, "eager"], **options}, None))
        context = torch._guards.TracingContext(mode)
        with recorded() as runners, torch._guards.tracing(context), mode:
            entry = CapturedGraph(lambda graph=graph: graph, "captured")
            Pipeline(session, "test").compile(entry, "inference")
    (report,), (runner,) = ledger.graphs(), runners
    shared = runner.context
    return Partitioned(
        shared.graph, runner.program.sites, list(shared.board_nodes), report, entry.boxed()
    )


def search(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        derandomize=True,  # the same graphs in every run: a failure is a change
    )


options = st.fixed_dictionaries(
    {
        "repeats": st.sampled_from(["always", "never"]),
        "min_region_us": st.sampled_from([0.0, 50.0]),
    }
)


pins = st.dictionaries(
    st.sampled_from(["aten.relu", "aten.add", "aten.cat", "aten.bernoulli", "aten.var_mean"]),
    st.sampled_from(BACKENDS),
    max_size=3,
)


def sources_of(node: Node, homes: dict[Node, int]) -> set[int]:
    """The regions that a node's inputs come from, looking through the board's own nodes."""
    found: set[int] = set()
    for used in node.all_input_nodes:
        if used in homes:
            found.add(homes[used])
        else:
            found |= sources_of(used, homes)
    return found


@search(80)
@given(recipes(), claims(), claims(), options)
@pytest.mark.thorough
def test_every_cut_is_sound(recipe, first, second, options):
    """Regions cover the ops once, depend on each other in one direction only, and keep order."""
    done = partition(recipe, first, second, **options)
    assert not done.report.trips
    homes = done.homes()
    ops = [node for node in done.graph.graph.nodes if node.op == "call_function"]

    # coverage: each op in one region or with the board, never in two
    assert sum(len(site.cut.nodes) for site in done.sites) == len(homes)
    assert set(homes).isdisjoint(done.kept)
    assert set(homes) | set(done.kept) == set(ops)
    assert all(site.cut.nodes for site in done.sites)

    # convexity: contracted to its regions, the graph has no cycle; and they run in that order
    depends = {number: set[int]() for number in range(len(done.sites))}
    for node in ops:
        if node in homes:
            depends[homes[node]] |= sources_of(node, homes) - {homes[node]}
    list(TopologicalSorter(depends).static_order())
    assert all(before < number for number, found in depends.items() for before in found)

    # a tuple's item is where the tuple was made
    for node in ops:
        if node.target is operator.getitem and node in homes:
            assert homes[node] == homes[node.args[0]]

    # draws and effects: from region to region and inside each in the graph's order
    position = {node: number for number, node in enumerate(ops)}
    ordered = [n for site in done.sites for n in site.cut.nodes if keeps_order(n)]
    assert ordered == sorted(ordered, key=position.__getitem__)

    # what a region needs and gives: all of it, each once
    for number, site in enumerate(done.sites):
        given, made = site.cut.inputs, site.cut.outputs
        assert len(set(given)) == len(given)
        assert len(set(made)) == len(made)
        read = {used for node in site.cut.nodes for used in node.all_input_nodes}
        outside = {n for n in read if homes.get(n, number) != number} - set(given)
        assert all(n.target is aten.full.default for n in outside)  # made anew where it is read
        assert set(made) <= set(site.cut.nodes)
    made = {node for site in done.sites for node in site.cut.outputs}
    assert all(n in made for site in done.sites for n in site.cut.inputs if n in homes)


@search(60)
@given(recipes(), claims(), claims(), options, pins)
@pytest.mark.thorough
def test_backends_run_what_they_claimed(recipe, first, second, options, pins):
    """No op is on a backend that didn't claim it; pinned ops are where the pin says, if that
    backend claimed them; every op has a reason."""
    done = partition(recipe, first, second, pin=pins, **options)
    assert not done.report.trips
    claimed = {}
    for name, own in (("first", first), ("second", second)):
        answers = [answer for answer in own.hook(done.graph) if isinstance(answer, Claim)]
        claimed[name] = {node for claim in answers for node in claim.nodes}
    for site in done.sites:
        backend = site.lowered.region.backend
        assert backend == site.cut.backend
        for node in site.cut.nodes:
            follows = node.target is operator.getitem  # its producer, whoever claimed it
            assert backend == "eager" or follows or node.name in claimed[backend]
            wanted = pins.get(str(node.target).rpartition(".")[0])
            if wanted is not None and node.name in claimed[wanted]:
                assert backend == wanted
    assert all(node.reason for node in done.report.nodes)


@search(80)
@given(recipes(), claims(), claims(), options, st.sampled_from(["choice", "always"]))
@pytest.mark.thorough
def test_results_are_eagers_bit_for_bit(recipe, first, second, options, verify):
    """Values, strides, aliases' values, random numbers and effects, in two calls; with other
    numbers of rows where that is symbolic."""
    done = partition(recipe, first, second, verify=verify, **options)
    graph = recipe.make()
    for rows in (5, 5, 3) if recipe.symbolic else (5, 5):
        traces = []
        for run in (lambda args: Interpreter(graph).run(*args), done.call):
            torch.manual_seed(7)
            with torch.no_grad(), logged() as calls:
                results = tuple(run(inputs_for(graph, rows)))
                traces.append((results, torch.rand(2), list(calls)))
        assert_same(traces[1], traces[0])
    assert not done.report.trips
