"""Which graphs are compiled beside their calls, and why others aren't."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session, board
from fuseboard.capture.unfit_graphs import may_save_inference_tensors
from fuseboard.files import make_private
from fuseboard.lower.artifacts import Store, store_at
from fuseboard.ops.effects import is_collective
from fuseboard.ranks.job import several_ranks
from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.symbols import in_the_example, symbolic_numbers, why_unknown
from fuseboard.torch_api.tensor_classes import is_fake, is_plain
from fuseboard.workshop.process import scratch_cache


def why_in_calls(session: Session, inputs: Sequence[Any]) -> str:
    """Why a graph is compiled within its calls rather than beside them; "" if it needn't be."""
    settings = session.settings
    if settings.policy != "measured" or settings.settle != "background":
        return f"policy = {settings.policy!r}, settle = {settings.settle!r}"
    if session.eager_is_fallback_only:
        return (
            "what the setting backends names runs from the first call on, as eager isn't among it"
        )
    if settings.on_failure == "raise" or session.decides_on_failure:
        return "failures may be raised, which needs a call to raise in"
    if settings.ranks == "priority" and several_ranks():
        return "a job of several ranks, which plan by priority (ranks)"
    if any(session.module_name(name) is None for name in session.plugins):
        return "a plugin is an object of this process"
    if path := session.override_of_this_process():
        return f"{path}, a function of the settings, can't be imported by another process"
    for value in inputs:
        if is_fake(value) and symbolic_numbers(value):
            return "sizes that change, of inputs that aren't known before its first call"
        if why := why_unknown(value) or why_not_kept(in_the_example(value)):
            return why
    if may_save_inference_tensors(inputs):
        return "an input was made in inference mode, and another one has a gradient"
    return ""


def why_held(graph: GraphModule) -> str:
    """Why a graph can only be tried where it is; "" if it can be elsewhere.

    Parameters are among its inputs, but those in a graph inside of it: what that writes to is what
    it holds, and no copy of that.
    """
    for one in graph.modules():
        for name, _ in one.named_parameters(recurse=False):
            return f"the graph holds the parameter {name}"
    return ""


def why_not_apart(graph: GraphModule) -> str:
    """Why no other process can run it: it talks to the ranks of this one's job."""
    for one in graphs_in(graph):
        for node in one.graph.nodes:
            if is_collective(node.target):
                return f"{node.name} is a collective of this process's ranks"
    return ""


def with_a_cache(session: Session) -> Session:
    """The session, or one like it with a cache that goes with this process.

    A cache is how the workshop gives back what it compiled. Where there is to be none, or none can
    be written to, one in a temporary directory serves.
    """
    settings = session.settings
    if settings.cache and _is_writable(store_at(settings)):
        return session
    remote = settings.cache_remote if settings.cache else None
    scratch = {"cache": True, "cache_dir": str(scratch_cache()), "cache_remote": remote}
    made = board.session(settings.model_copy(update=scratch))
    made.notes.extend(session.notes)
    return made


def _is_writable(store: Store) -> bool:
    try:
        make_private(store.directory)
    except OSError:
        return False
    return os.access(store.directory, os.W_OK)


def why_not_kept(value: Any) -> str:
    """Why an input can't be kept for work on it later; "" if it can."""
    if type(value) is int:  # a size
        return ""
    if not is_plain(value) and not is_fake(value):
        return f"an input is of type {type(value).__name__}"
    if value.device.type != "cpu":
        return f"an input is on {value.device}"
    if value.layout != torch.strided or value.is_quantized:
        return "an input isn't strided"
    if value.requires_grad and not value.is_leaf and value.is_inference():
        return "an input was made in inference mode"
    return ""
