"""Custom ops that no other process can import, as bytes: those of a notebook, or of what is typed.

pickle sends a function by its name, under which no other process finds one of ``__main__``. Here it
is sent as its code, with what that names: globals, cells, defaults. Both processes run the same
Python. What an op computes here later, once a cell with it has run again, is another definition.

Read against torch 2.13: ``torch/_library/custom_ops.py`` (``CustomOpDef``, ``register_kernel``),
``torch/_library/simple_registry.py``.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import inspect
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch.fx import GraphModule

from fuseboard.errors import LoweringError, error_text
from fuseboard.torch_api.custom_ops import MAIN, custom_op_names, is_importable

#: What an op may have that isn't sent, as it is seldom: rules for subclasses and for autocast.
_NOT_SENT = ("_torch_dispatch_fns", "_autocast_dtype", "_disabled_kernel")


def definitions(graph: GraphModule) -> bytes:
    """The custom ops in a graph that no other process can import; b"" where there are none.

    Ops of a :class:`torch.library.Library` aren't among them: it keeps no function.

    :raises LoweringError: one of them can't be sent.
    """
    found = []
    for name in custom_op_names(graph):
        op = _definition(name)
        if op is not None and not is_importable(op._init_fn.__module__):
            found.append(op)
    if not found:
        return b""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(found)
    except LoweringError:
        raise
    except Exception as error:  # whatever the objects raise that an op's code names
        raise LoweringError(
            f"an op that the program defines can't be sent: {error_text(error)}"
        ) from error
    return stream.getvalue()


def define(data: bytes) -> None:
    """Define the ops of :func:`definitions` in this process."""
    pickle.loads(data)


def _definition(name: str) -> Any:
    try:
        from torch._library.custom_ops import OPDEFS
    except ImportError:
        return None
    return OPDEFS.get(name)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and not _is_found(value):
            code = marshal.dumps(value.__code__)
            arguments = (code, value.__module__, value.__qualname__, value.__closure__)
            return _function, arguments, _state(value), None, None, _complete
        if isinstance(value, CellType):
            return _cell, (), (value.cell_contents,), None, None, _fill
        if isinstance(value, ModuleType) and _is_there(value.__name__):
            return importlib.import_module, (value.__name__,)
        if type(value).__name__ == "CustomOpDef":
            return _op, _parts(value)
        return NotImplemented


def _is_found(function: FunctionType) -> bool:
    """Whether another process finds a function by its name."""
    found: Any = sys.modules.get(function.__module__ or "")
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function and _is_there(function.__module__)


def _is_there(module: str | None) -> bool:
    """Whether another process has a module under its name."""
    is_torchs = module is not None and module.partition(".")[0] == "torch"
    return is_torchs or (module != MAIN and is_importable(module))


# --- functions ------------------------------------------------------------------------------------


def _state(function: FunctionType) -> dict[str, Any]:
    named = {n for n in _globals_of(function.__code__) if n in function.__globals__}
    return {
        "globals": {name: function.__globals__[name] for name in sorted(named)},
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__dict__": dict(function.__dict__),
    }


def _globals_of(code: CodeType) -> Iterator[str]:
    """The globals that a function's code names, the functions in it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _function(
    code: bytes, module: str | None, name: str, closure: tuple[CellType, ...] | None
) -> FunctionType:
    own = {"__builtins__": builtins, "__name__": module}
    made = FunctionType(marshal.loads(code), own, closure=closure)
    made.__qualname__ = name
    return made


def _complete(function: FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state.pop("globals"))
    for name, value in state.items():
        setattr(function, name, value)


def _cell() -> CellType:
    return CellType()


def _fill(cell: CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents


# --- ops ------------------------------------------------------------------------------------------


def _parts(op: Any) -> tuple[Any, ...]:
    if any(getattr(op, name, None) for name in _NOT_SENT) or _has_effects(op._qualname):
        raise LoweringError(f"{op._qualname} has effects, or rules for autocast or for subclasses")
    kernels = {device: _kernel(wrapped) for device, wrapped in op._backend_fns.items()}
    functions = (op._abstract_fn, op._backward_fn, op._setup_context_fn, op._vmap_fn)
    return op._namespace, op._name, op._schema, op._tags, op._init_fn, kernels, functions


def _kernel(wrapped: Any) -> Any:
    """The user's function in what ``register_kernel`` makes of it."""
    return inspect.getclosurevars(inspect.unwrap(wrapped)).nonlocals["fn"]


def _has_effects(name: str) -> bool:
    from torch._library.simple_registry import singleton

    return getattr(getattr(singleton.find(name), "effect", None), "effect", None) is not None


def _op(
    namespace: str,
    name: str,
    schema: str,
    tags: Any,
    function: Callable[..., Any],
    kernels: dict[str | None, Callable[..., Any]],
    functions: tuple[Callable[..., Any] | None, ...],
) -> Any:
    from torch._library.custom_ops import CustomOpDef

    op = CustomOpDef(namespace, name, schema, function, tags)
    for device, kernel in kernels.items():
        op.register_kernel(device, kernel)
    op._abstract_fn, op._backward_fn, op._setup_context_fn, vmap = functions
    if vmap is not None:
        op.register_vmap(vmap)
    return op
