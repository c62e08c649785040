"""The one module that reaches torch's private APIs.

Read against torch 2.13: ``torch/multiprocessing/reductions.py``,
``torch/fx/experimental/symbolic_shapes.py``, ``torch/_inductor/cudagraph_trees.py``
(``clear_cublas_cache``). What may be missing is probed by attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def has_unbacked_symbols(value: torch.Tensor | torch.SymInt) -> bool:
    """Whether a size or a value is known only once the data are."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def weak_storage(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's memory; ``expired()`` says that it was freed.

    AOTAutograd may hand the same weight over as a new tensor object in each call, so a weak
    reference to the object would say nothing.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors of equal shapes pairwise, in one kernel where torch can."""
    if not targets:
        return
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def forget_cublas_workspaces() -> None:
    """Let cuBLAS's workspaces go, so that one is made inside the memory pool of a recording.

    One made outside could be freed while the graph still writes to it, as torch's own CUDA graph
    trees do whenever they record.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
