"""What an artifact's key is made of: all that the code of a lowered region may depend on."""

from __future__ import annotations

import ctypes
import hashlib
import json
import operator
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from pydantic import BaseModel
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.contracts import BackendInfo, GraphKind, Region
from fuseboard.lower.artifact_files import Key
from fuseboard.lower.machine import code_hash, gpu, machine_parts
from fuseboard.partition.signature import signature
from fuseboard.torch_api import graphs as torch_graphs
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import symbols as torch_symbols
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.torch_api.custom_ops import defining_modules
from fuseboard.torch_api.nodes import graphs_in


class NotCacheable(Exception):
    """Why a region has no key; the message completes "not cached: "."""


def region_key(
    region: Region,
    info: BackendInfo,
    homes: Sequence[Path],
    baked: Sequence[str] | None,
    facts: str | None = None,
) -> Key:
    """The key of a region that is about to be lowered.

    :param region: with the graph that the backend is given: decomposed, fused, hoisted.
    :param homes: the files and packages whose code makes the artifact.
    :param baked: hashes of what the backend builds in; None where it builds in values that can't
        be had.
    :param facts: what was known of its sizes when it was lowered; None: what is known now.
    :raises NotCacheable: something in the region has no name outside of this process.
    """
    _must_have_names(region.graph)
    if baked is None:
        raise NotCacheable(
            f"{region.backend} builds in the values of weights, which aren't known in this graph"
        )
    parts = {
        "backend": region.backend,
        "whole graph": f"{region.whole}",
        "random": region.random,
        "weights": " ".join(baked),
        "fingerprint": info.fingerprint,
        "code": " ".join(map(code_hash, homes)),
        "composites": code_hash(Path(__file__).parents[1] / "fuse"),
        "options": plugin_options_text(region.options),
        **_parts(region.graph, region.backend, region.kind, region.static_inputs),
    }
    if facts is not None:
        parts["sizes"] = facts
    return Key(parts)


def graph_parts(graph: GraphModule, kind: GraphKind, static: Sequence[int]) -> dict[str, str]:
    """What measurements of a whole graph depend on, backends and settings aside.

    :param static: positions of its inputs that are weights.
    :raises NotCacheable: something in the graph has no name outside of this process.
    """
    _must_have_names(graph)
    return {**_parts(graph, "", kind, tuple(static)), "code": code_hash(Path(__file__).parents[1])}


def call_parts(
    graph: GraphModule,
    inputs: Sequence[torch.Tensor | int],
    static: Sequence[int],
    sizes: CallSizes | None,
) -> dict[str, str]:
    """What the choice among candidates for a graph of Dynamo's depends on.

    :param inputs: real ones.
    :param sizes: what Dynamo knows of sizes that change from call to call.
    :raises NotCacheable: something in the graph has no name outside of this process.
    """
    _must_have_names(graph)
    graphs = graphs_in(graph)
    held = [
        content_hash(value) if isinstance(value, torch.Tensor) else repr(value)
        for one in graphs
        for node in one.graph.find_nodes(op="get_attr")
        if not isinstance(value := operator.attrgetter(str(node.target))(one), GraphModule)
    ]
    # Inputs that share memory are told from those that don't.
    places: dict[int, int] = {}
    shown = []
    changing = (None,) * len(inputs) if sizes is None else sizes.texts
    for value, known in zip(inputs, changing, strict=True):
        if isinstance(value, int):
            shown.append(known or f"{value}")
            continue
        shape = known or f"{tuple(value.shape)}{value.stride()}{value.storage_offset()}"
        shown.append(
            f"{value.dtype}{shape} "
            f"{value.requires_grad} {value.is_conj()} {value.is_neg()} {value.is_inference()} "
            f"{places.setdefault(torch_internals.storage_address(value), len(places))}"
        )
    text = "\n".join(
        [*(one.code for one in graphs), *held, *shown, *(sizes.facts if sizes else ())]
    )
    return {
        "backend": "the whole call",
        "graph": hashlib.sha256(text.encode()).hexdigest(),
        "static inputs": f"{static}",
        "code": code_hash(Path(__file__).parents[1]),
        "custom ops": " ".join(map(_module_hash, defining_modules(graph))),
        **machine_parts(),
    }


def _module_hash(name: str) -> str:
    """Of the code of a module that defines ops: their gradients are in what is captured."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or not Path(file).is_file():
        raise NotCacheable(f"the module {name}, which defines an op, has no file")
    return code_hash(Path(file))


def _parts(
    graph: GraphModule, backend: str, kind: GraphKind, static: Sequence[int]
) -> dict[str, str]:
    """A graph, and the machine and the process that it is to run on and in."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    parts = {
        "graph": signature(graph, backend, (kind, _views(graph))),
        "static inputs": f"{static}",
        "sizes": size_facts(graph),
        **machine_parts(),
    }
    own_keys = [getattr(node.target, "cache_key", None) for node in graph.graph.nodes]
    if any(isinstance(own, str) for own in own_keys):
        parts["functions"] = " ".join(own for own in own_keys if isinstance(own, str))
    devices = {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    if any(device.type == "cuda" for device in devices):
        parts["gpu"] = gpu()
    return parts


def size_facts(graph: GraphModule) -> str:
    """What is known now of the symbolic sizes in a graph."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return "; ".join(torch_symbols.known_facts(values))


# --- the region -----------------------------------------------------------------------------------


def _must_have_names(graph: GraphModule) -> None:
    for what in _nameless(graph):
        raise NotCacheable(f"{what} means nothing to another process")


def _nameless(graph: GraphModule) -> Iterator[str]:
    """What in a graph can only be told by its place in memory."""
    for node in graph.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr":
            held = operator.attrgetter(str(target))(graph)
            if isinstance(held, GraphModule):
                yield from _nameless(held)
            elif not isinstance(held, torch.Tensor | int | float | str | None):
                yield f"the constant {target} of type {type(held).__name__}"
        elif node.op == "call_function":
            if not _has_a_name(target):
                yield f"the function that {node.name} calls, {target!r},"
            for leaf in tree_leaves((node.args, node.kwargs)):
                if not isinstance(leaf, Node) and " at 0x" in repr(leaf):
                    yield f"an argument of {node.name} of type {type(leaf).__name__}"


#: torch's own, and what is found by the name under which it is registered.
_NAMED = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    BuiltinFunctionType,
    MethodDescriptorType,
)


def _has_a_name(target: Any) -> bool:
    """Whether another process finds the same function, or it says what it is good for.

    One that is made in another function holds values of its own. It may have a string ``cache_key``
    that stands for these.
    """
    if isinstance(target, torch._ops.HigherOrderOperator):
        return torch_graphs.cacheable(target)
    if isinstance(target, _NAMED):
        return True
    if isinstance(target, FunctionType) and "<" not in target.__qualname__:
        return True
    return isinstance(getattr(target, "cache_key", None), str)


def _views(graph: GraphModule) -> tuple[tuple[bool, bool], ...]:
    """Whether each input is to be read as conjugated, or as negated."""
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return tuple((v.is_conj(), v.is_neg()) for v in values if isinstance(v, torch.Tensor))


def plugin_options_text(options: Any) -> str:
    """A plugin's options, for keys.

    :raises NotCacheable: a value has no name outside of this process.
    """
    if options is None:
        return ""
    if isinstance(options, BaseModel):
        options = options.model_dump()
    text = json.dumps(options, sort_keys=True, default=repr)
    if " at 0x" in text:
        raise NotCacheable("an option's value means nothing to another process")
    return text


def content_hash(tensor: torch.Tensor) -> str:
    """A hash of what a real tensor holds, its shape, strides and dtype."""
    with torch_internals.real_tensors():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        count = plain.numel() * plain.element_size()
        held = (ctypes.c_char * count).from_address(plain.data_ptr()) if count else b""
        digest = hashlib.sha256(held)
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
    return digest.hexdigest()
