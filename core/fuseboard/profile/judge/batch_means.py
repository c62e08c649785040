"""Means of batch norms as engines have them that sum in the tensor's own dtype.

Eager's kernel on CPU sums float32 in float64. What it reads, moved by units in the last place,
moves the mean far less than the partial sums of an engine that rounds each of them, where these
cancel: as what a convolution makes of a normalised channel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

#: Where the arguments are that tell of training and of the momentum, and where the new running mean
#: is in the result (None: there is none).
_PLACES: dict[Any, tuple[int, int, int | None]] = {
    aten.native_batch_norm.default: (5, 6, None),
    aten._native_batch_norm_legit.no_stats: (3, 4, None),
    aten._native_batch_norm_legit_functional.default: (5, 6, 3),
}


def is_batch_norm(target: Any) -> bool:
    """Whether an op is a batch norm whose mean engines round in another way."""
    return target in _PLACES


def with_other_mean(
    target: Any, args: Sequence[Any], result: Any, generator: torch.Generator
) -> Any:
    """A batch norm's result with the mean that another engine might have; as it is in evaluation.

    :param generator: of the roundings.
    """
    training, momentum, running = _PLACES[target]
    if len(args) <= momentum or not args[training] or args[0].numel() == 0:
        return result
    tensor, weight = args[0], args[1]
    lost = _lost(tensor, generator)
    by = lost * result[2].double()
    if weight is not None:
        by = by * weight.double()
    normed = result[0].double() - by.view(-1, *[1] * (tensor.dim() - 2))
    changed = list(result)
    changed[0] = torch.empty_like(result[0]).copy_(normed)
    changed[1] = (result[1].double() + lost).to(result[1].dtype)
    if running is not None:
        mean = result[running]
        changed[running] = (mean.double() + args[momentum] * lost).to(mean.dtype)
    return tuple(changed)


def _lost(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """How far each channel's mean may be off: each partial sum by up to a unit in its last place.

    Half types are summed in float32 by all engines that are right.
    """
    unit = min(torch.finfo(kind).eps for kind in (tensor.dtype, torch.float32))
    channels = tensor.transpose(0, 1).flatten(1).double()
    sums = channels.cumsum(1)
    sums = torch.where(sums == sums.round(), 0, sums)  # engines have integers exactly
    noise = torch.empty_like(sums).uniform_(-1, 1, generator=generator)
    return (sums * noise).sum(1) * (unit / channels.shape[1])
