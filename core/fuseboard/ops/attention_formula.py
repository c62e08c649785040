"""Attention as its author wrote it: steps from scores to probabilities, values and gradients.

Values and gradients are computed for some heads, or some queries of one head, at a time: a row of
scores needs no other row. So what is held beside operands and results is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: How many masks the op has.
MASKS = 3
#: Scores of a block: 2 MiB of float32. Of fewer, products take longer for each score.
BLOCK_SCORES = 1 << 19


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
def scale_of(text: str) -> float:
    """The number that written steps multiply scores by."""
    scale = 1.0
    for step in _read(text)[1]:
        scale *= {"mul": step.number, "div": 1 / (step.number or math.nan)}.get(step.kind, 1.0)
    return scale


class Call(NamedTuple):
    """The op's arguments.

    :ivar query: (N, H, L, E); ``key`` and ``value`` are (N, H, S, E).
    :ivar bias: what the kernel adds to scores, broadcast to them.
    :ivar first: the masks that ``steps`` (:func:`written`) puts on scores are this one, ``second``
        and ``third``; they are broadcast to scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    first: Tensor | None
    second: Tensor | None
    third: Tensor | None
    steps: str

    @property
    def masks(self) -> tuple[Tensor | None, ...]:
        return self.first, self.second, self.third

    def mask(self, step: Step) -> Tensor:
        mask = self.masks[step.mask]
        assert mask is not None
        return mask


# --- as a whole -----------------------------------------------------------------------------------


def formula(*arguments: Any) -> tuple[Tensor, Tensor]:
    """What the op stands for, as eager computes it; the arguments and results are the op's."""
    call = Call(*arguments)
    *before, probabilities = _scores(call)
    scores = next(
        one
        for one, step in zip(before, _read(call.steps)[1], strict=True)
        if step.kind == "softmax"
    )
    sums = torch.logsumexp(scores.to(dtype_of_sums(call.query.dtype)), -1)
    result = probabilities.to(call.query.dtype) @ call.value
    return laid_out(result, call.query), by_tokens(sums)


def _scores(call: Call) -> list[Tensor]:
    """The product of queries and keys, and what it is after each step: probabilities at last."""
    dtype, steps = _read(call.steps)
    # Wider operands than were written are those of a float64 run, which no cast makes less exact.
    lifted = call.query.dtype != dtype
    found = [call.query @ call.key.transpose(-2, -1)]
    for step in steps:
        found.append(_after(step, found[-1], call, None if lifted else step.dtype))
    return found


def _after(step: Step, scores: Tensor, call: Call, dtype: torch.dtype | None) -> Tensor:
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


def formula_backward(grad: Tensor, call: Call, wanted: Sequence[bool]) -> list[Tensor]:
    """Gradients as autograd computes them from what eager would have saved.

    :param grad: of the result.
    :param wanted: which masks' gradients are.
    :return: those of query, key, value, and of the masks; empty where they aren't wanted.
    """
    scores = _scores(call)
    probabilities = scores[-1].to(call.query.dtype)
    grad_value = probabilities.transpose(-2, -1) @ grad
    of_masks: dict[int, Tensor] = {}
    # Of the scores after each step, from the last step to the first.
    on_way = grad @ call.value.transpose(-2, -1)
    for step, before, after in reversed(
        list(zip(_read(call.steps)[1], scores, scores[1:], strict=False))
    ):
        on_way = on_way.to(after.dtype)
        if step.kind == "add" and wanted[step.mask]:
            mask = call.mask(step)
            own = on_way.sum_to_size(mask.shape).to(mask.dtype)
            of_masks[step.mask] = own + of_masks[step.mask] if step.mask in of_masks else own
        on_way = _before(step, on_way, after, call).to(before.dtype)
    none = call.query.new_empty(0)
    rest = [of_masks.get(place, none) for place in range(MASKS)]
    return [on_way @ call.key, on_way.transpose(-2, -1) @ call.query, grad_value, *rest]


def _before(step: Step, grad: Tensor, after: Tensor, call: Call) -> Tensor:
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


# --- in blocks ------------------------------------------------------------------------------------

#: Of batch, heads and queries.
_Block = tuple[slice, slice, slice]


def blockwise(call: Call) -> Tensor:
    """The formula's result."""
    result = torch.empty_like(call.query)
    for block in _blocks(call):
        own = _part(call, block)
        result[block] = _scores(own)[-1].to(own.query.dtype) @ own.value
    return result


def blockwise_backward(grad: Tensor, call: Call, wanted: Sequence[bool]) -> list[Tensor]:
    """As :func:`formula_backward`, laid out :func:`by_tokens`; sums are of float32 at least."""
    query, key, value = (one.contiguous() for one in call[:3])
    call, grad = call._replace(query=query, key=key, value=value), grad.contiguous()
    made = empty_gradients(call, wanted, summed=True)
    for one in made:
        one.zero_()
    for block in _blocks(call):
        of_query, of_key, of_value, *of_masks = formula_backward(
            grad[block], _part(call, block), wanted
        )
        made[0][block] = of_query
        made[1][block[:2]] += of_key
        made[2][block[:2]] += of_value
        for total, own, is_wanted in zip(made[3:], of_masks, wanted, strict=True):
            if is_wanted:
                _broadcast_part(total, block).add_(own)
    dtypes = [one.dtype for one in empty_gradients(call, wanted)]
    return [one.to(dtype) for one, dtype in zip(made, dtypes, strict=True)]


def empty_gradients(call: Call, wanted: Sequence[bool], summed: bool = False) -> list[Tensor]:
    """What :func:`blockwise_backward` returns, without values.

    :param summed: those of several blocks are in the dtype of their sums.
    """

    def dtype(one: Tensor) -> torch.dtype:
        return dtype_of_sums(one.dtype) if summed else one.dtype

    query, key, value = call[:3]
    operands = [(query, query.dtype), (key, dtype(key)), (value, dtype(value))]
    made = [
        one.new_empty([one.shape[dim] for dim in (0, 2, 1, 3)], dtype=of).transpose(1, 2)
        for one, of in operands
    ]
    for mask, is_wanted in zip(call.masks, wanted, strict=True):
        if is_wanted and mask is not None:
            made.append(mask.new_empty(mask.shape, dtype=dtype(mask)))
        else:
            made.append(query.new_empty(0))
    return made


def _blocks(call: Call) -> Iterator[_Block]:
    """Parts of batch, heads and queries; several of one only with all of the next."""
    batch, heads, queries = call.query.shape[:3]
    rows = max(1, BLOCK_SCORES // max(1, call.key.shape[2]))
    for first in _slices(batch, rows // max(1, heads * queries)):
        for second in _slices(heads, rows // max(1, queries)):
            for third in _slices(queries, rows):
                yield first, second, third


def _slices(size: int, most: int) -> Iterator[slice]:
    step = max(1, most)
    for start in range(0, size, step):
        yield slice(start, min(size, start + step))


def _part(call: Call, block: _Block) -> Call:
    first, second, third = (
        one if one is None else _broadcast_part(one, block) for one in call.masks
    )
    keys, values = call.key[block[:2]], call.value[block[:2]]
    return Call(call.query[block], keys, values, None, first, second, third, call.steps)


def _broadcast_part(mask: Tensor, block: _Block) -> Tensor:
    """What a block reads of a mask that is broadcast to (batch, heads, queries, keys)."""
    dims = (*block, slice(None))[4 - mask.dim() :]
    whole = slice(None)
    return mask[tuple(whole if n == 1 else one for n, one in zip(mask.shape, dims, strict=True))]


# --- layouts and dtypes ---------------------------------------------------------------------------


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def laid_out(result: Tensor, query: Tensor) -> Tensor:
    """A result in memory as the op's: as its query, without gaps."""
    strides = torch.empty_like(query).stride()
    if result.stride() == strides:
        return result
    order = sorted(range(query.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(query.dim()), key=order.__getitem__)
    return result.permute(order).contiguous().permute(back)


def by_tokens(value: Tensor) -> Tensor:
    """(N, H, L, ...) that lies in memory as (N, L, H, ...), as the kernel has it."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)
