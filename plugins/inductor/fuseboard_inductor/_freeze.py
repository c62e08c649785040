"""Inductor's freezing: weights become constants of a graph, and what they determine is folded.

Read against torch 2.13, in ``torch/_inductor``: ``compile_fx.py`` (``fw_compiler_freezing``),
``freezing.py`` (``freeze``, ``convert_conv_weights_to_channels_last``), ``freezing_utils.py``,
``constant_folding.py`` (``replace_node_with_constant``), ``output_code.py`` (``CompiledFxGraph``),
``codecache.py`` (``FxGraphCache``, ``PyCodeCache``), ``runtime/compile_tasks.py``.

Frozen code names its constants, and the module that it is in holds them: one code serves all
weights of the same shapes, in a module for each. Inductor's own cache counts on that as well, but
refuses constants in oneDNN's layouts (``CacheabilityValidator.check_tensor``), as most are on a
CPU; and ``PyCodeCache`` never lets go of a module, and so of the weights.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard import LoweringError, fork_safe_lock
from fuseboard_inductor import _artifacts, _compile, _fallbacks, _generated
from fuseboard_inductor._recipes import Recipe, recording

aten = torch.ops.aten

#: What ``torch._inductor.config`` is beside the settings of the region.
SETTINGS = {
    "freezing": True,
    "freezing_discard_parameters": False,  # the weights stay the user's
    "always_keep_tensor_constants": True,  # no values in code, however small the tensor
    "max_autotune": False,  # it packs weights while it lowers, into constants without a name
    "max_autotune_gemm": False,
    "cpp_wrapper": False,
    "fx_graph_cache": False,  # the board has its own, and this one would copy constants
    "fx_graph_remote_cache": False,
}

#: Inductor's patterns and counters are the process's.
_lock = fork_safe_lock()


@dataclass(frozen=True)
class Code:
    """What Inductor made of a frozen graph, for any weights.

    :ivar compiled: the pickled ``CompiledFxGraph``, without constants that come of weights.
    :ivar recipe: makes these constants.
    :ivar needs: of its module.
    """

    compiled: bytes
    recipe: Recipe
    notes: tuple[str, ...]
    needs: _generated.Needs


def compile_frozen(
    graph: GraphModule,
    weights: Sequence[int],
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    random: str,
) -> tuple[Code, bytes | None]:
    """Code for a graph, and the same as an artifact; None where it means nothing elsewhere.

    Freezing computes with the weights' values and decides by their shapes, so that any values do.

    :param graph: is changed.
    :param weights: positions of the inputs that are to be constants.
    :param inputs: fake.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    complex_ops = _fallbacks.ops_on_complex(graph)
    with _context(inputs, settings), _compile.telling_strides(graph):
        others = [value for i, value in enumerate(inputs) if i not in weights]
        graph = _compile.joint_graph_passes(graph)
        own = _constants(graph)
        graph, recipe, layouts = _freeze(graph, weights, inputs)
        _compile.mark_roundings(graph)
        with _fallbacks.counting() as fallbacks:
            compiled: Any = compile_fx_inner(
                graph, others, static_input_idxs=[], is_inference=True, layout_opt=layouts
            )
        names = getattr(compiled, "frozen_param_names", None)
        if names is None or not callable(getattr(compiled, "write_to_disk", None)):
            raise LoweringError("this version of Inductor doesn't tell a frozen graph's constants")
        _let_go(compiled)
        made = [v for name, v in compiled.constants.items() if not _is_number(name, v)]
        if not all(any(value is one for one in own) for value in made):
            raise LoweringError("Inductor made constants of weights while it lowered the graph")
        stored = _artifacts.pickled(compiled)
        if stored is None:
            raise LoweringError("what Inductor compiled can't be copied for other weights")
        notes = _fallbacks.notes(compiled, fallbacks, complex_ops, random)
        needs = _generated.needs_of(compiled)
        code = Code(stored, recipe.only(names.values()), notes, needs)
        stamp = _artifacts.stamp()
        return code, None if stamp is None else pickle.dumps((stamp, code))


def load_code(artifact: bytes, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Code | None:
    """The code of an artifact; None where Inductor's settings or sources are others."""
    with _context(inputs, settings):
        stamp, code = pickle.loads(artifact)
        if stamp != _artifacts.stamp():
            return None
        _module(pickle.loads(code.compiled), code)  # its kernels, for which no handle is to wait
        return code  # type: ignore[no-any-return]


def frozen_call(
    code: Code,
    weights: Sequence[torch.Tensor],
    others: Sequence[Any],
    settings: Mapping[str, Any],
) -> Callable[[list[Any]], Sequence[Any]]:
    """The code with these weights in it: boxed, takes the other inputs.

    :param others: fake.
    """
    from torch._inductor.output_code import CompiledFxGraphConstants

    with _context(others, settings):
        compiled = pickle.loads(code.compiled)
        made = code.recipe.follow([_plain(weight) for weight in weights])
        module = _module(compiled, code)
        frozen = {name: made[own] for name, own in compiled.frozen_param_names.items()}
        constants = CompiledFxGraphConstants()
        vars(module).update(constants.unwrap(compiled) | frozen)
        compiled.current_callable = module.call
        compiled.compiled_fn_runner = getattr(module, "runner", None)
        compiled.post_compile(others, constants, compiled.fx_kwargs)
        return _generated.direct_call(compiled)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """Its memory as it is to be read: kernels look at no flags."""
    return weight.detach().resolve_conj().resolve_neg()


def _module(compiled: Any, code: Code) -> Any:
    """As ``CompiledFxGraph.after_deserialization`` loads it, but nobody else holds the module."""
    return _generated.load_module(compiled.cache_key, compiled.write_to_disk(), code.needs)


@contextlib.contextmanager
def _context(inputs: Sequence[Any], settings: Mapping[str, Any]) -> Iterator[Any]:
    """Inductor as it is to be, for this thread alone, whatever is being compiled around it.

    Without a tracing context, since that is where ``freeze`` looks for the weights.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with (
        _lock,
        unset_fake_temporarily(),
        torch.no_grad(),
        torch._guards.tracing(None),
        config.patch({**settings, **SETTINGS}),
        _compile.fake_mode_of(inputs) as mode,
        V.set_fake_mode(mode),
    ):
        yield mode


def _stand_in(weight: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one, zeros."""
    shape, strides = tuple(weight.shape), weight.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(max(span, 0), dtype=weight.dtype, device=weight.device)
    return memory.as_strided(shape, strides)


def _freeze(
    graph: GraphModule, weights: Sequence[int], inputs: Sequence[Any]
) -> tuple[GraphModule, Recipe, bool]:
    """What ``fw_compiler_freezing`` does between the joint-graph passes and compiling.

    :returns: the frozen graph, what makes its constants, and whether layouts are optimised.
    """
    from torch._inductor import compile_fx, freezing
    from torch._inductor.constant_folding import replace_node_with_constant
    from torch._inductor.freezing_utils import enter_freezing
    from torch._inductor.graph import GraphLowering

    layouts = bool(GraphLowering.decide_layout_opt(graph, is_inference=True))
    if layouts:
        compile_fx.fake_tensor_prop(graph, list(inputs), True)
        freezing.convert_conv_weights_to_channels_last(graph)
    _narrow_zero_points(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    with recording(graph) as recipe:
        with enter_freezing():
            for position in weights:
                stand_in = _stand_in(inputs[position])
                replace_node_with_constant(graph, placeholders[position], stand_in)
        graph.recompile()
        others = [value for i, value in enumerate(inputs) if i not in weights]
        frozen, _ = freezing.freeze(graph, graph, others)
    _keep_nan(frozen)
    output = frozen.graph.output_node()
    results: Any = output.args[0]
    if any(isinstance(value, Node) and value.op == "get_attr" for value in results):
        raise LoweringError("a result is a constant, which the caller could write to")
    output.meta["user_visible_output_idxs"] = [
        i for i, value in enumerate(results) if isinstance(value, Node)
    ]
    return frozen, recipe, layouts


def _keep_nan(graph: GraphModule) -> None:
    """Write relu and clip so that Inductor doesn't put them into oneDNN's products.

    These answer a number for NaN (``fx_passes/mkldnn_fusion.py`` has the patterns). Inductor fuses
    them with what follows instead; on ResNet-50 and MobileNetV2 that is no slower.
    """
    for node in list(graph.graph.nodes):
        bound: Any = 0 if node.target is aten.relu.default else None
        if node.target is aten.clamp_min.default:
            bound = node.args[1]
        elif node.target is aten.mul.Tensor and node.args[1] == 0:  # a leaky relu's slope
            bound = node.args[1]
        value = node.meta.get("val")
        if not isinstance(bound, int | float) or not isinstance(value, torch.Tensor):
            continue
        if not value.is_floating_point():
            continue
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        with graph.graph.inserting_before(node):
            number = graph.graph.call_function(aten.full.default, ([], bound), options)
        number.meta["val"] = value.new_empty(())
        if node.target is not aten.mul.Tensor:
            node.target = aten.maximum.default
        node.args = (node.args[0], number)
    graph.recompile()


def _narrow_zero_points(graph: GraphModule) -> None:
    """Make zero points int32 before they are frozen.

    What lowers oneDNN's quantised products would do it (``mkldnn_lowerings.py``), with a constant
    that no recipe tells of.
    """
    quantised = torch.ops.quantized_decomposed
    packet = getattr(quantised, "dequantize_per_channel", None)  # none before PT2E is imported
    if packet is None:
        return
    for node in graph.graph.find_nodes(op="call_function", target=packet.default):
        zero_points: Any = node.args[2]
        value = zero_points.meta.get("val") if isinstance(zero_points, Node) else None
        if value is None or value.dtype == torch.int32:
            continue
        with graph.graph.inserting_before(node):
            narrow = graph.graph.call_function(
                aten._to_copy.default, (zero_points,), {"dtype": torch.int32}
            )
        narrow.meta["val"] = value.to(torch.int32)
        node.update_arg(2, narrow)


def _is_number(name: str, value: torch.Tensor) -> bool:
    """Whether a constant is a scale or zero point that the graph has as a number.

    The same lowerings make tensors of these; of those that come of weights they name others.
    """
    return value.dim() == 0 and name.startswith(("x_scale", "x_zp", "w_zp"))


def _constants(graph: GraphModule) -> list[Any]:
    return [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]


def _let_go(compiled: Any) -> None:
    """Of the constants that were compiled with, which ``PyCodeCache`` would keep for ever."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules:
        if getattr(module, "key", None) == compiled.cache_key:
            for name in compiled.frozen_param_names:
                vars(module).pop(name, None)
