"""Whether rewrites of Dynamo's graph keep its values.

What was changed is run both ways, on the values of the call that is compiled. The float64 run needs
ops of ATen, so the part as it was is traced first. Gradients are held against Dynamo's graph with
all that AOTAutograd makes of the rewritten one (:mod:`fuseboard.capture.comparison`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fuseboard.contracts import Verdict
from fuseboard.errors import containable, error_text
from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.replays import generators_put_back, replayable
from fuseboard.profile.judge.rewrites import (
    LEADING,
    changed,
    first_difference,
    other_ends,
    part_computing,
    why_no_room,
)
from fuseboard.profile.judge.verify import misplaced
from fuseboard.torch_api.dynamo_graphs import fake_results
from fuseboard.torch_api.symbols import in_the_example, why_unknown
from fuseboard.torch_api.tensor_classes import is_plain


def judge_dynamo_rewrites(
    before: GraphModule, after: GraphModule, inputs: Sequence[Any]
) -> Verdict | str:
    """Run what differs between two graphs of Dynamo's both ways; a text if it can't be judged.

    :param before: with the same inputs and outputs as ``after``; nodes have fake values in ``val``.
    :param inputs: of both, real. They aren't written to.
    """
    if problem := other_ends(before, after):
        return Verdict(False, problem)
    change = changed(before, after)
    if change is None:
        return Verdict(True)
    values = [None if why_unknown(value) else in_the_example(value) for value in inputs]
    if not all(map(is_plain, (value for value in values if isinstance(value, torch.Tensor)))):
        return "an input is a tensor of a class of its own"
    if problem := _other_forms(before, after, values):
        return Verdict(False, problem)
    first = before.graph.find_nodes(op="placeholder")
    if len(first) != len(values):
        return "the values of its inputs aren't known when it is compiled"
    leading = part_computing(before, first, change.inputs, first)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    copied = sum(value.untyped_storage().nbytes() for value in tensors)
    if reason := why_no_room(LEADING, [leading], copied):
        return reason
    with torch.no_grad(), generators_put_back(), _autocast_at(change.outputs[0]):
        try:
            # What the user's code writes to are copies.
            copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            read = list(leading(*copies))
            traced = make_fx(change.before, tracing_mode="real")(*read)
        except containable() as error:  # eager raises it, too
            return error_text(error)
        if reason := replayable(traced):
            return reason
        reference = make_reference(traced, read)
        try:
            results = change.after(*read)
        except containable() as error:
            return Verdict(False, f"what was rewritten raises {error_text(error)}")
    return first_difference(change, reference, results)


@contextlib.contextmanager
def _autocast_at(node: Node) -> Iterator[None]:
    """The autocast that a graph has entered where a node stands, for the block.

    A part that is cut out of the graph is without the nodes that enter it.
    """
    entered: list[Node] = []
    for one in node.graph.nodes:
        if one is node:
            break
        name = getattr(one.target, "__name__", "")
        if name == "_enter_autocast":
            entered.append(one)
        elif name == "_exit_autocast":
            entered.remove(one.args[0])
    with contextlib.ExitStack() as stack:
        for one in entered:
            arguments: Any = one.args  # those of torch.autocast
            stack.enter_context(torch.autocast(*arguments))
        yield


def _other_forms(before: GraphModule, after: GraphModule, values: Sequence[Any]) -> str:
    """What is wrong with the form of a rewritten graph's results; "" if nothing is known to be."""
    try:
        wanted = fake_results(before, values)
    except containable():  # the user's own error, or a limit of fake tensors
        return ""
    try:
        found = fake_results(after, values)
    except containable() as error:
        return f"the rewritten graph raises {error_text(error)}"
    for number, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
            continue
        forms = [(one.dtype, tuple(one.shape), one.requires_grad) for one in (want, got)]
        if forms[0] != forms[1]:
            return f"output {number} is {forms[1]}, not {forms[0]}: dtype, shape, requires_grad"
        if problem := misplaced(want, got):
            return f"output {number} {problem}"
    return ""
