"""Graphs traced once more, so that ops in them fall into others.

Read against torch 2.13: ``torch/fx/experimental/proxy_tensor.py`` (``make_fx``),
``torch/_subclasses/fake_tensor.py`` (``allow_non_fake_inputs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.torch_api.compiling import alone_in_tracing
from fuseboard.torch_api.internals import fake_mode_of, isolated_tracing


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


def beside_the_trace(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op gives for values that are being traced, with no node for it."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return op(*args, **kwargs)


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
