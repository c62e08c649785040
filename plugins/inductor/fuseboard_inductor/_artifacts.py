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

log = logging.getLogger("fuseboard")


def dump(compiled: Any, notes: tuple[str, ...]) -> bytes | None:
    """A compiled graph, with what there is to say of it; None where it can't be stored.

    Like :func:`load` it is called while Inductor's settings are those of the region.
    """
    key = stamp()
    if key is None or getattr(compiled, "frozen_param_names", None):
        return None  # these live in the graph module, which isn't stored
    stored = pickled(compiled)
    return None if stored is None else pickle.dumps((key, stored, notes))


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
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    key, stored, notes = pickle.loads(artifact)
    if key != stamp():
        return None
    constants = CompiledFxGraphConstants()
    graph, _ = FxGraphCache.cache_hit_post_compile(pickle.loads(stored), {}, constants)
    if graph is None:
        return None
    graph.post_compile(list(inputs), constants, graph.fx_kwargs)
    return graph, notes


def stamp() -> str | None:
    """What Inductor's code depends on beside the graph; None where that has no name elsewhere.

    Its settings can be changed at any time, so they aren't in the backend's fingerprint.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CacheBase, torch_key

    settings = json.dumps(config.save_config_portable(), sort_keys=True, default=repr)
    if " at 0x" in settings:  # a pass of the user's
        return None
    parts = (torch_key().hex(), CacheBase.get_system()["hash"], settings)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
