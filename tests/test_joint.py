"""The joint split: policies, budgets, budgets of marked code, checkpoints, draws, wrong splits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, plugged
from tests.support.values import rnd

WIDTH = 16
POLICIES = [
    *({"memory_budget": budget} for budget in (1.0, 0.5, 0.1, 0.0)),
    {"memory_budget": 0.5, "knapsack": "greedy"},
    {"joint_policy": "default"},
    {"joint_policy": "recompute_all"},
]
policies = pytest.mark.parametrize(
    "options", POLICIES, ids=lambda o: "-".join(map(str, o.values()))
)


class Block(nn.Module):
    """Attention and an MLP.

    :param noise: the probability of dropout, and a mask from ``bernoulli``; 0 for neither.
    :param budget: marks the block with a memory budget.
    """

    def __init__(self, noise: float = 0.0, budget: float | None = None) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.noise, self.budget = noise, budget

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.budget is None:
            return self.body(x)
        with fuseboard.memory_budget(self.budget):
            return self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        y = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), self.noise)
        if self.noise:
            y = y * torch.bernoulli(torch.full_like(y, 1 - self.noise))
        return x + self.down(y)


def step(function, x, seed=3):
    """Gradients of one step; the seed decides about the draws."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    function(x).square().sum().backward()
    return [x.grad]


def check_gradients(model, x, target=None, fullgraph=False, **options):
    """Compare one step with eager's, and return the shapes and bytes that the backward was given.

    :param target: makes what is compiled from a module; the module itself by default.
    """
    target = target or (lambda module: module)
    model.zero_grad()
    twin = copy.deepcopy(model)
    taken = []

    def watch(call, region):
        def run(args):
            if region.kind == "backward":
                taken[:] = [(tuple(a.shape), a.nbytes) for a in args if isinstance(a, torch.Tensor)]
            return call(args)

        return run

    torch._dynamo.reset()
    with plugged(call=watch):
        got = step(compiled(target(model), "fake", **options), x)
    want = step(target(twin), x)
    got += [p.grad for p in model.parameters()]
    want += [p.grad for p in twin.parameters()]
    torch.testing.assert_close(got, want)
    assert not all_trips()
    return taken


def total(taken):
    return sum(count for _, count in taken)


def blocks(count, **given):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**given) for _ in range(count)))


# --- policies -------------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("rows", [3, 40])  # of 40, draws are large enough to be replayed
def test_gradients_are_eagers(options, rows):
    """Dropout, bernoulli and attention included: draws are saved, or replayed as they were."""
    check_gradients(blocks(2, noise=0.3), rnd(rows, 8, WIDTH), **options)


@pytest.mark.thorough
def test_a_smaller_budget_saves_less():
    """From all that min-cut would save down to the inputs."""
    x = rnd(3, 8, WIDTH)
    saved = {b: total(check_gradients(blocks(4), x, memory_budget=b)) for b in (1.0, 0.5, 0.0)}
    assert saved[0.0] < saved[0.5] < saved[1.0]
    # What can be left out is halved: inputs and weights are saved under each budget.
    kept = (saved[0.5] - saved[0.0]) / (saved[1.0] - saved[0.0])
    assert 0.3 <= kept <= 0.7


@pytest.mark.parametrize("options", [{"joint_policy": "recompute_all"}, {"memory_budget": 0.0}])
@pytest.mark.thorough
def test_recompute_all_saves_inputs_alone(options):
    """The backward gets weights, the input and the tangent, nothing that was computed."""
    model, x = blocks(3), rnd(3, 8, WIDTH)
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(x.shape)}
    flat = {(3 * 8, WIDTH)}  # the input, or the tangent, as a view
    assert {shape for shape, _ in check_gradients(model, x, **options)} <= shapes | flat


def test_large_draws_are_replayed():
    """Of a mask that takes 64 KiB the state of the generator is saved, 5056 bytes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    x = rnd(4096, WIDTH)
    taken = check_gradients(model, x, joint_policy="recompute_all")
    weights = sum(p.nbytes for p in model.parameters())
    assert total(taken) <= weights + 2 * x.nbytes + 5056  # the input and the tangent
    assert ((5056,), 5056) in taken


def test_the_default_policy_saves_all():
    """Each input of four sines; min-cut saves the first and computes the others again."""

    class Sines(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin().sin().sin().sin()

    model, x = Sines(WIDTH, WIDTH), rnd(5, WIDTH)
    everything = total(check_gradients(model, x, joint_policy="default"))
    assert everything - total(check_gradients(model, x)) == 3 * x.nbytes


@policies
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_reads_a_buffer_that_the_call_overwrites(options, checkpointed):
    """A batch norm isn't run again on the statistics that it has updated."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def target(module):
        if not checkpointed:
            return module
        return lambda x: checkpoint(module, x, use_reentrant=False)

    model.zero_grad()
    twin = copy.deepcopy(model)
    function = compiled(target(model), **options)
    for seed in range(3):
        x = rnd(9, WIDTH, seed=seed)
        torch.testing.assert_close(step(function, x), step(twin, x))
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()))
    assert not all_trips()


@pytest.mark.parametrize("knapsack", ["dp", "greedy"])
@pytest.mark.thorough
def test_the_knapsack_is_the_one_asked_for(knapsack, monkeypatch):
    """Of torch's solvers, the one of that name chooses."""
    from torch._functorch import partitioners

    asked = []
    for name in ("dp", "greedy"):
        solver = getattr(partitioners, f"{name}_knapsack")
        told = partial(
            lambda solver, name, *args: asked.append(name) or solver(*args), solver, name
        )
        monkeypatch.setattr(partitioners, f"{name}_knapsack", told)
    check_gradients(blocks(4), rnd(3, 8, WIDTH), memory_budget=0.2, knapsack=knapsack)
    assert set(asked) == {knapsack}


def test_ilp_asks_for_scipy(monkeypatch):
    """Before anything is compiled, with where it was set and what to install."""
    monkeypatch.setattr("fuseboard.board.selection.find_spec", lambda name: None)
    with (
        fuseboard.settings(knapsack="ilp", backends=["eager"]),
        pytest.raises(fuseboard.SettingsError) as caught,
    ):
        fuseboard.explain(nn.Linear(2, 2), rnd(1, 2))
    text = str(caught.value)
    assert "knapsack = 'ilp', set in fuseboard.settings(...)" in text
    assert "pip install scipy" in text


@pytest.mark.thorough
def test_sizes_may_be_symbolic():
    """Every policy, with sizes that change between calls."""
    for options in POLICIES:
        torch._dynamo.reset()
        model = blocks(1, noise=0.3)
        twin = copy.deepcopy(model)
        function = compiled(model, dynamic=True, **options)
        for rows in (3, 5):
            torch.testing.assert_close(
                step(function, rnd(rows, 8, WIDTH)), step(twin, rnd(rows, 8, WIDTH))
            )
    assert not all_trips()


# --- checkpoints ----------------------------------------------------------------------------------

HIDDEN = 96


class Checkpointed(nn.Module):
    """A wide MLP under ``torch.utils.checkpoint``, between two layers."""

    def __init__(self, context=None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.how = {} if context is None else {"context_fn": context}

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.3)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.inner, self.first(x), use_reentrant=False, **self.how)
        return self.last(y)


@policies
def test_checkpointed_modules_are_not_saved(options):
    """Nothing of the checkpointed width reaches the backward, and draws are the forward's."""
    shapes = [shape for shape, _ in check_gradients(Checkpointed(), rnd(7, WIDTH), **options)]
    assert (7, HIDDEN) not in shapes


@pytest.mark.parametrize("options", [{}, {"joint_policy": "default"}, {"memory_budget": 0.0}])
def test_selective_checkpoints_save_what_they_say(options):
    """A policy that saves matrix products has the wide one saved, and what follows computed."""

    def choose(ctx, op, *args, **kwargs):
        save = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    model = Checkpointed(partial(create_selective_checkpoint_contexts, choose))
    shapes = [shape for shape, _ in check_gradients(model, rnd(7, WIDTH), **options)]
    assert shapes.count((7, HIDDEN)) == 1


# --- budgets of marked code -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (0.0, [{"memory_budget": 0.5}]),
        (0.3, [{}, {"memory_budget": 0.5}, {"joint_policy": "recompute_all"}]),
        (1.0, [{"joint_policy": "recompute_all"}]),
    ],
)
@pytest.mark.thorough
def test_a_mark_on_everything_is_that_budget(budget, options):
    """Whatever the setting says."""
    x = rnd(3, 8, WIDTH)
    wanted = total(check_gradients(blocks(2), x, memory_budget=budget))
    for given in options:
        marked = blocks(2, budget=budget)
        assert total(check_gradients(marked, x, fullgraph=True, **given)) == wanted


@pytest.mark.parametrize(("inside", "outside"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
@pytest.mark.thorough
def test_a_mark_decides_for_its_nodes_alone(inside, outside):
    """Two of four like blocks marked: what is saved lies half way between the two budgets."""
    x = rnd(3, 8, WIDTH)
    one, other = (total(check_gradients(blocks(4), x, memory_budget=b)) for b in (inside, outside))
    torch.manual_seed(0)
    both = nn.Sequential(Block(), Block(), Block(budget=inside), Block(budget=inside))
    got = total(check_gradients(both, x, memory_budget=outside))
    block_input = x.nbytes  # where the marked code begins, it may be saved or not
    assert abs(got - (one + other) / 2) <= block_input


@pytest.mark.thorough
def test_marks_break_no_graph():
    """Dynamo makes one graph of a model with marks, nested ones too."""
    model = nn.Sequential(Block(budget=0.3), Block(), Block(budget=0.0))

    def nested(x):
        with fuseboard.memory_budget(0.5):
            y = model(x)
            with fuseboard.memory_budget(0.0):
                return y.sin().exp()

    assert torch._dynamo.explain(nested)(rnd(2, 8, WIDTH)).graph_break_count == 0
    torch._dynamo.reset()
    torch.compile(nested, backend="fuseboard", fullgraph=True, options={"backends": ["eager"]})(
        rnd(2, 8, WIDTH)
    ).sum().backward()


def test_a_mark_that_changes_between_calls():
    """Each value gets code of its own; none makes the budget symbolic."""

    def marked(x, budget):
        with fuseboard.memory_budget(budget):
            return x.sin().exp()

    function = torch.compile(
        marked, backend="fuseboard", fullgraph=True, options={"backends": ["eager"]}
    )
    for budget in (0.25, 0.5, 0.75):
        x = rnd(3).requires_grad_()
        torch.testing.assert_close(function(x, budget), x.sin().exp())


def test_marks_do_nothing_in_eager():
    """Also when the code inside raises."""
    x = rnd(2, 8, WIDTH)
    model = Block()
    want = model(x)
    model.budget = 0.3
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError), fuseboard.memory_budget(0.5):
        raise ZeroDivisionError
    assert "custom" not in torch.fx.traceback.current_meta


@pytest.mark.parametrize("value", [1.01, -0.1, float("nan"), "half", True, None])
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_mark_out_of_range(value, compile_it):
    """The error comes at once and names the value; compiled code raises what eager does."""

    def marked(x):
        with fuseboard.memory_budget(value):
            return x.sin()

    function = compiled(marked) if compile_it else marked
    with pytest.raises(fuseboard.SettingsError) as caught:
        function(rnd(3))
    assert f"fuseboard.memory_budget({value!r}): allowed: a number from 0 to 1" in str(caught.value)


# --- splits of the user's -------------------------------------------------------------------------

WRONG = {
    "keeps_a_saved_value_back": "the backward's inputs are",
    "returns_too_little": "the forward returns 0 values, the joint graph's has 1",
    "forgets_a_gradient": "the backward's outputs are",
    "swaps_the_parts": "the forward's inputs are",
    "mixes_up_saved_values": "the backward's input 0 ",
    "raises": "it raised ZeroDivisionError: no cut found",
    "answers_three": "it isn't a tuple of two",
}


def split_by(name, **options):
    return {"stages.partition_joint": f"tests.support.splits:{name}", **options}


@pytest.mark.parametrize(("name", "said"), WRONG.items())
def test_a_wrong_split_is_caught(name, said):
    """Before anything is lowered: the default splits instead, and the report says why."""
    model = blocks(1)
    twin = copy.deepcopy(model)
    x = rnd(3, 8, WIDTH)
    got = step(compiled(model, **split_by(name)), x)
    torch.testing.assert_close(got, step(twin, x))
    (trip,) = all_trips()
    assert trip.plugin == f"tests.support.splits:{name}"
    assert (trip.stage, trip.instead) == ("partition", "the default split")
    assert said in trip.error
    assert "set in torch.compile(options=)" in trip.error


def test_a_wrong_split_raises_if_the_policy_says_so():
    """The error names the function, what is wrong, and where it was set."""
    name = "keeps_a_saved_value_back"
    with pytest.raises(Exception, match=name) as caught:
        step(compiled(blocks(1), **split_by(name, on_failure="raise")), rnd(3, 8, WIDTH))
    assert "set in torch.compile(options=)" in str(caught.value)
    assert not [graph for graph in ledger.graphs() if graph.kind != "joint"]


@pytest.mark.thorough
def test_a_right_split_is_used():
    """A function of the user's decides, and nothing trips."""
    model = blocks(1)
    twin = copy.deepcopy(model)
    got = step(compiled(model, dynamic=True, **split_by("good")), rnd(3, 8, WIDTH))
    torch.testing.assert_close(got, step(twin, rnd(3, 8, WIDTH)))
    assert not all_trips()
