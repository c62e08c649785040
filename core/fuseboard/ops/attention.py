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
from typing import Any, NamedTuple

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


class _Call(NamedTuple):
    """The op's arguments.

    :ivar query: (N, H, L, E); ``key`` and ``value`` are (N, H, S, E).
    :ivar bias: what the kernel adds to scores, broadcast to them.
    :ivar first: the masks that ``steps`` (:func:`written`) puts on scores are this one, ``second``
        and ``third``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    first: Tensor | None
    second: Tensor | None
    third: Tensor | None
    steps: str

    def mask(self, step: Step) -> Tensor:
        mask = (self.first, self.second, self.third)[step.mask]
        assert mask is not None
        return mask


# --- the formula ----------------------------------------------------------------------------------


def formula(*arguments: Any) -> tuple[Tensor, Tensor]:
    """What the op stands for, as eager computes it; the arguments and results are the op's."""
    call = _Call(*arguments)
    *before, probabilities = _scores(call)
    scores = next(
        one
        for one, step in zip(before, _read(call.steps)[1], strict=True)
        if step.kind == "softmax"
    )
    sums = torch.logsumexp(scores.to(_dtype_of_sums(call.query)), -1)
    result = probabilities.to(call.query.dtype) @ call.value
    return _laid_out(result, call.query), _by_tokens(sums)


def _scores(call: _Call) -> list[Tensor]:
    """The product of queries and keys, and what it is after each step: probabilities at last."""
    dtype, steps = _read(call.steps)
    # Wider operands than were written are those of a float64 run, which no cast makes less exact.
    lifted = call.query.dtype != dtype
    found = [call.query @ call.key.transpose(-2, -1)]
    for step in steps:
        found.append(_after(step, found[-1], call, None if lifted else step.dtype))
    return found


def _after(step: Step, scores: Tensor, call: _Call, dtype: torch.dtype | None) -> Tensor:
    match step.kind:
        case "mul":
            return scores * step.number
        case "div":
            return scores / step.number
        case "add":
            return scores + call.mask(step)
        case "fill":
            return scores.masked_fill(call.mask(step), step.number)
        case "keep":
            return scores.masked_fill(call.mask(step).logical_not(), step.number)
        case "softmax":
            return torch.softmax(scores, -1, dtype=dtype)
    return scores if dtype is None else scores.to(dtype)


def _formula_backward(grad: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as autograd computes them from what eager would have saved."""
    scores = _scores(call)
    probabilities = scores[-1].to(call.query.dtype)
    grad_value = probabilities.transpose(-2, -1) @ grad
    # Of the scores after each step, from the last step to the first.
    on_way = grad @ call.value.transpose(-2, -1)
    for step, before, after in reversed(
        list(zip(_read(call.steps)[1], scores, scores[1:], strict=False))
    ):
        on_way = _before(step, on_way.to(after.dtype), after, call).to(before.dtype)
    return on_way @ call.key, on_way.transpose(-2, -1) @ call.query, grad_value


def _before(step: Step, grad: Tensor, after: Tensor, call: _Call) -> Tensor:
    match step.kind:
        case "mul":
            return grad * step.number
        case "div":
            return grad / step.number
        case "fill":
            return grad.masked_fill(call.mask(step), 0.0)
        case "keep":
            return grad.masked_fill(call.mask(step).logical_not(), 0.0)
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
    if not sums.numel():
        return False
    largest = float(torch.linalg.vector_norm(sums, math.inf))  # NaN where one is
    return largest <= LARGEST and (bias is None or bool(sums.all()))


def _is_finite(value: Tensor) -> bool:
    """By one sum, a hundredth of the kernel's time. One that overflows counts as not finite."""
    return math.isfinite(float(value.sum(dtype=_dtype_of_sums(value))))


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*arguments)
    query, key, value = map(_side_by_side, call[:3])
    # The kernel divides by the sizes of its operands.
    if query.numel() and key.numel():
        result, sums = cpu_kernel(query, key, value, call.bias, _scale(call.steps))
        if _holds(sums, call.bias) and _is_finite(result):
            return _laid_out(result, query), sums
        del result, sums
    probabilities = _scores(call)[-1].to(query.dtype)
    # Sums of NaN: the backward is the formula's as well.
    sums = _attention_fake(*arguments)[1].fill_(math.nan)
    return _laid_out(probabilities @ value, query), sums


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = _Call(*arguments).query
    batch, heads, tokens, _ = query.shape
    sums = query.new_empty((batch, tokens, heads), dtype=_dtype_of_sums(query))
    return torch.empty_like(_side_by_side(query)), sums.transpose(1, 2)


def _attention_backward(
    grad: Tensor, result: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(*arguments)
    found: Sequence[Tensor] = ()
    if _holds(sums, call.bias):
        grad_, query, key, value = map(_side_by_side, (grad, *call[:3]))
        scale = _scale(call.steps)
        found = cpu_kernel_backward(grad_, query, key, value, call.bias, result, sums, scale)
    if not found or not all(map(_is_finite, found)):
        found = _formula_backward(grad, call)
    of_query, of_key, of_value = map(_by_tokens, found)
    return of_query, of_key, of_value


def _attention_backward_fake(
    grad: Tensor, result: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        one.new_empty((one.shape[0], one.shape[2], one.shape[1], one.shape[3])).transpose(1, 2)
        for one in _Call(*arguments)[:3]
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
        ctx.save_for_backward(*results, *operands)
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
    grad, _, _, *arguments = args
    call = _Call(*arguments)
    differentiable = any(one.requires_grad for one in (grad, *call[:3]))
    if forward_ad._current_level >= 0 or (differentiable and torch.is_grad_enabled()):
        return tuple(map(_by_tokens, _formula_backward(grad, call)))
    with below_autograd():
        return attention_backward(*args)


# No list of masks: vmap, by which gradients are computed in a batch, calls ops with lists by none.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "Tensor? first, Tensor? second, Tensor? third, str steps"
)
_library = torch.library.Library("fuseboard", "DEF")
_library.define(
    f"attention({_ARGUMENTS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"attention_backward(Tensor grad, Tensor result, Tensor sums, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attention", _attention, "CPU")
_library.impl("attention_backward", _attention_backward, "CPU")
torch.library.register_fake("fuseboard::attention", _attention_fake, lib=_library)
torch.library.register_fake("fuseboard::attention_backward", _attention_backward_fake, lib=_library)
_library.impl("attention", _attention_of_autograd, "Autograd")
_library.impl("attention_backward", _backward_of_autograd, "Autograd")

#: The result, and of each row the logarithm of the sum that softmax divides by.
attention = torch.ops.fuseboard.attention.default
attention_backward = torch.ops.fuseboard.attention_backward.default
