"""Layers: linear, convolution, pooling, norms, attention, embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseboard.testing.program import INF, NAN, Program, flags, function, ints, module, rnd, trained

BF16 = torch.bfloat16


class Residual(nn.Sequential):
    """``nn.Sequential``, and its input added."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self:
            y = layer(y)
        return x + y


# --- linear ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embedding(tokens).relu())


_LINEAR = (
    module(
        "linear_mlp",
        lambda: nn.Sequential(
            nn.Linear(17, 23), nn.ReLU(), Residual(nn.Linear(23, 23), nn.GELU()), nn.Linear(23, 3)
        ),
        lambda: (rnd(9, 17),),
    ),
    function(
        "matmul_ranks",
        lambda x, y, v: (x @ y, x @ v, v @ y[0], y.mT @ v, torch.outer(v, v), v.dot(v)),
        lambda: (rnd(3, 5, 7), rnd(3, 7, 7, seed=1), rnd(7, seed=2)),
    ),
    function(
        "matmul_scaled_sums",
        lambda m, x, y: (
            torch.addmm(m, x[0], y[0], beta=0.5, alpha=2.0),
            torch.baddbmm(m, x, y, beta=2, alpha=-1),
            torch.addmm(m[0], x[1], y[1]),
        ),
        lambda: (rnd(4, 6), rnd(2, 4, 5, seed=1), rnd(2, 5, 6, seed=2)),
    ),
    module("linear_tied_weights", Tied, lambda: (ints(2, 5, low=0, high=11),)),
)
_OTHER_LINEAR = (
    module("linear_three_dims", lambda: nn.Linear(6, 4, bias=False), lambda: (rnd(2, 3, 6),)),
    module("linear_batch_of_one", lambda: nn.Linear(33, 17), lambda: (rnd(1, 33),)),
    module(
        "linear_post_operations",
        lambda: nn.Sequential(
            nn.Linear(5, 9),
            nn.SiLU(),
            nn.Linear(9, 9),
            nn.GELU(approximate="tanh"),
            nn.Linear(9, 9),
            nn.Hardswish(),
            nn.Linear(9, 4),
            nn.LeakyReLU(0.3),
        ),
        lambda: (rnd(6, 5),),
    ),
    module(
        "linear_bfloat16",
        lambda: nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).to(BF16),
        lambda: (rnd(8, 32, dtype=BF16),),
    ),
    module(
        "linear_nan",
        lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Hardtanh()),
        lambda: (torch.where(torch.arange(20).reshape(4, 5) == 7, NAN, rnd(4, 5)),),
    ),
    function(
        "matmul_layouts",
        lambda x, y, i: (x.t() @ y, x.mT.contiguous() @ y[:, ::2], (y.t() @ x).t() + 0, i @ i.t()),
        lambda: (rnd(7, 5), rnd(7, 6, seed=1), ints(4, 5)),
    ),
    function(
        "matmul_nothing_to_sum",
        lambda x, y: (x @ y, torch.bmm(x[None], y[None]), torch.addmm(torch.ones(4), x, y)),
        lambda: (rnd(3, 0), rnd(0, 4)),
        reference=False,  # the constant in it is float32
    ),
)

# --- convolution ----------------------------------------------------------------------------------


def _conv_bn(**options: Any) -> Callable[[], nn.Module]:
    """A convolution, a batch norm whose statistics aren't the initial ones, relu."""

    def make() -> nn.Module:
        norm = nn.BatchNorm2d(6)
        norm.running_mean, norm.running_var = rnd(6), rnd(6, seed=1).square() + 0.5
        return nn.Sequential(nn.Conv2d(3, 6, 3, **options), norm, nn.ReLU())

    return make


_CONVOLUTION = (
    module(
        "convolution_stride_and_padding",
        lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1),
        lambda: (rnd(2, 3, 9, 7),),
    ),
    module(
        "convolution_groups",
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8)),
        lambda: (rnd(2, 4, 7, 7),),
    ),
    module(
        "convolution_dilation",
        lambda: nn.Conv2d(3, 4, (3, 5), dilation=(2, 1), padding="same", bias=False),
        lambda: (rnd(1, 3, 8, 9),),
    ),
    module(
        "convolution_transposed",
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
        lambda: (rnd(2, 4, 5, 4),),
    ),
    module("convolution_one_dim", lambda: nn.Conv1d(3, 5, 4, stride=3), lambda: (rnd(2, 3, 11),)),
    module(
        "convolution_batch_norm",
        _conv_bn(padding=1),
        lambda: (rnd(3, 3, 6, 5),),
    ),
)
_OTHER_CONVOLUTION = (
    module("convolution_three_dims", lambda: nn.Conv3d(2, 3, 2), lambda: (rnd(1, 2, 4, 5, 3),)),
    module(
        "convolution_channels_last",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)),
        lambda: (rnd(2, 3, 6, 6).to(memory_format=torch.channels_last),),
    ),
    module(
        "convolution_nan",
        _conv_bn(),
        lambda: (torch.where(torch.arange(75).reshape(1, 3, 5, 5) == 31, NAN, rnd(1, 3, 5, 5)),),
    ),
    module("convolution_batch_of_none", lambda: nn.Conv2d(3, 4, 3), lambda: (rnd(0, 3, 5, 5),)),
    module(
        "convolution_residual",
        lambda: nn.Sequential(
            Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)), nn.ReLU()
        ),
        lambda: (rnd(2, 4, 5, 5),),
    ),
)

# --- pooling --------------------------------------------------------------------------------------


def _average_pools(x: Tensor) -> Any:
    return (
        F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False),
        F.avg_pool2d(x, 2, divisor_override=3),
        F.avg_pool1d(x[0], 3, 2, ceil_mode=True),
    )


def _max_pools(x: Tensor) -> Any:
    indices = F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)
    return *indices, F.max_pool2d(x, 2, ceil_mode=True), F.max_pool1d(x[0], 2)


def _adaptive_pools(x: Tensor) -> Any:
    return F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, 1), x.mean((2, 3))


def _resizes(x: Tensor) -> Any:
    return (
        F.interpolate(x, scale_factor=2.0, mode="nearest"),
        F.interpolate(x, size=(4, 9), mode="bilinear", align_corners=False),
        F.interpolate(x, size=(9, 4), mode="bilinear", align_corners=True),
    )


_POOLING = (
    function("pooling_average_ceil_mode", _average_pools, lambda: (rnd(2, 3, 8, 7),)),
    function("pooling_max_ceil_mode", _max_pools, lambda: (rnd(2, 3, 8, 7),)),
    function("pooling_adaptive", _adaptive_pools, lambda: (rnd(2, 3, 8, 7),)),
    function("pooling_resize", _resizes, lambda: (rnd(1, 2, 5, 6),)),
)
_OTHER_POOLING = (
    function(
        "pooling_nan",
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 1), F.adaptive_avg_pool2d(x, 2)),
        lambda: (torch.where(torch.arange(49).reshape(1, 1, 7, 7) == 10, NAN, rnd(1, 1, 7, 7)),),
    ),
)

# --- norms ----------------------------------------------------------------------------------------


def _statistics(norm: Any) -> nn.Module:
    """A batch norm that has already seen something."""
    norm.running_mean, norm.running_var = rnd(norm.num_features), rnd(norm.num_features).exp()
    return norm  # type: ignore[no-any-return]


_NORMS = (
    module("norm_layer", lambda: nn.LayerNorm(7), lambda: (rnd(3, 5, 7) * 3 + 1,)),
    module("norm_group", lambda: nn.GroupNorm(2, 6), lambda: (rnd(2, 6, 5),)),
    function(
        "norm_functional",
        lambda x: (F.layer_norm(x, (4, 5)), F.rms_norm(x, (5,)), F.normalize(x, dim=1)),
        lambda: (rnd(3, 4, 5),),
    ),
)
_BATCH_NORMS = (
    module("norm_batch_evaluation", lambda: _statistics(nn.BatchNorm1d(5)), lambda: (rnd(4, 5),)),
    Program(
        "norm_batch_statistics",
        lambda: nn.BatchNorm2d(3, momentum=0.3),
        [lambda: (rnd(4, 3, 5, 2),), lambda: (rnd(4, 3, 5, 2, seed=1) * 2 + 1,)],
    ),
)
_OTHER_NORMS = (
    module(
        "norm_layer_special_values",
        lambda: nn.LayerNorm(4),
        lambda: (torch.tensor([[1.0, NAN, 2, 3], [INF, 0, 1, 2], [5, 5, 5, 5], [0, 0, 0, 1e-30]]),),
    ),
)

# --- attention and embedding ----------------------------------------------------------------------


class Attention(nn.Module):
    """Two heads, written out: projections, a mask of -inf, softmax."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = q @ k.transpose(-2, -1) / (dim // 2) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -INF).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    return rnd(2, 3, 5, 8), rnd(2, 3, 7, 8, seed=1), rnd(2, 3, 7, 8, seed=2)


def _mask() -> Tensor:
    """Every query sees the first key and some others."""
    mask = flags(5, 7)
    mask[:, 0] = True
    return mask


_ATTENTION = (
    function(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: tuple(rnd(2, 3, 6, 8, seed=seed) for seed in range(3)),
    ),
    function(
        "attention_masked",
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        lambda: (*_qkv(), _mask()),
    ),
    module("attention_written_out", Attention, lambda: (rnd(2, 5, 8),)),
    module(
        "embedding_padding",
        lambda: nn.Embedding(7, 4, padding_idx=2),
        lambda: (ints(3, 5, low=0, high=7),),
    ),
)
_OTHER_ATTENTION = (
    function(
        "attention_added_mask",
        lambda q, k, v, m: (
            F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.5),
            F.scaled_dot_product_attention(q, k, v),
        ),
        lambda: (*_qkv(), torch.zeros(5, 7).masked_fill(~_mask(), -INF)),
    ),
    function(
        "attention_fully_masked_row",
        lambda q, k, mask: ((q @ k.mT).masked_fill(mask, -INF).softmax(-1) @ k).nan_to_num(),
        lambda: (rnd(2, 4, 3), rnd(2, 4, 3, seed=1), torch.arange(4)[:, None].expand(4, 4) == 2),
    ),
    module(
        "embedding_sizes",
        lambda: nn.Embedding(7, 4),
        lambda: (torch.tensor(3),),
        lambda: (torch.zeros(0, 2, dtype=torch.long),),
        lambda: (torch.zeros(2, 1, dtype=torch.int32),),
    ),
)

_DIFFERENTIABLE = (*_LINEAR, *_CONVOLUTION, *_POOLING, *_NORMS, *_BATCH_NORMS, *_ATTENTION)
#: Not all: a check that trains costs as much as three that don't.
_TRAINED = (
    "linear_tied_weights",
    "matmul_ranks",
    "convolution_stride_and_padding",
    "convolution_batch_norm",
    "pooling_average_ceil_mode",
    "pooling_max_ceil_mode",
    "norm_layer",
    "norm_batch_statistics",
    "attention_masked",
    "embedding_padding",
)
PROGRAMS: tuple[Program, ...] = (
    *_LINEAR,
    *_OTHER_LINEAR,
    *_CONVOLUTION,
    *_OTHER_CONVOLUTION,
    *_POOLING,
    *_OTHER_POOLING,
    *_NORMS,
    *_BATCH_NORMS,
    *_OTHER_NORMS,
    *_ATTENTION,
    *_OTHER_ATTENTION,
    *trained([program for program in _DIFFERENTIABLE if program.name in _TRAINED]),
)
