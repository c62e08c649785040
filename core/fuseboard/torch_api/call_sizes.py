"""The sizes of a graph's inputs as Dynamo knows them, for another process.

What Dynamo knows is in its ShapeEnv: a symbol for each size that changes, its value in the call,
its range, the guards. torch's own pickler takes all of that along. Over there fake inputs are made
of the real ones, as AOTAutograd makes them when Dynamo calls its backend: a context says which
symbol each size is.

Read against torch 2.13: ``torch/fx/experimental/symbolic_shapes.py`` (``StatefulSymbolicContext``,
``ShapeEnv.create_symbol``), ``torch/_functorch/_aot_autograd/frontend_utils.py``
(``process_inputs``), ``torch/fx/_graph_pickler.py`` (``_ShapeEnvPickleData``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.errors import LoweringError, error_text
from fuseboard.torch_api.symbols import (
    expression,
    in_the_example,
    known_facts,
    measures,
    symbolic_numbers,
    why_unknown,
)


@dataclass(frozen=True)
class CallSizes:
    """What Dynamo knows of the sizes of a graph's inputs.

    :ivar data: for :class:`SymbolicInputs`.
    :ivar texts: for keys, of each input: its sizes, strides and offset; None where they are plain.
    :ivar facts: for keys: ranges and guards.
    """

    data: bytes
    texts: tuple[str | None, ...]
    facts: tuple[str, ...]


def sizes_of(graph: GraphModule, inputs: Sequence[Any]) -> CallSizes | None:
    """Those of a graph of Dynamo's that waits for its backend; None where none is symbolic.

    :param inputs: of the call, as Dynamo gives them.
    :raises LoweringError: another process can't be told, or wouldn't know what only a call decides.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in nodes]
    items = [getattr(value, "item_memo", None) for value in values]
    numbers = [number for value in (*values, *inputs, *items) for number in symbolic_numbers(value)]
    if not numbers:
        return None
    every = [node.meta.get("example_value") for node in graph.graph.nodes]
    if why := next(filter(None, map(why_unknown, (*every, *inputs))), ""):
        raise LoweringError(why)
    for node, value, real in zip(nodes, values, inputs, strict=True):
        if not _is_example_of(value, real):
            raise LoweringError(f"the shape of its input {node.name} isn't what it was at first")
    expressions = [_expressions(value) for value in values]
    known = [_fixed_number(item) for item in items]
    try:
        from fuseboard.torch_api.graph_pickler import dumps

        data = dumps((numbers[0].node.shape_env, expressions, known), ())
    except Exception as error:  # whatever the code of an object in it raises
        raise LoweringError(
            f"what is known of its sizes can't be sent: {error_text(error)}"
        ) from error
    texts = (None if one is None else str(one) for one in expressions)
    return CallSizes(data, tuple(texts), (*known_facts(values), f"numbers {known}"))


def _fixed_number(item: Any) -> Any:
    """The number in a tensor that stands for one of the user's, where Dynamo guards on it."""
    if symbolic_numbers(item) and expression(item).is_number:
        return in_the_example(item)
    return None


def _is_example_of(value: Any, real: Any) -> bool:
    """Whether a fake value is like a real one, in the call that is being compiled."""
    if isinstance(real, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.layout != real.layout:
            return False
        return [in_the_example(n) for n in measures(value)] == measures(real)
    return bool(in_the_example(value) == in_the_example(real))


def _expressions(value: Any) -> list[Any] | None:
    """Sizes, strides and offset of a tensor, or a number; None where all of it is plain."""
    if not symbolic_numbers(value):
        return None
    numbers = measures(value) if isinstance(value, torch.Tensor) else [value]
    return [n if isinstance(n, int) else expression(n) for n in numbers]


class SymbolicInputs:
    """Fake inputs of a graph, with the symbols that Dynamo has in another process.

    :param data: of :class:`CallSizes`.
    :ivar mode: the fake mode that they belong to.
    :ivar numbers: of each input: what its ``item()`` is, where Dynamo guards on that; else None.
    """

    def __init__(self, data: bytes) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        from fuseboard.torch_api.graph_pickler import loads

        self.mode: Any = FakeTensorMode(shape_env=ShapeEnv())
        self._env, self._expressions, self.numbers = loads(data, self.mode)
        # AOTAutograd would have Dynamo trace again, without symbols for floats that are fixed.
        values = getattr(self._env, "backed_var_to_val", None) or self._env.var_to_val
        for symbol in [one for one in values if not one.is_integer]:
            if getattr(self._env.replacements.get(symbol), "is_number", False):
                del values[symbol]

    def made(self, inputs: Sequence[Any], apart: bool = False) -> list[Any]:
        """Fake values of some real ones, whose aliases and strides they have.

        :param inputs: of the call that was compiled.
        :param apart: of another fake mode, so that what is done to them is done to no others.
        :raises LoweringError: they have other sizes here than there.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = self.mode
        if apart:
            mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        pairs = zip(inputs, self._expressions, strict=True)
        return [self._made(mode, i, *pair) for i, pair in enumerate(pairs)]

    def _made(self, mode: Any, number: int, value: Any, known: list[Any] | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if known is None else self._env.create_symintnode(known[0], hint=value)
        if known is None:
            return mode.from_tensor(value, static_shapes=True)
        made = mode.from_tensor(value, **self._named(f"args_{number}", value.dim(), known))
        if _expressions(made) != known:
            raise LoweringError(f"the sizes of input {number} can't be made again: {made.shape}")
        return made

    def _named(self, name: str, rank: int, known: list[Any]) -> dict[str, Any]:
        """What lets torch take the known expressions in the place of new symbols."""
        import sympy  # type: ignore[import-untyped]  # it ships no type information
        from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

        source = LocalSource(name)
        properties = [
            *((TensorProperty.SIZE, i) for i in range(rank)),
            *((TensorProperty.STRIDE, i) for i in range(rank)),
            (TensorProperty.STORAGE_OFFSET, None),
        ]
        names = [TensorPropertySource(source, *one).name for one in properties]
        texts = [one() if callable(one) else one for one in names]
        symbols = dict(zip(texts, map(sympy.sympify, known), strict=True))
        context = StatefulSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * rank,
            tensor_source=source,
            shape_env_to_source_to_symbol_cache={id(self._env): symbols},
        )
        return {"symbolic_context": context, "source": source}
