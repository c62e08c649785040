"""Splits of joint graphs that are wrong, for ``stages.partition_joint``: each breaks one rule."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch._functorch.partitioners import default_partition


def good(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    """torch's split that saves all."""
    return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)


def keeps_a_saved_value_back(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    """The backward needs a value that the forward doesn't give."""
    forward, backward = good(joint, inputs, num_fwd_outputs)
    output = forward.graph.output_node()
    output.args = (tuple(output.args[0])[:-1],)
    return forward, backward


def returns_too_little(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    """The forward returns nothing but the joint graph's first input."""
    forward, backward = good(joint, inputs, num_fwd_outputs)
    forward.graph.output_node().args = ((),)
    return forward, backward


def forgets_a_gradient(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    forward, backward = good(joint, inputs, num_fwd_outputs)
    output = backward.graph.output_node()
    output.args = (tuple(output.args[0])[:-1],)
    return forward, backward


def swaps_the_parts(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    forward, backward = good(joint, inputs, num_fwd_outputs)
    return backward, forward


def mixes_up_saved_values(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    """As many saved values as there should be, in another order."""
    forward, backward = good(joint, inputs, num_fwd_outputs)
    output = forward.graph.output_node()
    results = tuple(output.args[0])
    saved = results[num_fwd_outputs:]
    output.args = ((*results[:num_fwd_outputs], *reversed(saved)),)
    return forward, backward


def raises(joint: Any, inputs: Any, num_fwd_outputs: int) -> Any:
    raise ZeroDivisionError("no cut found")


def answers_three(joint: Any) -> Any:
    return partial, partial, partial
