"""The one module of this plugin that reaches torch's private APIs: the core of its ONNX exporter.

Read against torch 2.13: ``torch/onnx/_internal/exporter/_core.py`` (``_translate_fx_graph``,
``_set_shape_type``), ``_registration.py`` (``ONNXRegistry``), ``_ir_passes.py``
(``add_opset_imports``), ``_torchlib``. Translating a graph there takes a tenth of what
``torch.onnx.export`` takes, which captures the graph again. Functions are probed by the names of
their parameters; where they differ, the public exporter is used.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard

#: What one translation calls, with the parameters that are relied on.
_EXPECTED = {
    ("_core", "_translate_fx_graph"): (
        *("fx_graph", "model", "graph_like", "owned_graphs", "lower", "registry"),
    ),
    ("_ir_passes", "add_opset_imports"): ("model",),
    ("_registration", "ONNXRegistry.from_torchlib"): ("opset_version",),
    ("_registration", "ONNXRegistry.register_op"): ("self", "target", "function", "is_complex"),
}

#: What ONNX Runtime 1.22 reads; the same as torch 2.13 writes.
IR_VERSION = 10

Translations = Mapping[Any, Callable[..., Any]]


@cache
def has_core() -> bool:
    """Whether the exporter's core is as it was read."""
    return not any(_differs(*place, names) for place, names in _EXPECTED.items())


def _differs(module: str, path: str, expected: tuple[str, ...]) -> bool:
    try:
        found: Any = _exporter(module)
        for name in path.split("."):
            found = getattr(found, name)
        return tuple(inspect.signature(found).parameters) != expected
    except (ImportError, AttributeError, ValueError):
        return True


def _exporter(module: str) -> Any:
    from importlib import import_module

    return import_module(f"torch.onnx._internal.exporter.{module}")


@cache
def _registry(opset: int) -> Any:
    """torch's library of translations; half a second once a process."""
    registry = _exporter("_registration").ONNXRegistry.from_torchlib(opset_version=opset)
    registry.fuseboard = set()  # ops that were registered on top
    return registry


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings: about torchvision, and about nodes without a module."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    children = [
        logger,
        *(logging.getLogger(f"{logger.name}.{n}") for n in ("_core", "_registration")),
    ]
    before = [child.level for child in children]
    for child in children:
        child.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for child, level in zip(children, before, strict=True):
            child.setLevel(level)


def translate(graph: GraphModule, own: Translations, opset: int) -> Any:
    """A graph as an ``onnx_ir.Model``; placeholders are its inputs, in order.

    :param graph: every op in it is in ``own`` or in torch's library.
    :param own: op → function that writes ONNX, before torch's library.
    """
    with _quiet():
        return (_translate_core if has_core() else _translate_publicly)(graph, own, opset)


def _translate_core(graph: GraphModule, own: Translations, opset: int) -> Any:
    import onnx_ir as ir

    for node in graph.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(graph, str(node.target))  # the real constant
    registry = _registry(opset)
    for op, function in own.items():
        if op not in registry.fuseboard:
            registry.register_op(op, function)  # before torch's own
            registry.fuseboard.add(op)
    model = ir.Model(
        graph=ir.Graph([], [], nodes=[], name="main_graph"),
        ir_version=IR_VERSION,
        producer_name="fuseboard",
    )
    _exporter("_core")._translate_fx_graph(
        graph.graph,
        model,
        graph_like=model.graph,
        owned_graphs={},
        lower="at_conversion",
        registry=registry,
    )
    model.graph.opset_imports.setdefault("", opset)
    _exporter("_ir_passes").add_opset_imports(model)
    return model


def _translate_publicly(graph: GraphModule, own: Translations, opset: int) -> Any:
    """The same by ``torch.onnx.export``, which captures the graph a second time.

    :raises LoweringError: the graph has symbolic sizes, which that capture would fix.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) or not all(
            isinstance(size, int) for size in getattr(value, "shape", ())
        ):
            raise fuseboard.LoweringError(
                "symbolic sizes: torch's exporter isn't inside as it was when this was read, and "
                "torch.onnx.export takes static sizes only"
            )
    inputs = tuple(_example(node) for node in graph.graph.find_nodes(op="placeholder"))
    with fuseboard.real_tensors():
        program = torch.onnx.export(
            torch.export.export(graph, inputs),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=opset,
            custom_translation_table=dict(own),
        )
    return program.model


def _example(node: Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu")


def fake_mode() -> Any:
    """A fake mode of one's own, for tensors of which only the metadata matters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


# --- symbolic sizes -------------------------------------------------------------------------------


def known_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(statically_known_true(left == right))


def known_true(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold, without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return condition if isinstance(condition, bool) else bool(statically_known_true(condition))


def has_unbacked_symbols(value: Any) -> bool:
    """Whether a fake value has sizes that only data decide."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def size_hint(value: Any) -> int:
    """A size in the example that is being compiled; where only data decide it, a large one."""
    if isinstance(value, int):
        return value
    return int(value.node.hint) if value.node.has_hint() else 4096


def expression(value: Any) -> Any:
    """A size as a sympy expression."""
    import sympy

    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


# --- quantised graphs ----------------------------------------------------------------------------


@cache
def quantised_ops() -> Any:
    """``torch.ops.quantized_decomposed``, which PT2E writes; None where torch hasn't got it."""
    try:
        import torch.ao.quantization.fx._decomposed
    except ImportError:
        return None
    return torch.ops.quantized_decomposed


# --- decompositions -------------------------------------------------------------------------------


def decompositions(ops: Any) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of some ops."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(ops))
