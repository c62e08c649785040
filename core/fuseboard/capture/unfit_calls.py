"""Calls that what was compiled isn't made for, though Dynamo's guards let them pass.

Dynamo's own graph answers them, as eager would. What such a call has about it is looked for in each
call, but only where the graph could tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import modes as torch_modes

Run = Callable[..., Any]
#: What is unfit about a call's arguments, as people read it; "" for nothing.
Unfit = Callable[[Sequence[Any]], str]


def unless_unfit(
    compiled: Run, own: Run, conditions: Sequence[Unfit], note: Callable[[str], None]
) -> Run:
    """What was compiled, but for calls for which one of the conditions says why not.

    :param own: Dynamo's graph.
    :param note: is told why it ran.
    """
    if not conditions:
        return compiled

    def run(*args: Any) -> Any:
        for unfit in conditions:
            if why := unfit(args):
                note(f"{why}: Dynamo's own graph ran")
                return own(*args)
        return compiled(*args)

    return run


def with_tangents(args: Sequence[Any]) -> str:
    """Training graphs under forward-mode AD: AOTAutograd's function has no such derivative."""
    return "called under forward-mode AD" if forward_ad._current_level >= 0 else ""


def writes_in_a_checkpoint(args: Sequence[Any]) -> str:
    """Training graphs that write to their inputs, where hooks of saved tensors are set.

    A checkpoint's recomputation ends as soon as all tensors are saved, by an exception. What
    AOTAutograd writes back to inputs after that would be left out; eager writes as it goes.
    """
    hooks = torch_modes.saved_tensor_hooks_are_set()
    return "it writes to inputs, and hooks of saved tensors are set" if hooks else ""


def other_overlaps(example_inputs: Sequence[Any]) -> Unfit:
    """Graphs that write to their inputs, where these overlap as the compiled ones didn't.

    AOTAutograd compiles for the overlap that it sees, and Dynamo doesn't guard on it
    (pytorch#139789).
    """
    expected = _overlap(example_inputs)

    def unfit(args: Sequence[Any]) -> str:
        overlap = _overlap(args)
        return (
            "" if overlap == expected else "a call's inputs overlapped as the compiled ones didn't"
        )

    return unfit


def _overlap(args: Sequence[Any]) -> frozenset[tuple[tuple[int, int], ...]]:
    """Which inputs overlap, and how: (position, offset) of each, a tuple for each storage.

    Code for inputs that overlap has their offsets in their storage built in.
    """
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    addresses = [torch_internals.storage_address(tensor) for _, tensor in tensors]
    if len(set(addresses)) == len(addresses):
        return frozenset()
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for address, pair in zip(addresses, tensors, strict=True):
        groups.setdefault(address, []).append(pair)
    found = []
    for group in groups.values():
        if len(group) > 1:
            places = sorted(torch_internals.overlapping([tensor for _, tensor in group]))
            found.append(tuple((group[i][0], int(group[i][1].storage_offset())) for i in places))
    return frozenset(filter(None, found))
