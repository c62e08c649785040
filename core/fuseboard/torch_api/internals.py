"""torch's private APIs, what isn't a subject of its own.

Read against torch 2.13 (``torch/_guards.py``, ``torch/_functorch/aot_autograd.py``,
``torch/_functorch/partitioners.py``, ``torch/_dynamo/backends/common.py``); everything that moved
between 2.11 and 2.14 is probed by signature or attribute, never by version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class InputRoles:
    """What AOTAutograd knows of a graph's inputs, by position.

    :ivar static: parameters and buffers.
    :ivar mutated: inputs that the call writes to (in the epilogue, outside of the graph).
    :ivar visible_outputs: how many leading outputs the caller sees; the others are saved for
        the backward.
    :ivar copied_back: position of an output → that of the input that it is copied into after the
        call, where that is all that is done with it.
    """

    static: frozenset[int]
    mutated: frozenset[int]
    visible_outputs: int | None
    copied_back: Mapping[int, int] = field(default_factory=dict)


def writes_cut_gradients_off() -> bool:
    """Whether results have a gradient, and so has an input that the graph writes to.

    What the graph computes from it after that depends on the input that there was before, for
    autograd: AOTAutograd's function knows no other one. In eager it depends on the input as it is.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if metadata is None:
        return False
    hidden = ("mutations_hidden_from_autograd", "mutations_under_no_grad_or_inference_mode")
    return any(one.requires_grad for one in metadata.output_info) and any(
        info.mutates_data
        and info.requires_grad
        and not any(getattr(info, h, False) for h in hidden)
        for info in metadata.input_info
    )


def first_call_unwatched() -> contextlib.AbstractContextManager[Any]:
    """For the block, let AOTAutograd not look for aliases among the results of custom ops.

    In the first call of what it compiled it sees each op by a dispatch mode (pytorch#170986), those
    of preparing and judging included: 0.15 ms for each of some thousands. The call after the block
    is watched in its place.
    """
    from torch._functorch import config

    if not hasattr(config, "check_custom_op_aliasing"):  # torch 2.11
        return contextlib.nullcontext()
    return config.patch(check_custom_op_aliasing=False)  # type: ignore[no-any-return]


def aot_autograd(**compilers: Any) -> Callable[..., Any]:
    """AOTAutograd as a Dynamo backend; see ``torch._dynamo.backends.common``."""
    from torch._dynamo.backends.common import aot_autograd as torch_aot_autograd

    return torch_aot_autograd(**compilers)


def input_roles() -> InputRoles:
    """The roles of the inputs of the forward or inference graph that is being compiled."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if metadata is None:
        return InputRoles(frozenset(), frozenset(), None)
    if subclasses_were_unwrapped(context):  # assume the worst of every input
        everything = frozenset(range(len(metadata.input_info)))
        return InputRoles(frozenset(), everything, getattr(metadata, "num_forward", None))
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    mutated |= {i for i, info in enumerate(metadata.input_info) if info.mutates_metadata}
    return InputRoles(
        static=frozenset(metadata.static_input_indices or ()),
        mutated=frozenset(mutated),
        visible_outputs=getattr(metadata, "num_forward", None),
        copied_back=_copied_back(metadata),
    )


def _copied_back(metadata: Any) -> dict[int, int]:
    """Read in ``runtime_wrappers.py`` (``_apply_input_mutations``) of torch 2.13."""
    if getattr(metadata, "tokens", None):  # for effects; they come first among the outputs
        return {}
    return {
        output: position
        for output, position in enumerate(metadata.mutated_inp_runtime_indices)
        if (info := metadata.input_info[position]).mutates_data
        and not info.mutates_metadata
        and not info.mutates_storage_metadata
    }


def subclasses_were_unwrapped(context: Any) -> bool:
    """Whether tensor subclasses among the inputs became several inputs each.

    The positions in AOTAutograd's metadata then speak of other inputs than the graph has.
    """
    return bool(getattr(context, "params_unwrapped_to_flat_index", None))


def inputs_were_changed() -> bool:
    """Whether the compiled graph's inputs may be others than Dynamo's though they are as many."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    tokens = getattr(metadata, "tokens", None)  # for effects; they come first
    return metadata is None or bool(tokens) or subclasses_were_unwrapped(context)


def is_dynamo_error(error: BaseException) -> bool:
    """Whether Dynamo itself knows what to do after an error: trace again, or break the graph.

    Read in ``torch/_dynamo/output_graph.py`` (``call_user_compiler``) and ``exc.py`` of torch 2.13.
    """
    from torch._dynamo import exc

    fallbacks = getattr(exc, "exceptions_allowed_to_be_fallback", ())
    if isinstance(error, exc.Unsupported):  # by a compile inside of AOTAutograd's, as of a cond
        return False
    return isinstance(error, (exc.TorchDynamoException, *fallbacks))


def mirrors_dynamo() -> bool:
    """Whether the graph that is being compiled returns just what Dynamo's does, for its inputs.

    So it is where nothing is written to, and AOTAutograd makes no result anew from an input or from
    another result.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if inputs_were_changed():
        return False
    written = (i.mutates_data or i.mutates_metadata for i in metadata.input_info)  # type: ignore[union-attr]
    kinds = {info.output_type.name for info in metadata.output_info}  # type: ignore[union-attr]
    return not any(written) and kinds <= {"non_alias", "unsafe_view_alias"}


def registered_ops() -> list[str]:
    """Every op that torch knows: ``aten.mm.default``, ``higher_order.cond``."""
    overloads = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()]
    names = [name if name.count(".") > 1 else f"{name}.default" for name in overloads]
    names.extend(f"higher_order.{name}" for name in getattr(torch._ops, "_higher_order_ops", ()))
    return names


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The FakeTensorMode of fake values, or None where there is none."""
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    context = torch._guards.TracingContext.try_get()
    return context.fake_mode if context is not None else None


@contextlib.contextmanager
def isolated_tracing(fake_mode: Any) -> Iterator[None]:
    """A tracing context of its own around the lowering of one region.

    A backend that fills in ``TracingContext.output_strides`` or reads ``fw_metadata`` (Inductor
    does both) would otherwise act on the whole graph's. The fake mode, and so the ShapeEnv, is
    shared: guards are still recorded.
    """
    if fake_mode is None:
        yield
        return
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def capturing() -> contextlib.AbstractContextManager[None]:
    """Settings of AOTAutograd for a graph that it captures.

    Backward code may not overwrite saved tensors: the positions that it notes for that are those of
    the whole backward; code for a part of it would overwrite other tensors (silently: see "Inductor
    on regions" in docs/design.md). And the backward graph is given away with the forward graph, not
    when it first runs. It is captured with autocast off, though the forward may be called under it:
    what the forward excepts from autocast would be cast in the backward.
    """
    from torch._functorch import config

    settings = {
        "donated_buffer": False,
        "force_non_lazy_backward_lowering": True,
        "backward_pass_autocast": "off",
    }
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    return config.patch(known)  # type: ignore[no-any-return]


def compiling_later() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What enters, in a later call, the contexts that a graph is given to a compiler in.

    That is what AOTAutograd does for a backward that it compiles when it first runs: torch's timers
    and callbacks see a compilation. Read in ``runtime_wrappers.py`` (``get_or_compile``) of 2.13.
    """
    tracing = torch._guards.TracingContext.try_get()
    compiling = torch._guards.CompileContext.try_get()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        from torch._dynamo.callback import CallbackTrigger, callback_handler
        from torch._dynamo.utils import CompileEventLogger, dynamo_timed, get_metrics_context

        name = str(getattr(compiling, "compile_id", None))
        with (
            torch._guards.tracing(tracing),
            torch._guards.compile_context(compiling),
            torch._C._DisableAutocast(),
            get_metrics_context(),
            dynamo_timed(
                "backward._backward_impl",
                phase_name="entire_backward_compile",
                log_pt2_compile_event=True,
                dynamo_compile_column_us="backward_cumulative_compile_time_us",
            ),
            callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, name),
        ):
            CompileEventLogger.compilation_metric(is_forward=False)
            yield

    return entered


def note_no_donated_buffers() -> None:
    """Tell the forward graph that is being compiled that its backward overwrites no saved tensor.

    Without that note a backward that ran once without ``retain_graph`` is taken to overwrite some,
    and a later ``backward(retain_graph=True)`` is refused. Read in ``runtime_wrappers.py``
    (``_backward_impl``) of torch 2.13.
    """
    context = torch._guards.TracingContext.try_get()
    metadata: Any = getattr(context, "fw_metadata", None)
    if getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []


def allocations(profile: Any, marker: str) -> tuple[list[tuple[int, int, int]], int]:
    """The CPU allocator's events in a ``torch.profiler.profile`` with ``profile_memory``.

    :returns: (nanoseconds, bytes taken or given back, address) in order; and when ``marker`` began.
    """
    results = profile.profiler.kineto_results
    found: list[tuple[int, int, int]] = []
    pending = list(results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    marked = next((e.start_ns() for e in results.events() if e.name() == marker), 0)
    return sorted(found, key=lambda change: change[0]), marked


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """The function that torch decomposes an op into, if there is one."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found


def storage_address(tensor: torch.Tensor) -> int:
    """An integer that is equal for tensors on one storage, while both live."""
    return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor count its writes from a number again, after some were undone.

    Left as it is where torch has no such function. Read in ``torch/csrc/autograd/init.cpp`` (2.13).
    """
    setter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if setter is not None:
        setter((tensor,), (version,))


def overlapping(tensors: list[torch.Tensor]) -> set[int]:
    """Positions of the tensors whose memory overlaps that of another one of the list."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    return set(compute_overlapping_tensors(tensors, symbolic=False))


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute on real tensors inside the block, although a fake mode may be active.

    Compilers run under one: a tensor that is made there has no values, and real ones are refused.
    ``torch.load`` asks the tracing context for it, so there is none inside. Gradients are off.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch._guards.tracing(None), torch.no_grad():
        yield


def watch_dynamo(started: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Be told, for the rest of the process, when Dynamo begins to trace and when it has ended.

    Has to be called again after ``torch._dynamo.reset()``, which forgets it; in a trace that one's
    end alone is told then. ``torch/_dynamo/callback.py``; where traces nest, the outermost counts.
    """
    from torch._dynamo.callback import callback_handler

    if started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)


def size_hint(value: Any) -> int:
    """A symbolic int's value in the example that is being compiled; 4096 for unbacked ones."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint if value.node.has_hint() else None
        return 4096 if hint is None else int(hint)
    return int(value)


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a fake tensor's sizes, strides and offset, or in a SymInt."""
    # Most tensors have none; torch's search takes 20 us a tensor, over graphs of 40,000 nodes.
    if isinstance(value, torch.Tensor) and not getattr(value, "_has_symbolic_sizes_strides", True):
        return set()
    from torch.fx.experimental.symbolic_shapes import free_symbols as torch_free_symbols

    return set(torch_free_symbols(value))


def plain_symbol(value: Any) -> Any:
    """The symbol, where a SymInt is just that; else None."""
    import sympy  # type: ignore[import-untyped]  # it ships no type information

    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None


def direct_call(target: Any) -> Any:
    """What an op overload's ``__call__`` calls: one Python frame less on the hot path."""
    if isinstance(target, torch._ops.OpOverload):
        return getattr(target, "_op", target)
    return target
