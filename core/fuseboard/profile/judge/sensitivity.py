"""How much error each place of a narrowed graph causes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.errors import error_text
from fuseboard.profile.judge.accuracy import Metric, NotMeasured
from fuseboard.profile.judge.reference import run_eager
from fuseboard.profile.judge.rewrites import Change, changed, part_computing, why_no_room


def own_errors(
    before: GraphModule,
    after: GraphModule,
    places: Sequence[tuple[str, ...]],
    inputs: Sequence[Any],
) -> dict[tuple[str, ...], float]:
    """The error of what comes out of each place, relative to its norm, if what goes in is exact.

    Places between which nothing has stayed as it was, such as a product and the attention that
    reads it in the narrower type, are one, and have the same error.

    :param after: a rewritten copy of ``before``.
    :param places: names of the nodes of ``before`` that one rewrite took the place of.
    :param inputs: real ones, which aren't written to.
    :raises NotMeasured: the graphs can't be run so.
    """
    change = changed(before, after)
    if change is None:
        return {}
    first = before.graph.find_nodes(op="placeholder")
    leading = part_computing(before, first, change.inputs, first)
    graphs = [leading, change.before, change.after]
    if why := why_no_room("errors of each place", graphs):
        raise NotMeasured(why)
    try:
        values = run_eager(leading, inputs)
        exact, narrowed = (run_eager(part, values) for part in (change.before, change.after))
    except Exception as error:  # an op may raise anything
        raise NotMeasured(error_text(error)) from error
    metric = Metric("norm")
    place_of = {name: place for place in places for name in place}
    found: dict[tuple[str, ...], float] = {}
    for node, want, got in zip(change.outputs, exact, narrowed, strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        own = metric.distance(got, want)
        for name in _between(node, change):
            if (place := place_of.get(name)) is not None:
                found[place] = max(own, found.get(place, 0.0))
    return found


def _between(output: Node, change: Change) -> Mapping[str, None]:
    """Names of the nodes by which an output comes of the inputs, or of other outputs."""
    ends = {*change.inputs, *change.outputs}
    left, found = [output], {output.name: None}
    while left:
        for node in left.pop().all_input_nodes:
            if node not in ends and node.name not in found:
                found[node.name] = None
                left.append(node)
    return found
