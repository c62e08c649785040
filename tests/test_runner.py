"""The runner: what it holds on to, what it costs, and what a call looks like."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fuseboard.run.codegen import Source
from fuseboard.run.eager import boxed_function
from tests.support.backends import compiled, graph_count, last_graph, plugged
from tests.support.values import assert_same, rnd


class Storage:
    """Watches a tensor's memory without holding it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())

    @property
    def freed(self) -> bool:
        return bool(self._ref.expired())


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_example_inputs_are_not_kept(grad, dynamic):
    """Neither those of the compile nor those of later calls."""

    def f(x, y):
        y.add_(1)
        return (x * y).sin().sum()

    fn = compiled(f, dynamic=dynamic)
    for _ in range(3):
        x, y = rnd(5, 6).requires_grad_(grad), rnd(5, 6)
        watched = [Storage(x), Storage(y)]
        result = fn(x, y)
        if grad:
            result.backward()
        del x, y, result
        assert [storage.freed for storage in watched] == [True, True]


@pytest.mark.parametrize("name", ["eager", "fake"])
def test_a_module_is_freed(name):
    """With its parameters and what was prepared from them, once Dynamo forgets it."""
    with plugged():
        model = nn.utils.parametrize.register_parametrization(
            nn.Linear(200, 200), "weight", nn.Tanh()
        )
        fn = compiled(model, name)
        with torch.no_grad():
            fn(rnd(2, 200))
        assert last_graph().regions[0].hoisted == 1
        weight = model.parametrizations.weight.original
        storage, alive = Storage(weight), weakref.ref(model)
        del model, fn, weight
        torch._dynamo.reset()
        gc.collect()
        assert alive() is None
        assert storage.freed


def test_values_between_regions_are_let_go():
    """An intermediate value lives until its last reader, as in eager."""
    living, most = [], [0]

    def call(eager_call, region):
        def run(args):
            results = eager_call(args)
            living.extend(weakref.ref(result) for result in results)
            most[0] = max(most[0], sum(r() is not None for r in living) - len(results) + 1)
            return results

        return run

    def f(x):
        for _ in range(12):
            x = x.exp().sin()
        return x

    plan = {"plan": "tests.support.plans:alternate"}
    with plugged("one", call=call), plugged("two", call=call):
        fn = compiled(f, "one", "two", stages=plan, verify="off")
        with torch.no_grad():
            fn(rnd(3))
    assert len(last_graph().regions) > 15
    assert most[0] <= 3


def test_saved_tensors_are_let_go_in_the_backward():
    """Its inputs are freed while it runs: they are most of a training step's memory."""
    counts = []

    def call(eager_call, region):
        if region.kind != "backward":
            return eager_call

        def run(args):
            saved = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
            results = eager_call(list(args))
            args.clear()
            counts.append(sum(reference() is not None for reference in saved))
            return results

        return run

    with plugged(call=call):
        fn = compiled(lambda x: x.exp().sin().sum(), "fake")
        for _ in range(3):
            fn(rnd(4, 5).requires_grad_()).backward()
    assert min(counts[:3]) > 0  # checked, by three calls: kept for another try
    assert counts[3:] == [1, 1]  # the tangent, which autograd holds


# --- a call --------------------------------------------------------------------------------------


def test_hooks_run_at_compile_time_only():
    """A call of compiled code asks no plugin and takes no lock."""
    asked = []

    def claim(graph):
        from tests.support.backends import claim_all

        asked.append("claim")
        return claim_all(graph)

    with plugged(claim=claim, verify=lambda: asked.append("verify")):
        fn = compiled(lambda x: x.exp() + 1, "fake")
        with torch.no_grad():
            fn(rnd(3))
            before = list(asked)
            for _ in range(5):
                fn(rnd(3))
    assert asked == before == ["claim", "verify"]


def test_verify_always_checks_each_call():
    """For debugging."""
    asked = []
    with plugged(verify=lambda: asked.append("verify")):
        fn = compiled(lambda x: x.exp() + 1, "fake", verify="always")
        with torch.no_grad():
            for _ in range(4):
                fn(rnd(3))
    assert len(asked) == 4


def test_a_boxed_callable_may_empty_its_list_or_not():
    """Both kinds of lowered code work, and a call may return a list or a tuple."""

    def call(eager_call, region):
        return lambda args: list(eager_call(list(args)))

    def f(x, y):
        return x.exp() + y, y.sin()

    with plugged(call=call):
        fn = compiled(f, "fake")
        with torch.no_grad():
            for _ in range(3):
                assert_same(fn(rnd(3), rnd(3)), f(rnd(3), rnd(3)))


def test_graph_breaks_are_dynamos():
    """The board adds none; each part is a graph of its own."""

    def f(x):
        y = x.exp()
        torch._dynamo.graph_break()
        return y.sin()

    fn = compiled(f)
    with torch.no_grad():
        assert_same(fn(rnd(3)), f(rnd(3)))
    assert graph_count("inference") == 2


def test_fullgraph():
    """Nothing here breaks a graph."""
    fn = torch.compile(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        backend="fuseboard",
        fullgraph=True,
        options={"backends": ["eager"]},
    )
    fn(rnd(2, 5, 8)).sum().backward()
    assert graph_count("forward", "backward") == 2


def test_a_graph_without_ops():
    """Inputs come back, constants are made."""
    fn = compiled(lambda x: (x, None, 3))
    x = rnd(3)
    assert fn(x)[0] is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_scalars_of_every_kind_in_the_generated_code(dtype):
    """inf, nan, negative zero, big ints, dtypes, devices, memory formats, slices, strings."""

    def f(x):
        y = torch.full((3,), float("inf")), torch.full((2,), float("-inf")), x.to(dtype)
        z = torch.full((2,), -0.0), torch.full((2,), 2**60), torch.full((2,), float("nan"))
        w = torch.div(x, 3, rounding_mode="floor"), x[1::2], x.to("cpu", non_blocking=True)
        return *y, *z, *w, torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last) + 1j

    fn = compiled(f)
    with torch.no_grad():
        for _ in range(2):
            assert_same(fn(rnd(6)), f(rnd(6)))


# --- generated source ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["args", "error", "_site", "recover", "cell", "prepared"])
def test_names_that_collide_with_the_generated_codes_own(name):
    """A node may be called like anything that the function uses."""
    graph = torch.fx.Graph()
    x = graph.placeholder(name)
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    y.name = "args" if name == "error" else "error"
    graph.output((y,))
    call = boxed_function(torch.fx.GraphModule({}, graph), "named")
    assert_same(call([rnd(3)])[0], rnd(3) + 1)


def test_unique_names():
    """Identifiers, whatever they are made from."""
    source = Source()
    names = [source.unique(hint) for hint in ("x", "x", "class", "1", "a.b", "", "x_1")]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_literals():
    """Each value's expression evaluates to the value."""
    source = Source()
    for value in (
        None,
        True,
        3,
        -1,
        2**70,
        1.5,
        float("inf"),
        -float("inf"),
        "a'b",
        (1,),
        (1, [2, (3,)]),
        slice(1, None, 2),
        {"a": [1, None]},
        torch.float32,
        torch.device("cpu"),
        2 + 3j,
        torch.contiguous_format,
        ...,
        (),
        [],
        torch.Size([2, 3]),
    ):
        text = source.literal(value, {})
        assert eval(text, dict(source.globals)) == value
    assert str(eval(source.literal(-0.0, {}))) == "-0.0"


def test_tracebacks_show_the_generated_line():
    """An error inside of an op points to the line that called it."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, y)),))
    call = boxed_function(torch.fx.GraphModule({}, graph), "product")
    with pytest.raises(RuntimeError) as caught:
        call([rnd(2, 3), rnd(2, 3)])
    entry = caught.traceback[-1]
    assert str(entry.path).startswith("<fuseboard:product")
    assert "mm" in str(entry.statement)
