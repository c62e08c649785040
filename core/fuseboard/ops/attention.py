"""``fuseboard::attention``: a formula as it was written, by torch's kernel where that computes it.

The kernel keeps no matrix of scores. It adds masks to scores, where a formula may replace these,
and keeps of each row the logarithm of the sum that softmax divides by. That number tells where the
kernel isn't the formula:

* It is NaN where a score is, as under a mask that would have replaced it.
* It is infinite, or 0, in a row that is masked as a whole by ``-inf``. (torch 2.13 has 0 there.)
* It is large where a finite number masks a whole row. There ``P = exp(S - logsumexp)``, by which
  the kernel computes gradients, is off by roundings of the size of the scores.

In these cases, and where a result isn't finite, the formula itself is computed, step by step, and
so is its backward. Both are the same op to autograd, so what is saved doesn't depend on it.

Only the CPU has a kernel here. Backends that know of no such op may take :func:`formula` in its
place (``fuseboard.OWN_OPS``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuseboard.ops.attention_formula import (
    MASKS,
    Call,
    blockwise,
    blockwise_backward,
    by_tokens,
    dtype_of_sums,
    empty_gradients,
    formula,
    formula_backward,
    laid_out,
    scale_of,
)
from fuseboard.torch_api.attention import below_autograd, cpu_kernel, cpu_kernel_backward

#: A logarithm of a sum is rounded by as much as scores of its size are. Below this gradients are
#: as exact as eager's, whose scores are rounded in a sum with such a mask.
LARGEST = 1024.0
#: What is filled with as little as this has no weight beside scores of a sum within ``LARGEST``.
NO_WEIGHT = -2 * LARGEST

_NO_MASKS = (False,) * MASKS


# --- the op ---------------------------------------------------------------------------------------


def _holds(sums: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel's row sums say that it computed the formula."""
    if not sums.numel():
        return False
    largest = float(torch.linalg.vector_norm(sums, math.inf))  # NaN where one is
    return largest <= LARGEST and (bias is None or bool(sums.all()))


def _is_finite(value: Tensor) -> bool:
    """By one sum, a hundredth of the kernel's time. One that overflows counts as not finite."""
    return math.isfinite(float(value.sum(dtype=dtype_of_sums(value.dtype))))


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Call(*arguments)
    query, key, value = map(side_by_side, call[:3])
    # The kernel divides by the sizes of its operands.
    if query.numel() and key.numel():
        result, sums = cpu_kernel(query, key, value, call.bias, scale_of(call.steps))
        if _holds(sums, call.bias) and _is_finite(result):
            return laid_out(result, query), sums
        del result, sums
    # Sums of NaN: the backward is the formula's as well.
    sums = _attention_fake(*arguments)[1].fill_(math.nan)
    return laid_out(blockwise(call), query), sums


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = Call(*arguments).query
    batch, heads, tokens, _ = query.shape
    sums = query.new_empty((batch, tokens, heads), dtype=dtype_of_sums(query.dtype))
    return torch.empty_like(side_by_side(query)), sums.transpose(1, 2)


def _attention_backward(
    grad: Tensor, result: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*arguments)
    found: Sequence[Tensor] = ()
    if _holds(sums, call.bias):
        grad_, query, key, value = map(side_by_side, (grad, *call[:3]))
        scale = scale_of(call.steps)
        found = cpu_kernel_backward(grad_, query, key, value, call.bias, result, sums, scale)
    if not found or not all(map(_is_finite, found)):
        found = blockwise_backward(grad, call, _NO_MASKS)[:3]
    of_query, of_key, of_value = map(by_tokens, found)
    return of_query, of_key, of_value


def _attention_backward_fake(
    grad: Tensor, result: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = empty_gradients(Call(*arguments), _NO_MASKS)[:3]
    return of_query, of_key, of_value


def _attention_gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and of those masks that have one.

    The kernel has none of masks. Scores are computed again, in blocks.
    """
    *rest, wanted = arguments
    return tuple(blockwise_backward(grad, Call(*rest), wanted))


def _attention_gradients_fake(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *rest, wanted = arguments
    return tuple(empty_gradients(Call(*rest), wanted))


def side_by_side(operand: Tensor) -> Tensor:
    """An operand whose last dimension has no gaps, as the kernel reads it."""
    return operand if operand.stride(-1) == 1 else operand.contiguous()


# --- for autograd ---------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with below_autograd():
            results = attention(*args)
        *operands, ctx.steps = args
        ctx.wanted = list(ctx.needs_input_grad[4:7])
        if any(ctx.wanted):
            operands[3] = None
            ctx.save_for_backward(*operands)
        else:
            ctx.save_for_backward(*results, *operands)
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not any(ctx.wanted):
            gradients = attention_backward(grads[0], *ctx.saved_tensors, ctx.steps)
            return (*gradients, *[None] * 5)
        found = attention_gradients(grads[0], *ctx.saved_tensors, ctx.steps, ctx.wanted)
        of_masks = (one if need else None for one, need in zip(found[3:], ctx.wanted, strict=True))
        return (*found[:3], None, *of_masks, None)


def _attention_of_autograd(*args: Any) -> Any:
    """With a backward if one may be wanted. Of tangents the kernel has none: the formula does."""
    if forward_ad._current_level >= 0:
        return formula(*args)
    if torch.is_grad_enabled() and _may_differentiate(Call(*args)):
        return _Attention.apply(*args)  # type: ignore[no-untyped-call]
    with below_autograd():
        return attention(*args)


def _may_differentiate(call: Call) -> bool:
    return any(one is not None and one.requires_grad for one in (*call[:3], *call.masks))


def _again(grad: Tensor, call: Call) -> bool:
    """Whether gradients may be differentiated again: then they are the formula's."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and (grad.requires_grad or _may_differentiate(call))


def _backward_of_autograd(*args: Any) -> Any:
    grad, _, _, *arguments = args
    call = Call(*arguments)
    if _again(grad, call):
        return tuple(map(by_tokens, formula_backward(grad, call, _NO_MASKS)[:3]))
    with below_autograd():
        return attention_backward(*args)


def _gradients_of_autograd(*args: Any) -> Any:
    grad, *arguments, wanted = args
    call = Call(*arguments)
    if _again(grad, call):
        found = formula_backward(grad, call, wanted)
        return (*map(by_tokens, found[:3]), *found[3:])
    with below_autograd():
        return attention_gradients(*args)


# No list of masks: vmap, by which gradients are computed in a batch, calls ops with lists by none.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "Tensor? first, Tensor? second, Tensor? third, str steps"
)
_GRADIENTS = "Tensor, Tensor, Tensor"
_library = torch.library.Library("fuseboard", "DEF")


def _op(schema: str, computed: Any, faked: Any, of_autograd: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, computed, "CPU")
    torch.library.register_fake(f"fuseboard::{name}", faked, lib=_library)
    _library.impl(name, of_autograd, "Autograd")
    return getattr(torch.ops.fuseboard, name).default


#: The result, and of each row the logarithm of the sum that softmax divides by.
attention = _op(
    f"attention({_ARGUMENTS}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    _attention_of_autograd,
)
attention_backward = _op(
    f"attention_backward(Tensor grad, Tensor result, Tensor sums, {_ARGUMENTS}) -> ({_GRADIENTS})",
    _attention_backward,
    _attention_backward_fake,
    _backward_of_autograd,
)
#: Those of the masks too, as far as they are ``wanted``; others are empty.
attention_gradients = _op(
    f"attention_gradients(Tensor grad, {_ARGUMENTS}, bool[] wanted)"
    f" -> ({_GRADIENTS}, {_GRADIENTS})",
    _attention_gradients,
    _attention_gradients_fake,
    _gradients_of_autograd,
)
