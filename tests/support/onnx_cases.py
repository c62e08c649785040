"""Single-op cases for ONNX Runtime: ops, and tensors to call them with.

Names of cases are names of ops with what is special about them after an underscore.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fuseboard.ops.attention import attention

aten = torch.ops.aten


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    """From a quarter up."""
    return floats(*shape, seed=seed).abs() + 0.25


def within(*shape: int, seed: int = 0) -> torch.Tensor:
    """Between -0.9 and 0.9, where every function of one number is defined."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1.8 - 0.9


def ints(
    *shape: int, low: int = -9, high: int = 10, seed: int = 0, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Integers from low to high - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flags(*shape: int, seed: int = 0) -> torch.Tensor:
    """Booleans."""
    return ints(*shape, low=0, high=2, seed=seed).bool()


#: Both zeros, infinities and NaN.
SPECIAL = torch.tensor([[0.0, -0.0, 1.0, -1.5], [float("inf"), -float("inf"), float("nan"), 2.5]])

#: Ops of UNARY that are also called with a tensor without dimensions, of which they name one.
OF_A_NUMBER = frozenset(
    "sum_last mean_last cumsum var var_biased std var_mean norm norm_1 logsumexp softmax amax "
    "argmax any_dim all_dim flip".split()
)
#: Ops of OTHER whose kernels lay out results otherwise than torch's fake ones, by their inputs.
LAID_OUT = frozenset(
    "layer_norm_grad batch_norm batch_norm_2d batch_norm_training batch_norm_grad index_second "
    "softmax_grad log_softmax_grad relu_grad hardtanh_grad split_sizes".split()
)

#: Op → function of tensors that calls it. The inputs are in the tables after this one.
UNARY = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "acosh": lambda x: torch.acosh(x.abs() + 1),
    "asinh": torch.asinh,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "frac": torch.frac,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "log1p": torch.log1p,
    "log2": lambda x: torch.log2(x.abs() + 0.1),
    "log10": lambda x: torch.log10(x.abs() + 0.1),
    "logical_not": torch.logical_not,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "round": torch.round,
    "round_decimals": lambda x: torch.round(x, decimals=2),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "signbit": torch.signbit,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "relu": torch.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "elu_args": lambda x: aten.elu(x, 1.5, 0.7, 1.2),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "clamp_min": lambda x: torch.clamp(x, min=0.1),
    "clamp_max": lambda x: torch.clamp(x, max=0.1),
    "clamp_min_op": lambda x: torch.clamp_min(x, 0.1),
    "clamp_max_op": lambda x: torch.clamp_max(x, 0.1),
    "add_scalar": lambda x: x + 1.5,
    "sub_scalar": lambda x: x - 1.5,
    "rsub_scalar": lambda x: 1.5 - x,
    "mul_scalar": lambda x: x * -0.3,
    "div_scalar": lambda x: x / 0.7,
    "div_floor": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "div_trunc": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "remainder_scalar": lambda x: torch.remainder(x, 0.7),
    "fmod_scalar": lambda x: torch.fmod(x, 0.7),
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_half": lambda x: x.abs() ** 0.5,
    "pow_minus": lambda x: (x.abs() + 0.5) ** -1.5,
    "pow_scalar_base": lambda x: 1.7**x,
    "eq_scalar": lambda x: x == 0,
    "ne_scalar": lambda x: x != 0,
    "lt_scalar": lambda x: x < 0.2,
    "le_scalar": lambda x: x <= 0.2,
    "gt_scalar": lambda x: x > 0.2,
    "ge_scalar": lambda x: x >= 0.2,
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.5, 7.0, -7.0),
    "to_int64": lambda x: x.to(torch.int64),
    "to_int32": lambda x: x.to(torch.int32),
    "to_bool": lambda x: x.to(torch.bool),
    "clone": torch.clone,
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: torch.ones_like(x) * x,
    "full_like": lambda x: torch.full_like(x, 2.5) * x,
    "cumsum": lambda x: torch.cumsum(x, -1),
    "cumsum_0": lambda x: torch.cumsum(x, 0),
    "sum": lambda x: x.sum(),
    "sum_last": lambda x: x.sum(-1),
    "sum_keep": lambda x: x.sum(0, keepdim=True),
    "sum_two": lambda x: x.sum((0, 1)),
    "mean": lambda x: x.mean(),
    "mean_last": lambda x: x.mean(-1, keepdim=True),
    "mean_0": lambda x: x.mean(0),
    "var": lambda x: x.var(-1),
    "var_biased": lambda x: x.var(-1, unbiased=False),
    "var_correction": lambda x: torch.var(x, 0, correction=2, keepdim=True),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax_0": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "log_softmax_0": lambda x: torch.log_softmax(x, 0),
    "amax": lambda x: torch.amax(x, -1),
    "amin": lambda x: torch.amin(x, 0, keepdim=True),
    "max": torch.max,
    "min": torch.min,
    "max_dim": lambda x: torch.max(x, -1),
    "min_dim": lambda x: torch.min(x, 0),
    "argmax": lambda x: torch.argmax(x, -1),
    "argmax_all": torch.argmax,
    "argmin": lambda x: torch.argmin(x, 0, keepdim=True),
    "prod": torch.prod,
    "prod_dim": lambda x: torch.prod(x, -1),
    "any": torch.any,
    "any_dim": lambda x: torch.any(x > 0, -1),
    "all": torch.all,
    "all_dim": lambda x: torch.all(x > 0, 0),
    "t": lambda x: x.t() + 1,
    "t_out": lambda x: x.t() * 1,
    "view": lambda x: x.reshape(-1) + 1,
    "unsqueeze": lambda x: x.unsqueeze(1) + 1,
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1) + 1,
    "squeeze_all": lambda x: x.unsqueeze(0).squeeze() + 1,
    "squeeze_dims": lambda x: torch.squeeze(x[None, :, None], (0, 2)) + 1,
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1) + 1,
    "repeat": lambda x: x.repeat(2, 1, 2),
    "tile": lambda x: torch.tile(x, (2,)),
    "flip": lambda x: torch.flip(x, (-1,)),
    "roll": lambda x: torch.roll(x, 1, 0),
    "roll_2": lambda x: torch.roll(x, (1, -2), (0, 1)),
    "tril": torch.tril,
    "triu": lambda x: torch.triu(x, 1),
    "diagonal": lambda x: torch.diagonal(x) * 2,
    "cat": lambda x: torch.cat([x, x * 2], -1),
    "cat_0": lambda x: torch.cat([x, x * 2, x], 0),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "pad_negative": lambda x: F.pad(x, (-1, 2)),
    "slice": lambda x: x[..., :-1] * 2,
    "slice_step": lambda x: x[..., ::2] * 2,
    "split": lambda x: [part * 2 for part in torch.split(x, 2, -1)],
    "chunk": lambda x: [part * 2 for part in torch.chunk(x, 2, -1)],
    "unbind": lambda x: [part * 2 for part in torch.unbind(x.new_ones(2, 3) * x.sum())],
    "topk": lambda x: torch.topk(x, 1, -1),
    "sort": lambda x: torch.sort(x, -1)[0],
    "sort_down": lambda x: torch.sort(x, 0, descending=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, -3.0),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.5),
    "arange": lambda x: torch.arange(5, dtype=torch.float32) + x.sum(),
    "arange_mixed": lambda x: torch.arange(0.0, 5) + torch.arange(1, 6.0) + x.sum(),
    "arange_step": lambda x: torch.arange(1, 9, 3) + x.sum(),
    "full": lambda x: torch.full((2, 3), 1.5) * x.sum(),
    "new_ones": lambda x: x.new_ones((2, 3)) * x.sum(),
    "scalar_tensor": lambda x: torch.scalar_tensor(2.5) * x,
    "unfold": lambda x: x.unfold(0, 1, 1) * 2,
    "cumprod": lambda x: torch.cumprod(x, -1),
    "l1": lambda x: F.l1_loss(x, x * 0.5),
    "mse": lambda x: F.mse_loss(x, x * 0.5),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 0.5),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid() * 0.5),
    "bce_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5),
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "is_pow": lambda x: torch.pow(x, 2.0),
    "trig": lambda x: torch.deg2rad(x),
    "logit": lambda x: torch.logit(x.sigmoid(), 1e-4),
    "lift": lambda x: x + torch.tensor([1.5]),
    "alias": lambda x: aten.alias(x) * 2,
    "detach": lambda x: aten.detach(x) * 2,
    "transpose": lambda x: x.transpose(0, 1).contiguous() * 2,
    "arange_from": lambda x: torch.arange(2, 9) + x.sum(),
    "zeros": lambda x: torch.zeros((2, 3)) + x.sum(),
    "ones": lambda x: torch.ones((2, 3)) + x.sum(),
    "new_zeros": lambda x: x.new_zeros((2, 3)) + x.sum(),
    "new_full": lambda x: x.new_full((2, 3), 2.5) + x.sum(),
    "item_select": lambda x: x.select(1, -1) * 2,
    "movedim": lambda x: x[None].movedim(0, -1).contiguous() * 2,
    "pixel": lambda x: F.pixel_shuffle(x.new_ones(1, 4, 2, 3) * x.sum(), 2),
    "linspace": lambda x: torch.linspace(0, 1, 5) + x.sum(),
    "eye": lambda x: torch.eye(3) * x.sum(),
    "count": lambda x: torch.count_nonzero(x > 0),
    "dropout_eval": lambda x: F.dropout(x, training=False),
    "add_number": lambda x: aten.add.Scalar(x, 1.5),
    "alpha": lambda x: torch.add(x, x, alpha=0.3),
    "sub_alpha": lambda x: torch.sub(x, x * x, alpha=2),
    "baddbmm": lambda x: torch.baddbmm(
        x.new_ones(1, 1, 1), x[None], x.t()[None], beta=0.5, alpha=2
    ),
}

BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / y,
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "atan2": torch.atan2,
    "pow": lambda x, y: x.abs() ** y,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_tensor": lambda x, y: torch.lerp(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "heaviside": torch.heaviside,
    "logaddexp": torch.logaddexp,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "clamp_tensor": lambda x, y: torch.clamp(x, y),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "cdist": lambda x, y: (x[:, None] - y[None]).abs().sum(-1),
}

INTEGER = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "shift_left": lambda x, y: x << (y % 3),
    "shift_right": lambda x, y: x >> (y % 3),
    "bitwise_not": lambda x, y: ~x,
    "add_scalar": lambda x, y: x + 3,
    "add_float": lambda x, y: x + 1.5,
    "mul_float": lambda x, y: x * 0.5,
    "div_int": lambda x, y: x / 3,
    "floordiv_int": lambda x, y: x // 3,
    "mod_int": lambda x, y: x % 3,
    "pow_int": lambda x, y: x**2,
    "rsub_int": lambda x, y: 5 - x,
    "lt_float": lambda x, y: x < 1.5,
    "to_float": lambda x, y: x.float(),
    "to_bool": lambda x, y: x.bool(),
    "sum": lambda x, y: x.sum(),
    "mean_float": lambda x, y: x.float().mean(),
    "cumsum": lambda x, y: x.cumsum(0),
    "where_float": lambda x, y: torch.where(x > y, 1.5, x),
    "clamp": lambda x, y: x.clamp(-2, 2),
    "clamp_min_op": lambda x, y: x.clamp_min(-2),
    "clamp_max_op": lambda x, y: x.clamp_max(2),
    "abs": lambda x, y: x.abs(),
    "neg": lambda x, y: -x,
    "sign": lambda x, y: x.sign(),
    "exp": lambda x, y: torch.exp(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "sqrt": lambda x, y: torch.sqrt(x.abs()),
    "amax": lambda x, y: x.amax(-1),
    "argmax": lambda x, y: x.argmax(-1),
    "amin": lambda x, y: x.amin(-1),
    "argmin": lambda x, y: x.argmin(-1),
    "div_floor": lambda x, y: torch.div(x, 3, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, 3, rounding_mode="trunc"),
    "max_dim": lambda x, y: x.max(-1)[0],
    "sort": lambda x, y: x.sort(-1)[0],
    "any": lambda x, y: x.any(),
    "all": lambda x, y: x.all(-1),
    "prod": lambda x, y: x.prod(-1),
    "cat": lambda x, y: torch.cat([x, y], 0),
    "cat_mixed": lambda x, y: torch.cat([x.float() / 2, y], 0),
    "add_mixed": lambda x, y: x + y.float() / 2,
    "eq_mixed": lambda x, y: x == y.float(),
    "index_pad": lambda x, y: F.pad(x, (1, 1), value=7),
    "tril": lambda x, y: x.tril(),
    "relu": lambda x, y: torch.relu(x),
    "one_hot": lambda x, y: F.one_hot(x.abs(), 10),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, 4),
    "gather": lambda x, y: x.gather(1, y.abs() % x.shape[1]),
}


def _attention_case(mask=False, causal=False, length=5, keys=7, scale=None):
    def call(q, k, v, *m):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=m[0] if m else None, scale=scale
        )[0]

    inputs = [floats(2, 3, length, 8), floats(2, 3, keys, 8, seed=1), floats(2, 3, keys, 8, seed=2)]
    return call, [*inputs, *([floats(1, 1, length, keys, seed=3)] if mask else [])]


def _masked_row():
    def call(q, k, v, m):
        return list(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=m))

    def first(*args):
        return call(*args)[0]

    mask = torch.zeros(1, 1, 5, 7)
    mask[..., 2, :] = -torch.inf
    mask[..., 3, 4:] = -torch.inf
    return first, [floats(2, 3, 5, 8), floats(2, 3, 7, 8), floats(2, 3, 7, 8, seed=2), mask]


def _written_attention(q, k, v, m):
    steps = "of:float32 mul:0.3 add:0 softmax:float32"
    return attention(q, k, v, m, m, None, None, steps)[0]


def _attention_grad(q, k, v, g):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, False
    )
    return [out, lse, *grads]


def _norm_grad(x, w, b, g):
    y, mean, rstd = aten.native_layer_norm(x, [8], w, b, 1e-5)
    return [
        y,
        mean,
        rstd,
        *aten.native_layer_norm_backward(g, x, [8], mean, rstd, w, b, [True, True, True]),
    ]


def _batch_norm_training(x, w, b, m, v):
    y, mean, rstd, new_m, new_v = aten._native_batch_norm_legit_functional(
        x, w, b, m, v, True, 0.1, 1e-5
    )
    return [y, mean, rstd, new_m, new_v]


def _batch_norm_grad(x, w, b, m, v, g):
    _, mean, rstd, _, _ = aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5)
    return list(
        aten.native_batch_norm_backward(g, x, w, m, v, mean, rstd, True, 1e-5, [True, True, True])
    )


def _conv(*args):
    return lambda x, w, *b: aten.convolution(x, w, b[0] if b else None, *args)


_C3 = ([1], [1], [1], False, [0])
_NORM = [floats(4, 8), floats(8, seed=1), floats(8, seed=2)]
_BN = [
    floats(3, 4, 5, 6),
    floats(4, seed=1),
    floats(4, seed=2),
    floats(4, seed=3),
    positive(4, seed=4),
]

#: Ops with inputs of their own.
OTHER = {
    "mm": (torch.mm, [floats(5, 7), floats(7, 3)]),
    "mm_t": (lambda x, w: x @ w.t(), [floats(5, 7), floats(3, 7)]),
    "mm_column_major": (torch.mm, [floats(7, 5).t(), floats(3, 7).t()]),
    "mm_empty": (torch.mm, [floats(0, 7), floats(7, 3)]),
    "mm_no_terms": (torch.mm, [floats(4, 0), floats(0, 3)]),
    "addmm": (torch.addmm, [floats(3), floats(5, 7), floats(7, 3)]),
    "addmm_scaled": (
        lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2),
        [floats(3), floats(5, 7), floats(7, 3)],
    ),
    "linear": (F.linear, [floats(2, 5, 7), floats(3, 7), floats(3)]),
    "bmm": (torch.bmm, [floats(2, 5, 7), floats(2, 7, 3)]),
    "bmm_permuted": (torch.bmm, [floats(5, 2, 7).transpose(0, 1), floats(2, 3, 7).transpose(1, 2)]),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2),
        [floats(2, 5, 3), floats(2, 5, 7), floats(2, 7, 3)],
    ),
    "conv2d": (
        _conv([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [floats(2, 3, 7, 9), floats(4, 3, 3, 3), floats(4)],
    ),
    "conv2d_strided": (
        _conv([2, 1], [0, 1], [1, 2], False, [0, 0], 1),
        [floats(2, 3, 7, 9), floats(4, 3, 3, 3)],
    ),
    "conv2d_grouped": (
        _conv([1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        [floats(2, 4, 7, 9), floats(6, 2, 3, 3), floats(6)],
    ),
    "conv2d_depthwise": (
        _conv([1, 1], [1, 1], [1, 1], False, [0, 0], 4),
        [floats(2, 4, 7, 9), floats(4, 1, 3, 3), floats(4)],
    ),
    "conv2d_channels_last": (
        _conv([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [
            floats(2, 3, 7, 9).to(memory_format=torch.channels_last),
            floats(4, 3, 3, 3).to(memory_format=torch.channels_last),
        ],
    ),
    "conv1d": (_conv([1], [1], [1], False, [0], 1), [floats(2, 3, 9), floats(4, 3, 3), floats(4)]),
    "conv3d": (
        _conv([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
        [floats(1, 2, 4, 5, 6), floats(3, 2, 3, 3, 3)],
    ),
    "conv2d_one": (
        _conv([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        [floats(1, 1, 1, 1), floats(1, 1, 1, 1)],
    ),
    "conv2d_empty": (
        _conv([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [floats(0, 3, 7, 9), floats(4, 3, 3, 3)],
    ),
    "conv_transpose": (
        _conv([2, 2], [1, 1], [1, 1], True, [0, 0], 1),
        [floats(2, 3, 7, 9), floats(3, 4, 3, 3)],
    ),
    "conv2d_backward": (
        lambda g, x, w: list(
            aten.convolution_backward(
                g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3
            )
        ),
        [floats(2, 4, 7, 9), floats(2, 3, 7, 9), floats(4, 3, 3, 3)],
    ),
    "attention": _attention_case(),
    "attention_masked": _attention_case(mask=True),
    "attention_masked_row": _masked_row(),
    "attention_written": (_written_attention, _masked_row()[1]),
    "attention_causal": _attention_case(causal=True, keys=5),
    "attention_causal_wide": _attention_case(causal=True),
    "attention_scaled": _attention_case(scale=0.3),
    "attention_one": _attention_case(length=1, keys=1),
    "attention_grad": (
        _attention_grad,
        [
            floats(2, 3, 5, 8),
            floats(2, 3, 7, 8),
            floats(2, 3, 7, 8, seed=2),
            floats(2, 3, 5, 8, seed=3),
        ],
    ),
    "layer_norm": (lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[0], _NORM),
    "layer_norm_statistics": (
        lambda x, w, b: list(aten.native_layer_norm(x, [8], w, b, 1e-5)),
        _NORM,
    ),
    "layer_norm_plain": (
        lambda x: aten.native_layer_norm(x, [8], None, None, 1e-5)[0],
        [floats(4, 8)],
    ),
    "layer_norm_two": (
        lambda x: aten.native_layer_norm(x, [3, 8], None, None, 1e-5)[0],
        [floats(2, 3, 8)],
    ),
    "layer_norm_empty": (
        lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[0],
        [floats(0, 8), *_NORM[1:]],
    ),
    "layer_norm_grad": (_norm_grad, [*_NORM, floats(4, 8, seed=5)]),
    "batch_norm": (lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0], _BN),
    "batch_norm_plain": (
        lambda x, m, v: aten._native_batch_norm_legit_no_training(x, None, None, m, v, 0.1, 1e-5)[
            0
        ],
        [_BN[0], *_BN[3:]],
    ),
    "batch_norm_2d": (
        lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0],
        [floats(5, 4), *_BN[1:]],
    ),
    "batch_norm_training": (_batch_norm_training, _BN),
    "batch_norm_grad": (_batch_norm_grad, [*_BN, floats(3, 4, 5, 6, seed=7)]),
    "group_norm": (
        lambda x, w, b: aten.native_group_norm(x, w, b, 3, 4, 30, 2, 1e-5)[0],
        [_BN[0], *_BN[1:3]],
    ),
    "group_norm_statistics": (
        lambda x, w, b: list(aten.native_group_norm(x, w, b, 3, 4, 30, 2, 1e-5)),
        [_BN[0], *_BN[1:3]],
    ),
    "max_pool": (
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])[0],
        [floats(2, 3, 7, 9)],
    ),
    "max_pool_dilated": (
        lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [0, 0], [2, 2])[0],
        [floats(2, 3, 7, 9)],
    ),
    "max_pool_ceil": (
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1], [1, 1], True)[0],
        [floats(2, 3, 8, 10)],
    ),
    "max_pool_indices": (
        lambda x: list(aten.max_pool2d_with_indices(x, [2, 2])),
        [floats(2, 3, 8, 10)],
    ),
    "max_pool_nan": (lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], [SPECIAL[None, None]]),
    "avg_pool": (lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]), [floats(2, 3, 7, 9)]),
    "avg_pool_inside": (
        lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1], False, False),
        [floats(2, 3, 7, 9)],
    ),
    "avg_pool_ceil": (
        lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1], True),
        [floats(2, 3, 8, 10)],
    ),
    "adaptive_pool": (lambda x: aten._adaptive_avg_pool2d(x, [1, 1]), [floats(2, 3, 7, 9)]),
    "adaptive_pool_3": (lambda x: aten._adaptive_avg_pool2d(x, [3, 2]), [floats(2, 3, 7, 9)]),
    "embedding": (F.embedding, [ints(2, 5, low=0, high=11), floats(11, 4)]),
    "embedding_int32": (
        F.embedding,
        [ints(2, 5, low=0, high=11, dtype=torch.int32), floats(11, 4)],
    ),
    "embedding_empty": (F.embedding, [ints(0, 5, low=0), floats(11, 4)]),
    "embedding_grad": (
        lambda g, i: aten.embedding_dense_backward(g, i, 11, -1, False),
        [floats(2, 5, 4), ints(2, 5, low=0, high=11)],
    ),
    "embedding_grad_padding": (
        lambda g, i: aten.embedding_dense_backward(g, i, 11, 3, False),
        [floats(2, 5, 4), ints(2, 5, low=2, high=5)],
    ),
    "gather": (lambda x, i: torch.gather(x, 1, i), [floats(4, 6), ints(4, 3, low=0, high=6)]),
    "gather_0": (lambda x, i: torch.gather(x, 0, i), [floats(4, 6), ints(2, 6, low=0, high=4)]),
    "index_select": (
        lambda x, i: torch.index_select(x, 1, i),
        [floats(4, 6), ints(3, low=0, high=6)],
    ),
    "index": (lambda x, i: x[i], [floats(5, 6), ints(3, low=-5, high=5)]),
    "index_two": (
        lambda x, i, j: x[i, j],
        [floats(5, 6), ints(3, low=-5, high=5), ints(3, low=-6, high=6)],
    ),
    "index_broadcast": (
        lambda x, i, j: x[i, j],
        [floats(5, 6), ints(3, 1, low=-5, high=5), ints(2, low=-6, high=6)],
    ),
    "index_second": (lambda x, i: x[:, i], [floats(5, 6), ints(2, 3, low=-6, high=6)]),
    "index_gap": (
        lambda x, i, j: x[i, :, j],
        [floats(5, 6, 4), ints(3, low=0, high=5), ints(3, low=0, high=4)],
    ),
    "index_mask": (lambda x, m: x[m], [floats(5, 6), flags(5)]),
    "index_int": (lambda x, i: x[i], [ints(5, 6), ints(3, low=-5, high=5)]),
    "index_bool": (lambda x, i: x[i], [flags(5, 6), ints(3, low=-5, high=5)]),
    "nll": (
        lambda x, t: list(aten.nll_loss_forward(x, t, None, 1, -100)),
        [floats(5, 4), ints(5, low=0, high=4)],
    ),
    "nll_ignored": (
        lambda x, t: list(aten.nll_loss_forward(x, t, None, 1, 2)),
        [floats(5, 4), ints(5, low=0, high=4)],
    ),
    "nll_weighted": (
        lambda x, t, w: list(aten.nll_loss_forward(x, t, w, 1, -100)),
        [floats(5, 4), ints(5, low=0, high=4), positive(4)],
    ),
    "nll_grad": (
        lambda g, x, t: aten.nll_loss_backward(g, x, t, None, 1, -100, torch.tensor(5.0)),
        [floats(), floats(5, 4), ints(5, low=0, high=4)],
    ),
    "cross_entropy": (F.cross_entropy, [floats(5, 4), ints(5, low=0, high=4)]),
    "softmax_masked": (
        lambda x, m: torch.softmax(x.masked_fill(m, float("-inf")), -1),
        [floats(5, 7), flags(5, 7)],
    ),
    "softmax_grad": (
        lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "log_softmax_grad": (
        lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, torch.float32),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "gelu_grad": (lambda g, x: aten.gelu_backward(g, x), [floats(5, 7), floats(5, 7, seed=1)]),
    "gelu_tanh_grad": (
        lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "relu_grad": (
        lambda g, x: aten.threshold_backward(g, x, 0),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "silu_grad": (lambda g, x: aten.silu_backward(g, x), [floats(5, 7), floats(5, 7, seed=1)]),
    "tanh_grad": (
        lambda g, x: aten.tanh_backward(g, x.tanh()),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "sigmoid_grad": (
        lambda g, x: aten.sigmoid_backward(g, x.sigmoid()),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "hardtanh_grad": (
        lambda g, x: aten.hardtanh_backward(g, x, -1, 1),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "leaky_relu_grad": (
        lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
        [floats(5, 7), floats(5, 7, seed=1)],
    ),
    "select_grad": (lambda g: aten.select_backward(g, [5, 7], 1, 2), [floats(5)]),
    "slice_grad": (lambda g: aten.slice_backward(g, [5, 7], 1, 1, 5, 2), [floats(5, 2)]),
    "expand_one": (lambda x: x.expand(4, 3) * 2, [floats(1, 3)]),
    "expanded_input": (lambda x: x * 2, [floats(1, 3).expand(4, 3)]),
    "gaps": (lambda x: x * 2, [floats(6, 8)[::2, 1::3]]),
    "gaps_out": (lambda x: x.permute(2, 0, 1) * 1.0, [floats(3, 4, 5)]),
    "offset": (lambda x: x * 2, [floats(7, 3).flatten()[1:].view(-1, 4)]),
    "scalar": (lambda x: x * 2 + 1, [floats()]),
    "where_scalar_cond": (torch.where, [flags(), floats(3), floats(3, seed=1)]),
    "logical_mask": (lambda x, y: torch.logical_and(x > 0, y > 0), [floats(3), floats(3, seed=1)]),
    "bool_and": (torch.bitwise_and, [flags(5), flags(5, seed=1)]),
    "bool_or": (torch.bitwise_or, [flags(5), flags(5, seed=1)]),
    "bool_not": (torch.bitwise_not, [flags(5)]),
    "bool_to_float": (lambda x: x.float() * 2, [flags(5)]),
    "bool_sum": (lambda x: x.sum(-1), [flags(5, 4)]),
    "bool_cumsum": (lambda x: x.cumsum(-1), [flags(5, 4)]),
    "bool_cat": (lambda x, y: torch.cat([x, y]), [flags(5), flags(2)]),
    "bool_any_dim": (lambda x: x.any(-1), [flags(5, 4)]),
    "uint8_to_float": (
        lambda x: x.to(torch.float32) / 255,
        [ints(5, 4, low=0, high=255).to(torch.uint8)],
    ),
    "float64": (lambda x: x * 2, [floats(3).double()]),
    "half": (lambda x: x * 2, [floats(3).half()]),
    "bfloat16": (lambda x: x * 2, [floats(3).bfloat16()]),
    "complex": (lambda x: x * 2, [torch.complex(floats(3), floats(3))]),
    "unbind": (lambda x: [part * 2 for part in torch.unbind(x, 1)], [floats(4, 3)]),
    "split_sizes": (lambda x: [part * 2 for part in torch.split(x, [1, 2, 4], 1)], [floats(4, 7)]),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        [floats(4, 6), ints(4, 3, low=0, high=6), floats(4, 3, seed=1)],
    ),
    "index_put": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        [floats(5, 3), ints(4, low=0, high=5), floats(4, 3, seed=1)],
    ),
    "rand": (lambda x: x + torch.rand_like(x), [floats(3)]),
    "dropout": (lambda x: F.dropout(x, 0.5, True), [floats(3)]),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), [floats(3)]),
    "nonzero": (torch.nonzero, [flags(5)]),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2), [floats(1, 2, 3, 4)]),
}
