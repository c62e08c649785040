"""A graph as torch's own archive of compiled code, a ``.pt2`` by AOTInductor.

Read against torch 2.13: ``torch/_inductor/__init__.py`` (``aot_compile``),
``torch/_inductor/compile_fx.py`` (``compile_fx_aot``),
``torch/export/pt2_archive/_package.py`` (``package_pt2``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard import LoweringError, real_tensors
from fuseboard_inductor._compile import fake_mode_of, roundings


def export(
    graph: GraphModule, inputs: Sequence[Any], weights: Sequence[int], path: Path, options: Any
) -> tuple[Any, ...]:
    """Compile a graph, write it, and run what was written.

    What is written takes the tensors among the inputs that aren't weights, in their order; sizes
    are read off these. Weights are stored in it.

    :raises LoweringError: an input or a result is a number that no tensor tells.
    """
    from torch._inductor import aot_compile
    from torch.export.pt2_archive._package import package_pt2

    if not all(isinstance(node, Node) for node in graph.graph.output_node().args[0]):
        raise LoweringError("AOTInductor has no results that are None or numbers")
    taken = [
        number
        for number, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and number not in weights
    ]
    prepared = _of_tensors(graph, inputs, weights)
    fakes = [node.meta["val"] for node in prepared.graph.find_nodes(op="placeholder")]
    settings = {
        **({} if options is None else options.config),
        **roundings(graph),
        "fallback_random": True,
        "keep_output_stride": True,
        "aot_inductor.package": True,
    }
    with fake_mode_of(fakes), torch.no_grad():
        files = aot_compile(prepared, tuple(fakes), options=settings)
    package_pt2(str(path), aoti_files=files)
    with real_tensors():
        runner = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        return tuple(runner.boxed_run([inputs[number] for number in taken]))


def _of_tensors(graph: GraphModule, inputs: Sequence[Any], weights: Sequence[int]) -> GraphModule:
    """A copy that has the weights, and takes only tensors."""
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    made = GraphModule(graph, copy)
    placeholders = copy.find_nodes(op="placeholder")
    sizes: dict[Any, Node] = {}
    first = next(node for node in copy.nodes if node.op != "placeholder")  # behind all tensors
    for number, node in enumerate(placeholders):
        value = node.meta["val"]
        if number in weights:
            made.register_buffer(f"weight{number}", inputs[number].detach())
            with copy.inserting_before(first):
                held = copy.get_attr(f"weight{number}")
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
            copy.erase_node(node)
        elif isinstance(value, torch.Tensor):
            for place, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    sizes.setdefault(size.node.expr, (node, place))
    for node in copy.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            continue
        if node.users:
            source = sizes.get(getattr(value.node, "expr", None))
            if source is None:
                raise LoweringError(f"the number {node.name} is the size of no input")
            with copy.inserting_before(first):
                size = copy.call_function(torch.ops.aten.sym_size.int, source)
            size.meta["val"] = value
            node.replace_all_uses_with(size)
        copy.erase_node(node)
    made.recompile()
    return made
