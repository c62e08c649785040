"""Small repairs of what was translated, for ONNX Runtime's own fusions to find their patterns."""

from __future__ import annotations

from typing import Any


def clean(graph: Any) -> None:
    """In one walk each: casts, unused results, unused nodes.

    ``CastLike`` is the one that matters: ONNX Runtime writes it out as a cast after its own fusions
    ran, so a constant behind it is none to them (gelu, scaled products).

    :param graph: an ``onnx_ir.Graph``.
    """
    for node in list(graph):
        if node.op_type == "CastLike":
            _plain_cast(graph, node)
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
        elif node.op_type in ("LayerNormalization", "MaxPool"):
            _drop_side_results(node)
    _own_outputs(graph)


def _own_outputs(graph: Any) -> None:
    """Each output a value of its own that a node computes.

    ONNX Runtime writes nothing to the memory that an output is bound to if it is an input, too.
    """
    import onnx_ir as ir

    taken: set[Any] = set()
    for place, value in enumerate(graph.outputs):
        if value.producer() is None or value in taken:
            node = ir.Node("", "Identity", [value])
            node.outputs[0].name = f"output_{place}_of_its_own"
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[place] = node.outputs[0]
        taken.add(graph.outputs[place])


def _plain_cast(graph: Any, node: Any) -> None:
    import onnx_ir as ir

    value, like = node.inputs
    if like.dtype is None:
        return  # a value within an op's form: its type isn't known here
    if _dtype(value) == like.dtype:
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        return
    node.op_type = "Cast"
    node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))
    node.resize_inputs(1)


def _dtype(value: Any) -> Any:
    """A value's type; that of a constant from what it holds."""
    import onnx_ir as ir

    producer = value.producer()
    if value.dtype is not None or producer is None or producer.op_type != "Constant":
        return value.dtype
    if "value" in producer.attributes:
        return producer.attributes["value"].value.dtype
    whole = producer.attributes.keys() & {"value_int", "value_ints"}
    return ir.DataType.INT64 if whole else ir.DataType.FLOAT


def _drop_side_results(node: Any) -> None:
    """With one result a layer norm is fused to the addition before it, a pool is run in blocks."""
    if not any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        node.resize_outputs(1)
