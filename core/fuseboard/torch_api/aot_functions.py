"""The autograd function that AOTAutograd puts around a training graph.

Read against torch 2.13: ``torch/_functorch/_aot_autograd/runtime_wrappers.py``
(``_AOTDispatchAutogradFunctionFactory``, ``_codegen_backward_prologue``) and ``schemas.py``
(``ViewAndMutationMeta``, ``OutputAliasInfo``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.fx import GraphModule, Node

#: Where the functions that are made in this context are noted; None: nowhere.
_noted: ContextVar[list[Any] | None] = ContextVar("AOTAutograd's functions", default=None)

#: Outputs that have a gradient of their own, by the names in ``OutputType``.
_OWN_GRADIENT = frozenset({"non_alias", "unsafe_view_alias", "custom_function_view"})
#: Outputs that are made anew as views of a base, which is among the results besides them.
_OF_A_BASE = frozenset({"alias_of_intermediate_save_as_output", "alias_of_intermediate"})
_BASE_IS_OUTPUT = "alias_of_intermediate_base_is_user_output"


@contextlib.contextmanager
def noting_functions() -> Iterator[list[Any]]:
    """A list of the autograd functions that AOTAutograd makes in the block, in this thread."""
    _install()
    noted: list[Any] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@functools.cache
def _install() -> None:
    """Outside of blocks torch's own function is called, and nothing else."""
    from torch._functorch._aot_autograd import runtime_wrappers

    factory: Any = getattr(runtime_wrappers, "_AOTDispatchAutogradFunctionFactory", None)
    build = getattr(factory, "build", None)
    if build is None:
        return

    @wraps(build)
    def noting(self: Any) -> Any:
        function = build(self)
        if (noted := _noted.get()) is not None:
            noted.append(function)
        return function

    factory.build = noting


@dataclass(frozen=True)
class FunctionForm:
    """What the function's results are.

    :ivar count: of the results; those that have no gradient are among them.
    :ivar with_gradient: positions of those that have one, in the order in which the backward graph
        takes these.
    :ivar bases: positions of results, whose bases are the last results, in order.
    :ivar written: positions of the inputs that a call writes to. They have no gradient; their new
        values are the first results.
    """

    count: int
    with_gradient: tuple[int, ...]
    bases: tuple[int, ...]
    written: tuple[int, ...] = ()


class UnknownForm(Exception):
    """Results aren't the graph's own outputs; the text says what they are."""


def form_of(function: Any) -> FunctionForm:
    """:raises UnknownForm: the reason is the text."""
    data: Any = getattr(function, "metadata", None)
    try:
        if getattr(function, "maybe_subclass_metadata", None) is not None:
            raise UnknownForm("an input or a result is of a tensor subclass")
        if any(
            one.mutates_metadata or (one.mutates_data and one.requires_grad)
            for one in data.input_info
        ):
            raise UnknownForm("it writes to an input with a gradient, or changes an input's form")
        if data.tokens or data.is_rng_op_functionalized or data.num_graphsafe_rng_states:
            raise UnknownForm("it has effects, or a generator's state among its inputs")
        written = tuple(data.mutated_inp_runtime_indices)
        outputs = data.output_info
        kinds = [one.output_type.name for one in outputs]
        own = [
            len(written) + i
            for i, one in enumerate(outputs)
            if kinds[i] in _OWN_GRADIENT
            and issubclass(one.raw_type, torch.Tensor)
            and one.requires_grad_for_backward
        ]
        based = {one.base_idx: i for i, one in enumerate(outputs) if kinds[i] in _OF_A_BASE}
        bases = tuple(len(written) + based[i] for i in range(data.num_intermediate_bases))
    except (AttributeError, KeyError) as error:
        raise UnknownForm(f"this torch describes its results otherwise ({error})") from error
    first_base = len(written) + len(outputs)
    count = first_base + len(bases)
    return FunctionForm(count, (*own, *range(first_base, count)), bases, written)


def gradients_by_result(
    backward: GraphModule, form: FunctionForm, is_differentiated: Sequence[bool]
) -> list[frozenset[int]] | None:
    """For the gradient of each input the results whose gradients it is computed from.

    :param backward: as AOTAutograd captured it.
    :param is_differentiated: for each input.
    :returns: None where the graph isn't what it is taken for.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    outputs: Any = backward.graph.output_node().args[0]
    count = len(form.with_gradient)
    if len(outputs) != len(is_differentiated) or len(placeholders) < count:
        return None
    reached: dict[Node, frozenset[int]] = dict(
        zip(
            placeholders[len(placeholders) - count :],
            (frozenset({i}) for i in form.with_gradient),
            strict=True,
        )
    )
    for node in backward.graph.nodes:
        if node not in reached:
            inputs = (reached.get(one, frozenset()) for one in node.all_input_nodes)
            reached[node] = frozenset[int]().union(*inputs)
    return [reached.get(one, frozenset()) for one in outputs]


def keeps_graph() -> bool:
    """Whether the backward that is under way may run again."""
    asks = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asks is None or bool(asks())
