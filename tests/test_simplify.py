"""The pass ``simplify``: what needn't be computed in each call isn't."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from fuseboard.board import board
from fuseboard.fuse import simplify
from fuseboard.fuse.passes import FusionCounter, apply_fusions
from fuseboard.report.data import ledger
from fuseboard.torch_api.nodes import target_name
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import assert_same, rnd

BACKENDS = ["eager", "mkldnn", "inductor", "onnxruntime", "tvm"]


def needs(backend: str) -> None:
    states = {state.name: state.state for state in board.states()}
    if states[backend] != "ready":
        pytest.skip(f"needs {backend}")


@pytest.fixture(autouse=True)
def _clear():
    torch._dynamo.reset()
    ledger.clear()


def done() -> dict[str, int]:
    """How often each rewrite was applied."""
    return dict(Counter(one.name for one in last_graph().fusions if one.plugin == "simplify"))


def ops() -> dict[str, int]:
    found: Counter[str] = Counter()
    for region in last_graph().regions:
        found.update(region.ops)
    return dict(found)


def run(function: Any, *inputs: Any, **options: Any) -> dict[str, int]:
    """Values, strides and dtypes bit for bit as in eager, in two calls; what was rewritten."""
    own = compiled(function, **options)
    with torch.no_grad():
        for _ in range(2):
            assert_same(own(*inputs), function(*inputs))
    assert all_trips() == []
    return done()


# --- no-ops ---------------------------------------------------------------------------------------

NO_OPS = {
    "a dropout in inference": lambda x: nn.functional.dropout(x, 0.5, training=False).sin(),
    "a slice of all": lambda x: x[:, :].sin(),
    "an expand to the same": lambda x: x.expand(3, 5).sin(),
    "a view of the same": lambda x: x.sin().view(3, 5).cos(),
    "times 1": lambda x: (x * 1).sin(),
    "less 0": lambda x: (x - 0.0).sin(),
    "by 1": lambda x: (x / 1).sin(),
    "to the power of 1": lambda x: (x**1.0).sin(),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_is_taken_out(name):
    """The report counts it, and it isn't among the ops that run."""
    assert run(NO_OPS[name], rnd(3, 5)) == {"no-op": 1}
    assert set(ops()) <= {"aten.sin.default", "aten.cos.default"}


NEAR_MISSES = {
    "plus 0, which makes 0 of -0": (lambda x: (x + 0).sin(), torch.tensor([-0.0, 1.0])),
    "less -0, which does too": (lambda x: 1 / (x - -0.0), torch.tensor([-0.0, 1.0])),
    "times 1 in another dtype": (lambda x: (x * 1.0).sin(), torch.arange(4)),
    "a copy with other strides": (lambda x: x.t().contiguous().view(-1).sin(), rnd(3, 5)),
    "a slice of a part": (lambda x: x[:, 1:].sin(), rnd(3, 5)),
    "an expand of one row": (lambda x: x.expand(3, 5).sin(), rnd(1, 5)),
    "a cast": (lambda x: x.double().sin(), rnd(3)),
    "a conjugate, which is a view": (lambda x: x.conj().sin(), torch.tensor([1 + 2j])),
    "bits of another dtype": (lambda x: x.view(torch.int32) + 1, rnd(3)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_looks_like_a_no_op_stays(name):
    """Values and dtypes would be others."""
    function, x = NEAR_MISSES[name]
    assert "no-op" not in run(function, x)


def test_results_are_tensors_of_their_own():
    """A copy, or a view, that the caller gets isn't the tensor it is of."""

    def function(x):
        y = x.sin()
        return x.clone(), y, y.clone(), y.view(3, 5)

    x = rnd(3, 5)
    own = compiled(function)
    with torch.no_grad():
        copy, y, other, view = own(x)
    assert copy.data_ptr() != x.data_ptr()
    assert other.data_ptr() != y.data_ptr()
    assert view is not y
    assert view.data_ptr() == y.data_ptr()


def test_a_copy_from_before_a_write_stays():
    """An input is written to after it was copied, and the copy is returned or read."""

    class Counter_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(5))

        def forward(self, x: torch.Tensor) -> Any:
            before = self.total.clone()
            self.total.add_(x.sum(0))
            return before, before * 2 + self.total

    models = Counter_(), Counter_()
    own = compiled(models[0])
    with torch.no_grad():
        for seed in range(3):
            assert_same(own(rnd(3, 5, seed=seed)), models[1](rnd(3, 5, seed=seed)))
    assert_same(models[0].total, models[1].total)


# --- duplicates -----------------------------------------------------------------------------------


def test_what_was_computed_is_read_again():
    """With what follows from it: the second half is the first."""

    def function(x, y):
        return (x @ y).sin() * 2 + (x @ y).sin().cos()

    assert run(function, rnd(4, 4), rnd(4, 4)) == {"duplicate": 2}
    assert ops()["aten.mm.default"] == 1


def test_other_results_of_an_op_that_was_computed_are_read_again():
    """The op is made once, though the second place reads another of its results."""

    def function(x):
        values, _ = nn.functional.max_pool2d(x, 2, return_indices=True)
        _, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return values.sin(), places + 1

    assert run(function, rnd(1, 2, 6, 6)) == {"duplicate": 1}
    assert ops()["aten.max_pool2d_with_indices.default"] == 1


def test_a_draw_that_nobody_reads_stays():
    """What is taken out around it isn't all that nobody reads: later numbers follow from it."""

    def function(x):
        return x.relu() + x.relu(), torch.rand(2)

    graph = make_fx(function, tracing_mode="fake")(rnd(5))
    graph.graph.output_node().args = (graph.graph.output_node().args[0][:1],)
    fusions = simplify.fuseboard_fuse(graph, "inference", None)
    with tracing(TracingContext(None)):  # as where it compiles; fx then keeps no draws by itself
        apply_fusions(graph, fusions, "simplify", FusionCounter(), 60.0)
    names = [target_name(n) for n in graph.graph.nodes if n.op == "call_function"]
    assert sum("rand" in name for name in names) == 1
    assert sum("relu" in name for name in names) == 1


def test_random_draws_are_no_duplicates():
    """Each is another one; eager's numbers from the same seed."""

    def function(x):
        return torch.rand_like(x) - torch.rand_like(x)

    own = compiled(function)
    with torch.no_grad():
        results = []
        for called in (own, function):
            torch.manual_seed(3)
            results.append(called(rnd(5)))
    assert_same(*results)
    assert done() == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1, x * 1.0),
        lambda x: (x / 0.0, x / -0.0),
        lambda x: (x.sum(0), x.sum(0, keepdim=True)),
    ],
)
def test_what_differs_in_a_number_alone_is_no_duplicate(function):
    """1 isn't 1.0, and 0.0 isn't -0.0."""
    assert run(lambda x: tuple(part.sin() for part in function(x)), torch.arange(1, 4)) == {
        name: count for name, count in done().items() if name != "duplicate"
    }


def test_two_equal_results_are_two_tensors():
    """The caller may write to one of them."""
    own = compiled(lambda x: (x.sin(), x.sin()))
    with torch.no_grad():
        one, other = own(rnd(3))
    assert one.data_ptr() != other.data_ptr()
    assert done() == {}


# --- constants ------------------------------------------------------------------------------------


def masked(x):
    """Scores of a causal attention: the mask depends on no input."""
    mask = torch.arange(x.shape[-1])[None, :] <= torch.arange(x.shape[-2])[:, None]
    return x.masked_fill(~mask, float("-inf")).softmax(-1)


def test_a_value_that_no_input_decides_is_computed_once():
    """The mask is read; only what depends on the input is computed."""
    assert run(masked, rnd(6, 6))["constant"] == 1
    assert not any("arange" in op or "le" in op.split(".") for op in ops())


def given_out(x, shape):
    """A value that no input decides, read and returned."""
    c = torch.arange(5, device="cpu") * 2
    return x + c, shape(c)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("larger than the limit", lambda x: x + torch.arange(5, device="cpu") * 2),
        ("made by one op", lambda x: x + torch.arange(5, device="cpu")),
        ("random", lambda x: x + torch.rand(5, device="cpu", dtype=torch.float32) * 2),
        ("of the default dtype", lambda x: x + torch.ones(5, device="cpu") / 3),
        ("a quotient of integers", lambda x: x + torch.arange(5, device="cpu") / 3),
        ("a result", lambda x: given_out(x, lambda c: c)),
        ("a result's memory", lambda x: given_out(x, lambda c: c.view(1, 5)[0])),
    ],
)
def test_what_isnt_kept_as_a_constant(monkeypatch, name, function):
    """Too large a value, one as quickly made as read, a draw, and what the caller gets."""
    if name == "larger than the limit":
        monkeypatch.setattr(simplify, "MAX_CONSTANT_BYTES", 7)
    torch.manual_seed(0)
    own = compiled(function)
    with torch.no_grad():
        torch.manual_seed(0)
        first = own(rnd(5))
        torch.manual_seed(0)
        assert_same(first, function(rnd(5)))
    assert "constant" not in done()


@pytest.mark.parametrize("device", [{}, {"device": torch.device("cpu")}], ids=["none", "cpu"])
def test_a_value_on_the_default_device_is_made_in_each_call(device):
    """It may be another device by then."""
    graph = make_fx(lambda x: x + torch.arange(5) * 2, tracing_mode="fake")(rnd(5))
    (arange,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)
    arange.kwargs = device
    fusions = simplify.fuseboard_fuse(graph, "inference", None)
    assert [fusion.name for fusion in fusions] == (["constant"] if device else [])


def test_a_result_that_a_caller_writes_to_is_new_in_the_next_call():
    """Nothing of a constant is handed out."""
    own = compiled(lambda x: (torch.arange(4) + 1).view(2, 2) * torch.ones(2, 2))
    with torch.no_grad():
        first = own(rnd(2))
        first.zero_()
        assert_same(own(rnd(2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


# --- everywhere -----------------------------------------------------------------------------------


class Block(nn.Module):
    """All three in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            scores = self.linear(x) @ x.mT
            x = x + self.dropout(masked(scores) @ x[:, :])
        return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_backend_has_it(backend, dynamic):
    """Before its decompositions; with symbolic sizes nothing is a constant."""
    needs(backend)
    block = Block().eval()
    own = compiled(block, backend, dynamic=dynamic)
    with torch.no_grad():
        for size in (6, 6, 9) if dynamic else (6, 6):
            torch.testing.assert_close(own(rnd(2, size, 8)), block(rnd(2, size, 8)))
    counts = done()
    assert counts["no-op"] >= 4
    assert counts.get("constant", 0) == (0 if dynamic else 1)
    assert counts["duplicate"] >= 3
    assert all_trips() == []


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_constant_survives_the_cache(backend):
    """What is loaded has its values, whichever tensors are fake at that time."""
    needs(backend)
    rows = nn.Embedding(20, 8)

    def function(x):
        return (x + rows(torch.arange(6)[None] + 3)).sin()

    for _ in range(2):
        torch._dynamo.reset()
        run = compiled(function, backend, isolate=backend == "inductor")
        with torch.no_grad():
            torch.testing.assert_close(run(rnd(2, 6, 8)), function(rnd(2, 6, 8)))
        assert done() == {"constant": 1}
        assert all_trips() == []


def test_it_is_switched_off_as_any_pass():
    """By the plugin's name, and by number."""
    assert run(NO_OPS["times 1"], rnd(3), block=["simplify"]) == {}
    torch._dynamo.reset()
    run(NO_OPS["times 1"], rnd(3), fuse_limit=0)
    assert not any(one.applied for one in last_graph().fusions)


def test_training_is_left_to_torchs_own_passes():
    """A joint graph isn't rewritten by it."""
    own = compiled(NO_OPS["times 1"])
    x = rnd(3, 5).requires_grad_()
    own(x).sum().backward()
    assert_same(x.grad, x.detach().cos())
    assert all(one.plugin != "simplify" for one in ledger.graphs()[-1].fusions)


def test_a_backend_gets_the_constant_as_an_attribute():
    """A plugin sees a ``get_attr`` node with a fake value."""
    seen = []

    def lower(region):
        seen.extend(node.meta["val"].shape for node in region.graph.graph.find_nodes(op="get_attr"))
        return fuseboard.lower_eagerly(region)

    with plugged("fake", lower=lower):
        own = compiled(masked, "fake")
        with torch.no_grad():
            assert_same(own(rnd(6, 6)), masked(rnd(6, 6)))
    assert seen == [torch.Size([6, 6])]
