"""What AOTAutograd puts around the graphs that it captures, for another process.

Mutations, aliases, the autograd function: torch's own precompilation bundles all of it, with the
code of the graphs. Here numbers stand for that code, and the other process has functions of its own
for them.

Read against torch 2.13: ``torch/_functorch/_aot_autograd/aot_autograd_result.py``
(``BundledAOTAutogradResult``, ``deserialize_bundled_cache_entry``), ``autograd_cache.py``
(``AOTAutogradCache``), ``schemas.py`` (``SerializableAOTDispatchCompiler``),
``torch/_inductor/output_code.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import OutputCode

Code = Callable[[list[Any]], Any]


@dataclasses.dataclass
class NumberedCode(OutputCode):
    """Stands for the code of one graph; pickled as its number alone."""

    number: int
    function: Any = None

    def __call__(self, *inputs: Any) -> Any:
        boxed = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list) else list(inputs)
        return self.function(boxed)

    def prepare_for_serialization(self) -> None:
        self.function = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """There is nothing to do: other code takes its place."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""


@contextlib.contextmanager
def bundling() -> Iterator[Callable[[Callable[..., Code]], Any]]:
    """Let AOTAutograd bundle what it makes in the block; for a process that does nothing else.

    Yields what has to be put around each of its compilers. torch refuses to bundle graphs that its
    own cache wouldn't take, and would keep bundles in that cache: neither matters here, where the
    board has keys of its own.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import autograd_cache
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler

    count = 0

    def bundled(compiler: Callable[..., Code]) -> Any:
        def compile_graph(graph: Any, inputs: Any) -> NumberedCode:
            nonlocal count
            code = NumberedCode(count)
            count += 1
            code._fx_graph_cache_key, code._time_taken_ns = f"fuseboard{code.number}", 0
            code.function = compiler(graph, inputs)
            return code

        return SerializableAOTDispatchCompiler(NumberedCode, compile_graph)

    cache = autograd_cache.AOTAutogradCache
    with (
        config.patch(
            bundled_autograd_cache=True, enable_autograd_cache=True, strict_autograd_cache=True
        ),
        torch._dynamo.config.patch(caching_precompile=True),
        mock.patch.object(autograd_cache, "check_cacheable", _nothing),
        mock.patch.object(autograd_cache, "autograd_cache_key", _new_key),
        mock.patch.object(cache, "_lookup", _nothing),
        mock.patch.object(cache, "_write_to_local_cache", _nothing),
    ):
        yield bundled


def _nothing(*args: Any, **keywords: Any) -> None:
    """Find nothing in torch's cache, keep nothing there, and refuse no graph for its sake."""


def _new_key(*args: Any, **keywords: Any) -> tuple[str, list[str]]:
    return uuid.uuid4().hex, []


def bundle_of(compiled: Any) -> bytes:
    """The bundle of what AOTAutograd made in a block of :func:`bundling`."""
    entry = compiled.serialize()
    for name in ("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str"):
        setattr(entry, name, None)  # for logs, and long
    return pickle.dumps(entry)


class _Held:
    """Code in the place of an ``InductorOutput``, so that calls go right to it."""

    def __init__(self, code: Code, held: Any) -> None:
        self._code = code
        # Of a backward.
        self.backward_state_indices = getattr(held, "backward_state_indices", None)
        self.num_symints_saved_for_bw_ = getattr(held, "num_symints_saved_for_bw_", None)

    def load(self, example_inputs: Any) -> Code:
        return self._code

    def post_compile(self, code: Code, settings: Any) -> Code:
        return code


def from_bundle(data: bytes, codes: Sequence[Code]) -> Callable[..., Any]:
    """What AOTAutograd made, around other code.

    :param codes: boxed functions, in the order in which the graphs were compiled.
    """
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    entry = pickle.loads(data)
    # torch keeps a deep copy, to be serialised again, which nobody does here.
    vars(entry)["__deepcopy__"] = lambda _: entry
    for name in ("compiled_fw", "compiled_bw"):
        if (held := getattr(entry, name)) is not None:
            setattr(entry, name, _Held(codes[held.result.number], held))
    compiled = deserialize_bundled_cache_entry(entry)
    return torch._dynamo.disable(compiled)  # type: ignore[no-any-return]
