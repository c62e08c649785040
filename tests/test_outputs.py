"""What values don't show: identity, aliasing, strides, None, sizes 0, overlap of the inputs."""

from __future__ import annotations

import pytest
import torch

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import assert_same, rnd


def merging(eager_call, region):
    """A backend that removes no-op views and merges what is equal: one tensor for all of them."""

    def run(args):
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        kept = list(inputs)
        results = []
        for result in eager_call(list(args)):
            same = [k for k in kept if _alike(k, result)]
            results.append(same[0] if same else result)
            kept.append(results[-1])
        args.clear()
        return results

    return run


def _alike(one, other):
    return (
        isinstance(other, torch.Tensor)
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and torch.equal(one, other)
    )


@pytest.fixture(params=["eager", "merging"])
def backend(request):
    if request.param == "eager":
        yield "eager"
    else:
        with plugged("merging", call=merging):
            yield "merging"


def sharing(tensors) -> list[list[int]]:
    """Positions of tensors by storage, in order of appearance."""
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
    return list(groups.values())


def objects(tensors) -> list[int]:
    """For each the first position of the same object."""
    return [next(i for i, o in enumerate(tensors) if o is t) for t in tensors]


def both(x):
    y = x + 1
    return y, y


FUNCTIONS = {
    "no_op_views": lambda x: ((y := x + 1), y.view(y.shape), y.reshape(4, 5), y.expand(4, 5)),
    "views": lambda x: ((y := x * 2), y.t(), y[1:], y.view(-1), y.unsqueeze(0)),
    "views_of_views": lambda x: ((y := x * 2)[1:], y[1:].t(), y[1:][:, :2]),
    "an_input": lambda x: (x, x + 1),
    "an_input_twice": lambda x: (x, x),
    "views_of_an_input": lambda x: (x.t(), x[1:], x.view(-1), x),
    "same_object_twice": lambda x: (*both(x), x * 2),
    "equal_values": lambda x: (x + 1, x + 1, 1 + x),
    "a_copy": lambda x: (x.clone(), x * 1, x + 0, x.contiguous(), x.to(torch.float32)),
    "none": lambda x: (None, x + 1, None, 3, "text", x.shape[0], 2.5, True),
    "only_none": lambda x: None,
    "nothing": lambda x: (),
    "nested": lambda x: {"a": [x + 1, (x * 2, None)], "b": x.sum()},
    "constants": lambda x: (torch.tensor([1.0, 2.0]), torch.ones(2), x.new_zeros(3), x + 1),
    "a_constant_twice": lambda x: ((c := torch.arange(3.0)), c, c.view(3, 1), x.sum()),
    "split": lambda x: (*x.split(2), *(x + 1).split(2), *(x * 2).unbind(1)),
    "chunks_of_an_output": lambda x: ((y := x.exp()), *y.chunk(2)),
    "expanded": lambda x: (x[:1].expand(3, 5), (x[:1] + 1).expand(3, 5)),
    "transposed": lambda x: (x.t() + 1, (x @ x.t()).t(), x.t().exp().contiguous()),
    "channels_last": lambda x: (
        x.reshape(1, 2, 2, 5).to(memory_format=torch.channels_last) + 1,
        torch.nn.functional.avg_pool2d(
            x.reshape(1, 2, 2, 5).to(memory_format=torch.channels_last), 2
        ),
    ),
    "zero_d": lambda x: (x.sum(), x.max(), x[0, 0], x.sum() * 2, x.mean().view(1)),
    "empty": lambda x: (x[:0], x[:0] + 1, x[:0].sum(1), x[:0].sum(), x[:, :0].t(), torch.empty(0)),
    "complex": lambda x: (torch.complex(x, x), torch.view_as_real(torch.complex(x, x)), x.conj()),
    "detached": lambda x: (x.detach(), (x + 1).detach()),
    "integers": lambda x: (x.argmax(1), x.long(), x > 0, x.topk(2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_are_eagers(backend, name):
    """Values, strides, identity, and which share storage with which: three calls alike."""
    function = FUNCTIONS[name]
    fn = compiled(function, backend)
    for _ in range(3):
        x, mine = rnd(4, 5), rnd(4, 5)
        with torch.no_grad():
            want, got = function(x), fn(mine)
        assert_same(got, want)
        if isinstance(want, tuple) and name != "a_copy":
            assert sharing((mine, *got)) == sharing((x, *want))
            assert objects((mine, *got)) == objects((x, *want))
    assert not all_trips()


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in {"a_copy", "integers"}])
def test_outputs_can_be_written_to(name):
    """What a caller does to one shows in those that share its storage, and nowhere else."""
    function = FUNCTIONS[name]
    with plugged("merging", call=merging):
        fn = compiled(function, "merging")
        for call in range(3):
            x, mine = rnd(4, 5, seed=call), rnd(4, 5, seed=call)
            with torch.no_grad():
                want, got = function(x), fn(mine)
                for results in (want, got):
                    for tensor in results if isinstance(results, tuple) else ():
                        if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                            tensor.add_(1)
            assert_same(got, want)
            assert_same(mine, x)


def test_merged_outputs_are_cloned_and_told():
    """The note says which."""
    with plugged("merging", call=merging):
        fn = compiled(FUNCTIONS["equal_values"], "merging")
        fn(rnd(4, 5))
    assert "outputs [1, 2] are cloned" in " ".join(last_graph().notes)


def test_a_copy_is_a_copy():
    """``clone`` and arithmetic give new tensors, ``contiguous`` and ``to`` may not."""
    x = rnd(4, 5)
    with plugged("merging", call=merging):
        fn = compiled(FUNCTIONS["a_copy"], "merging")
        for _ in range(3):
            copies = fn(x)
            for copy in copies[:3]:
                copy.add_(1)
            assert_same(x, rnd(4, 5))
            assert_same(list(copies[:3]), [x + 1] * 3)
            assert [c is x for c in copies] == [False, False, False, True, True]


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_in_training(grad):
    """Views and duplicates of outputs with gradients."""

    def function(x):
        y = x.sigmoid()
        return y, y.t(), y.view(-1), y * 2, x, x.detach()

    with plugged("merging", call=merging):
        fn = compiled(function, "merging")
        for _ in range(3):
            results = []
            for f in (fn, function):
                x = rnd(4, 5).requires_grad_(grad)
                outputs = f(x)
                if grad:
                    sum((o.sum() for o in outputs[:4]), start=x.sum() * 0).backward()
                results.append((outputs, x.grad, sharing((x, *outputs))))
            assert_same(*results)


# --- mutation ------------------------------------------------------------------------------------


def shift(x):
    x[1:] = x[:-1].clone()
    return x.sum()


def write_view(x):
    x.t()[0].add_(1)
    x.view(-1)[3:7] = 0
    return x.t()


def return_mutated(x):
    x.mul_(2)
    return x, x + 1, x.view(-1)


def resized_view(x):
    x.unsqueeze_(0)
    return x * 2


def mutate_then_read(x):
    y = x + 1
    x.zero_()
    return y + x, x


@pytest.mark.parametrize(
    "function", [shift, write_view, return_mutated, resized_view, mutate_then_read]
)
def test_mutated_inputs(backend, function):
    """The caller's tensors are what eager leaves, in every call."""
    fn = compiled(function, backend)
    for seed in range(3):
        x, mine = rnd(4, 5, seed=seed), rnd(4, 5, seed=seed)
        assert_same(fn(mine), function(x))
        assert_same(mine, x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thorough
def test_overlap_that_changes_between_calls(dynamic):
    """Compiled for one overlap of the arguments, called with others; offsets count too."""

    def f(left, right):
        left.sub_(7)
        right.mul_(2)
        return left * right, right.sum()

    ranges = [
        ((0, 6), (10, 16)),
        ((0, 6), (3, 9)),
        ((0, 6), (2, 8)),
        ((1, 7), (4, 10)),
        ((1, 7), (0, 6)),
        ((0, 6), (0, 6)),
        ((0, 4), (2, 6)),
        ((0, 6), (10, 16)),
    ]
    for first in range(4):
        torch._dynamo.reset()
        fn = compiled(f, dynamic=dynamic)
        for (a, b), (c, d) in ranges[first:] + ranges[:first]:
            mine, theirs = torch.arange(20.0), torch.arange(20.0)
            got = fn(mine[a:b], mine[c:d])
            assert_same(got, f(theirs[a:b], theirs[c:d]))
            assert_same(mine, theirs)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1)])
def test_pairs_of_arguments_that_overlap_otherwise(order):
    """All four overlap another one in every call, but not the same one."""

    def f(a, b, c, d):
        a.add_(1)
        b.mul_(2)
        c.sub_(3)
        d.mul_(4)
        return a + b + c + d

    def arguments(order):
        first, second = torch.arange(8.0), torch.arange(8.0) + 10
        views = [first[:4], first[2:6], second[:4], second[2:6]]
        return (first, second), [views[i] for i in order]

    fn = compiled(f)
    for each in [(0, 1, 2, 3), order]:
        mine, theirs = arguments(each), arguments(each)
        assert_same(fn(*mine[1]), f(*theirs[1]))
        assert_same(mine[0], theirs[0])


def test_a_call_that_the_compiled_code_does_not_fit_is_noted():
    """The report says that Dynamo's own graph ran."""

    def f(left, right):
        left.add_(1)
        return left * right

    fn = compiled(f)
    base = torch.arange(6.0)
    fn(rnd(4), rnd(4))
    assert not last_graph().notes
    fn(base[:4], base[2:])
    assert "Dynamo's own graph ran" in last_graph().notes[-1]


def test_overlapping_arguments_that_are_only_read():
    """Nothing to fear, nothing to check."""

    def f(left, right):
        return left * right

    fn = compiled(f)
    base = rnd(10)
    for a, b in [(0, 4), (2, 6), (0, 0)]:
        assert_same(fn(base[a : a + 4], base[b : b + 4]), f(base[a : a + 4], base[b : b + 4]))
    assert not any(graph.notes for graph in ledger.graphs())


def test_a_backend_isnt_given_what_reads_a_view_that_it_declines():
    """The region would hold a copy of the view, though the board makes the one that goes out."""
    asked, lowered = [], []

    def why_not(node):
        asked.append(node.name)
        return "it has no diagonals" if node.target is torch.ops.aten.diagonal.default else None

    def lower(region):
        lowered.extend(node.name for node in region.graph.graph.nodes)
        return fuseboard.lower_eagerly(region)

    def f(x, y):
        z, w = x * 2, y * 2
        diagonal = z.diagonal()
        return z, diagonal, diagonal.t().sin(), diagonal.cos(), w, w.view(-1), z.exp()

    info = {"dtypes": frozenset({torch.float32})}
    x, y = rnd(4, 4), rnd(2, 2, dtype=torch.float64)
    claim = lambda graph: fuseboard.claim_nodes(graph, why_not)  # noqa: E731
    with plugged("picky", claim=claim, lower=lower, info=info):
        assert_same(compiled(f, "picky")(x, y), f(x, y))
    assert "diagonal" in asked
    assert not any(name.startswith("view") for name in asked)  # of a dtype that isn't declared
    assert "exp" in lowered
    assert not {"diagonal", "sin", "cos"} & set(lowered)
    declined = {node.name: node.declined.get("picky") for node in last_graph().nodes}
    assert declined["cos"] == "it reads diagonal, and it has no diagonals"
    assert not all_trips()
