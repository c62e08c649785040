"""Single-op programs for the plugin ``tvm``: op x dtype x layout x size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fuseboard.ops.attention import attention

aten = torch.ops.aten

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool


@dataclass(frozen=True)
class Case:
    """A program and its inputs, the same ones each time.

    :ivar declined: the plugin says that it can't run it.
    :ivar as_eager: compared with eager, as its values depend on the precision.
    """

    name: str
    call: Callable[..., Any]
    inputs: Callable[[], list[torch.Tensor]]
    declined: bool = False
    as_eager: bool = False


CASES: list[Case] = []


def draw(
    *shape: int,
    dtype: torch.dtype = F32,
    seed: int = 0,
    low: float = -3.0,
    high: float = 3.0,
    layout: str = "plain",
) -> torch.Tensor:
    """Random numbers: integers from -9 to 9, floats between ``low`` and ``high``.

    ``layout``: ``plain``, ``turned`` (axes in reverse order in memory), ``sliced`` (every second
    element of a larger tensor, after one that isn't used).
    """
    generator = torch.Generator().manual_seed(seed)
    full = shape
    if layout == "turned":
        full = shape[::-1]
    elif layout == "sliced":
        full = tuple(2 * size + 1 for size in shape)
    if dtype is BOOL:
        result = torch.rand(full, generator=generator) < 0.5
    elif dtype.is_floating_point:
        result = (torch.rand(full, generator=generator) * (high - low) + low).to(dtype)
    else:
        result = torch.randint(-9, 10, full, generator=generator).to(dtype)
    if layout == "turned":
        return result.permute(*reversed(range(len(shape))))
    if layout == "sliced":
        return result[tuple(slice(1, None, 2) for _ in shape)]
    return result


def special(dtype: torch.dtype = F32) -> torch.Tensor:
    """Infinities, NaN, zeros of both signs, the largest and the smallest numbers."""
    info = torch.finfo(dtype)
    numbers = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        math.inf,
        -math.inf,
        math.nan,
        info.max,
        info.min,
        info.tiny,
        -info.tiny,
        info.eps,
        88.0,
        -88.0,
        100.0,
        -104.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
    ]
    return torch.tensor(numbers, dtype=dtype)


def case(
    name: str,
    call: Callable[..., Any],
    *tensors: Any,
    declined: bool = False,
    as_eager: bool = False,
) -> None:
    """Enter a case; a tensor may be a shape, for floats, or a function that makes it."""

    def inputs() -> list[torch.Tensor]:
        return [
            draw(*one, seed=place) if isinstance(one, tuple) else one()
            for place, one in enumerate(tensors)
        ]

    CASES.append(Case(name, call, inputs, declined, as_eager))


# --- functions of one element: everywhere, in both precisions, and at the edges -------------------

UNARY = {
    name: getattr(torch, name)
    for name in (
        "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac "
        "isnan isinf lgamma log log10 log1p log2 logical_not neg reciprocal relu round rsqrt "
        "sigmoid sign sin sinh sqrt square tan tanh trunc"
    ).split()
}
DOMAINS = {
    "acosh": (1.0, 9.0),
    "atanh": (-0.9, 0.9),
    "asin": (-1.0, 1.0),
    "acos": (-1.0, 1.0),
    "log": (0.01, 9.0),
    "log2": (0.01, 9.0),
    "log10": (0.01, 9.0),
    "log1p": (-0.9, 9.0),
    "sqrt": (0.0, 9.0),
    "rsqrt": (0.01, 9.0),
    "lgamma": (0.1, 9.0),
}

for name, function in UNARY.items():
    low, high = DOMAINS.get(name, (-3.0, 3.0))
    for dtype in (F32, F64):
        tag = str(dtype).removeprefix("torch.")
        case(
            f"{name}/{tag}",
            function,
            lambda low=low, high=high, dtype=dtype: draw(37, 19, dtype=dtype, low=low, high=high),
        )
    case(f"{name}/special", function, special)
for name in ("exp", "sigmoid", "log", "tanh", "erf", "sqrt"):
    case(f"{name}/int64", UNARY[name], lambda: draw(7, 9, dtype=I64).abs())
    case(f"{name}/wide", UNARY[name], lambda: draw(999, low=1e-3, high=60.0))
for name in (
    "gelu",
    "silu",
    "softplus",
    "elu",
    "leaky_relu",
    "hardswish",
    "hardsigmoid",
    "mish",
    "relu6",
    "hardtanh",
    "celu",
    "selu",
    "logsigmoid",
    "softsign",
):
    case(f"{name}/float32", getattr(F, name), (5, 33))
    case(f"{name}/float64", getattr(F, name), lambda: draw(5, 33, dtype=F64))
case("gelu/tanh", lambda x: F.gelu(x, approximate="tanh"), (5, 33))

# --- of two --------------------------------------------------------------------------------------

BINARY = {
    name: getattr(torch, name)
    for name in (
        "add sub mul div maximum minimum fmax fmin atan2 hypot copysign fmod remainder "
        "eq ne lt le gt ge logical_and logical_or logical_xor floor_divide"
    ).split()
}
INTEGER_DIVISION = {"fmod", "remainder", "floor_divide"}
for name, function in BINARY.items():
    case(f"{name}/float32", function, (7, 33), (7, 33))
    case(f"{name}/float64", function, lambda: draw(7, 9, dtype=F64), lambda: draw(9, dtype=F64))
    case(f"{name}/broadcast", function, (7, 1, 33), (5, 1))
    case(f"{name}/special", function, lambda: special()[:, None].clone(), special)
    case(
        f"{name}/int64",
        function,
        lambda: draw(9, 11, dtype=I64),
        lambda: draw(9, 11, dtype=I64, seed=1),
        declined=name in INTEGER_DIVISION | {"hypot"},
    ) if name != "hypot" else None
    case(f"{name}/scalar", lambda x, f=function: f(x, torch.tensor(1.5)), (5, 7))
for name in ("eq", "ne", "lt", "maximum", "minimum", "add", "mul", "logical_and", "logical_xor"):
    case(
        f"{name}/bool",
        BINARY[name],
        lambda: draw(9, 11, dtype=BOOL),
        lambda: draw(9, 11, dtype=BOOL, seed=1),
    )
for name in ("add", "sub", "mul", "div", "lt", "maximum"):
    case(f"{name}/mixed", BINARY[name], lambda: draw(9, 11, dtype=I64), (9, 11))
    case(
        f"{name}/int32 int64",
        BINARY[name],
        lambda: draw(9, 11, dtype=I32),
        lambda: draw(9, 11, dtype=I64, seed=1),
    )
for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    function = getattr(torch, name)
    for dtype in (I32, I64, BOOL):
        case(
            f"{name}/{dtype}",
            function,
            lambda dtype=dtype: draw(9, 11, dtype=dtype),
            lambda dtype=dtype: draw(9, 11, dtype=dtype, seed=1),
        )
case("bitwise_not/int64", torch.bitwise_not, lambda: draw(9, dtype=I64))
case("bitwise_not/bool", torch.bitwise_not, lambda: draw(9, dtype=BOOL))
case("add/alpha", lambda x, y: torch.add(x, y, alpha=-2), (5, 7), (5, 7))
case("sub/alpha", lambda x, y: torch.sub(x, y, alpha=0.5), (5, 7), (5, 7))
case(
    "add/alpha int",
    lambda x, y: torch.add(x, y, alpha=3),
    lambda: draw(5, dtype=I32),
    lambda: draw(5, dtype=I32),
)
case("rsub/scalar", lambda x: 2 - x, (5, 7))
case("rsub/int", lambda x: 2 - x, lambda: draw(5, dtype=I64))
case("mul/zero", lambda x: x * 0.0, special)
case("mul/overflow", lambda x: x * 2**31 * 5 + 7, lambda: draw(9, dtype=I64))
case("int tensor + float", lambda x: x + 0.5, lambda: draw(9, dtype=I64))
case("bool tensor + int", lambda x: x + 1, lambda: draw(9, dtype=BOOL))
case("bool tensor * float", lambda x: x * 0.5, lambda: draw(9, dtype=BOOL))
case("div by zero", lambda x: x / 0.0, special)
for mode in ("floor", "trunc"):
    case(
        f"div {mode}/float32", lambda x, y, m=mode: torch.div(x, y, rounding_mode=m), (9, 9), (9, 9)
    )
    case(
        f"div {mode}/special",
        lambda x, y, m=mode: torch.div(x, y, rounding_mode=m),
        lambda: special()[:, None].clone(),
        special,
    )
    case(
        f"div {mode}/int by 3",
        lambda x, m=mode: torch.div(x, 3, rounding_mode=m),
        lambda: draw(40, dtype=I64),
    )
    case(
        f"div {mode}/int by int",
        lambda x, y, m=mode: torch.div(x, y, rounding_mode=m),
        lambda: draw(9, dtype=I64),
        lambda: draw(9, dtype=I64) * 2 + 1,
        declined=True,
    )
case("remainder/int by 4", lambda x: torch.remainder(x, 4), lambda: draw(40, dtype=I64))
case("fmod/int by 4", lambda x: torch.fmod(x, 4), lambda: draw(40, dtype=I64))
case("floor_divide/int by 4", lambda x: x // 4, lambda: draw(40, dtype=I64))
case("remainder/negative", lambda x: torch.remainder(x, -4.0), (40,))
case("shift left", lambda x: x << 3, lambda: draw(9, dtype=I64))
case("shift right", lambda x: x >> 2, lambda: draw(9, dtype=I32))
case(
    "shift left/by tensor",
    lambda x, y: x << y,
    lambda: draw(9, dtype=I64),
    lambda: draw(9, dtype=I64).abs(),
    declined=True,
)
for exponent in (0.5, -0.5, 1, 2, 3, -1, -2, 2.5, 4, 0):
    case(f"pow {exponent}", lambda x, e=exponent: x**e, lambda: draw(99, low=0.1, high=3.0))
case("pow tensor", torch.pow, lambda: draw(99, low=0.1, high=3.0), (99,))
case("pow special", lambda x: x**2, special)
case("pow scalar base", lambda x: 2.0**x, (99,))
case("pow int 2", lambda x: x**2, lambda: draw(9, dtype=I64))
case("pow int 5", lambda x: x**5, lambda: draw(9, dtype=I64), declined=True)
case("where", torch.where, lambda: draw(9, 11, dtype=BOOL), (9, 11), (11,))
case("where/scalars", lambda c, x: torch.where(c, x, -1.0), lambda: draw(9, dtype=BOOL), (9,))
case("where/mixed", torch.where, lambda: draw(9, dtype=BOOL), (9,), lambda: draw(9, dtype=I64))
case("masked_fill", lambda x, m: x.masked_fill(m, -math.inf), (9, 11), lambda: draw(11, dtype=BOOL))
case("clamp", lambda x: x.clamp(-1, 1), special)
case("clamp/min", lambda x: x.clamp(min=0.25), special)
case("clamp/int", lambda x: x.clamp(-2, 5), lambda: draw(40, dtype=I64))
case("clamp/tensors", lambda x, a, b: torch.clamp(x, a, b), (9, 9), (9,), (9, 1))
case("clamp/int by float", lambda x: x.clamp(min=-1.5), lambda: draw(40, dtype=I64))
case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (9, 9), (9, 9), (9,))
case(
    "addcdiv",
    lambda x, y, z: torch.addcdiv(x, y, z, value=2),
    (9, 9),
    (9, 9),
    lambda: draw(9, low=1),
)
case("lerp", lambda x, y: torch.lerp(x, y, 0.3), (9, 9), (9, 9))
case("lerp/tensor", torch.lerp, (9, 9), (9, 9), (9, 9))
case("nan_to_num", torch.nan_to_num, special, as_eager=True)
case("cancel", lambda x: (x + 1e8) - 1e8, (99,), as_eager=True)
case("xlogy", torch.xlogy, lambda: draw(9, low=0.0), lambda: draw(9, low=0.1))
case("logaddexp", torch.logaddexp, (9,), (9,))
case("heaviside", torch.heaviside, (9,), (9,))

# --- conversions and constants ------------------------------------------------------------------

for source in (F32, F64, I32, I64, BOOL):
    for target in (F32, F64, I32, I64, BOOL):
        case(
            f"{source} to {target}",
            lambda x, t=target: x.to(t),
            lambda s=source: draw(5, 7, dtype=s),
        )
case("to float16", lambda x: x.half(), (5,), declined=True)
case("float16", lambda x: x + 1, lambda: draw(5).half(), declined=True)
case("bfloat16", lambda x: x * 2, lambda: draw(5).bfloat16(), declined=True)
case("complex", lambda x: x * 2, lambda: torch.complex(draw(5), draw(5)), declined=True)
case("clone", torch.clone, lambda: draw(5, 7, layout="turned"))
case("contiguous", lambda x: x.contiguous(), lambda: draw(5, 7, layout="turned"))
case("channels_last", lambda x: x.contiguous(memory_format=torch.channels_last) + 1, (2, 3, 4, 5))
case("full", lambda x: torch.full((3, 4), 2.5) + x, (4,))
case("zeros ones", lambda x: (torch.zeros_like(x), torch.ones_like(x), x.new_full((2,), 7)), (3, 4))
case("arange", lambda x: x + torch.arange(7), (7,))
case("arange/float", lambda x: x + torch.arange(0.1, 2.0, 0.3), (7,))
case("arange/step", lambda x: x + torch.arange(20, 6, -2), (7,))
case("linspace", lambda x: x + torch.linspace(-1, 1, 7), (7,))
case("eye", lambda x: x + torch.eye(5, 4), (5, 4))
case("tril", torch.tril, (6, 9))
case("triu/offset", lambda x: torch.triu(x, 2), (3, 6, 9))

# --- reductions ----------------------------------------------------------------------------------

AXES = {"all": None, "0": 0, "-1": -1, "1": 1, "0,2": (0, 2), "1,2": (1, 2)}
for axes_name, axes in AXES.items():
    for name in ("sum", "mean", "amax", "amin", "var", "std"):
        function = getattr(torch, name)
        axes_given = tuple(range(3)) if axes is None else axes
        case(f"{name} {axes_name}", lambda x, f=function, a=axes_given: f(x, dim=a), (4, 35, 33))
        case(
            f"{name} {axes_name} keepdim",
            lambda x, f=function, a=axes_given: f(x, dim=a, keepdim=True),
            lambda: draw(4, 5, 3, layout="turned"),
        )
for name in ("any", "all"):
    function = getattr(torch, name)
    case(f"{name}/bool", function, lambda: draw(5, 7, dtype=BOOL))
    case(f"{name}/dim", lambda x, f=function: f(x, 1), lambda: draw(5, 2, dtype=BOOL))
    case(f"{name}/float", lambda x, f=function: f(x > 1, 0), (5, 2))
for name in ("argmax", "argmin"):
    function = getattr(torch, name)
    for dim in (None, 0, 1, -1):
        case(f"{name}/{dim}", lambda x, f=function, d=dim: f(x, dim=d), (9, 5, 17))
    case(f"{name}/int", lambda x, f=function: f(x, dim=1), lambda: draw(9, 33, dtype=I64))
    case(f"{name}/special", function, special)
for name in ("max", "min"):
    function = getattr(torch, name)
    case(f"{name}/all", function, (9, 5))
    case(f"{name}/dim", lambda x, f=function: tuple(f(x, 1)), (9, 40))
    case(f"{name}/first", lambda x, f=function: tuple(f(x, 0, keepdim=True)), (9, 40))
    case(f"{name}/special", function, special)
    case(f"{name}/int", lambda x, f=function: tuple(f(x, 1)), lambda: draw(9, 33, dtype=I64))
case("sum/int64", lambda x: x.sum(), lambda: draw(9, 33, dtype=I64))
case("sum/bool", lambda x: x.sum(1), lambda: draw(9, 33, dtype=BOOL))
case("sum/int32", lambda x: x.sum(0), lambda: draw(9, 33, dtype=I32))
case("sum/long", lambda x: x.sum(), lambda: draw(200, 333, low=0.0))
case("sum/long column", lambda x: x.sum(0), lambda: draw(20000, 3, low=0.0))
case("sum/to float64", lambda x: x.sum(1, dtype=F64), (9, 33))
case("mean/float64", lambda x: x.mean(), lambda: draw(9, 33, dtype=F64))
case("prod", lambda x: x.prod(), lambda: draw(9, low=0.5, high=1.5))
case("prod/dim", lambda x: x.prod(1), lambda: draw(9, 40, low=0.5, high=1.5))
case("var/correction", lambda x: x.var(1, correction=0), (9, 40))
case("std/correction", lambda x: x.std(1, correction=2), (9, 40))
case("var_mean", lambda x: torch.var_mean(x, 1), (9, 40))
case("var/one element", lambda x: x.var(1), (9, 1))
case("logsumexp", lambda x: torch.logsumexp(x, 1), (9, 40))
case("norm", lambda x: torch.linalg.vector_norm(x, dim=1), (9, 40))
case("norm/1", lambda x: torch.linalg.vector_norm(x, 1), (9, 40))
case("cumsum", lambda x: x.cumsum(1), (9, 40))
case("cumprod", lambda x: x.cumprod(0), (9, 4))
case("sort", lambda x: x.sort(1), (9, 40))
case("topk", lambda x: x.topk(3), (9, 40))

# --- shapes --------------------------------------------------------------------------------------

for layout in ("plain", "turned", "sliced"):
    make = lambda layout=layout: draw(4, 6, 5, layout=layout)  # noqa: E731
    case(f"view {layout}", lambda x: x.reshape(8, 15) * 2, make)
    case(f"permute {layout}", lambda x: x.permute(2, 0, 1) * 2, make)
    case(f"transpose {layout}", lambda x: x.transpose(1, 2).exp(), make)
    case(f"slice {layout}", lambda x: x[1:, ::2, -3:] + 1, make)
    case(f"select {layout}", lambda x: x[-1] + x[:, 2].sum(0)[:, None].sum(), make)
    case(f"expand {layout}", lambda x: x[:, :1].expand(4, 6, 5) + x, make)
    case(f"cat {layout}", lambda x: torch.cat([x, x * 2, x[:, :1]], 1), make)
    case(f"stack {layout}", lambda x: torch.stack([x, x + 1], 1), make)
    case(f"flip {layout}", lambda x: x.flip(0, 2), make)
    case(f"roll {layout}", lambda x: x.roll((1, -2), (0, 1)), make)
    case(f"split {layout}", lambda x: [a * 2 for a in x.split([1, 2, 3], 1)], make)
    case(f"unbind {layout}", lambda x: [a.exp() for a in x.unbind(2)], make)
    case(f"pad {layout}", lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), make)
    case(f"pad negative {layout}", lambda x: F.pad(x, (-1, 2)), make)
    case(f"repeat {layout}", lambda x: x.repeat(2, 1, 3), make)
    case(f"softmax {layout}", lambda x: x.softmax(-1), make)
    case(f"sum {layout}", lambda x: x.sum((0, 2)), make)
    case(f"two outputs {layout}", lambda x: (x.t() if x.dim() == 2 else x.mT, x.exp().mT), make)
case("squeeze", lambda x: (x.squeeze() * 2, x.squeeze(1) * 2, x.unsqueeze(0) * 2), (3, 1, 4))
case("cat/mixed", lambda x, y: torch.cat([x, y]), lambda: draw(3, dtype=I64), (4,))
case("cat/many", lambda x: torch.cat([x] * 20), (3,), declined=True)
case("stack/0", lambda x: torch.stack([x.sum(), x.mean()]), (3,))
case("diagonal", lambda x: x.diagonal(1) * 2, (4, 6))
case("unfold", lambda x: x.unfold(1, 3, 2) * 2, (4, 9))
case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 6, 2), (4, 6), (4, 3))
case("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 2), (4, 6), (4,))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 3))
case("reflect", lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), (2, 3, 5, 6))
case("replicate", lambda x: F.pad(x, (2, 1, 1, 2), mode="replicate"), (2, 3, 5, 6))
case("zero axes", lambda x, y: x * y + 1, lambda: draw(), lambda: draw(seed=1))
case("zero axes/sum", lambda x: (x.sum(), x.mean(), x.exp().max()), lambda: draw())
case("one element", lambda x: (x.softmax(0), x.sum(0), x.argmax(), x.var(0, correction=0)), (1,))
case("one row", lambda x: (x.softmax(1), x.sum(0), x.mean(1), x.t() * 2), (1, 7))
case("one column", lambda x: (x.softmax(0), x.sum(1), x.mean(0), x.t() * 2), (7, 1))
for name, function in (
    ("add", lambda x: x + 1),
    ("sum", lambda x: x.sum()),
    ("cat", lambda x: torch.cat([x, x])),
    ("softmax", lambda x: x.softmax(-1)),
    ("mm", lambda x: x.t() @ x),
):
    case(f"no elements/{name}", function, lambda: draw(0, 3), declined=True)

# --- indices -------------------------------------------------------------------------------------


def places(*shape: int, high: int) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(high, shape, generator=generator)
    return lambda: found.clone()


case("embedding", lambda i, w: F.embedding(i, w), places(3, 4, high=9), (9, 5))
case("index", lambda x, i: x[i], (9, 5), lambda: torch.tensor([[0, -1], [3, -9]]))
case("index/two", lambda x, i, j: x[i, :, j], (9, 5, 4), places(6, high=9), places(6, high=4))
case("index_select", lambda x, i: x.index_select(1, i), (9, 5), places(7, high=5))
case("gather", lambda x, i: x.gather(1, i), (9, 5), places(9, 3, high=5))
case("scatter", lambda x, i, y: x.scatter(1, i, y), (9, 5), lambda: torch.tensor([[0, 3]]), (9, 3))
case("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), (9, 5), places(9, 3, high=5), (9, 3))
case("index_add", lambda x, i, y: x.index_add(0, i, y), (9, 5), places(4, high=9), (4, 5))
case("index_put", lambda x, i, y: x.index_put((i,), y, True), (9, 5), places(4, high=9), (4, 5))
case("take", torch.take, (9, 5), places(7, high=45))
case("nonzero", torch.nonzero, (9,), declined=True)
case("masked_select", lambda x: x[:, None][:, 0] * 2, (9,))

# --- linear algebra ------------------------------------------------------------------------------

for dtype in (F32, F64):
    two = lambda dtype=dtype: draw(7, 9, dtype=dtype)  # noqa: E731
    other = lambda dtype=dtype: draw(9, 5, dtype=dtype, seed=1)  # noqa: E731
    case(f"mm/{dtype}", torch.mm, two, other)
    case(f"mm turned/{dtype}", lambda x, y: (x @ y).t() @ x, two, other)
    case(f"linear/{dtype}", lambda x, w: F.linear(x, w.t(), w[0]), two, other)
    case(f"addmm/{dtype}", lambda x, y: torch.addmm(y[0], x, y, beta=2, alpha=0.5), two, other)
case("bmm", torch.bmm, (3, 7, 9), (3, 9, 5))
case("bmm/turned", lambda x, y: x @ y.mT, (3, 7, 9), (3, 5, 9))
case("baddbmm", torch.baddbmm, (3, 7, 5), (3, 7, 9), (3, 9, 5))
case("matmul/broadcast", torch.matmul, (2, 3, 7, 9), (9, 5))
case("mv", torch.mv, (7, 9), (9,))
case("dot", torch.dot, (9,), (9,))
case("mm/int64", torch.mm, lambda: draw(4, 5, dtype=I64), lambda: draw(5, 3, dtype=I64))
case("einsum", lambda x, y: torch.einsum("bij,bkj->bik", x, y), (3, 7, 9), (3, 5, 9))
case("outer", torch.outer, (7,), (9,))

# --- networks ------------------------------------------------------------------------------------

case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 3, 9), (4, 3, 3), (4,))
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2), (2, 3, 9, 8), (4, 3, 3, 3), (4,))
case("conv2d/groups", lambda x, w: F.conv2d(x, w, groups=4, dilation=2), (2, 4, 9, 8), (4, 1, 3, 3))
case("conv3d", lambda x, w: F.conv3d(x, w), (1, 2, 5, 5, 5), (3, 2, 3, 3, 3))
case(
    "conv_transpose2d",
    lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
    (2, 3, 5, 5),
    (3, 4, 3, 3),
)
case(
    "conv2d/channels last",
    lambda x, w: F.conv2d(x, w, padding=1).relu(),
    lambda: draw(2, 3, 9, 8).contiguous(memory_format=torch.channels_last),
    (4, 3, 3, 3),
)
case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 9, 8))
case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (2, 3, 9, 8))
case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 9, 8))
case("adaptive_avg_pool2d/3", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (2, 3, 9, 8))
case("upsample nearest", lambda x: F.interpolate(x, scale_factor=2), (2, 3, 4, 5))
case("upsample bilinear", lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), (2, 3, 4, 5))
case("layer_norm", lambda x, w: F.layer_norm(x, (33,), w, w), (4, 7, 33), (33,))
case("layer_norm/two axes", lambda x: F.layer_norm(x, (7, 33)), (4, 7, 33))
case("layer_norm/float64", lambda x: F.layer_norm(x, (33,)), lambda: draw(4, 33, dtype=F64))
case(
    "rms_norm",
    lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
    (4, 7, 33),
    (33,),
)
case("group_norm", lambda x, w: F.group_norm(x, 2, w, w), (3, 4, 5, 6), (4,))
case(
    "batch_norm",
    lambda x, m: aten._native_batch_norm_legit_no_training(x, m, m, m, m.abs() + 1, 0.1, 1e-5)[0],
    (5, 4, 6),
    (4,),
)
case(
    "batch_norm/training",
    lambda x, m: aten._native_batch_norm_legit_functional(x, m, m, m, m.abs() + 1, True, 0.1, 1e-5),
    (5, 4, 6),
    (4,),
)
case(
    "instance_norm",
    lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0],
    (3, 4, 5, 6),
)
case("softmax", lambda x: x.softmax(-1), (4, 7, 197))
case("softmax/first", lambda x: x.softmax(0), (4, 7, 19))
case("softmax/masked", lambda x: (x.masked_fill(x > 1, -math.inf)).softmax(-1), (9, 40))
case("softmax/float64", lambda x: x.softmax(1), lambda: draw(4, 7, 19, dtype=F64))
case("log_softmax", lambda x: x.log_softmax(-1), (9, 40))
case("cross_entropy", F.cross_entropy, (9, 5), places(9, high=5))
case("mse_loss", F.mse_loss, (9, 5), (9, 5))
case("smooth_l1_loss", F.smooth_l1_loss, (9, 5), (9, 5))
case("huber_loss", F.huber_loss, (9, 5), (9, 5))
case(
    "bce_with_logits", F.binary_cross_entropy_with_logits, (9, 5), lambda: draw(9, 5, low=0, high=1)
)
case(
    "bce",
    F.binary_cross_entropy,
    lambda: draw(9, 5, low=0.1, high=0.9),
    lambda: draw(9, 5, low=0, high=1),
)
case("glu", lambda x: F.glu(x, -1), (9, 8))
case("prelu", F.prelu, (9, 4, 3), (4,))
case(
    "attention",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    (2, 3, 7, 8),
    (2, 3, 7, 8),
    (2, 3, 7, 8),
)
case(
    "attention/written",
    lambda q, k, v, m: attention(
        q, k, v, m, m, None, None, "of:float32 mul:0.3 add:0 softmax:float32"
    )[0],
    (2, 3, 5, 8),
    (2, 3, 7, 8),
    (2, 3, 7, 8),
    (1, 1, 5, 7),
)
case(
    "attention/mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    (2, 3, 7, 8),
    (2, 3, 9, 8),
    (2, 3, 9, 8),
    (7, 9),
)
case("dropout", lambda x: F.dropout(x, 0.5), (9,), declined=True)
case("rand", lambda x: x + torch.rand_like(x), (9,), declined=True)

# --- gradients -----------------------------------------------------------------------------------


def gradient(call: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a weighted sum of a program's result by its floating inputs."""

    def backward(*inputs: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [
                one.detach().requires_grad_() if one.is_floating_point() else one for one in inputs
            ]
            result = call(*leaves)
            weights = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
            wanted = [one for one in leaves if one.is_floating_point()]
            return torch.autograd.grad((result * (weights / result.numel() + 0.5)).sum(), wanted)

    return backward


for name in (
    "gelu",
    "silu",
    "softplus",
    "elu",
    "leaky_relu",
    "hardswish",
    "hardsigmoid",
    "mish",
    "hardtanh",
    "relu",
    "sigmoid",
    "tanh",
    "logsigmoid",
):
    case(f"grad {name}", gradient(getattr(F, name)), (5, 33))
case("grad gelu/tanh", gradient(lambda x: F.gelu(x, approximate="tanh")), (5, 33))
case("grad prelu", gradient(F.prelu), (9, 4, 3), (4,))
case("grad glu", gradient(lambda x: F.glu(x, -1)), (9, 8))
case("grad softmax", gradient(lambda x: x.softmax(-1)), (9, 40))
case("grad log_softmax", gradient(lambda x: x.log_softmax(1)), (4, 7, 5))
case("grad layer_norm", gradient(lambda x, w: F.layer_norm(x, (33,), w, w)), (4, 7, 33), (33,))
case("grad group_norm", gradient(lambda x, w: F.group_norm(x, 2, w, w)), (3, 4, 5, 6), (4,))
case(
    "grad batch_norm",
    gradient(
        lambda x, w: aten._native_batch_norm_legit_functional(
            x, w, w, w.detach(), w.detach().abs(), True, 0.1, 1e-5
        )[0]
    ),
    (5, 4, 6),
    (4,),
)
case("grad cross_entropy", gradient(F.cross_entropy), (9, 5), places(9, high=5))
case("grad mse_loss", gradient(F.mse_loss), (9, 5), (9, 5))
case("grad smooth_l1_loss", gradient(F.smooth_l1_loss), (9, 5), (9, 5))
case("grad huber_loss", gradient(F.huber_loss), (9, 5), (9, 5))
case(
    "grad bce",
    gradient(lambda x: F.binary_cross_entropy(x, x.detach() * 0.5)),
    lambda: draw(9, 5, low=0.1, high=0.9),
)
case("grad linear", gradient(F.linear), (7, 9), (5, 9), (5,))
case(
    "grad conv2d",
    gradient(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1)),
    (2, 3, 9, 8),
    (4, 3, 3, 3),
    (4,),
)
case("grad conv1d", gradient(lambda x, w: F.conv1d(x, w, groups=2)), (2, 4, 9), (6, 2, 3))
case("grad max_pool2d", gradient(lambda x: F.max_pool2d(x, 3, 2, 1)), (2, 3, 9, 8))
case("grad avg_pool2d", gradient(lambda x: F.avg_pool2d(x, 3, 2, 1)), (2, 3, 9, 8))
case("grad adaptive_avg_pool2d", gradient(lambda x: F.adaptive_avg_pool2d(x, (3, 2))), (2, 3, 9, 8))
case("grad upsample nearest", gradient(lambda x: F.interpolate(x, size=(7, 9))), (2, 3, 4, 5))
case(
    "grad upsample bilinear",
    gradient(lambda x: F.interpolate(x, size=(7, 9), mode="bilinear")),
    (2, 3, 4, 5),
)
case("grad embedding", gradient(lambda i, w: F.embedding(i, w)), places(3, 4, high=9), (9, 5))
case("grad slice", gradient(lambda x: x[1:, ::2] * x[0, 3]), (4, 6))
case("grad unfold", gradient(lambda x: x.unfold(1, 3, 2)), (4, 9))
case("grad index", gradient(lambda x, i: x[i]), (9, 5), places(6, high=9))
case(
    "grad attention",
    gradient(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    (2, 3, 7, 8),
    (2, 3, 7, 8),
    (2, 3, 7, 8),
)

# --- overloads that the functions above don't reach ----------------------------------------------

for name in ("add", "sub", "mul", "div"):
    case(
        f"{name}.Scalar",
        lambda x, n=name: getattr(aten, n).Scalar(x, 3),
        lambda: draw(9, dtype=I64),
    )
for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    case(
        f"{name}.Scalar",
        lambda x, n=name: getattr(aten, n).Scalar(x, 6),
        lambda: draw(9, dtype=I64),
    )
case(
    "shifts.Tensor_Scalar",
    lambda x: (
        aten.bitwise_left_shift.Tensor_Scalar(x, 3),
        aten.bitwise_right_shift.Tensor_Scalar(x, 1),
    ),
    lambda: draw(9, dtype=I64),
)
case("clamp_max", lambda x: (aten.clamp_max(x, 0.5), aten.clamp_min(x, 0.5)), special)
case(
    "made of numbers",
    lambda x: (
        x + aten.full_like(x, 2),
        aten.new_ones(x, [2]),
        torch.ones(2) + x[0],
        torch.zeros(2) + x[0],
        torch.eye(3) + x[0],
    ),
    (4,),
)
case(
    "alias view split",
    lambda x: (aten.alias(x) * 2, aten.view(x, [6, 4]) * 2, aten.split.Tensor(x, 3, 1)[1] * 2),
    (4, 6),
)
case(
    "prims",
    lambda x: (
        torch.ops.prims.convert_element_type(x, F64)
        + torch.ops.prims.iota(5, start=2, step=3, dtype=I64, device="cpu", requires_grad=False)
    ),
    (5,),
)
case(
    "any all dims",
    lambda x: (torch.any(x, (0, 2)), torch.all(x, (0, 1))),
    lambda: draw(2, 3, 4, dtype=BOOL),
)
case("masked_fill/tensor", lambda x, v: x.masked_fill(x > 0, v), (9,), lambda: draw())
case("addmv", torch.addmv, (7,), (7, 9), (9,))
case("scatter/value", lambda x, i: x.scatter(1, i, 2.5), (9, 5), lambda: torch.tensor([[0, 3]]))
case(
    "scatter_reduce",
    lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
    (9, 5),
    places(9, 3, high=5),
    (9, 3),
)
case(
    "index_copy",
    lambda x, i, y: x.index_copy(0, i, y),
    (9, 5),
    lambda: torch.tensor([3, 1]),
    (2, 5),
)
case("sort/stable", lambda x: x.sort(dim=1, stable=True), lambda: draw(9, 33, dtype=I64))
case(
    "unsafe_index_put",
    lambda x, i, y: aten._unsafe_index_put(x, [i], y),
    (9, 5),
    lambda: torch.tensor([3, 1]),
    (2, 5),
)
case("fill", lambda x: aten.fill(x, 2.5), (3, 4))
case("infinities", lambda x: (torch.isposinf(x), torch.isneginf(x)), special)
case("with itself", lambda x: (x == x, x != x, x <= x, x >= x, x < x, x - x, x / x), special)
