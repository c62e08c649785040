"""Whether the two parts of a split joint graph fit each other and the graph that they come from.

AOTAutograd wires them by position and doesn't look: the forward takes the joint graph's inputs and
returns its outputs, then what it saves (symbolic ints last); the backward takes the symbolic ints,
the other saved values and the tangents, and returns the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.errors import ContractError, containable

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check_parts(
    forward: GraphModule,
    backward: GraphModule,
    joint: GraphModule,
    num_fwd_outputs: int,
    who: str,
    where: str,
) -> None:
    """Hold the answer of ``fuseboard_partition_joint`` against the joint graph.

    :param where: by which setting ``who`` decides, for the message; "" if by none.
    :raises ContractError: the parts don't fit. It names ``who``.
    """
    for problem in _problems(forward, backward, joint, num_fwd_outputs):
        place = f" ({where})" if where else ""
        raise ContractError(who, "fuseboard_partition_joint", problem + place)


def _problems(
    forward: GraphModule, backward: GraphModule, joint: GraphModule, num_fwd_outputs: int
) -> Iterator[str]:
    for name, part in (("forward", forward), ("backward", backward)):
        yield from _malformed(name, part)
    inputs = joint.graph.find_nodes(op="placeholder")
    late = [n for n in inputs if _is_late(n)]
    early = [n for n in inputs if n not in late]
    results = _outputs(joint)
    given, saved = _outputs(forward)[:num_fwd_outputs], _outputs(forward)[num_fwd_outputs:]
    if len(given) < num_fwd_outputs:
        yield f"the forward returns {len(given)} values, the joint graph's has {num_fwd_outputs}"
    yield from _differ("the forward's input", _inputs(forward), early)
    yield from _differ("the forward's output", given, results[:num_fwd_outputs])
    symbols = [node for node in saved if isinstance(_value(node), _SYMBOLIC)]
    others = [node for node in saved if not isinstance(_value(node), _SYMBOLIC)]
    yield from _differ(
        "the backward's input",
        _inputs(backward),
        [*symbols, *others, *late],
        f" ({len(saved)} saved by the forward, {len(late)} tangents)",
    )
    yield from _differ("the backward's output", _outputs(backward), results[num_fwd_outputs:])


def _malformed(name: str, part: GraphModule) -> Iterator[str]:
    if len(part.graph.find_nodes(op="output")) != 1:
        yield f"the {name} has no output"
    try:
        part.graph.lint()
    except containable() as error:  # lint raises what it likes
        yield f"the {name} is malformed: {error}"


def _is_late(placeholder: Node) -> bool:
    """Whether only the backward gets an input (``torch/_functorch/partitioners.py``)."""
    name = str(placeholder.target)
    return any(part in name for part in ("tangents", "bwd_seed", "bwd_base_offset"))


def _inputs(part: GraphModule) -> list[Node]:
    """What a part takes, but for generators, which AOTAutograd adds itself."""
    return [
        node
        for node in part.graph.find_nodes(op="placeholder")
        if not isinstance(_value(node), torch.Generator)
    ]


def _outputs(part: GraphModule) -> list[Any]:
    return [leaf for node in part.graph.find_nodes(op="output") for leaf in tree_leaves(node.args)]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _differ(
    what: str, got: Sequence[Any], wanted: Sequence[Any], composed: str = ""
) -> Iterator[str]:
    """Another number of values, or one whose type, dtype, shape or device is another."""
    if len(got) != len(wanted):
        names = ", ".join(map(str, got[:8])) + (", ..." if len(got) > 8 else "")
        yield f"{what}s are {len(got)} ({names}), where {len(wanted)} are due{composed}"
        return
    for place, (mine, due) in enumerate(zip(got, wanted, strict=True)):
        if _text(mine) != _text(due):
            yield f"{what} {place} ({mine}) is {_text(mine)}, where {_text(due)} is due ({due})"


def _text(node: Any) -> str:
    value = _value(node)
    if isinstance(value, torch.Tensor):
        shape = ", ".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}] on {value.device}"
    if isinstance(value, _SYMBOLIC):
        return str(value)
    return "None" if value is None else f"a {type(value).__name__}"
