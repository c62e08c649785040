"""Inductor's compiled graphs as bytes, and back.

Read against torch 2.13: ``torch/_inductor/output_code.py`` (``CompiledFxGraph``) and
``torch/_inductor/codecache.py`` (``FxGraphCache._save_graph``, ``cache_hit_post_compile``). What is
stored is what Inductor's own cache stores: Python source and metadata. Shared objects stay in
Inductor's cache directory, and are built again from the source where they are gone from there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fuseboard
from fuseboard_inductor import _generated

log = logging.getLogger("fuseboard")


def dump(compiled: Any, notes: tuple[str, ...]) -> bytes | None:
    """A compiled graph, with what there is to say of it; None where it can't be stored.

    Like :func:`load` it is called while Inductor's settings are those of the region.
    """
    key = stamp()
    if key is None or getattr(compiled, "frozen_param_names", None):
        return None  # these live in the graph module, which isn't stored
    stored = pickled(compiled)
    if stored is None:
        return None
    return pickle.dumps((key, stored, notes, _generated.needs_of(compiled)))


def pickled(compiled: Any) -> bytes | None:
    """A compiled graph without its code's module; None where it has what can't be pickled."""
    if not callable(getattr(compiled, "prepare_for_serialization", None)):
        return None
    if getattr(compiled, "torchbind_constants", None):
        return None
    stored = copy.copy(compiled)
    stored.prepare_for_serialization()
    try:
        return pickle.dumps(stored)
    except Exception as error:  # pickle raises whatever an object's own code does
        log.debug("inductor: a compiled graph can't be stored: %s", error)
        return None
    finally:
        # ``__del__`` reads it, and torch sets it to what has no partitions.
        stored.compiled_fn_runner = None


def load(
    artifact: bytes, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """The compiled graph and its notes; None where Inductor's settings or sources are others."""
    from torch._inductor.output_code import CompiledFxGraphConstants

    key, stored, notes, needs = pickle.loads(artifact)
    if key != stamp():
        return None
    constants = CompiledFxGraphConstants()
    with fuseboard.real_tensors():  # of which there are constants
        unpickled = pickle.loads(stored)
    graph = _with_module(unpickled, constants, needs)
    if graph is None:
        return None
    graph.post_compile(list(inputs), constants, graph.fx_kwargs)
    return _generated.direct_call(graph), notes


def _with_module(graph: Any, constants: Any, needs: _generated.Needs) -> Any:
    """The graph with its code's module; None where its source is gone.

    What Inductor does beside that concerns Triton's kernels, and its counters.
    """
    if _generated.is_for_cpu(graph):
        module = _generated.load_module(graph.cache_key, graph.write_to_disk(), needs)
        vars(module).update(constants.unwrap(graph))
        graph.current_callable = module.call
        graph.recursively_apply_fns = getattr(module, "recursively_apply_fns", None)
        graph.compiled_fn_runner = getattr(module, "runner", None)
        return graph
    from torch._inductor.codecache import FxGraphCache

    return FxGraphCache.cache_hit_post_compile(graph, {}, constants)[0]


def stamp() -> str | None:
    """What Inductor's code depends on beside the graph; None where that has no name elsewhere.

    Its settings can be changed at any time, so they aren't in the backend's fingerprint. torch's
    version is in the key of what is stored. Inductor's own key is a hash of all of its sources and
    of Triton's libraries, half a second of CPU time in each process that loads.
    """
    from torch._inductor import config

    settings = json.dumps(config.save_config_portable(), sort_keys=True, default=repr)
    if " at 0x" in settings:  # a pass of the user's
        return None
    return hashlib.sha256(f"{_gpu()}\n{settings}".encode()).hexdigest()


def _gpu() -> str:
    """The GPU and the Triton that code was compiled for; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    from torch._inductor.codecache import CacheBase

    return str(CacheBase.get_system()["hash"])
