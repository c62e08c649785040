"""Graphs traced once more, so that ops in them fall into others.

Read against torch 2.13: ``torch/fx/experimental/proxy_tensor.py`` (``make_fx``),
``torch/_subclasses/fake_tensor.py`` (``allow_non_fake_inputs``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseboard.torch_api.compiling import alone_in_tracing
from fuseboard.torch_api.internals import fake_mode_of, isolated_tracing, real_tensors
from fuseboard.torch_api.symbols import NUMBERS, in_the_example, why_unknown

#: Zeros that a kernel is given to see how it lays out its results are no larger together.
_ZEROS_BYTES = 1 << 28


def retrace(
    graph: GraphModule, inputs: Sequence[Any], table: dict[Any, Callable[..., Any]]
) -> GraphModule:
    """Trace a graph again under a decomposition table, on its own fake inputs.

    In a tracing context of its own: the current one has the graphs of ``invoke_subgraph`` as they
    were traced before, and would give these. The graph's constants are real tensors, and stay
    constants.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(inputs)
    with (
        isolated_tracing(mode),
        mode if mode is not None else contextlib.nullcontext(),
        _beside_real_tensors(mode),
        enable_python_dispatcher(),
        torch.fx.traceback.preserve_node_meta(),
        alone_in_tracing(),
    ):
        return make_fx(_Retracer(graph).run, decomposition_table=table)(*inputs)


def as_its_kernel_lays_out(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op's kernel gives for zeros that lie as values which are being traced.

    A fake kernel may lay out results otherwise: those of ``log_sigmoid_forward`` and of
    ``native_batch_norm`` keep the order of dimensions, and the real ones are row-major. Symbolic
    sizes are those of the call that is compiled.

    :returns: None where a size isn't known, the zeros would be too large, or the kernel refuses.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(map(why_unknown, tensors)):
        return None
    if sum(map(_bytes_in_the_example, tensors)) > _ZEROS_BYTES:
        return None
    with disable_proxy_modes_tracing(), real_tensors(), torch.random.fork_rng(devices=()):
        given_args, given = tree_map_only(torch.Tensor, _zeros_as, (tuple(args), kwargs))
        numbers = tree_map_only(NUMBERS, in_the_example, (given_args, given))
        try:
            return op(*numbers[0], **numbers[1])
        except (RuntimeError, ValueError, IndexError):  # of zeros, where others would do
            return None


def _bytes_in_the_example(value: torch.Tensor) -> int:
    count: int = math.prod(map(in_the_example, value.shape))
    return count * value.element_size()


def _zeros_as(value: torch.Tensor) -> torch.Tensor:
    shape, strides = ([in_the_example(n) for n in ns] for ns in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()


class _Retracer(torch.fx.Interpreter):
    """Runs a graph in which ops fall into others, whose results may lie otherwise in memory.

    What is a view of such a result may then be none of theirs: a copy has its elements.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, ValueError):  # of the kernel, of its fake one
            if target is not torch.ops.aten.view.default:
                raise
        return super().call_function(torch.ops.aten.reshape.default, args, kwargs)


@contextlib.contextmanager
def _beside_real_tensors(mode: Any) -> Iterator[None]:
    """Let a fake mode take real tensors, too: torch's own switch, put back at the end."""
    if not hasattr(mode, "allow_non_fake_inputs"):
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
