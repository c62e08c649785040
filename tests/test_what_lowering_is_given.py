"""What ``docs/plugins.md`` says of a region that is to be lowered, held against the board."""

from __future__ import annotations

import pytest
import torch
from torch._decomp import get_decompositions

import fuseboard
from tests.support.backends import all_trips, claim_ops, compiled, last_graph, plugged
from tests.support.values import assert_same, rnd

aten = torch.ops.aten


def lowered(function, *inputs, look, name="fake", dynamic=None, **hooks):
    """What ``look(region, inputs)`` finds in each region of a compiled function."""
    seen = []

    def lower(region, inputs):
        seen.append(look(region, inputs))
        return fuseboard.lower_eagerly(region)

    with plugged(name, lower=lower, **hooks):
        result = compiled(function, name, min_region_us=0.0, dynamic=dynamic)(*inputs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    return seen


def targets(region, inputs):
    return {node.target for node in region.graph.graph.nodes if node.op == "call_function"}


# --- what the graph holds -------------------------------------------------------------------------


def test_constants_are_attributes_with_one_reader():
    """Real tensors, though a fake mode is active; weights are placeholders."""

    def look(region, inputs):
        graph = region.graph
        found = {}
        for node in graph.graph.find_nodes(op="get_attr"):
            (reader,) = node.users
            with fuseboard.real_tensors():
                found[reader.target] = getattr(graph, node.target).tolist()
        return found, len(inputs)

    model = torch.nn.Linear(3, 3).requires_grad_(False)
    with torch.no_grad():
        seen = lowered(lambda x: model(x)[:, [0, 2]], rnd(2, 3), look=look)
    assert seen == [({aten.lift_fresh_copy.default: [0, 2]}, 3)]


def test_graphs_of_a_higher_order_op_are_attributes():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    def look(region, inputs):
        graph = region.graph
        return [type(getattr(graph, n.target)) for n in graph.graph.find_nodes(op="get_attr")]

    with torch.no_grad():
        ((one, other),) = lowered(f, rnd(3), look=look)
    assert issubclass(one, torch.fx.GraphModule)
    assert issubclass(other, torch.fx.GraphModule)


def test_decompositions_bring_ops_that_nobody_claimed():
    """Those of torch's own tables: ``prims``, and ops that make tensors."""
    table = get_decompositions([aten.native_layer_norm, aten.var_mean, aten.log_sigmoid_forward])
    asked = set()

    def claim(graph):
        asked.update(node.target for node in graph.graph.nodes if node.op == "call_function")
        return fuseboard.claim_nodes(graph, lambda node: None)

    with torch.no_grad():
        (found,) = lowered(
            lambda x: torch.nn.functional.logsigmoid(torch.nn.functional.layer_norm(x, (4,))),
            rnd(2, 4).bfloat16(),
            look=targets,
            claim=claim,
            decompositions=lambda: dict(table),
        )
    unasked = found - asked
    names = {str(target).removesuffix(".default") for target in unasked}
    prims = {f"prims.{name}" for name in ("var", "broadcast_in_dim", "div", "sum")}
    assert prims | {"aten._to_copy", "aten.new_zeros"} <= names
    assert not all_trips()


def test_arithmetic_on_sizes_is_in_the_region():
    def f(x):
        return x.view(x.shape[0] * 2, -1).exp()

    with torch.no_grad():
        (found,) = lowered(f, rnd(4, 6), look=targets, dynamic=True)
    assert any(getattr(target, "__module__", "") == "_operator" for target in found)


# --- aliasing -------------------------------------------------------------------------------------


def returning(which):
    """A call that gives ``which(results, inputs)`` instead of the results."""

    def call(eager_call, region):
        def run(args):
            inputs = list(args)
            return which(list(eager_call(args)), inputs)

        return run

    return call


@pytest.mark.parametrize(
    ("function", "which"),
    [
        (lambda x: x * 1, lambda results, inputs: [inputs[0]]),
        (lambda x: (x + 1, x.clone() + 1), lambda results, inputs: [results[0]] * 2),
    ],
    ids=["an input", "another output"],
)
def test_what_shares_memory_on_the_first_call_is_cloned_and_told(function, which):
    x = rnd(3)
    with plugged("fake", call=returning(which)), torch.no_grad():
        fn = compiled(function, "fake", min_region_us=0.0)
        for _ in range(2):
            results = fn(x)
            results = results if isinstance(results, tuple) else (results,)
            addresses = {t.data_ptr() for t in (x, *results)}
            assert len(addresses) == 1 + len(results)
    (note,) = [note for note in last_graph().notes if "cloned" in note]
    assert "storage that eager's results don't share" in note


@pytest.mark.parametrize("copies", [True, False])
def test_a_view_between_regions_may_be_one_or_a_copy(copies):
    """The region's output is ``x.t()`` of its input; the strides are what counts."""

    def which(results, inputs):
        return [r.clone() for r in results] if copies else results

    def f(x):
        return x.t().sort(-1)[0]

    x = rnd(3, 4)
    with plugged("fake", call=returning(which), claim=claim_ops("t")), torch.no_grad():
        assert_same(compiled(f, "fake", min_region_us=0.0)(x), f(x))
    assert not all_trips()
    assert not last_graph().notes


def test_views_that_a_caller_could_see_never_reach_a_backend():
    def f(x):
        y = x + 1
        return y, y.t(), x.t()

    with torch.no_grad():
        (found,) = lowered(f, rnd(3, 4), look=targets)
    assert found == {aten.add.Tensor}


# --- fake and real tensors ------------------------------------------------------------------------


def kinds(region, inputs):
    """Whether a new tensor is fake as it is, in real_tensors, and in the inputs' own mode."""
    fake = torch._subclasses.FakeTensor
    with fuseboard.real_tensors():
        real = torch.ones(2)
        assert real.tolist() == [1.0, 1.0]
        assert not torch.is_grad_enabled()
    with inputs[0].fake_mode:
        made = isinstance(torch.ones(2), fake)
    return region.kind, isinstance(torch.ones(2), fake), isinstance(real, fake), made


def test_tensors_that_are_made_while_lowering_are_fake_or_not():
    """A backward is lowered when it first runs, outside of Dynamo's compile."""
    x = rnd(3).requires_grad_()
    assert lowered(lambda x: x.sin().exp(), x, look=kinds) == [
        ("forward", True, False, True),
        ("backward", False, False, True),
    ]


def test_a_tensor_that_is_loaded_is_real_where_tensors_are(tmp_path):
    """``torch.load`` gives one without values within a tracing context."""
    torch.save(torch.ones(2), tmp_path / "tensor.pt")

    def look(region, inputs):
        with fuseboard.real_tensors():
            return torch.load(tmp_path / "tensor.pt").tolist()

    with torch.no_grad():
        assert lowered(lambda x: x.exp(), rnd(3), look=look) == [[1.0, 1.0]]
