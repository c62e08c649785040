"""Symbolic sizes: the part of :mod:`fuseboard.torch_api.internals` that is about them.

Read against torch 2.13: ``torch/fx/experimental/symbolic_shapes.py`` (``ShapeEnv``),
``torch/fx/experimental/sym_node.py``, ``torch/_subclasses/fake_tensor.py``.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.torch_api.views import eager_strides

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def measures(tensor: torch.Tensor) -> list[Any]:
    """A tensor's sizes, then its strides and storage offset where it has some."""
    if tensor.layout != torch.strided:
        return list(tensor.shape)
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def symbolic_numbers(value: Any) -> list[Any]:
    """The numbers in a node's value that aren't plain: itself, or its sizes, strides, offset."""
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            return []  # as nearly always: looking at each number takes a hundred times as long
        return [number for number in measures(value) if isinstance(number, NUMBERS)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in symbolic_numbers(item)]
    return [value] if isinstance(value, NUMBERS) else []


def is_symbolic(graph: GraphModule) -> bool:
    """Whether anything in a graph has symbolic sizes, or is a symbolic number."""
    return any(symbolic_numbers(node.meta.get("val")) for node in graph.graph.nodes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether all of a tensor's sizes and strides are known to be plain numbers at a glance."""
    return not getattr(tensor, "_has_symbolic_sizes_strides", True)


def expression(number: Any) -> Any:
    """The sympy expression of a symbolic number, under what is known of it now."""
    return number.node.expr


def why_unknown(value: Any) -> str:
    """Why a value's numbers can't be told before a call; "" where sizes of the inputs give them."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for number in symbolic_numbers(value):
        if free_unbacked_symbols(number):
            return "sizes that only the data decide"
        if any(not symbol.is_integer for symbol in expression(number).free_symbols):
            return "a float that changes from call to call"
    return ""


def in_the_example(number: Any) -> Any:
    """A number's plain value in the call that is being compiled. No guard is added.

    Only for numbers of which :func:`why_unknown` knows nothing.
    """
    if not isinstance(number, NUMBERS):
        return number
    if number.node.has_hint():
        return number.node.pytype(number.node.hint)
    expr = expression(number)
    return number.node.pytype(expr.xreplace(dict(number.node.shape_env.backed_var_to_val)))


def source_name(symbol: Any, value: Any) -> str:
    """What a symbol stands for, such as ``x.size()[0]``; its own name where that isn't known.

    :param value: a symbolic number, whose ShapeEnv is asked.
    """
    return _source_name(value.node.shape_env, symbol)


def _source_name(env: Any, symbol: Any) -> str:
    by_symbol = getattr(env, "var_to_sources", None) or {}
    sources = by_symbol.get(symbol)
    if not sources:
        return str(symbol)
    name = sources[0].name
    name = name() if callable(name) else name
    return re.sub(r"L\['(\w+)'\]", r"\1", str(name))


@contextlib.contextmanager
def compiling_in_a_call(mode: Any) -> Iterator[None]:
    """What holds while Dynamo compiles, in the middle of a call of compiled code.

    Modes, autocast and inference mode of the caller's are off, and random numbers stay where they
    were. Inside, ``mode`` is what :func:`fuseboard.torch_api.internals.fake_mode_of` finds.
    """
    from torch._guards import TracingContext, tracing
    from torch.utils._python_dispatch import _disable_current_modes

    state, pythons = torch.get_rng_state(), random.getstate()
    try:
        with (
            eager_strides(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            tracing(TracingContext(mode)),
        ):
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(pythons)


# --- guards ---------------------------------------------------------------------------------------


#: What a guard changes in a ShapeEnv, by kind: containers are copied, and put back in place.
_CONTAINERS = (
    "guards",
    "axioms",
    "replacements",
    "replacements_slocs",
    "var_to_range",
    "divisible",
    "size_like",
    "specializations",
    "specialization_stacks",
    "symbol_guard_counter",
    "deferred_runtime_asserts",
    "pending_fresh_unbacked_symbols",
    "ignorable_fresh_unbacked_symbols",
)
_COUNTERS = ("num_deferred_runtime_asserts",)


class GuardWatch:
    """What a ShapeEnv learns from now on, and a way back.

    :param mode: the fake mode whose ShapeEnv is watched; it may have none.
    :param known: how many of its guards are known; None: those that it has.
    """

    def __init__(self, mode: Any, known: int | None = None) -> None:
        self._env = getattr(mode, "shape_env", None)
        if self._env is None:
            return
        self._before = {name: _copied(getattr(self._env, name)) for name in self._names()}
        self._counts = {name: getattr(self._env, name) for name in _COUNTERS}
        self._known = {id(guard) for guard in self._env.guards[:known]}

    def _names(self) -> list[str]:
        return [name for name in _CONTAINERS if hasattr(self._env, name)]

    @property
    def guards(self) -> int:
        """How many guards there are now."""
        return 0 if self._env is None else len(self._env.guards)

    @property
    def too_late(self) -> bool:
        """Dynamo has made its guards: it doesn't hear of further ones."""
        return bool(getattr(self._env, "frozen", False))

    def added(self) -> list[str]:
        """The guards that came, as people read them."""
        if self._env is None:
            return []
        new = [guard.expr for guard in self._env.guards if id(guard) not in self._known]
        return list(dict.fromkeys(self._readable(expr) for expr in new))

    def code(self) -> list[str] | None:
        """The guards that came, as Python over the symbols' names; None if that doesn't say all."""
        if self._env is None:
            return []
        if any(getattr(self._env, name) != count for name, count in self._counts.items()):
            return None  # asserts on numbers that only a call decides are no guards
        from torch.utils._sympy.printers import PythonPrinter

        new = [guard.expr for guard in self._env.guards if id(guard) not in self._known]
        return list(dict.fromkeys(PythonPrinter().doprint(expr) for expr in new))

    def all_code(self) -> list[str] | None:
        """The guards, and what became of symbols and their ranges, which follows from guards.

        All of it as Python over the symbols' names; None if that doesn't say all.
        """
        code = self.code()
        if code is None or self._env is None:
            return code
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.printers import PythonPrinter

        ranges, replaced = self._before["var_to_range"], self._before["replacements"]
        for symbol, now in self._env.var_to_range.items():
            before = ranges.get(symbol)
            if before is None or symbol in self._env.replacements:
                continue
            if now.lower != before.lower and now.lower != -int_oo:
                code.append(f"{symbol} >= {now.lower}")
            if now.upper != before.upper and now.upper != int_oo:
                code.append(f"{symbol} <= {now.upper}")
        for symbol, expr in self._env.replacements.items():
            if symbol not in replaced:
                code.append(f"{symbol} == {PythonPrinter().doprint(expr)}")
        return list(dict.fromkeys(code))

    def fixed(self) -> dict[str, tuple[int, bool]]:
        """Sizes that became numbers: name → (the number, whether the user marked it dynamic)."""
        if self._env is None:
            return {}
        found: dict[str, tuple[int, bool]] = {}
        marked: set[Any] | None = None
        before = self._before["replacements"]
        for symbol, expr in list(self._env.replacements.items()):
            if expr.is_number and not (symbol in before and before[symbol].is_number):
                marked = self._marked() if marked is None else marked
                found[self._name(symbol)] = (int(expr), symbol in marked)
        return found

    def undo(self) -> None:
        """Forget what was learned, in every cache too. The code that relied on it must go."""
        if self._env is None:
            return
        for name, before in self._before.items():
            here = getattr(self._env, name)
            here.clear()
            (here.extend if isinstance(here, list) else here.update)(before)
        for name, count in self._counts.items():
            setattr(self._env, name, count)
        self._env._prev_cache_key = self._env._get_key()
        self._env._version_counter += 1
        if hasattr(self._env, "_replacements_version_counter"):
            self._env._replacements_version_counter += 1
        if hasattr(self._env, "fake_tensor_cache"):
            self._env.fake_tensor_cache.clear()
        for function in vars(type(self._env)).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    def _marked(self) -> set[Any]:
        """The symbols of sizes that ``mark_dynamic`` was called for."""
        found: set[Any] = set()
        for tracked in getattr(self._env, "tracked_fakes", None) or ():
            constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
            sizes = getattr(tracked.fake, "shape", ())
            for size, constraint in zip(sizes, constraints, strict=False):
                if constraint is not None and not constraint.warn_only:
                    # The symbol itself, though it has been replaced since.
                    found |= (
                        size.node._expr.free_symbols if isinstance(size, torch.SymInt) else set()
                    )
        return found

    def _name(self, symbol: Any) -> str:
        return _source_name(self._env, symbol)

    def _readable(self, expr: Any) -> str:
        text = str(expr)
        for symbol in expr.free_symbols:
            name = self._name(symbol).replace("\\", r"\\")
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text


def guard_again(code: Sequence[str], values: Sequence[Any]) -> bool:
    """Add guards that :meth:`GuardWatch.code` told of, where they hold in the example.

    :param values: of a graph's nodes, in which every symbol of the guards appears alone.
    :returns: False where one doesn't hold, or a symbol isn't there; nothing is added then.
    """
    if not code:
        return True
    symbols: dict[str, Any] = {}
    for value in values:
        for number in symbolic_numbers(value):
            if isinstance(number, torch.SymInt) and expression(number).is_Symbol:
                symbols.setdefault(str(expression(number)), number)
    example = {name: in_the_example(number) for name, number in symbols.items()}
    try:
        if not all(eval(text, dict(_GUARD_NAMES), example) for text in code):
            return False
    except NameError:  # a symbol that these values don't show, or a function of torch's printer
        return False
    return all(bool(eval(text, dict(_GUARD_NAMES), symbols)) for text in code)


_GUARD_NAMES = {"max": torch.sym_max, "min": torch.sym_min, "math": math}


def known_facts(values: Sequence[Any]) -> list[str]:
    """What is known of the symbols in values: ranges, and guards that speak of them."""
    numbers = [number for value in values for number in symbolic_numbers(value)]
    if not numbers:
        return []
    env = numbers[0].node.shape_env
    symbols = {symbol for number in numbers for symbol in expression(number).free_symbols}
    facts = [f"{symbol} in {env.var_to_range.get(symbol)}" for symbol in symbols]
    said = [guard.expr for guard in env.guards]
    said += [item.expr for items in env.deferred_runtime_asserts.values() for item in items]
    facts += [str(expr) for expr in said if expr.free_symbols & symbols]
    return sorted(set(facts))


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return {
            key: list(item) if isinstance(item, list) else item for key, item in container.items()
        }
    return list(container)


def guarded_number(placeholder: Node) -> int | None:
    """The number in the 0-d tensor that an input of Dynamo's graph is, if it guards on that.

    None where it doesn't. Read in ``torch/_subclasses/fake_tensor.py`` of 2.13: the number of a 0-d
    integer on the CPU has a symbol, known by its source, which is fixed once something depends on
    it. (``item_memo`` has it, too, until the graph writes to the tensor.)
    """
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    mode = getattr(placeholder.meta.get("example_value"), "fake_mode", None)
    env: Any = getattr(mode, "shape_env", None)
    symbols = getattr(env, "source_to_var", None)
    if source is None or not symbols:
        return None
    from torch._dynamo.source import CallMethodItemSource

    name: Any = CallMethodItemSource(source).name
    symbol = symbols.get(name() if callable(name) else name)
    number: Any = None if symbol is None else env.replace(symbol)
    return int(number) if getattr(number, "is_Integer", False) else None
