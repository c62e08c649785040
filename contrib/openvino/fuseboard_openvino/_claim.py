"""What OpenVINO is given: ops that ``tests/test_ops.py`` holds against float64, and no others."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

import fuseboard

aten = torch.ops.aten

#: Ops that OpenVINO has better kernels for than eager, or fuses into them.
NATIVE = {
    aten._log_softmax.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._softmax.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.gelu.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.linear.default,
    aten.max_pool2d_with_indices.default,
    aten.mean.dim,
    aten.mm.default,
    aten.native_layer_norm.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.tanh.default,
}

#: Ops that are carried between those.
CARRIED = {
    aten._unsafe_view.default,
    aten.abs.default,
    aten.add.Tensor,
    aten.avg_pool2d.default,
    aten.cat.default,
    aten.clone.default,
    aten.cos.default,
    aten.div.Tensor,
    aten.embedding.default,
    aten.erf.default,
    aten.exp.default,
    aten.expand.default,
    aten.mul.Tensor,
    aten.neg.default,
    aten.permute.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.rsub.Scalar,
    aten.select.int,
    aten.sin.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.sqrt.default,
    aten.squeeze.dim,
    aten.sub.Tensor,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.where.self,
}

#: Ops with several results of which the converter makes the first only.
_FIRST_ONLY = {
    aten._native_batch_norm_legit_no_training.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.max_pool2d_with_indices.default,
    aten.native_layer_norm.default,
}

#: Ops that read whole numbers as indices: their size bounds them, and 32 bits hold them.
_INDEXED = {aten.embedding.default: (1,)}


def claim(graph: GraphModule) -> list[fuseboard.Claim | fuseboard.Decline]:
    return fuseboard.claim_nodes(graph, why_not, native=lambda node: node.target in NATIVE)


def why_not(node: Node) -> str | None:
    """Why OpenVINO doesn't get a node; None where it does."""
    if node.target is operator.getitem:
        source = node.args[0]
        return why_not(source) if isinstance(source, Node) else None
    if node.target not in NATIVE and node.target not in CARRIED:
        return f"{node.target} isn't among the ops that are proven on OpenVINO"
    if node.target in _FIRST_ONLY and any(user.args[1:] != (0,) for user in node.users):
        return "the converter makes its first result only"
    own = _OWN_RULES.get(node.target)
    reason = own(node) if own is not None else None
    return reason or _why_not_values(node)


def _why_not_values(node: Node) -> str | None:
    indexed = _INDEXED.get(node.target, ())
    indices = {node.args[place] for place in indexed if place < len(node.args)}
    values = [used.meta.get("val") for used in node.all_input_nodes if used not in indices]
    own = node.meta.get("val")
    if isinstance(own, list | tuple):
        values.extend(own[:1] if node.target in _FIRST_ONLY else own)
    else:
        values.append(own)
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype not in (torch.float32, torch.bool):
            return f"{value.dtype}: the CPU plugin computes whole numbers in 32 bits"
        if value.numel() == 0:
            return "a tensor without elements"
    return None


def _no_rounding(node: Node) -> str | None:
    if (len(node.args) > 2 and node.args[2] is not None) or node.kwargs.get("rounding_mode"):
        return "a division that rounds"
    return None


def _no_alpha(node: Node) -> str | None:
    return "alpha" if node.kwargs.get("alpha", 1) != 1 else None


def _whole_mask(node: Node) -> str | None:
    mask = node.kwargs.get("attn_mask")
    if isinstance(mask, Node) and mask.meta["val"].dtype != torch.float32:
        return "an attention mask that isn't float32"
    return None


def _no_transposed(node: Node) -> str | None:
    if node.args[6]:
        return "a transposed convolution"
    return None


def _scaled_only(node: Node) -> str | None:
    if (node.args[3:5] or (1, 1)) != (1, 1) or {"alpha", "beta"} & set(node.kwargs):
        return "alpha and beta"
    return None


def _plain_pool(node: Node) -> str | None:
    if len(node.args) > 4 and node.args[4]:
        return "ceil_mode, which counts padding in other windows"
    return "a divisor of its own" if node.args[6:] else None


def _plain_embedding(node: Node) -> str | None:
    indices = node.args[1]
    if isinstance(indices, Node) and indices.meta["val"].dtype not in (torch.int64, torch.int32):
        return "indices that aren't whole numbers"
    return None


_OWN_RULES: dict[object, Callable[[Node], str | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _whole_mask,
    aten.add.Tensor: _no_alpha,
    aten.addmm.default: _scaled_only,
    aten.avg_pool2d.default: _plain_pool,
    aten.convolution.default: _no_transposed,
    aten.div.Tensor: _no_rounding,
    aten.embedding.default: _plain_embedding,
    aten.rsub.Scalar: lambda node: "alpha" if len(node.args) > 2 or node.kwargs else None,
    aten.sub.Tensor: _no_alpha,
}
