"""Is an arm's answer right? Judged against the same model in float64, with eager as the rival."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: How much further from float64 than eager an arm may be. Another summation order moves single
#: values by a small multiple; wrong code is off by orders of magnitude.
RIVAL_FACTOR = 10.0
#: And this, times the largest value, in float32: a sum of a few thousand terms loses about
#: sqrt(4096) eps = 8e-6 of its scale, whatever the order; eager may have been lucky.
SCALE_FACTOR = 1e-5


def double(module: nn.Module) -> nn.Module:
    """A float64 copy, in the same mode, with gradients of its own."""
    return copy.deepcopy(module).double()


def as_double(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in inputs]


def problem_with(
    answers: Sequence[Tensor], eager: Sequence[Tensor], reference: Sequence[Tensor] | None
) -> str:
    """What is wrong with an arm's answers, or "".

    Element by element, so that one bad value in a million counts.
    :param reference: in float64; None where the model has no float64: eager takes its place.
    """
    if len(answers) != len(eager):
        return f"{len(answers)} outputs, eager has {len(eager)}"
    for index, (answer, rival) in enumerate(zip(answers, eager, strict=True)):
        truth = rival if reference is None else reference[index]
        if problem := _problem(answer, rival, truth):
            return f"output {index}: {problem}"
    return ""


def _problem(answer: Tensor, rival: Tensor, truth: Tensor) -> str:
    if (answer.shape, answer.dtype) != (rival.shape, rival.dtype):
        return f"{answer.dtype} {tuple(answer.shape)}, eager has {rival.dtype} {tuple(rival.shape)}"
    if not answer.is_floating_point():
        return "" if torch.equal(answer, rival) else "differs from eager, must be equal"
    if not torch.equal(answer.isfinite(), rival.isfinite()):
        return "not finite in the same places as eager"
    finite = rival.isfinite() & truth.isfinite()
    exact = truth[finite].double()
    if exact.numel() == 0:
        return ""
    error = (answer[finite].double() - exact).abs().max().item()
    allowed = RIVAL_FACTOR * (rival[finite].double() - exact).abs().max().item()
    allowed += SCALE_FACTOR * exact.abs().max().item()
    if error <= allowed:
        return ""
    return f"off by {error:.3g} from float64, allowed is {allowed:.3g}"
