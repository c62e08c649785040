"""``fuseboard::linear_cross_entropy``: cross entropy of a linear layer, without all of its logits.

With a vocabulary of 49,152 the logits of 2,048 tokens take 384 MiB, and eager holds up to three
such tensors: log probabilities and two gradients. Here logits are computed for a chunk of rows at a
time, and at once the gradients of the layer's operands from them, as Liger Kernel does
(github.com/linkedin/Liger-Kernel): a loss is one number, so its gradient is a factor that the
backward multiplies by. To compute logits again in the backward instead takes one more matrix
product for three. That is done where there is no such factor (``reduction="none"``), and for
float16, where the factor keeps gradients from vanishing.

A chunk goes through eager's ops in eager's order: the layer in its dtype, the loss in the loss's,
or float32 if that is wider. Sums over chunks are of float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Of a chunk's logits. Smaller ones cost time: each chunk reads and writes the weight's gradient.
CHUNK_BYTES = 32 * 2**20


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Call(NamedTuple):
    """The arguments of the op, which its backward has as well.

    :ivar hidden: ``(N, H)``; ``weight`` ``(V, H)`` and ``bias`` ``(V,)`` have its dtype.
    :ivar target: ``(N,)``, int64.
    :ivar class_weight: ``(V,)``.
    :ivar reduction: of the rows' losses, as in ``torch.nn.functional.cross_entropy``; so are
        ``ignore_index`` and ``label_smoothing``.
    :ivar dtype: of the loss.
    :ivar wanted: which gradients are: of ``hidden``, ``weight``, ``bias``; others are empty
        tensors.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype
    wanted: Sequence[bool]


_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "str reduction, int ignore_index, float label_smoothing, ScalarType dtype, bool[] wanted"
)


@dataclass(frozen=True)
class _Rows:
    """Cross entropy of ``N`` rows of ``V`` logits, as far as it doesn't depend on these.

    :ivar target: ``(N,)``, int64; 0 where a row is ignored.
    :ivar kept: ``(N,)``, which rows aren't ignored.
    :ivar class_weight: ``(V,)``, or None.
    :ivar dtype: that losses are computed in.
    """

    target: Tensor
    kept: Tensor
    class_weight: Tensor | None
    classes: int
    smoothing: float
    dtype: torch.dtype

    @classmethod
    def of(cls, call: _Call) -> _Rows:
        """
        :raises IndexError: a target is no class, as eager has it.
        """
        target, classes = call.target, len(call.weight)
        kept = target != call.ignore_index
        known = (target >= 0) & (target < classes) | ~kept
        if not known.all():
            wrong = int(target.masked_select(~known)[0])
            raise IndexError(f"Target {wrong} is out of bounds.")
        dtype = _at_least_float32(call.dtype)
        class_weight = None if call.class_weight is None else call.class_weight.to(dtype)
        target = target.masked_fill(~kept, 0)
        return cls(target, kept, class_weight, classes, call.label_smoothing, dtype)

    def weights(self) -> Tensor:
        """``(N,)``: the weight of each row's class; 0 where it is ignored."""
        if self.class_weight is None:
            return self.kept.to(self.dtype)
        return self.class_weight[self.target].masked_fill(~self.kept, 0)

    def at(self, part: slice) -> _Rows:
        """Some of the rows."""
        return replace(self, target=self.target[part], kept=self.kept[part])

    def losses(self, log_p: Tensor) -> Tensor:
        """``(N,)``, from log probabilities ``(N, V)``."""
        found = self.weights() * -log_p.gather(1, self.target.unsqueeze(1)).squeeze(1)
        if self.smoothing:
            weighted = log_p if self.class_weight is None else log_p * self.class_weight
            share = self.smoothing / self.classes
            found = (1 - self.smoothing) * found - share * weighted.sum(1)
        return found.masked_fill(~self.kept, 0)

    def to_gradient(self, log_p: Tensor, factors: Tensor) -> Tensor:
        """The gradient of the logits, in the place of log probabilities ``(N, V)``.

        :param factors: ``(N,)``, the gradients of the rows' losses.
        """
        factors = factors.masked_fill(~self.kept, 0)
        of_target = (1 - self.smoothing) * self.weights() * factors
        of_each = self.smoothing / self.classes * factors
        total = of_target
        if self.smoothing:
            weights = self.classes if self.class_weight is None else self.class_weight.sum()
            total = of_target + of_each * weights
        gradient = log_p.exp_().mul_(total.unsqueeze(1))
        if self.smoothing and self.class_weight is None:
            gradient.sub_(of_each.unsqueeze(1))
        elif self.smoothing:
            assert self.class_weight is not None
            gradient.addr_(of_each, self.class_weight, alpha=-1)
        return gradient.scatter_add_(1, self.target.unsqueeze(1), -of_target.unsqueeze(1))


class _Gradients:
    """Gradients of the operands of the layer, those that are wanted, summed up over chunks."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._sums = _empty_gradients(call, _at_least_float32(call.hidden.dtype))
        for one in self._sums[1:]:
            one.zero_()

    def add(self, part: slice, gradient: Tensor) -> None:
        """:param gradient: of the logits of some rows, in the dtype of the layer."""
        hidden, weight, wanted = self._call.hidden, self._call.weight, self._call.wanted
        of_hidden, of_weight, of_bias = self._sums
        if wanted[0]:
            torch.mm(gradient, weight, out=of_hidden[part])
        if wanted[1] and of_weight.dtype == gradient.dtype:
            of_weight.addmm_(gradient.t(), hidden[part])
        elif wanted[1]:
            of_weight.add_(gradient.t() @ hidden[part])
        if wanted[2]:
            of_bias.add_(gradient.sum(0, dtype=of_bias.dtype))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        of_hidden, of_weight, of_bias = (one.to(self._call.hidden.dtype) for one in self._sums)
        return of_hidden, of_weight, of_bias


def _parts(rows: int, width_bytes: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // max(1, width_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _in_chunks(call: _Call, rows: _Rows, factors: Tensor | None) -> tuple[Tensor, _Gradients]:
    """The losses of the rows ``(N,)``, and gradients of the operands.

    :param factors: the gradients of the losses; None: those of the operands aren't wanted.
    """
    hidden, weight, bias = call.hidden, call.weight, call.bias
    gradients = _Gradients(call)
    losses = hidden.new_empty(len(hidden), dtype=rows.dtype)
    parts = list(_parts(len(hidden), rows.classes * rows.dtype.itemsize))
    longest = parts[0].stop if parts else 0
    # A chunk's memory is used again by the next one: new pages would be cleared each time.
    logits_memory = hidden.new_empty(longest, rows.classes)
    log_p_memory = hidden.new_empty(longest, rows.classes, dtype=rows.dtype)
    for part in parts:
        size = part.stop - part.start
        logits, log_p = logits_memory[:size], log_p_memory[:size]
        if bias is None:
            torch.mm(hidden[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[part], weight.t(), out=logits)
        torch.log_softmax(logits, 1, dtype=rows.dtype, out=log_p)
        own = rows.at(part)
        losses[part] = own.losses(log_p)
        if factors is not None:
            gradient = own.to_gradient(log_p, factors[part])
            gradients.add(part, gradient.to(hidden.dtype))
    return losses, gradients


# --- the ops --------------------------------------------------------------------------------------


@torch.library.custom_op(
    "fuseboard::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _loss(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and gradients of the operands for a gradient of 1.

    With ``reduction="none"`` no gradients may be wanted.
    :raises IndexError: a target is no class.
    """
    call = _Call(*arguments)
    rows = _Rows.of(call)
    with torch.autocast(call.hidden.device.type, enabled=False):
        count = rows.weights().sum()
        factors = _factors(count.new_ones(()), call, rows) if any(call.wanted) else None
        losses, gradients = _in_chunks(call, rows, factors)
        if call.reduction != "none":
            losses = losses.sum()
        if call.reduction == "mean":
            losses = losses / count
        return losses.to(call.dtype), *gradients.results()


@torch.library.custom_op(
    "fuseboard::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _recomputed_gradients(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the operands, from logits that are computed again.

    :param gradient: of the loss: ``()``, or ``(N,)`` with ``reduction="none"``.
    """
    call = _Call(*arguments)
    rows = _Rows.of(call)
    with torch.autocast(call.hidden.device.type, enabled=False):
        _, gradients = _in_chunks(call, rows, _factors(gradient, call, rows))
        return gradients.results()


def _factors(gradient: Tensor, call: _Call, rows: _Rows) -> Tensor:
    """The gradients of the rows' losses ``(N,)``, from that of the loss."""
    gradient = gradient.to(rows.dtype)
    if call.reduction == "mean":
        gradient = gradient / rows.weights().sum()
    return gradient.expand(len(rows.target))


def _fake_loss(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call(*arguments)
    shape = call.target.shape if call.reduction == "none" else ()
    return call.hidden.new_empty(shape, dtype=call.dtype), *_empty_gradients(call)


def _fake_gradients(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(_Call(*arguments))


def _empty_gradients(
    call: _Call, summed: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:param summed: the dtype of those that chunks add to; None: the layer's."""
    classes, width = call.weight.shape
    shapes = (tuple(call.hidden.shape), (classes, width), (classes,))
    of_hidden, of_weight, of_bias = (
        call.hidden.new_empty(shape if is_wanted else (0,), dtype=dtype)
        for shape, is_wanted, dtype in zip(shapes, call.wanted, (None, summed, summed), strict=True)
    )
    return of_hidden, of_weight, of_bias


# --- autograd -------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, reduction, ignore_index, label_smoothing, dtype, computed = inputs
    ctx.options = reduction, ignore_index, label_smoothing, dtype
    ctx.needed = [bool(one) for one in ctx.needs_input_grad[:3]]
    ctx.computed = all(done or not need for done, need in zip(computed, ctx.needed, strict=True))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(output[1:] if ctx.computed else operands))


def _backward(ctx: Any, gradient: Tensor | None, *of_gradients: Tensor | None) -> Any:
    if any(one is not None for one in of_gradients):
        raise RuntimeError(
            "fuseboard::linear_cross_entropy has no second gradient: its first was computed with "
            "the loss"
        )
    rest = (None,) * 7
    if gradient is None:
        return (None, None, None, *rest)
    if ctx.computed:
        pairs = zip(ctx.saved_tensors, ctx.needed, strict=True)
        return (*(one * gradient if need else None for one, need in pairs), *rest)
    found = linear_cross_entropy_backward(gradient, *ctx.saved_tensors, *ctx.options, ctx.needed)
    pairs = zip(found, ctx.needed, strict=True)
    return (*(one if need else None for one, need in pairs), *rest)


_loss.register_fake(_fake_loss)
_recomputed_gradients.register_fake(_fake_gradients)
_loss.register_autograd(_backward, setup_context=_setup_context)

linear_cross_entropy = torch.ops.fuseboard.linear_cross_entropy.default
linear_cross_entropy_backward = torch.ops.fuseboard.linear_cross_entropy_backward.default
