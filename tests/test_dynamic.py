"""Symbolic sizes: as many compiles as aot_eager needs, and right at every size, 0 and 1 too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, claim_ops, compiled, graph_count, last_graph, plugged
from tests.support.values import assert_same, rnd

ALTERNATE = {"stages": {"plan": "tests.support.plans:alternate"}}


@pytest.fixture(params=["one_region", "many_regions"])
def through(request):
    """How to compile: the graph in one piece, or cut at nearly every node."""
    if request.param == "one_region":
        yield compiled
    else:
        with plugged("other"):
            yield lambda fn, **options: compiled(fn, "other", "eager", **ALTERNATE, **options)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(nn.functional.layer_norm(self.one(x).relu(), (10,)))


def step(function, module, x):
    """A training step's answer and gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.thorough
def test_as_many_compiles_as_aot_eager(dynamic, grad):
    """Batch after batch: automatic dynamic shapes, always dynamic, never."""
    counts = []
    for backend in ("fuseboard", "aot_eager"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {"options": {"backends": ["eager"]}} if backend == "fuseboard" else {}
        model = MLP()
        fn = torch.compile(model, backend=backend, dynamic=dynamic, **options)
        for batch in (4, 5, 7, 1, 0) if dynamic is not False else (4, 5):
            with torch.set_grad_enabled(grad):
                fn(rnd(batch, 6))
        counts.append(dict(torch._dynamo.utils.counters["stats"]))
    assert counts[0] == counts[1]
    assert counts[0]["unique_graphs"] >= 1


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_third_batch_size_compiles_nothing(through, grad):
    """Automatic dynamic shapes: the second size makes the batch symbolic."""
    model = MLP()
    fn = through(model)
    for batch in (4, 5, 7, 6, 33):
        x = rnd(batch, 6)
        if grad:
            torch.testing.assert_close(step(fn, model, x), step(model, model, x))
        else:
            with torch.no_grad():
                torch.testing.assert_close(fn(x), model(x))
    assert graph_count("forward", "inference") == 2
    assert not all_trips()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_sizes_zero_and_one(through, grad):
    """They get graphs of their own, as Dynamo wants it, or the symbolic one."""
    model = MLP()
    fn = through(model, dynamic=True)
    for batch in (5, 1, 0, 2, 1, 0, 8):
        x = rnd(batch, 6)
        if grad:
            torch.testing.assert_close(step(fn, model, x), step(model, model, x))
        else:
            with torch.no_grad():
                torch.testing.assert_close(fn(x), model(x))
    assert not all_trips()


def test_marked_dynamic(through):
    """``mark_dynamic``: one graph from the first call on, and no guard is added."""
    model = MLP()
    fn = through(model)
    x = rnd(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        for value in (x, rnd(9, 6), rnd(3, 6)):
            torch.testing.assert_close(fn(value), model(value))
    assert graph_count("inference") == 1


def sizes(x, y):
    n, m = x.shape
    return x.sum() * n, n * m, x.view(m, n) + n // 2, (n + m) % 7, float(n) / 2, y[: n - 1]


def shapes(x, y):
    return x.shape, x.stride(), torch.arange(x.shape[0]), x.new_ones(x.shape[1], x.numel())


def reshapes(x, y):
    n, m = x.shape
    z = torch.cat([x.reshape(-1), y])
    return z, z[n:].unfold(0, 2, 1).sum(1), x.unsqueeze(0).expand(n, n, m).reshape(n * n, m) * 2


def views(x, y):
    z = x + 1
    return z, z.view(-1), z.t(), z[1:], x.view(-1), x[: x.shape[0] // 2]


def splits(x, y):
    return (
        *x.split(x.shape[0] - 1),
        *y.chunk(2),
        torch.stack([x, x]).permute(2, 0, 1).contiguous(),
    )


def branches(x, y):
    return x.relu() if x.shape[0] > 6 else x.neg()


def pads(x, y):
    return nn.functional.pad(x, (1, x.shape[0])), nn.functional.max_pool1d(x[None], 2, 1)


def loops(x, y):
    for _ in range(min(x.shape[0], 4)):
        y = y + x.mean()
    return y


@pytest.mark.parametrize(
    "function", [sizes, shapes, reshapes, views, splits, branches, pads, loops]
)
def test_arithmetic_on_sizes(through, function):
    """Outputs that are sizes, views by sizes, constants made from them."""
    fn = through(function, dynamic=True)
    for n, m in [(4, 6), (5, 3), (9, 6), (3, 8), (2, 2)]:
        x, y = rnd(n, m), rnd(n + m)
        with torch.no_grad():
            assert_same(fn(x, y), function(x, y))
    assert not all_trips()


@pytest.mark.parametrize("function", [reshapes, views, splits, pads])
def test_gradients_with_symbolic_sizes(through, function):
    """The backward gets sizes among its inputs."""
    fn = through(function, dynamic=True)
    for n, m in [(4, 6), (5, 3), (9, 6)]:
        results = []
        for f in (fn, function):
            x, y = rnd(n, m).requires_grad_(), rnd(n + m).requires_grad_()
            sum(output.square().sum() for output in f(x, y)).backward()
            results.append((x.grad, y.grad))
        torch.testing.assert_close(*results)
    assert not all_trips()


def test_sizes_that_data_decide(through):
    """``nonzero`` and masks: unbacked sizes, in the graph when the user asks for it."""

    def f(x):
        chosen = x[x > 0]
        return chosen * 2, torch.nonzero(x).sum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fn = through(f)
        for seed in range(4):
            x = rnd(4, 5, seed=seed)
            with torch.no_grad():
                assert_same(fn(x), f(x))
    assert graph_count("inference") == 1
    assert not all_trips()


@pytest.mark.parametrize("function", ["nonzero", "mask", "float"])
@pytest.mark.thorough
def test_inductor_on_a_region_that_reads_what_data_decide(function):
    """The symbol is bound where it is made, in another region; no other region makes it."""

    def nonzero(x):
        return torch.nonzero(x > 0).float().exp().sum(0)

    def mask(x):
        return (x[x > 0].exp() + 1).relu()

    def scalar(x):
        return (x * x.sum().item()).relu()

    f = {"nonzero": nonzero, "mask": mask, "float": scalar}[function]
    config = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with plugged("own", claim=claim_ops("nonzero", "index", "_local_scalar_dense")):
        with torch._dynamo.config.patch(config):
            stages = {"plan": "tests.support.plans:first_claimer"}
            fn = compiled(f, "own", "inductor", stages=stages)
            for seed in range(3):
                x = rnd(4, 5, seed=seed)
                with torch.no_grad():
                    torch.testing.assert_close(fn(x), f(x))
    assert "inductor" in {region.backend for region in last_graph().regions}
    assert not all_trips()


@pytest.mark.thorough
def test_assertions_in_a_joint_graph():
    """Inductor's rewrites put in nodes that compute nothing; they are applied all the same."""

    def f(x):
        torch._check(x.shape[0] < 50)
        return x[x > 0].exp().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fn = compiled(f, "inductor", dynamic=True)
        x = rnd(4, 5).requires_grad_()
        fn(x).backward()
    y = rnd(4, 5).requires_grad_()
    f(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert not all_trips()


def test_an_integer_argument_that_changes(through):
    """Python numbers become symbols, too."""

    def f(x, n, scale):
        return x[:n] * scale + n, n * 2

    fn = through(f)
    for n, scale in [(2, 0.5), (3, 1.5), (4, 2.5), (5, 3.5)]:
        with torch.no_grad():
            assert_same(fn(rnd(8, 3), n, scale), f(rnd(8, 3), n, scale))


def test_a_backend_without_dynamic_shapes():
    """It gets the static graph; the symbolic one goes elsewhere, with that reason."""
    with plugged("static", info={"dynamic_shapes": False}):
        fn = compiled(lambda x: x.exp() + 1, "static")
        for n in (4, 5, 6):
            with torch.no_grad():
                assert_same(fn(rnd(n)), rnd(n).exp() + 1)
    first, second = ledger.graphs()
    assert {node.backend for node in first.nodes} == {"static"}
    assert {node.backend for node in second.nodes} == {"eager"}
    assert "symbolic sizes" in second.nodes[0].declined["static"]


def test_a_backend_that_specialises_a_size():
    """It lowers for the size that it saw: the wrong shapes are noticed in the first call."""

    def call(eager_call, region):
        sizes = [
            int(n)
            for node in region.graph.graph.find_nodes(op="placeholder")
            if isinstance(node.meta["val"], torch.Tensor)
            for n in node.meta["val"].shape
        ]
        return lambda args: [torch.zeros(sizes[0] + 1)]

    with plugged("bad", call=call):
        fn = compiled(lambda x: x.exp() + 1, "bad", dynamic=True)
        for n in (4, 5, 6):
            with torch.no_grad():
                assert_same(fn(rnd(n)), rnd(n).exp() + 1)


def test_regions_with_symbolic_sizes_get_them_as_inputs():
    """A region whose tensors have symbolic sizes can read the sizes."""
    seen = []

    def call(eager_call, region):
        values = [n.meta["val"] for n in region.graph.graph.find_nodes(op="placeholder")]
        seen.append(any(isinstance(value, torch.SymInt) for value in values))
        return eager_call

    with plugged("other", call=call):
        fn = compiled(MLP(), "other", "eager", dynamic=True, **ALTERNATE)
        with torch.no_grad():
            fn(rnd(4, 6))
    assert len(seen) > 1
    assert sum(seen) >= len(seen) - 2  # all but the weights' transposes
    assert len(last_graph().regions) > 2


def test_claim_nodes_asks_only_about_what_the_backend_may_get():
    """Its rule needn't expect sizes, symbolic or undeclared values, nor what the user excludes."""
    asked = []

    def claim(graph):
        return fuseboard.claim_nodes(graph, lambda node: asked.append(node.name))

    def f(x, y):
        return x.sin(), x.exp(), x.double().cos(), y * y.shape[0]

    x, y = rnd(3), rnd(5)
    torch._dynamo.mark_dynamic(y, 0)
    info = {"dynamic_shapes": False, "dtypes": frozenset({torch.float32})}
    with plugged("static", claim=claim, info=info):
        fn = compiled(f, "static", exclude={"static": ["aten.exp"]})
        assert_same(fn(x, y), f(x, y))
    assert asked == ["sin"]
    declined = {node.op: node.declined["static"] for node in last_graph().nodes if node.declined}
    assert declined.pop("aten.exp.default").startswith("excluded by exclude.static = 'aten.exp'")
    assert declined == {
        "aten._to_copy.default": "dtype torch.float64 isn't supported by static",
        "aten.cos.default": "dtype torch.float64 isn't supported by static",
        "aten.mul.Tensor": "symbolic sizes; static has no dynamic shapes",
    }
