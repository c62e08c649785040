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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuseboard.torch_api.attention import below_autograd, cpu_kernel, cpu_kernel_backward

#: A logarithm of a sum is rounded by as much as scores of its size are. Below this gradients are
#: as exact as eager's, whose scores are rounded in a sum with such a mask.
LARGEST = 1024.0
#: What is filled with as little as this has no weight beside scores of a sum within ``LARGEST``.
NO_WEIGHT = -2 * LARGEST


#: How many masks the op has.
MASKS = 3

_Masks = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Step:
    """What is done to scores (..., tokens, tokens) on their way to probabilities.

    :ivar kind: ``mul``, ``div`` (by ``number``); ``add`` (a mask); ``fill`` (with ``number`` where
        a mask holds), ``keep`` (where it doesn't); ``cast`` and ``softmax`` (to ``dtype``).
    :ivar mask: its place among the masks.
    """

    kind: str
    number: float = 0.0
    mask: int = -1
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        parts = [] if self.mask < 0 else [str(self.mask)]
        if self.kind in ("mul", "div", "fill", "keep"):
            parts.append(repr(self.number))
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        return f"{self.kind}:{','.join(parts)}"


def written(steps: Sequence[Step], dtype: torch.dtype) -> str:
    """Steps as the op's argument, for operands of a dtype."""
    return " ".join(map(str, [Step("of", dtype=dtype), *steps]))


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[torch.dtype, tuple[Step, ...]]:
    steps = []
    for word in text.split():
        kind, _, rest = word.partition(":")
        values = rest.split(",")
        mask = int(values.pop(0)) if kind in ("add", "fill", "keep") else -1
        number = float(values.pop(0)) if kind in ("mul", "div", "fill", "keep") else 0.0
        steps.append(Step(kind, number, mask, getattr(torch, values[0]) if values else None))
    dtype = steps[0].dtype
    assert dtype is not None
    return dtype, tuple(steps[1:])


@lru_cache(maxsize=1024)
def _scale(text: str) -> float:
    scale = 1.0
    for step in _read(text)[1]:
        scale *= {"mul": step.number, "div": 1 / (step.number or math.nan)}.get(step.kind, 1.0)
    return scale


# --- the formula ----------------------------------------------------------------------------------


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    steps: str,
) -> tuple[Tensor, Tensor]:
    """What the op stands for, as eager computes it; the arguments and results are the op's."""
    *before, probabilities = _scores(query, key, (first, second, third), steps)
    scores = next(
        one for one, step in zip(before, _read(steps)[1], strict=True) if step.kind == "softmax"
    )
    sums = torch.logsumexp(scores.to(_dtype_of_sums(query)), -1)
    result = probabilities.to(query.dtype) @ value
    return _laid_out(result, query), _by_tokens(sums)


def _scores(query: Tensor, key: Tensor, masks: _Masks, text: str) -> list[Tensor]:
    """The product of queries and keys, and what it is after each step: probabilities at last."""
    dtype, steps = _read(text)
    # Wider operands than were written are those of a float64 run, which no cast makes less exact.
    lifted = query.dtype != dtype
    found = [query @ key.transpose(-2, -1)]
    for step in steps:
        found.append(_after(step, found[-1], masks, None if lifted else step.dtype))
    return found


def _after(step: Step, scores: Tensor, masks: _Masks, dtype: torch.dtype | None) -> Tensor:
    match step.kind:
        case "mul":
            return scores * step.number
        case "div":
            return scores / step.number
        case "add":
            return scores + _mask(step, masks)
        case "fill":
            return scores.masked_fill(_mask(step, masks), step.number)
        case "keep":
            return scores.masked_fill(_mask(step, masks).logical_not(), step.number)
        case "softmax":
            return torch.softmax(scores, -1, dtype=dtype)
    return scores if dtype is None else scores.to(dtype)


def _mask(step: Step, masks: _Masks) -> Tensor:
    mask = masks[step.mask]
    assert mask is not None
    return mask


def _formula_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, text: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as autograd computes them from what eager would have saved."""
    scores = _scores(query, key, masks, text)
    probabilities = scores[-1].to(query.dtype)
    grad_value = probabilities.transpose(-2, -1) @ grad
    # Of the scores after each step, from the last step to the first.
    on_way = grad @ value.transpose(-2, -1)
    for step, before, after in reversed(
        list(zip(_read(text)[1], scores, scores[1:], strict=False))
    ):
        on_way = _before(step, on_way.to(after.dtype), after, masks).to(before.dtype)
    return on_way @ key, on_way.transpose(-2, -1) @ query, grad_value


def _before(step: Step, grad: Tensor, after: Tensor, masks: _Masks) -> Tensor:
    match step.kind:
        case "mul":
            return grad * step.number
        case "div":
            return grad / step.number
        case "fill":
            return grad.masked_fill(_mask(step, masks), 0.0)
        case "keep":
            return grad.masked_fill(_mask(step, masks).logical_not(), 0.0)
        case "softmax":
            return torch.ops.aten._softmax_backward_data(grad, after, -1, after.dtype)  # type: ignore[no-any-return]
    return grad


def _dtype_of_sums(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _laid_out(result: Tensor, query: Tensor) -> Tensor:
    """A result in memory as the op's: as its query, without gaps."""
    strides = torch.empty_like(query).stride()
    if result.stride() == strides:
        return result
    order = sorted(range(query.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(query.dim()), key=order.__getitem__)
    return result.permute(order).contiguous().permute(back)


def _by_tokens(value: Tensor) -> Tensor:
    """(N, H, L, ...) that lies in memory as (N, L, H, ...), as the kernel has it."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


# --- the op ---------------------------------------------------------------------------------------


def _holds(sums: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel's row sums say that it computed the formula."""
    largest = float(torch.linalg.vector_norm(sums, math.inf))  # NaN where one is
    return largest <= LARGEST and (bias is None or bool(sums.all()))


def _is_finite(value: Tensor) -> bool:
    """By one sum, a hundredth of the kernel's time. One that overflows counts as not finite."""
    return math.isfinite(float(value.sum(dtype=_dtype_of_sums(value))))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    steps: str,
) -> tuple[Tensor, Tensor]:
    operands = _side_by_side(query), _side_by_side(key), _side_by_side(value)
    result, sums = cpu_kernel(*operands, bias, _scale(steps))
    if _holds(sums, bias) and _is_finite(result):
        return _laid_out(result, operands[0]), sums
    del result
    probabilities = _scores(query, key, (first, second, third), steps)[-1].to(query.dtype)
    # Sums of NaN: the backward is the formula's as well.
    return _laid_out(probabilities @ value, operands[0]), torch.full_like(sums, math.nan)


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    steps: str,
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    sums = query.new_empty((batch, tokens, heads), dtype=_dtype_of_sums(query))
    return torch.empty_like(_side_by_side(query)), sums.transpose(1, 2)


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    result: Tensor,
    sums: Tensor,
    steps: str,
) -> tuple[Tensor, Tensor, Tensor]:
    found: Sequence[Tensor] = ()
    if _holds(sums, bias):
        grad_, q, k, v = map(_side_by_side, (grad, query, key, value))
        found = cpu_kernel_backward(grad_, q, k, v, bias, result, sums, _scale(steps))
    if not found or not all(map(_is_finite, found)):
        found = _formula_backward(grad, query, key, value, (first, second, third), steps)
    of_query, of_key, of_value = map(_by_tokens, found)
    return of_query, of_key, of_value


def _attention_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        one.new_empty((one.shape[0], one.shape[2], one.shape[1], one.shape[3])).transpose(1, 2)
        for one in (query, key, value)
    )
    return q, k, v


def _side_by_side(operand: Tensor) -> Tensor:
    """An operand whose last dimension has no gaps, as the kernel reads it."""
    return operand if operand.stride(-1) == 1 else operand.contiguous()


# --- for autograd ---------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with below_autograd():
            results = attention(*args)
        *operands, ctx.steps = args
        ctx.save_for_backward(*operands, *results)
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gradients = attention_backward(grads[0], *ctx.saved_tensors, ctx.steps)
        return (*gradients, *[None] * 5)


def _attention_of_autograd(*args: Any) -> Any:
    """With a backward if one may be wanted. Of tangents the kernel has none: the formula does."""
    if forward_ad._current_level >= 0:
        return formula(*args)
    if torch.is_grad_enabled() and any(one.requires_grad for one in args[:3]):
        return _Attention.apply(*args)  # type: ignore[no-untyped-call]
    with below_autograd():
        return attention(*args)


def _backward_of_autograd(*args: Any) -> Any:
    """Gradients that are differentiated again are the formula's."""
    tensors = [one for one in args[:4] if one.requires_grad]
    if forward_ad._current_level >= 0 or (tensors and torch.is_grad_enabled()):
        grad, query, key, value, _, first, second, third, *_, steps = args
        found = _formula_backward(grad, query, key, value, (first, second, third), steps)
        return tuple(map(_by_tokens, found))
    with below_autograd():
        return attention_backward(*args)


# No list of masks: vmap, by which gradients are computed in a batch, calls ops with lists by none.
_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "Tensor? first, Tensor? second, Tensor? third"
)
_library = torch.library.Library("fuseboard", "DEF")
_library.define(
    f"attention({_OPERANDS}, str steps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"attention_backward(Tensor grad, {_OPERANDS}, Tensor result, Tensor sums, str steps)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attention", _attention, "CPU")
_library.impl("attention_backward", _attention_backward, "CPU")
torch.library.register_fake("fuseboard::attention", _attention_fake, lib=_library)
torch.library.register_fake("fuseboard::attention_backward", _attention_backward_fake, lib=_library)
_library.impl("attention", _attention_of_autograd, "Autograd")
_library.impl("attention_backward", _backward_of_autograd, "Autograd")

#: The result, and of each row the logarithm of the sum. Operands are (N, H, L, E), (N, H, S, E)
#: twice; ``bias`` is what the kernel adds to scores, broadcast to them; ``first`` to ``third`` are
#: the masks that ``steps`` (:func:`written`) puts on scores.
attention = torch.ops.fuseboard.attention.default
attention_backward = torch.ops.fuseboard.attention_backward.default
