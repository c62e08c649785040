"""The one module that reaches Inductor's internals.

Read against torch 2.13: ``torch/_inductor/compile_fx.py`` (``compile_fx_inner``,
``compile_fx_forward``, ``_recursive_joint_graph_passes``), ``torch/_inductor/decomposition.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard import Fusion, LoweredRegion, LoweringError, Region
from fuseboard_inductor import _artifacts, _fallbacks


def decomposition_table(random: str) -> dict[Any, Callable[..., Any]]:
    """What Inductor decomposes before it lowers.

    :param random: ``"fast"`` puts in Inductor's own random numbers, ``"eager"`` keeps torch's.
    """
    # Some decompositions (max_pool2d's) look for torch._inductor.lowering without importing it.
    from torch._inductor import config, lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=random == "eager"):
        table = dict(select_decomp_table())
    cat = torch.ops.aten.cat.default
    if cat in table:
        table[cat] = functools.partial(_cat, table[cat])
    remainder = torch.ops.aten.remainder
    return table | {remainder.Tensor: _remainder, remainder.Scalar: _remainder}


def _cat(decomposed: Callable[..., Any], tensors: Sequence[Any], dim: int = 0) -> Any:
    """Laid out as eager's: where one tensor isn't empty, Inductor's keeps that one's strides."""
    result = decomposed(tensors, dim)
    if not isinstance(result, torch.Tensor):
        return result
    return result.clone(memory_format=torch._prims_common.suggest_memory_format(result))


def _remainder(value: Any, divisor: Any) -> Any:
    """As ATen's kernel: Inductor's vectorised one takes a rounded quotient times the divisor off.

    Of an infinite divisor that is NaN, and of a large quotient it is off by more than a rounding.
    """
    if not torch.result_type(value, divisor).is_floating_point:
        return NotImplemented
    rest = torch.fmod(value, divisor)
    is_other_sign = (rest < 0) != (divisor < 0)
    return torch.where((rest != 0) & is_other_sign, rest + divisor, rest)


def joint_passes(graph: GraphModule, random: str) -> list[Fusion]:
    """Inductor's passes over a joint graph, as one rewrite."""

    def apply() -> None:
        from torch._inductor import config
        from torch._inductor.virtualized import V

        values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        settings = {"fallback_random": random == "eager", **roundings(graph)}
        with config.patch(settings), fake_mode_of(values) as mode:
            with V.set_fake_mode(mode) if mode is not None else contextlib.nullcontext():
                result = joint_graph_passes(graph)
        if result is not graph:
            graph.graph = result.graph

    return [Fusion("inductor's joint-graph passes", (), apply)]


def joint_graph_passes(graph: GraphModule) -> GraphModule:
    from torch._inductor import compile_fx

    for one in graph.modules():
        if isinstance(one, GraphModule):
            _keep_products_with_zero(one)
    passes = compile_fx._recursive_joint_graph_passes
    keywords: dict[str, Any] = {}
    accepted = inspect.signature(passes).parameters
    if "skip_invoke_subgraph" in accepted:
        keywords["skip_invoke_subgraph"] = True
    if "input_device" in accepted:
        keywords["input_device"] = _device_of(graph)
    with _fallbacks.without_warning():
        result = passes(graph, **keywords)
    return graph if result is None else result


def _keep_products_with_zero(graph: GraphModule) -> None:
    """Multiply floats by the float 0: products with the integer are folded into zeros.

    Those of NaN and infinities are NaN (torch 2.13, ``UniformValueConstantFolder``'s peepholes);
    ``softshrink`` is taken apart into one for that reason.
    """
    for target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex()
            ):
                node.args = tuple(
                    0.0 if isinstance(arg, int) and arg == 0 else arg for arg in node.args
                )


def _device_of(graph: GraphModule) -> torch.device:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def lower_region(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """Compile a region through ``compile_fx_inner``."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    graph = region.graph
    settings = settings_of(region)
    complex_ops = _fallbacks.ops_on_complex(graph)
    telling = telling_strides(graph)
    with config.patch(settings), telling, fake_mode_of(inputs) as mode:
        with V.set_fake_mode(mode) if mode is not None else contextlib.nullcontext():
            if region.kind == "inference":
                graph = joint_graph_passes(graph)
            drop_dead_items(graph)
            mark_roundings(graph)
            output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
            output.meta["user_visible_output_idxs"] = [
                i for i, value in enumerate(output.args[0]) if isinstance(value, Node)
            ]
            with _fallbacks.counting() as fallbacks:
                compiled = compile_fx_inner(
                    graph,
                    list(inputs),
                    static_input_idxs=list(region.static_inputs),
                    is_backward=region.kind == "backward",
                    is_inference=region.kind == "inference",
                    cpp_wrapper=settings.get("cpp_wrapper", False),
                )
        if not callable(compiled):
            raise LoweringError(f"Inductor returned {type(compiled).__name__}, nothing to call")
        notes = _fallbacks.notes(compiled, fallbacks, complex_ops, region.random)
        artifact = _artifacts.dump(compiled, notes)
    return LoweredRegion(call=_boxed(compiled), notes=notes, artifact=artifact)


def load_region(artifact: bytes, region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """A compiled region from the bytes that :func:`lower_region` gave."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    with config.patch(settings_of(region)), fake_mode_of(inputs) as mode:
        with V.set_fake_mode(mode) if mode is not None else contextlib.nullcontext():
            loaded = _artifacts.load(artifact, inputs)
    return None if loaded is None else LoweredRegion(call=_boxed(loaded[0]), notes=loaded[1])


def drop_dead_items(graph: GraphModule) -> None:
    """Results that nobody reads: Inductor's flex attention on CPU gives two of three."""
    for node in reversed(graph.graph.find_nodes(op="call_function", target=operator.getitem)):
        if not node.users:
            graph.graph.erase_node(node)


def _boxed(compiled: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """The compiled graph as a boxed callable."""
    if getattr(compiled, "_boxed_call", False):
        return compiled  # type: ignore[no-any-return]

    def call(args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        args.clear()
        return compiled(*inputs)  # type: ignore[no-any-return]

    return call


def settings_of(region: Region) -> dict[str, Any]:
    """What ``torch._inductor.config`` is while the region is compiled."""
    options = region.options
    settings: dict[str, Any] = {
        "fallback_random": region.random == "eager",
        "keep_output_stride": True,
        **roundings(region.graph),
    }
    if options is not None:
        settings["max_autotune"] = getattr(options, "max_autotune", False)
        if getattr(options, "cpp_wrapper", False) and _device_of(region.graph).type == "cpu":
            settings["cpp_wrapper"] = True
        settings.update(options.config)
    return settings


def roundings(graph: GraphModule) -> dict[str, Any]:
    """The setting that keeps eager's roundings to half types between fused ops, if there are any.

    Inductor computes in float32, and by default a result that is read by the same kernel isn't
    rounded: ``(x.half() * x.half()).float()`` is finite where eager's is infinite, and a sum less
    one of its terms isn't what eager leaves of it (pytorch#183607, pytorch#185337).
    """
    from torch._inductor import config

    wanted = hasattr(config, "emulate_precision_casts") and any(map(_rounds, graph.graph.nodes))
    return {"emulate_precision_casts": True} if wanted else {}


def mark_roundings(graph: GraphModule) -> None:
    """Mark the ops that round to a half type, or read one.

    torch marks them while it traces under the setting (``_maybe_record_pointwise_barrier`` of
    ``torch/fx/experimental/proxy_tensor.py``); this graph was traced without it. Without the
    setting the marks say nothing.
    """
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and (
            _rounds(node) or any(map(_rounds, node.all_input_nodes))
        ):
            node.meta["low_precision_pointwise_barrier"] = True


def _rounds(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def telling_strides(graph: GraphModule) -> contextlib.AbstractContextManager[None]:
    """Let the key of Inductor's cache hold how the results are to be laid out.

    They are laid out as the fake values say, which the key doesn't tell. The board puts some of
    these right, so that an equal graph that somebody else compiled may have other results.
    """
    from torch.compiler import config

    if not hasattr(config, "cache_key_tag"):
        return contextlib.nullcontext()
    results = [node for node in graph.graph.output_node().args[0] if isinstance(node, Node)]
    values = [node.meta.get("val") for node in results]
    strides = [v.stride() for v in values if getattr(v, "layout", None) == torch.strided]
    tag = f"{config.cache_key_tag} strides {strides}"
    return config.patch(cache_key_tag=tag)  # type: ignore[no-any-return]


@contextlib.contextmanager
def fake_mode_of(inputs: Sequence[Any]) -> Iterator[Any]:
    """The mode of fake inputs, or of the tracing context.

    Inside, it takes real tensors as well: a region's constants.
    """
    modes = [mode for mode in (getattr(v, "fake_mode", None) for v in inputs) if mode is not None]
    context = torch._guards.TracingContext.try_get()
    mode = modes[0] if modes else context.fake_mode if context is not None else None
    if mode is None:
        yield None
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield mode
    finally:
        mode.allow_non_fake_inputs = before
