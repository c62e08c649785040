"""What a region computes in float64: what is lifted, what isn't, and what is left alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.fx import Graph, GraphModule

from fuseboard.profile.judge.reference import make_reference, replayable
from fuseboard.profile.judge.values import judge
from tests.support.references import captured, reference_of, traced
from tests.support.values import rnd

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def graph_of(target: Any, *args: Any, **kwargs: Any) -> GraphModule:
    """A graph that calls one op; tensors among the arguments are its inputs."""
    graph = Graph()
    given = [
        graph.placeholder(f"x{number}") if isinstance(value, torch.Tensor) else value
        for number, value in enumerate(args)
    ]
    graph.output((graph.call_function(target, tuple(given), kwargs),))
    return GraphModule(nn.Module(), graph)


def first_of(target: Any, *args: Any) -> GraphModule:
    """A graph that returns the first result of an op that has several."""
    module = graph_of(target, *args)
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        first = module.graph.call_function(operator.getitem, (output.args[0][0], 0))
    output.args = ((first,),)
    return module


# --- lifting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_are_those_of_float64(dtype: torch.dtype) -> None:
    """A chain of ops gives what the same function gives on float64 inputs."""
    x, w = rnd(5, 7, dtype=dtype), rnd(3, 7, seed=1, dtype=dtype)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.gelu(F.linear(x, w)) * 0.1, -1)

    reference = reference_of(function, x, w)
    torch.testing.assert_close(
        reference.precise[0], function(x.double(), w.double()), rtol=1e-14, atol=0
    )
    assert torch.equal(reference.eager[0], function(x, w))
    assert reference.notes == ()


def test_dtype_arguments_and_constants_are_lifted() -> None:
    """Casts to half types, dtypes of new tensors and constants of the graph are no roundings."""
    constant = torch.full((4,), 0.1)
    third = torch.tensor(1 / 3)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        steps = torch.arange(4, dtype=torch.float32) / 7
        return [
            (x.half() * 3).bfloat16().float() * constant,
            torch.full((4,), 1 / 3, dtype=torch.float16) + x,
            x.sum(dtype=torch.float32) + torch.linspace(0, 1, 4),
            steps + torch.ones(4, dtype=torch.bfloat16) / 7,
            x.new_full((4,), 1 / 3) + torch.zeros_like(x, dtype=torch.float16) + third,
        ]

    x = rnd(4)
    reference = reference_of(function, x)
    wide, sevenths = x.double(), torch.arange(4).double() / 7
    expected = [
        wide * 3 * constant.double(),
        wide + 1 / 3,
        wide.sum() + torch.linspace(0, 1, 4, dtype=torch.float64),
        sevenths + 1 / 7,
        torch.full((4,), 1 / 3).double() * 0 + 1 / 3 + third.double(),
    ]
    for got, want in zip(reference.precise, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


def test_floats_of_integers_are_lifted() -> None:
    """Divisions, roots and products of integers with fractions are computed in float64."""
    x = torch.arange(1, 6)
    reference = reference_of(lambda a: [a / 3, a.sqrt(), a * 0.1, torch.where(a > 2, 0.1, 0.2)], x)
    wide = x.double()
    for got, want in zip(reference.precise[:3], [wide / 3, wide.sqrt(), wide * 0.1], strict=True):
        assert torch.equal(got, want)
    assert [e.dtype for e in reference.eager] == [torch.float32] * 4


def test_casts_to_integers_stay() -> None:
    """What drops digits on purpose drops them in float64, too; its rule is that of mismatches."""
    x = rnd(100) * 10
    reference = reference_of(lambda a: [a.int(), a.bool(), (a * 3).long().float() / 7], x)
    assert reference.rules == ("mismatches", "mismatches", "close")
    assert torch.equal(reference.precise[0], x.double().int())
    assert torch.equal(reference.precise[2], (x.double() * 3).long().double() / 7)


def test_limits_of_the_captured_dtype_stay() -> None:
    """nan_to_num and an epsilon that isn't given mean the dtype as captured."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 2.0])
    reference = reference_of(torch.nan_to_num, x)
    largest = torch.finfo(torch.float32).max
    assert reference.precise[0].tolist() == [largest, -largest, 0.0, 2.0]
    small = torch.full((1, 8), 1e-5)
    normed = make_reference(first_of(aten._fused_rms_norm.default, small, [8], None, None), [small])
    wide = small.double()
    expected = wide / (wide.square().mean() + torch.finfo(torch.float32).eps).sqrt()
    torch.testing.assert_close(normed.precise[0], expected)
    assert judge(normed, normed.eager).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_bits_are_those_of_the_captured_dtype(dtype: torch.dtype) -> None:
    """A view of the bits as integers is exact, as captured."""
    x = rnd(6).to(dtype)
    as_integers = torch.int32 if dtype == torch.float32 else torch.int64
    reference = reference_of(lambda a: (a.clone().view(as_integers) & 7).to(torch.int64), x)
    assert torch.equal(reference.precise[0], (x.view(as_integers) & 7).to(torch.int64))


def test_softmax_of_half_to_float() -> None:
    """A softmax that casts to float32 by a flag runs in float64 without it."""
    x = rnd(3, 5, dtype=torch.float16)
    graph = graph_of(aten._softmax.default, x, -1, False)
    reference = make_reference(graph, [x])
    assert torch.equal(reference.precise[0], x.double().softmax(-1))
    assert reference.notes == ()


@pytest.mark.parametrize("name", ["expanded", "window", "gaps", "offset", "transposed", "conj"])
def test_layouts_are_kept(name: str) -> None:
    """Inputs that overlap, have gaps, an offset or a lazy conjugation are lifted as they lie."""
    base = rnd(8, 6)
    x = {
        "expanded": base[:1].expand(8, 6),
        "window": base.flatten().as_strided((5, 4), (2, 1)),
        "gaps": base[::2, ::3],
        "offset": base[3:, 2:],
        "transposed": base.t(),
        "conj": torch.complex(base, base * 2).conj(),
    }[name]

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [a.clone() * 0.3, a.sum(-1), a.select(0, 1) + a.select(0, 0)]

    reference = reference_of(function, x)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    for got, want in zip(reference.precise, function(wide), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    assert judge(reference, reference.eager).ok


def test_as_strided_reaches_the_memory_around() -> None:
    """A view that is taken by offset reads the same elements in float64."""
    x = rnd(6, 4)[2:, 1:]
    reference = reference_of(lambda a: a.as_strided((3, 2), (4, 1), 2) * 0.3, x)
    torch.testing.assert_close(reference.precise[0], reference.eager[0].double())
    assert judge(reference, reference.eager).ok


def test_views_of_what_has_other_strides_in_float64() -> None:
    """Views are meant for eager's strides: float64 kernels give others now and then."""
    x = rnd(2, 8, 5, 5).to(memory_format=torch.channels_last)
    w = rnd(16, 8, 3, 3).to(memory_format=torch.channels_last)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, padding=1)
        return y.permute(0, 2, 3, 1).view(50, 16) * 0.5

    reference = reference_of(function, x, w)
    assert judge(reference, reference.eager).ok
    assert reference.precise[0].dtype == torch.float64


# --- ops that can't be lifted --------------------------------------------------------------------

_library = torch.library.Library("fuseboard_reference_tests", "FRAGMENT")
_library.define("float32_only(Tensor x) -> Tensor")
_library.define("once(Tensor x) -> Tensor")
_library.define("told(Tensor x) -> ()")
_calls: list[int] = []


def _float32_only(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError(f"dtype {x.dtype} isn't supported\nat all")
    return x.sin() * 3


def _once(x: torch.Tensor) -> torch.Tensor:
    _calls.append(1)
    if len(_calls) > 1:
        raise RuntimeError("only once")
    return x * 2


_library.impl("float32_only", _float32_only, "CPU")
_library.impl("once", _once, "CPU")
_library.impl("told", lambda x: None, "CPU")
ours = torch.ops.fuseboard_reference_tests


def test_an_op_without_float64_runs_in_float32() -> None:
    """The run goes on in float64 after it, other engines' roundings pass, and a note says so."""
    graph = Graph()
    x = graph.placeholder("x")
    half = graph.call_function(aten.mul.Tensor, (x, 0.7))
    sine = graph.call_function(ours.float32_only.default, (half,))
    graph.output((graph.call_function(aten.sum.dim_IntList, (sine, [-1])),))
    module = GraphModule(nn.Module(), graph)
    value = rnd(4, 500)
    reference = make_reference(module, [value])
    middle = ((value.double() * 0.7).float().sin() * 3).double()
    assert torch.equal(reference.precise[0], middle.sum(-1))
    (note,) = reference.notes
    assert note == (
        "fuseboard_reference_tests::float32_only ran in float32, not in float64: it refuses "
        "float64 (RuntimeError: dtype torch.float64 isn't supported)"
    )
    other = ((value * 0.7).double().sin() * 3).float().sum(-1)
    assert judge(reference, reference.eager).ok
    assert judge(reference, [other]).ok
    assert not judge(reference, [other + 0.01]).ok


def test_what_depends_on_an_op_that_fails_isnt_judged() -> None:
    """An op that can't be run again makes its outputs unjudged, the others are judged."""
    _calls.clear()
    graph = Graph()
    x = graph.placeholder("x")
    once = graph.call_function(ours.once.default, (x,))
    graph.output(
        (
            graph.call_function(aten.add.Tensor, (once, 1)),
            graph.call_function(aten.mul.Tensor, (x, 0.3)),
        )
    )
    value = rnd(3)
    reference = make_reference(GraphModule(nn.Module(), graph), [value])
    assert reference.rules == ("unjudged", "close")
    why = "fuseboard_reference_tests::once can't be run again: RuntimeError: only once"
    assert reference.notes == (why, f"output 0 isn't judged by value: {why}")
    assert judge(reference, [torch.zeros(3), value * 0.3]).ok
    assert not judge(reference, [value * 2 + 1, value * 0.31]).ok


def test_graphs_within_are_lifted() -> None:
    """cond and nested_compile_region run in float64, inside too."""

    @torch.compiler.nested_compile_region
    def block(a: torch.Tensor) -> torch.Tensor:
        return torch.sin(a.half().float() * 0.3) @ a

    def function(a: torch.Tensor) -> torch.Tensor:
        a = block(block(a))
        return torch.cond(a.sum() > 100, lambda b: b * 0.3, lambda b: b.cos() * 0.7, (a,))

    x = rnd(6, 6)
    with torch.no_grad():
        (found,) = captured(function, x)
    names = {str(node.target) for node in found.graph.graph.nodes}
    assert {"invoke_subgraph", "cond"} <= names
    reference = make_reference(found.graph, found.inputs)

    def wide(a: torch.Tensor) -> torch.Tensor:
        return torch.sin(a * 0.3) @ a

    expected = wide(wide(x.double())).cos() * 0.7
    torch.testing.assert_close(reference.precise[0], expected, rtol=1e-13, atol=0)
    assert reference.notes == ()


def test_branches_are_those_of_eager() -> None:
    """Where float64 would decide otherwise, it still computes what eager took, call by call."""

    @torch.compiler.nested_compile_region
    def block(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 1, lambda b: b * 0.1, lambda b: b + 0.1, (a,))

    half = torch.full((2,), 0.5) + torch.tensor([1e-8, 1e-8])  # 1 in float32
    x = half.double() + 1e-9  # more than 1
    graph = traced(lambda a: torch.cond(a.float().sum() > 1, torch.sin, torch.cos, (a,)), x)
    reference = make_reference(graph, [x])
    assert torch.equal(reference.precise[0], x.cos())
    with torch.no_grad():
        (found,) = captured(lambda a: block(block(a)), torch.full((2,), 0.6))
    reference = make_reference(found.graph, found.inputs)
    torch.testing.assert_close(reference.precise[0], torch.full((2,), 0.16).double())


@pytest.mark.parametrize("kind", ["while_loop", "scan"])
def test_loops_run_in_float64(kind: str) -> None:
    """What a loop holds runs in float64, and goes round as often as it does in eager."""

    def looping(a: torch.Tensor) -> torch.Tensor:
        _, result = torch.while_loop(
            lambda total, b: total.sum() < 3,
            lambda total, b: (total + b.square(), b * 0.3 + 1),
            (torch.zeros(5), a),
        )
        return result * 0.1

    def scanning(a: torch.Tensor) -> torch.Tensor:
        last, each = scan(lambda c, b: (c * 0.3 + b, c / 3), torch.zeros(()), a, dim=0)
        return each + last

    function = looping if kind == "while_loop" else scanning
    with torch.no_grad():
        (found,) = captured(function, rnd(5))
    reference = make_reference(found.graph, found.inputs)
    assert reference.rules == ("close",)
    torch.testing.assert_close(reference.precise[0], loop_by_hand(kind, found.inputs[0].double()))
    assert not any(kind in note for note in reference.notes)
    assert judge(reference, reference.eager).ok


def loop_by_hand(kind: str, a: torch.Tensor) -> torch.Tensor:
    """What the loops of the test above compute."""
    if kind == "while_loop":
        total = torch.zeros(5).double()
        while total.sum() < 3:
            total, a = total + a.square(), a * 0.3 + 1
        return a * 0.1
    carry, each = torch.zeros(()).double(), []
    for b in a:
        each.append(carry / 3)
        carry = carry * 0.3 + b
    return torch.stack(each) + carry


# --- random numbers and memory -------------------------------------------------------------------


def test_random_numbers_arent_judged() -> None:
    """Outputs that random numbers reach aren't judged, others are; the generator is put back."""

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        noisy = F.dropout(a, 0.5) + torch.rand_like(a)
        return [noisy * 2, a * 0.3, noisy > 0, torch.zeros_like(noisy) + a]

    x = rnd(4, 4)
    graph = traced(function, x)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    reference = make_reference(graph, [x])
    assert torch.equal(torch.get_rng_state(), before)
    assert reference.rules == ("unjudged", "close", "unjudged", "close")
    assert reference.notes[0] == "output 0 isn't judged by value: random numbers reach it"
    torch.manual_seed(3)
    assert torch.equal(reference.eager[0], graph(x)[0])
    other = [torch.zeros(4, 4), x * 0.3, torch.zeros(4, 4, dtype=torch.bool), x.clone()]
    assert judge(reference, other).ok
    assert not judge(reference, [other[0], x * 0.31, other[2], other[3]]).ok


def test_generators_are_left_alone_without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting a state back would repeat the numbers that another thread drew meanwhile."""
    q = rnd(1, 2, 8, 16)
    graph = traced(F.scaled_dot_product_attention, q, q, q)
    monkeypatch.delattr(torch, "set_rng_state")
    reference = make_reference(graph, [q, q, q])
    assert not judge(reference, [q]).ok
    with pytest.raises(AttributeError):
        make_reference(traced(torch.rand_like, q), [q])


def test_dropout_that_is_off_is_judged() -> None:
    """Attention without dropout carries a random op's tag and is judged."""
    q, k, v = (rnd(1, 2, 8, 16, seed=seed) for seed in range(3))
    assert reference_of(F.scaled_dot_product_attention, q, k, v).rules == ("close",)
    x = rnd(4)
    graph = first_of(aten.native_dropout.default, x, 0.5, False)
    assert make_reference(graph, [x]).rules == ("close",)


def test_memory_that_nobody_wrote_isnt_judged() -> None:
    """Uninitialised memory in an output isn't judged; memory that is overwritten wholly is."""

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        whole, part = torch.empty(6), torch.empty(6)
        whole[:3] = a
        whole[3:] = a * 0.3
        part[:3] = a
        return [whole, part, torch.empty_like(a), torch.zeros_like(torch.empty(3)) + a]

    x = rnd(3)
    with torch.no_grad():
        (found,) = captured(function, x)
    reference = make_reference(found.graph, found.inputs)
    assert reference.rules == ("close", "unjudged", "unjudged", "close")
    assert reference.notes[0] == "output 1 isn't judged by value: uninitialised memory reaches it"
    wrong = [value.clone() for value in reference.eager]
    wrong[1].fill_(7)
    assert judge(reference, wrong).ok
    wrong[0][4] = 7
    assert not judge(reference, wrong).ok


# --- what is left alone --------------------------------------------------------------------------


def test_inputs_come_out_as_they_were() -> None:
    """Bits and versions of the inputs, and the grad mode, aren't touched."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    x = rnd(2, 3, 8, 8).requires_grad_()
    for one in captured(model, x, backward=True):
        assert replayable(one.graph) == ""
        tensors = [value for value in one.inputs if isinstance(value, torch.Tensor)]
        before = [(value.clone(), value._version) for value in tensors]
        reference = make_reference(one.graph, one.inputs)
        assert judge(reference, reference.eager).ok
        assert "unjudged" not in reference.rules
        for value, (copy, version) in zip(tensors, before, strict=True):
            assert torch.equal(value, copy)
            assert value._version == version
    assert torch.is_grad_enabled()


def test_autocast_around_changes_nothing() -> None:
    """A graph is run in its own dtypes, whatever autocast is active."""
    a, b = rnd(8, 8), rnd(8, 8, seed=1)
    graph = traced(torch.mm, a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = make_reference(graph, [a, b])
    assert torch.equal(reference.eager[0], a @ b)


def test_inference_tensors_are_taken() -> None:
    """Tensors of inference mode, inside and outside of it."""
    with torch.inference_mode():
        x = torch.ones(3) * 0.3
    graph = traced(lambda a: a * 2 + 1, rnd(3))
    assert judge(make_reference(graph, [x]), [x * 2 + 1]).ok
    with torch.inference_mode():
        assert judge(make_reference(graph, [x]), [x * 2 + 1]).ok


def test_symbolic_sizes_come_as_numbers() -> None:
    """Sizes that are inputs of the graph are plain ints in a call, and results of it exact."""

    def function(a: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (a * a.shape[0]).sum(0) / a.shape[0], a.shape[0] * 2

    graph = traced(function, rnd(5, 4), tracing_mode="symbolic")
    reference = make_reference(graph, [rnd(9, 4)])
    assert reference.rules == ("close", "exact")
    assert reference.eager[1] == 18
    assert judge(reference, [rnd(9, 4).sum(0), 18]).ok
    verdict = judge(reference, [rnd(9, 4).sum(0), 17])
    assert verdict.problem == "output 1 is 17, eager has 18"


def test_sizes_that_depend_on_values() -> None:
    """An output whose size depends on comparisons of floats is judged where sizes agree."""
    x = torch.tensor([1.0, -1.0, 0.5])
    graph = traced(lambda a: (a[a > 0] * 2, a.nonzero()), x)
    reference = make_reference(graph, [x])
    assert judge(reference, [torch.tensor([2.0, 1.0]), torch.tensor([[0], [1], [2]])]).ok
    assert not judge(reference, [torch.tensor([2.0]), torch.tensor([[0], [1], [2]])]).ok


def test_results_that_are_inputs_none_or_repeated() -> None:
    """Inputs, None, numbers and one value twice are outputs like others."""
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (x, 2))
    graph.output((x, None, y, y, 3))
    value = rnd(3)
    reference = make_reference(GraphModule(nn.Module(), graph), [value])
    assert reference.rules == ("close", "exact", "close", "close", "exact")
    assert judge(reference, [value, None, value * 2, value * 2, 3]).ok
    assert not judge(reference, [value, None, value * 2, value * 3, 3]).ok


def test_sparse_results() -> None:
    """A sparse output is compared by its elements."""
    x = torch.eye(4) * 0.3
    reference = reference_of(lambda a: a.to_sparse(), x)
    assert judge(reference, [x.to_sparse()]).ok
    assert not judge(reference, [(x * 1.1).to_sparse()]).ok


# --- what may be run again -----------------------------------------------------------------------


def test_plain_graphs_may_be_run_again() -> None:
    """Functional graphs with random numbers, checks and graphs within are no problem."""

    def function(a: torch.Tensor) -> torch.Tensor:
        torch._check(a.shape[0] > 1)
        return torch.cond(a.sum() > 0, lambda b: b + 1, lambda b: F.dropout(b, 0.5), (a,))

    with torch.no_grad():
        (found,) = captured(function, rnd(5))
    assert replayable(found.graph) == ""


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten.copy_.default, (0, 0), "aten.copy_.default writes to a tensor"),
        (aten.add_.Tensor, (0, 0), "aten.add_.Tensor writes to a tensor"),
        (aten.mul.out, (0, 0), "aten.mul.out writes to a tensor"),
        (ours.told.default, (0,), "has no results, so it runs for its effects"),
        (
            torch.ops._c10d_functional.all_reduce.default,
            (0, "sum", "0"),
            "is a collective: other processes would have to take part again",
        ),
        (
            aten.native_batch_norm.default,
            (0, None, None, 0, 0, True, 0.1, 1e-5),
            "aten.native_batch_norm.default updates its running statistics",
        ),
        (torch.ops.higher_order.with_effects, (0, 0), "has effects beyond its results"),
        (print, (0,), "may do anything"),
    ],
    ids=str,
)
def test_what_must_not_be_run_again(target: Any, args: tuple[Any, ...], reason: str) -> None:
    """Writes, messages to other processes and effects are refused, with the reason."""
    graph = Graph()
    x = graph.placeholder("x")
    inputs = tuple(x if isinstance(a, int) and not isinstance(a, bool) else a for a in args)
    graph.output((graph.call_function(target, inputs),))
    assert reason in replayable(GraphModule(nn.Module(), graph))


def test_batch_norm_that_trains_nothing_may_be_run_again() -> None:
    """Evaluating, or without statistics, batch norm writes nothing."""
    for statistics, training in ((True, False), (False, True)):
        graph = Graph()
        x, mean = graph.placeholder("x"), graph.placeholder("mean")
        kept = mean if statistics else None
        args = (x, None, None, kept, kept, training, 0.1, 1e-5)
        graph.output((graph.call_function(aten.native_batch_norm.default, args),))
        assert replayable(GraphModule(nn.Module(), graph)) == ""


def test_effects_within_are_found() -> None:
    """A graph that a higher-order op holds is looked at, too."""
    inner = Graph()
    x = inner.placeholder("x")
    inner.output((inner.call_function(aten.add_.Tensor, (x, 1)),))
    module = nn.Module()
    module.inner = GraphModule(nn.Module(), inner)
    graph = Graph()
    y = graph.placeholder("y")
    held = graph.get_attr("inner")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (held, "inner", y))
    graph.output((call,))
    assert replayable(GraphModule(module, graph)) == "aten.add_.Tensor writes to a tensor"


def test_warnings_of_c_are_shown_by_no_run(capfd, recwarn):
    """torch prints what ops warn of that are called as the graph calls them."""
    x = rnd(1)
    graph = traced(lambda x: torch.ops.aten.std.correction(x, None, correction=1), x)
    capfd.readouterr()
    torch.ops.aten.std.correction(x, None, correction=1)
    assert "degrees of freedom" in capfd.readouterr().err  # so it is as was read in torch 2.13
    reference = make_reference(graph, [x])
    assert reference.eager[0].isnan()
    assert reference.disturbed() is not None
    assert capfd.readouterr().err == ""
    assert not recwarn.list
