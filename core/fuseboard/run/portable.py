"""Programs as bytes: generated functions with what they name, for another process.

A function that :class:`~fuseboard.run.codegen.Source` wrote becomes its source and its globals, ops
become their names, graphs that ops call become functions. All else is pickled as it is: so a
backend's code can be carried where what it calls is a module's function, or an object of a module's
class that pickles. Reading it back imports those modules, and no graph is made again.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.contracts import Boxed
from fuseboard.run.codegen import compile_source
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.profiler import Spanned


@dataclass(frozen=True)
class Preparing:
    """Makes values from weights, by several functions in turn.

    :ivar functions: (boxed, positions of the weights that it takes).
    """

    functions: tuple[tuple[Boxed, tuple[int, ...]], ...]

    def __call__(self, weights: Sequence[Any]) -> tuple[Any, ...]:
        with torch_internals.real_tensors():
            return tuple(
                value
                for function, positions in self.functions
                for value in function([weights[i] for i in positions])
            )


@dataclass(frozen=True)
class PortableProgram:
    """A program without containment and without a look at its weights.

    :ivar run: boxed; takes some of the graph's inputs, then the tuple of prepared values.
    :ivar takes: which: those of the inputs that come with each call, then of the weights.
    :ivar prepare: makes the values from the graph's inputs.
    """

    run: Boxed
    takes: tuple[tuple[int, ...], tuple[int, ...]]
    prepare: Preparing


def to_bytes(value: Any) -> bytes:
    """
    :raises Exception: what pickle, or the code of an object in it, raises.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def from_bytes(data: Any) -> Any:
    """What :func:`to_bytes` was given.

    :raises Exception: what pickle, or the code of an object in it, raises.
    """
    with warnings.catch_warnings():  # torch warns of its own pytrees
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            source = getattr(value, "__fuseboard_source__", None)
            return NotImplemented if source is None else _reduced(value, source)
        if isinstance(value, torch._ops.OpOverload):
            return _op, (value.namespace, value._opname, value._overloadname)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return _higher_order_op, (value.name(),)
        if isinstance(value, GraphModule):
            return Called, _called(value)
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, Spanned):  # it holds a name of this process
            return itself, (value.call,)
        return NotImplemented


def _reduced(function: Any, source: str) -> tuple[Any, ...]:
    ops = function.__fuseboard_ops__
    left_out = {"__builtins__", function.__name__}
    held = {
        name: ops.get(name, value)
        for name, value in function.__globals__.items()
        if name not in left_out
    }
    return _function, (function.__name__, source, held)


def _function(name: str, source: str, held: Mapping[str, Any]) -> Callable[..., Any]:
    direct = {key: torch_internals.direct_call(value) for key, value in held.items()}
    ops = {key: held[key] for key in held if direct[key] is not held[key]}
    return compile_source(name, source, direct, ops)


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order_op(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)


def itself(value: Any) -> Any:
    """What stands in for an object that is of use in this process alone."""
    return value


@dataclass(frozen=True)
class Called:
    """A graph as an op calls it, with its operands one by one.

    :ivar one_value: it returns a value by itself.
    :ivar values: that the code takes besides.
    """

    boxed: Boxed
    one_value: bool
    values: tuple[Any, ...] = ()

    def __call__(self, *operands: Any) -> Any:
        results = self.boxed([*operands, *self.values])
        return results[0] if self.one_value else results


@dataclass(frozen=True)
class AroundGraphs:
    """A higher-order op as in eager, on functions in the place of its graphs.

    :ivar body: takes the region's inputs, then a function for each graph.
    :ivar functions: what they call, how many prepared values it takes, whether the op wants a value
        by itself.
    :ivar count: of the region's inputs.
    """

    body: Boxed
    functions: tuple[tuple[Boxed, int, bool], ...]
    count: int

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        inputs, values = args[: self.count], args[self.count :]
        args.clear()
        for call, count, one_value in self.functions:
            inputs.append(Called(call, one_value, tuple(values[:count])))
            del values[:count]
        return self.body(inputs)


def _called(graph: GraphModule) -> tuple[Boxed, bool]:
    from fuseboard.partition.inner_plans import returns_one_value, with_flat_results
    from fuseboard.run.eager import boxed_function

    return boxed_function(with_flat_results(graph), "inner"), returns_one_value(graph)
