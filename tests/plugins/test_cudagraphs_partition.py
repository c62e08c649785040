"""Which ops a CUDA graph can hold, and which regions: all of it on fake CUDA tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fuseboard
from fuseboard_cudagraphs._cut import cut_region
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._partition import claim, why_not
from fuseboard_cudagraphs._region import Inputs, why_not_region

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def trace(function: Callable[..., Any], *inputs: Callable[[], torch.Tensor]) -> GraphModule:
    """The ATen graph of a function of fake tensors; each input is made under the fake mode."""
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        values = [make() for make in inputs]
        return make_fx(function)(*values)


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(shape, dtype=dtype, device="cuda")


def cpu(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(shape, dtype=dtype)


def mask_of(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=torch.bool, device="cuda")


def answers(graph: GraphModule, **keywords: Any) -> dict[str, str | None]:
    """Op → None where it is claimed, else the reason; each op of these graphs occurs once."""
    found: dict[str, str | None] = {}
    for answer in claim(graph, **keywords):
        if isinstance(answer, fuseboard.Decline):
            found[answer.node] = answer.reason
        else:
            found |= dict.fromkeys(answer.nodes)
    ops = {node.name: str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert set(found) == set(ops)  # every op has an answer
    return {op.removeprefix("aten."): found[name] for name, op in ops.items()}


def by_hand(target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Node:
    """One call on a fake CUDA tensor, where tracing it would need what isn't there."""
    graph = Graph()
    with FakeTensorMode():
        fake = torch.empty(4, device="cuda")
    x = graph.placeholder("x")
    x.meta["val"] = fake
    node = graph.call_function(target, (x, *args), kwargs)
    node.meta["val"] = fake if value is None else value
    return node


# --- ops ----------------------------------------------------------------------------------------


def test_ops_on_cuda_tensors_are_claimed():
    """Products, reductions, views, factories on the device, the results of several."""

    def function(x, w):
        top, where = (x @ w).relu().max(dim=1)
        return top.view(1, -1) + torch.arange(3, device="cuda"), where

    found = answers(trace(function, cuda(3, 5), cuda(5, 7)))
    assert len(found) == 7
    assert set(found.values()) == {None}


def test_a_result_follows_the_op_that_made_it():
    """``getitem`` of a declined op is declined for the same reason."""

    def function(x):
        return torch.unique(x, return_inverse=True)[1]

    graph = trace(function, cuda(5))
    unique, *getitems = list(graph.graph.nodes)[1:-1]
    getitem = getitems[-1]
    assert getitem.target is operator.getitem
    assert "data" in why_not(unique)
    assert why_not(getitem) == why_not(unique)


def test_sizes_that_data_decide_are_declined():
    """And what is computed on results of such sizes."""

    def function(x):
        return aten.nonzero(x) * 2

    found = answers(trace(function, cuda(5)))
    assert found["nonzero.default"] == "its size or value depends on data"
    assert found["mul.Tensor"] == "its size or value depends on data"


def test_values_that_the_host_reads_are_declined():
    """A number read off a tensor."""

    def function(x):
        return x * x.sum().item()

    found = answers(trace(function, cuda(5)))
    assert found["_local_scalar_dense.default"] == "the host reads what it computes"
    assert found["sum.default"] is None


def test_embedding_gradients_are_declined():
    """Their kernel waits for the GPU."""

    def function(grad, index):
        return aten.embedding_dense_backward(grad, index, 10, -1, False)

    found = answers(trace(function, cuda(3, 4), cuda(3, dtype=torch.int64)))
    reason = "its kernel waits for the GPU to count indices"
    assert found == {"embedding_dense_backward.default": reason}


def test_indices_may_not_be_masks():
    """Whole numbers as indices are claimed, masks are not, filling through a mask is."""

    def function(x, index, mask, values):
        return (
            aten.index.Tensor(x, [index]),
            aten.index_put(x, [mask], values),
            aten.index_put(x, [index], values),
        )

    def fill(x, mask, zero):
        return aten.index_put(x, [mask], zero)

    whole, mask = cuda(5, dtype=torch.int64), cuda(5, dtype=torch.bool)
    graph = trace(function, cuda(5), whole, mask, cuda(5))
    found = [why_not(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert found[0] is None
    assert found[1] == "a boolean index selects as many elements as the data say"
    assert found[2] is None
    assert answers(trace(fill, cuda(5), mask, cuda())) == {"index_put.default": None}
    index = by_hand(aten.isnan.default, value=mask_of(4))
    masked = by_hand(aten.index.Tensor, [index])
    assert why_not(masked) == "a boolean index selects as many elements as the data say"


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x: x.cpu(), [cuda(3)], "a tensor on cpu"),
        (lambda x: aten._to_copy(x, device=CUDA), [cpu(3)], "a tensor on cpu"),
        (lambda x: x.sum().cpu(), [cuda(3)], "it copies to the CPU"),
        (lambda x: aten._to_copy(x, device=CUDA), [cpu()], "it copies a CPU scalar to the GPU"),
        (
            lambda m, s, x: torch.where(m, s, x),
            [cuda(3, dtype=torch.bool), cpu(), cuda(3)],
            "it cop",
        ),
        (lambda x: torch.rand((), device="cpu") * x, [cuda(3)], "it draws random numbers on the"),
    ],
)
def test_copies_between_cpu_and_gpu_are_declined(function, inputs, reason):
    """Nothing crosses but numbers that a kernel takes by value."""
    declined = [found for found in answers(trace(function, *inputs)).values() if found]
    assert len(declined) == 1
    assert declined[0].startswith(reason)


def test_cpu_scalars_are_operands():
    """A number on the CPU, and arithmetic on it, as operands of pointwise ops."""

    def function(x, scale):
        return x * (scale + 1)

    assert answers(trace(function, cuda(3), cpu())) == {"add.Tensor": None, "mul.Tensor": None}


def test_random_numbers_of_the_default_generator_are_claimed():
    """A graph registers that generator's state, and no other's."""
    found = answers(trace(lambda x: torch.rand_like(x).bernoulli(0.5), cuda(3)))
    assert set(found.values()) == {None}
    assert why_not(by_hand(aten.bernoulli.default, generator=None)) is None
    own = by_hand(aten.bernoulli.default, generator=torch.Generator())
    assert why_not(own) == "it draws random numbers from a generator of its own"


def test_writing_ops_are_declined():
    """Regions are functional; an op that writes isn't recorded."""
    assert why_not(by_hand(aten.add_.Tensor, 1)) == "it writes to an argument"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs a torch with distributed")
def test_collectives_are_declined():
    """Whatever device they are on."""
    node = by_hand(torch.ops._c10d_functional.all_reduce.default, "sum", "0")
    assert "collective" in why_not(node)


def test_higher_order_ops_are_declined():
    """What they run may be decided on the host."""
    assert "higher-order" in why_not(by_hand(torch.ops.higher_order.cond))


def test_custom_ops_need_the_users_word():
    """The reason says which option to set; then they are claimed."""
    library = torch.library.Library("cudagraphs_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    node = by_hand(torch.ops.cudagraphs_test.twice.default)
    assert "'cudagraphs_test' in plugins.cudagraphs.namespaces" in why_not(node)
    assert why_not(node, namespaces=["cudagraphs_test"]) is None


def test_results_that_are_not_strided_are_declined():
    """Sparse ones among them."""
    sparse = torch.eye(4).to_sparse()
    assert why_not(by_hand(aten.relu.default, value=sparse)) == "its result isn't a strided tensor"


def test_symbolic_sizes_are_inputs():
    """Arithmetic on sizes, and tensors of such sizes, are claimed."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = torch.empty(mode.from_tensor(torch.empty(6, 5)).shape, device="cuda")
        graph = make_fx(lambda x: x.reshape(x.shape[0] * 5).relu(), tracing_mode="symbolic")(x)
    assert graph.graph.find_nodes(op="placeholder")
    assert set(answers(graph).values()) == {None}


# --- regions ------------------------------------------------------------------------------------


def region(graph: GraphModule, backend: str = "eager", static: tuple[int, ...] = ()) -> Any:
    return fuseboard.Region("inference0.region0", backend, "inference", graph, "s", static)


def chain(x):
    for _ in range(8):
        x = x.sin()
    return x


ENABLED = Options(enabled=True)


def test_a_region_of_enough_ops_is_recorded():
    """Eight that compute, by default; views don't count."""
    assert why_not_region(region(trace(chain, cuda(3))), ENABLED) is None
    shorter = trace(lambda x: x.sin().view(1, 3).cos().t().sin(), cuda(3))
    reason = "too small: 3 ops that compute, plugins.cudagraphs.min_nodes is 8"
    assert why_not_region(region(shorter), ENABLED) == reason
    assert why_not_region(region(shorter), Options(min_nodes=3)) is None


def test_a_region_names_the_first_op_that_stands_in_the_way():
    """And how many more there are."""

    def function(x):
        return chain(x), aten.add_(x, 1), aten.mul_(x, 2)

    reason = why_not_region(region(trace(function, cuda(3))), ENABLED)
    assert reason == "aten.add_.Tensor: it writes to an argument (and 1 more)"


def test_a_region_that_writes_is_not_cut():
    """Who reads before and after the write can't be told from the graph's wiring."""

    def function(x, index):
        rows = aten.embedding_dense_backward(x, index, 10, -1, False)
        y = x + 1
        z = y * 2
        y.add_(1)
        return rows * 2, z, y * 3

    made = region(trace(function, cuda(3, 4), cuda(3, dtype=torch.int64)))
    assert cut_region(made, Options(min_nodes=1)) == "an op of it writes to an argument"


def test_a_region_elsewhere_is_left_alone():
    """One on the CPU, one with an input there, one on two devices, another backend's."""
    assert why_not_region(region(trace(chain, cpu(3))), ENABLED).startswith("input x_1 is on cpu")
    made = trace(lambda: torch.ones(()) + 1)
    assert why_not_region(region(made), ENABLED) == "nothing of it is on a cuda device"
    two = trace(lambda x, y: (chain(x), chain(y)), cuda(3), lambda: torch.empty(3, device="cuda:1"))
    assert why_not_region(region(two), ENABLED) == "it spans cuda:0, cuda:1"
    options = Options(enabled=True, inner="inductor")
    reason = "eager isn't among plugins.cudagraphs.inner"
    assert why_not_region(region(trace(chain, cuda(3))), options) == reason
    assert why_not_region(region(trace(chain, cuda(3)), "inductor"), options) is None


def test_inputs_are_sorted_by_how_they_are_given():
    """Static ones, numbers on the CPU, and those whose layout has to be compared."""

    def function(x, scale, w, wide):
        return x * scale + w, wide * 2

    def strided() -> torch.Tensor:
        return torch.empty_strided((3, 5), (8, 1), device="cuda")

    graph = trace(function, cuda(3), cpu(), cuda(3), strided)
    known = Inputs.of(region(graph, static=(2,)))
    assert (known.tensors, known.static, known.scalars) == ((0, 2, 3), frozenset({2}), (1,))
    assert (known.numbers, known.shaped) == ((), (3,))
    assert known.device == torch.device("cuda", 0)


def test_the_options_read_lists_from_text():
    """As the environment gives them."""
    assert Options(inner="inductor,triton", namespaces="mylib").inner == ("inductor", "triton")
    with pytest.raises(ValueError, match="max_graphs"):
        Options(max_graphs=0)
