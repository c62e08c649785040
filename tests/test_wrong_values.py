"""Ways in which compilers were wrong without a word: each would have been seen.

Most kinds are those of public reports about torch.compile, whose numbers stand beside them; each
wrong result is made by hand, since the compilers are right by now, and so that it is always there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.values import judge
from tests.support.references import Function, captured, reference_of
from tests.support.values import rnd

Kind = tuple[Function, tuple[Any, ...], Function]
KINDS: dict[str, Callable[[], Kind]] = {}


def kind(report: str = "") -> Callable[[Callable[[], Kind]], Callable[[], Kind]]:
    """Register a function, its inputs, and the same function as it was miscompiled."""

    def register(make: Callable[[], Kind]) -> Callable[[], Kind]:
        KINDS[f"{make.__name__}, pytorch#{report}" if report else make.__name__] = make
        return make

    return register


@kind("197829")
def a_shift_in_place_reads_what_it_wrote() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1], x[:-1]])

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(6, 10).clone()

    return right, (torch.arange(60.0).reshape(6, 10),), wrong


@kind("183986")
def rows_of_an_expanded_tensor_are_one() -> Kind:
    index = torch.tensor([0, 1, 0])

    def right(source: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 8).expand(4, 8).index_add(0, index, source)

    def wrong(source: torch.Tensor) -> torch.Tensor:
        return source.sum(0).expand(4, 8).clone()

    return right, (torch.ones(3, 8),), wrong


@kind("198119")
def the_divisor_of_a_window_over_the_edge() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 3, 2, ceil_mode=True)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 1, 0, 1))
        return F.avg_pool2d(padded, 3, 2)

    return right, (rnd(2, 2, 8, 8),), wrong


@kind("182012")
def a_gradient_is_zero() -> Kind:
    return lambda g: g - torch.diag(g.diagonal()), (torch.ones(8, 8),), torch.zeros_like


@kind("180164")
def a_scatter_covers_all_of_a_row() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.slice_scatter(x, torch.zeros(4, 6), 1, 0, 6)

    return right, (rnd(4, 13),), torch.zeros_like


@kind("138908")
def what_is_added_is_added_twice() -> Kind:
    return lambda y: y + y, (rnd(2, 32),), lambda y: y * 4


@kind("143555")
def a_shift_by_all_bits() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return x >> 64

    return right, (torch.tensor([1000, -5]),), lambda x: x.clone()


@kind("105264")
def bytes_that_dont_wrap_around() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int16) * 2

    return lambda x: (x + x).to(torch.int16), (torch.tensor([128, 3], dtype=torch.uint8),), wrong


@kind("93829")
def a_comparison_of_bytes_as_integers() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return -x.int() < 4

    return lambda x: -x < 4, (torch.tensor([6, 255], dtype=torch.uint8),), wrong


@kind("184408")
def integers_divided_towards_zero() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.div(x, 3, rounding_mode="floor")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.div(x, 3, rounding_mode="trunc")

    return right, (torch.arange(-7, 8),), wrong


@kind("190764")
def integers_summed_as_floats() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.float().sum(0).long()

    return lambda x: x.sum(0), (torch.tensor([[2**24], [1]]),), wrong


@kind("118266")
def the_largest_of_numbers_and_nan() -> Kind:
    x = torch.tensor([[torch.nan, 4.6], [1.0, 2.0]])
    return lambda a: a.argmax(-1), (x,), lambda a: a.nan_to_num(-1e9).argmax(-1)


@kind("183082")
def the_largest_in_another_order() -> Kind:
    x = rnd(5, 8).t()
    x[3, 1] = 1.57
    return lambda a: a.sin().argmax(), (x,), lambda a: a.sin().t().argmax()


@kind("93784")
def a_maximum_loses_nan() -> Kind:
    x = torch.tensor([torch.nan, -1.0, 2.0])
    return lambda a: a.clamp_min(0.5), (x,), lambda a: torch.fmax(a, torch.tensor(0.5))


@kind("100466")
def a_comparison_gives_nan() -> Kind:
    return lambda x: x * (x >= 0), (rnd(40),), lambda x: torch.where(x >= 0, torch.nan, 0.0)


@kind("88937")
def the_sign_of_nan() -> Kind:
    x = torch.tensor([torch.nan, -3.0])
    return torch.sign, (x,), lambda a: torch.where(a < 0, -1.0, 1.0)


@kind("161150")
def a_row_that_is_masked_wholly() -> Kind:
    x = rnd(3, 4)
    x[1] = -torch.inf
    return lambda a: a.softmax(-1), (x,), lambda a: a.softmax(-1).nan_to_num(0.25)


@kind("189895")
def padding_is_summed_as_what_is_there() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x.cumsum(0), (1, 0))

    def wrong(x: torch.Tensor) -> torch.Tensor:
        sums = x.cumsum(0)
        return torch.cat([sums[:1], sums])

    return right, (torch.arange(3, 9),), wrong


@kind("194281")
def padding_between_rows_is_read() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(4, 16)
        memory[:, :13] = x.exp()
        return memory.flatten()[: 4 * 13].view(4, 13)

    return torch.exp, (rnd(4, 13),), wrong


@kind("179931")
def every_batch_but_the_first() -> Kind:
    def right(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, (2, 2)).flatten(1).sum(1)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        sums = F.adaptive_avg_pool2d(x, (2, 2)).flatten(1).sum(1)
        return torch.cat([sums[:1], sums.roll(1)[1:]])

    return right, (rnd(3, 4, 6, 6),), wrong


@kind("195582")
def memory_that_nobody_wrote() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        result = x[:, :50] * 2
        result[2, 40] = 3.7e-31
        return result

    return lambda x: F.pad(x, (0, -400)) * 2, (rnd(3, 450),), wrong


@kind("158930")
def a_convolution_of_transposed_memory() -> Kind:
    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.t().contiguous().view(1, 8, 20), w, groups=8)

    def right(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.view(1, 8, 20), w, groups=8)

    return right, (rnd(8, 20), rnd(8, 1, 3, seed=1)), wrong


@kind("154703")
def a_long_sum_in_a_half_type() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(8, dtype=x.dtype)
        for number in range(x.shape[1]):
            total = total + x[:, number]
        return total

    x = rnd(8, 3000).abs().bfloat16()
    return lambda a: a.sum(1), (x,), wrong


@kind("143182")
def a_variance_far_from_zero() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    return lambda x: x.var(-1, correction=0), (rnd(4, 999) + 1000,), wrong


@kind()
def the_last_elements_after_full_vectors() -> Kind:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(x)
        result[-3:] = x[-3:]
        return result

    return torch.tanh, (rnd(10_003) * 0.1,), wrong


@kind("150656")
def a_row_that_is_padding_counts() -> Kind:
    places = torch.tensor([[1, 0, 2], [0, 0, 3]])

    def right(w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(places, w, mode="mean", padding_idx=0)

    def wrong(w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(places, w, mode="mean")

    return right, (rnd(5, 6),), wrong


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_was_miscompiled_is_seen(name: str) -> None:
    """The wrong result fails by value, the right one passes."""
    right, inputs, wrong = KINDS[name]()
    reference = reference_of(right, *inputs)
    assert judge(reference, [right(*inputs)]).ok
    verdict = judge(reference, [wrong(*inputs)])
    assert not verdict.ok
    assert verdict.by_value


# --- what a compiler of today gets wrong ---------------------------------------------------------


def _inductor(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Inductor on a captured graph, brought down to the level that it wants."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    from fuseboard.lower.decompose import decompose

    return compile_fx_inner(decompose(graph, select_decomp_table()), inputs)


def _index_add(source: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([0, 2, 2, 3, 0])
    return torch.zeros(1, 3).expand(4, 3).index_add(0, index, source)


def _pool(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, 3, 2, ceil_mode=True) * rnd(2, 2, 4, 3, seed=3)


def near(results: list[Any], wanted: Any) -> bool:
    """Whether results are roughly right, without a look at the module that is tested."""
    pairs = zip(results, wanted, strict=True)
    return all(got is want is None or torch.allclose(got, want, 1e-3, 1e-3) for got, want in pairs)


#: Inductor of torch 2.13 differs from eager in all three cases below.
LATER = torch.__version__ > "2.13.99"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "make", "backward"),
    [
        (_index_add, lambda: rnd(5, 3, seed=1), False),
        (_pool, lambda: rnd(2, 2, 8, 7).requires_grad_(), True),
    ],
    ids=["183986", "198119"],
)
def test_what_inductor_gets_wrong_is_seen(
    function: Function, make: Function, backward: bool
) -> None:
    """Where Inductor differs from eager by far its results fail, else they pass."""
    verdicts = []
    for one in captured(function, make(), backward=backward, lower=_inductor):
        reference = make_reference(one.graph, one.inputs)
        verdicts.append(judge(reference, one.results).ok)
        assert verdicts[-1] == near(one.results, reference.eager)
    assert LATER or False in verdicts


def _shift(x: torch.Tensor) -> torch.Tensor:
    x[1:] = x[:-1].clone()
    return x.sum()


@pytest.mark.slow
def test_inductor_in_place_is_seen() -> None:
    """pytorch#197829: it is wrong only where the write to the input is in its graph."""
    (one,) = captured(_shift, torch.arange(60.0).reshape(6, 10))
    reference = make_reference(one.graph, one.inputs)
    x = torch.arange(60.0).reshape(6, 10)
    results = torch.compile(_shift, backend="inductor")(x)
    assert judge(reference, [x, results]).ok == near([x, results], reference.eager)
    assert LATER or not judge(reference, [x, results]).ok
