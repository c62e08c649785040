"""Results against float64: legitimate engines pass, one wrong element in 10,000 does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseboard.profile.judge.values import allowed_mismatches, judge
from tests.support.references import EXACT, Function, op_cases, reference_of
from tests.support.values import rnd

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def cases(*dtypes: torch.dtype) -> list[Any]:
    return [
        pytest.param(function, inputs, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for dtype in dtypes
        for name, function, inputs in op_cases(dtype)
    ]


def changed(tensor: torch.Tensor, number: int, by: float) -> torch.Tensor:
    """A copy with one element off; the strides stay."""
    result = tensor.clone()
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), tensor.shape))
    result[place] += by
    return result


@pytest.mark.parametrize(("function", "inputs"), cases(*FLOATS))
def test_eager_is_right(function: Function, inputs: tuple[Any, ...]) -> None:
    """Eager's own result passes, and is judged."""
    reference = reference_of(function, *inputs)
    assert reference.rules == ("close",)
    assert judge(reference, reference.eager).ok


@pytest.mark.parametrize(
    ("function", "inputs"), cases(torch.float32, torch.float16, torch.bfloat16)
)
def test_one_element_in_10_000_is_seen(function: Function, inputs: tuple[Any, ...]) -> None:
    """An element that is off by 100 times eager's largest error is found, wherever it is."""
    reference = reference_of(function, *inputs)
    result = reference.eager[0]
    error = 100 * float((result.double() - reference.precise[0]).abs().max())
    seen = 0
    for number in (0, 1, result.numel() // 3, result.numel() - 1):
        wrong = changed(result, number, error)
        if torch.equal(wrong, result):
            continue  # eager is exact; see the next test
        verdict = judge(reference, [wrong])
        assert not verdict.ok
        assert verdict.by_value
        seen += 1
    assert seen or error < torch.finfo(result.dtype).eps * float(result.abs().max())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_copies_must_be_copies(name: str, dtype: torch.dtype) -> None:
    """Where results are elements of the inputs, a few units in the last place are found."""
    function, inputs = {n: (f, i) for n, f, i in op_cases(dtype)}[name]
    reference = reference_of(function, *inputs)
    result = reference.eager[0]
    flat = result.flatten()
    for number in (0, 7, 5001, result.numel() - 1):
        by = 4 * torch.finfo(dtype).eps * max(abs(float(flat[number])), 1e-3)
        assert not judge(reference, [changed(result, number, by)]).ok


# --- other engines -------------------------------------------------------------------------------


def one_by_one(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, one element after the other: the least accurate order."""
    total = torch.zeros_like(x[..., 0])
    for number in range(x.shape[-1]):
        total = total + x[..., number]
    return total


def in_lanes(x: torch.Tensor, lanes: int = 16) -> torch.Tensor:
    """Sums as a vectorised loop has them."""
    return one_by_one(x.unflatten(-1, (-1, lanes)).transpose(-1, -2)).sum(-1)


def shuffled(x: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(7))
    return x[..., order].sum(-1)


def mm_one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for number in range(a.shape[1]):
        total = total + a[:, number : number + 1] * b[number : number + 1]
    return total


@pytest.mark.parametrize("length", [16, 256, 4096])
@pytest.mark.parametrize("shift", [0.0, 1.0])  # sums that cancel, and sums that grow
@pytest.mark.parametrize("engine", [one_by_one, in_lanes, shuffled])
def test_sums_in_other_orders_pass(engine: Function, shift: float, length: int) -> None:
    """A sum of up to 4096 float32 numbers is right in any order."""
    x = rnd(64, length) + shift
    assert judge(reference_of(lambda a: a.sum(-1), x), [engine(x)]).ok


def test_sums_to_one_number_pass() -> None:
    """A sum to a single number passes in other orders, also where eager's happens to be exact."""
    for seed in range(100):
        x = rnd(50, 80, seed=seed)
        reference = reference_of(torch.sum, x)
        for engine in (shuffled, in_lanes):
            verdict = judge(reference, [engine(x.flatten())])
            assert verdict.ok, f"seed {seed}: {verdict.problem}"


@pytest.mark.parametrize("length", [16, 256, 4096])
def test_matrix_products_in_other_orders_pass(length: int) -> None:
    """A product over up to 4096 float32 numbers is right one by one, in halves and shuffled."""
    a, b = rnd(32, length), rnd(length, 48, seed=1)
    reference = reference_of(torch.mm, a, b)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(7))
    half = length // 2
    assert judge(reference, [mm_one_by_one(a, b)]).ok
    assert judge(reference, [a[:, :half] @ b[:half] + a[:, half:] @ b[half:]]).ok
    assert judge(reference, [a[:, order] @ b[order]]).ok


def _softmax_by_products(x: torch.Tensor) -> torch.Tensor:
    powers = torch.exp2((x - x.amax(-1, keepdim=True)) * 1.4426950408889634)
    return powers * (1 / powers.sum(-1, keepdim=True))


def _moments(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def _math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.softmax((q / q.shape[-1] ** 0.5) @ k.transpose(-1, -2), -1) @ v


def _erf(x: torch.Tensor) -> torch.Tensor:
    """As vectorised libraries have it: formula 7.1.26 of Abramowitz and Stegun."""
    t = 1 / (1 + 0.3275911 * x.abs())
    series = t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    series = t * (0.254829592 + t * (-0.284496736 + series))
    return x.sign() * (1 - series * torch.exp(-x * x))


def _in_float32(function: Function) -> Function:
    """As engines compute half types: in float32, rounded once at the end."""
    return lambda *args: function(*(a.float() for a in args)).to(args[0].dtype)


OTHERS: list[tuple[str, Function, Function]] = [
    ("softmax", lambda x: F.softmax(x, -1), _softmax_by_products),
    ("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), _moments),
    ("gelu", F.gelu, lambda x: x * 0.5 * torch.erfc(-x * 0.7071067811865476)),
    (
        "gelu, tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)),
    ),
    ("silu", F.silu, lambda x: x / (1 + torch.exp(-x))),
    ("tanh", torch.tanh, lambda x: 1 - 2 / (torch.exp(2 * x) + 1)),
    ("sigmoid", torch.sigmoid, lambda x: 0.5 * torch.tanh(0.5 * x) + 0.5),
    ("exp", torch.exp, lambda x: torch.exp2(x * 1.4426950408889634)),
    ("erf", torch.erf, _erf),
    ("pow", lambda x: x.abs() ** 2.5, lambda x: torch.exp(2.5 * torch.log(x.abs()))),
    ("div", lambda x: x / 3, lambda x: x * (1 / 3)),
    ("rsqrt", lambda x: torch.rsqrt(x * x + 1), lambda x: 1 / torch.sqrt(x * x + 1)),
    ("var", lambda x: x.var(-1), lambda x: (x * x).mean(-1).sub(x.mean(-1) ** 2) * 199 / 198),
    ("logsumexp", lambda x: x.logsumexp(-1), lambda x: x.exp().sum(-1).log()),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("function", "other"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
def test_other_formulas_pass(function: Function, other: Function, seed: int) -> None:
    """What libraries and compilers compute in place of a formula passes in float32."""
    x = rnd(37, 199, seed=seed)
    assert judge(reference_of(function, x), [other(x)]).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("function", "other"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
def test_half_types_computed_in_float32_pass(
    function: Function, other: Function, dtype: torch.dtype
) -> None:
    """Other formulas pass for half types as engines compute these: rounded once, at the end."""
    x = rnd(37, 199, dtype=dtype)
    assert judge(reference_of(function, x), [_in_float32(other)(x)]).ok


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_passes_in_both_forms(dtype: torch.dtype) -> None:
    """Fused attention passes for unfused, and the other way round."""
    q, k, v = (rnd(2, 4, 33, 64, seed=seed, dtype=dtype) for seed in range(3))
    fused, unfused = F.scaled_dot_product_attention, _math_attention
    assert judge(reference_of(fused, q, k, v), [unfused(q, k, v)]).ok
    assert judge(reference_of(unfused, q, k, v), [fused(q, k, v)]).ok


def test_folded_batch_norm_passes() -> None:
    """A convolution with batch norm folded into its weight is right."""
    x, w = rnd(2, 16, 15, 15), rnd(24, 16, 3, 3, seed=1) * 0.1
    mean, scale, shift = (rnd(24, seed=seed) for seed in (2, 3, 4))
    variance = rnd(24, seed=5).abs() + 0.1

    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(F.conv2d(x, w), mean, variance, scale, shift)

    factor = scale / torch.sqrt(variance + 1e-5)
    folded = F.conv2d(x, w * factor[:, None, None, None], shift - mean * factor)
    assert judge(reference_of(layers, x, w), [folded]).ok


def test_packed_linear_passes() -> None:
    """oneDNN's and MKL's packed matrix products are right."""
    x, w, b = rnd(64, 768), rnd(256, 768, seed=1), rnd(256, seed=2)
    reference = reference_of(F.linear, x, w, b)
    packed = torch.ops.mkldnn._reorder_linear_weight(w, 64)
    result = torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")
    assert judge(reference, [result]).ok


def test_less_precise_products_are_seen() -> None:
    """A float32 product computed from bfloat16 is found."""
    a, b = rnd(64, 256), rnd(256, 48, seed=1)
    result = (a.bfloat16() @ b.bfloat16()).float()
    assert not judge(reference_of(torch.mm, a, b), [result]).ok


# --- patterns and kinds --------------------------------------------------------------------------


def test_nans_and_infinities_are_eagers() -> None:
    """NaN and infinities must be where eager has them."""
    x = torch.tensor([1.0, 0.0, -1.0, 4.0])
    reference = reference_of(lambda a: (torch.log(a), 1 / a), x)
    log, inverse = reference.eager
    assert judge(reference, [log.clone(), inverse.clone()]).ok
    for number in range(4):
        for value in (torch.nan, torch.inf, -torch.inf):
            wrong = log.clone()
            wrong[number] = value
            same = torch.equal(wrong.nan_to_num(77.0), log.nan_to_num(77.0))
            assert judge(reference, [wrong, inverse]).ok == same
    numbers = log.nan_to_num(0.0, neginf=0.0)
    assert not judge(reference, [numbers, inverse]).ok


def test_overflow_of_a_half_type_is_eagers() -> None:
    """float16 overflows where float64 doesn't: infinity is right, a number isn't."""
    x = torch.tensor([300.0, 2.0], dtype=torch.float16)
    reference = reference_of(lambda a: a * a, x)
    assert judge(reference, [torch.tensor([torch.inf, 4.0], dtype=torch.float16)]).ok
    assert not judge(reference, [torch.tensor([65504.0, 4.0], dtype=torch.float16)]).ok


def test_where_eager_has_a_nan_that_is_its_own_float64_s_infinity_is_right_too() -> None:
    """As gelu of infinity is with AVX-512. A number isn't right."""
    reference = reference_of(lambda a: a * 2, torch.tensor([torch.inf, 2.0, 3.0]))
    reference.eager[0][0] = torch.nan
    for value, right in ((torch.nan, True), (torch.inf, True), (-torch.inf, False), (4.0, False)):
        assert judge(reference, [torch.tensor([value, 4.0, 6.0])]).ok == right


def test_masks_of_minus_infinity_are_judged() -> None:
    """A softmax over a masked row is judged, and a row that is masked wholly is NaN."""
    mask = torch.zeros(4, 6)
    mask[:, 4:] = -torch.inf
    mask[3] = -torch.inf
    x = rnd(4, 6)
    reference = reference_of(lambda a, m: F.softmax(a + m, -1), x, mask)
    assert judge(reference, reference.eager).ok
    assert not judge(reference, [reference.eager[0].nan_to_num(0.0)]).ok


def test_integers_and_booleans_are_exact() -> None:
    """Where only integers and booleans reach an output, each element counts."""
    x = torch.arange(100_000)
    reference = reference_of(lambda a: (a * 3 - 7, a % 5 == 0), x)
    assert reference.rules == ("exact", "exact")
    numbers, flags = reference.eager
    assert judge(reference, [numbers.clone(), flags.clone()]).ok
    assert not judge(reference, [changed(numbers, 99_999, 1), flags]).ok
    flipped = flags.clone()
    flipped[5] = False
    verdict = judge(reference, [numbers, flipped])
    assert "is False at [5], eager has True (1 of 100000 elements are wrong" in verdict.problem


def test_booleans_that_floats_reach() -> None:
    """A comparison of floats may differ in one of 50,000 elements, in one of 10,000 not."""
    x = rnd(200, 500)
    reference = reference_of(lambda a: a.sin() > 0, x)
    assert reference.rules == ("mismatches",)
    for count, ok in ((0, True), (2, True), (3, False), (10, False)):
        result = reference.eager[0].clone()
        result.view(-1)[:count].logical_not_()
        assert judge(reference, [result]).ok == ok
    small = reference_of(lambda a: a.argmax(-1), x[:10])
    wrong = small.eager[0].clone()
    wrong[3] += 1
    assert not judge(small, [wrong]).ok


def test_mismatches_that_eager_has_are_allowed() -> None:
    """In bfloat16 eager itself takes other decisions than float64, and others may as well."""
    x, y = (rnd(300, 300, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    reference = reference_of(lambda a, b: a @ b > b, x, y)
    assert reference.spreads[0].mismatches > 3
    assert judge(reference, [x.float() @ y.float() > y]).ok
    assert not judge(reference, [~reference.eager[0]]).ok
    assert allowed_mismatches(0, 10_000) == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    """Complex results are judged by the distance in the plane."""
    x = torch.complex(rnd(100, 100), rnd(100, 100, seed=1)).to(dtype)
    reference = reference_of(lambda a: torch.fft.fft(a) * a.conj(), x)
    assert reference.rules == ("close",)
    assert judge(reference, reference.eager).ok
    assert not judge(reference, [changed(reference.eager[0], 5050, 0.01)]).ok
    assert not judge(reference, [reference.eager[0].conj().resolve_conj()]).ok


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("nothing", "returned str, not a tuple or list"),
        ([], "returned 0 outputs, expected 2"),
        ([None, 3], "output 0 is NoneType, expected a tensor"),
        ([torch.zeros(3, 2), 3], r"output 0 has shape (3, 2), expected (2, 3)"),
        ([torch.zeros(2, 3).half(), 3], "output 0 has dtype torch.float16, expected torch.float32"),
        ([torch.zeros(2, 3), None], "output 1 is NoneType, expected a number"),
        ([torch.zeros(2, 3), 4], "output 1 is 4, eager has 3"),
    ],
)
def test_other_forms_make_a_verdict(result: Any, problem: str) -> None:
    """What isn't of eager's form is told of, without an exception."""
    graph = torch.fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    graph.output((graph.call_function(torch.ops.aten.clone.default, (x,)), number))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    from fuseboard.profile.judge.reference import make_reference

    reference = make_reference(module, [torch.zeros(2, 3), 3])
    assert judge(reference, [torch.zeros(2, 3), 3]).ok
    verdict = judge(reference, result)
    assert (verdict.ok, verdict.problem) == (False, problem)
    assert verdict.by_value == ("eager has" in problem)


def test_the_problem_says_what_is_wrong() -> None:
    """Output, element, the three values and the factor are told."""
    x = rnd(100, 100).t()  # its elements lie in another order than they are numbered
    reference = reference_of(lambda a: (a + 1, a.exp()), x)
    wrong = reference.eager[1].clone()
    wrong[3, 41] = 77.0
    problem = judge(reference, [reference.eager[0], wrong]).problem
    exact = reference.precise[1][3, 41].item()
    eager = reference.eager[1][3, 41].item()
    assert problem.startswith(
        f"output 1 is 77.0 at [3, 41], eager has {eager} and float64 {exact}, "
    )
    assert "times beyond the limit (1 of 10000 elements are wrong" in problem


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_sizes_0_and_none(shape: tuple[int, ...]) -> None:
    """Outputs without elements and of one are judged."""
    x = torch.full(shape, 0.3)
    reference = reference_of(lambda a: (a * 2, a > 1), x)
    assert judge(reference, reference.eager).ok
    if not shape:
        assert not judge(reference, [torch.tensor(0.61), torch.tensor(False)]).ok


def test_layouts_are_compared_by_element() -> None:
    """A result of other strides than eager's is compared at the same places."""
    x = rnd(2, 6, 5, 5).to(memory_format=torch.channels_last)
    reference = reference_of(lambda a: a * 1.5, x)
    assert judge(reference, [(x * 1.5).contiguous()]).ok
    assert not judge(reference, [(x * 1.5).contiguous().flip(0)]).ok
