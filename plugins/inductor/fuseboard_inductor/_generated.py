"""Inductor's generated modules, loaded without what generates them.

A generated module imports two names from modules with which all of Inductor's lowerings come, more
than a second of CPU time in a process that only loads: ``extern_kernels``, of which code for a CPU
uses little but torch's own functions, and ``_align``. It also asks for the flags of a compiler, and
so for setuptools, to find shared objects that were compiled before. What these come to is noted by
the process that compiles and has imported all of it; one that loads is given just that, and
everything that wasn't noted comes from Inductor's own modules. Only the generated module sees the
stand-ins.

Read against torch 2.13, in ``torch/_inductor``: ``codegen/wrapper.py`` (``write_header``),
``select_algorithm.py`` (``ExternKernelChoice``), ``async_compile.py`` (``cpp_pybinding``),
``codecache.py`` (``PyCodeCache``, ``CppPythonBindingsCodeCache``), ``output_code.py``
(``CompiledFxGraph.after_deserialization``).
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_KERNELS = "torch._inductor.select_algorithm"
_ALIGN = "torch._inductor.codegen.memory_planning"
_COMPILE = "torch._inductor.async_compile"


@dataclass(frozen=True)
class Needs:
    """What a generated module uses of Inductor.

    :ivar kernels: names of ``extern_kernels`` under which torch's functions of these names stand.
    :ivar libraries: paths of its kernels' shared objects, in the order in which it asks for them;
        None where that isn't known.
    """

    kernels: tuple[str, ...] = ()
    libraries: tuple[str, ...] | None = None


def needs_of(compiled: Any) -> Needs:
    """What the module of a graph that this process compiled uses."""
    source = getattr(compiled, "source_code", None) or ""
    used = dict.fromkeys(re.findall(r"\bextern_kernels\.(\w+)", source))
    known = getattr(sys.modules.get(_KERNELS), "extern_kernels", None)
    own = tuple(name for name in used if getattr(known, name, used) is getattr(torch, name, None))
    return Needs(own, _libraries(getattr(compiled, "cache_key", None), source))


def _libraries(key: str | None, source: str) -> tuple[str, ...] | None:
    from torch._inductor.codecache import PyCodeCache

    modules = (one for one in PyCodeCache.modules if getattr(one, "key", None) == key)
    module = next(modules, None)
    if module is None:
        return None
    libraries = [
        getattr(getattr(value, "__self__", None), "__file__", None)
        for value in vars(module).values()
        if inspect.isbuiltin(value) and value.__name__ == "kernel"
    ]
    if None in libraries or len(libraries) != source.count("async_compile.cpp_pybinding("):
        return None
    return tuple(map(str, libraries))


def is_for_cpu(compiled: Any) -> bool:
    """Whether it runs on a CPU alone, and not through Triton."""
    has_triton_kernels = bool(getattr(compiled._triton_bundle, "kernel_artifacts", ()))
    return set(compiled.device_types) == {"cpu"} and not has_triton_kernels


def direct_call(compiled: Any) -> Callable[[list[Any]], Any]:
    """The boxed function of a graph that was loaded.

    ``CompiledFxGraph.__call__`` looks into ``torch._inductor.debug``, and thus needs the scheduler
    and the intermediate representation, whether executions are to be recorded; the rest of it tunes
    Triton's kernels.
    """
    if not is_for_cpu(compiled):
        return compiled  # type: ignore[no-any-return]
    call = compiled.current_callable

    def run(args: list[Any]) -> Any:
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.compiled = compiled  # type: ignore[attr-defined]  # its end would be that of its code
    return run


def load_module(key: str, path: str, needs: Needs) -> ModuleType:
    """The module at a path, which nobody else is given.

    As ``_reload_python_module`` of ``torch/_inductor/runtime/compile_tasks.py`` makes it.
    """
    from torch._inductor.runtime import compile_tasks

    module = ModuleType(f"{compile_tasks.__name__}.{key}")
    module.__file__ = path
    module.key = key  # type: ignore[attr-defined]
    scope = vars(module)
    scope["__builtins__"] = {**vars(builtins), "__import__": _import_for(needs)}
    code = compile(Path(path).read_text(), path, "exec", dont_inherit=True)
    exec(code, scope)
    return module


def _import_for(needs: Needs) -> Callable[..., Any]:
    """``__import__`` that imports no lowerings."""
    stand_ins: dict[str, SimpleNamespace] = {}
    if _KERNELS not in sys.modules:
        stand_ins[_KERNELS] = SimpleNamespace(extern_kernels=_ExternKernels(needs.kernels))
    align = getattr(importlib.import_module("torch._inductor.utils"), "_align", None)
    if _ALIGN not in sys.modules and align is not None:
        stand_ins[_ALIGN] = SimpleNamespace(_align=align)
    if needs.libraries is not None:
        libraries = needs.libraries
        stand_ins[_COMPILE] = SimpleNamespace(AsyncCompile=lambda: _loading(libraries))

    def import_module(
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> Any:
        known = stand_ins.get(name)
        if known is not None and fromlist and all(hasattr(known, one) for one in fromlist):
            return known
        return builtins.__import__(name, scope, local, fromlist, level)

    return import_module


class _ExternKernels:
    """``extern_kernels``: torch's functions, and for any other name Inductor's own."""

    def __init__(self, names: tuple[str, ...]) -> None:
        vars(self).update({name: getattr(torch, name) for name in names})

    def __getattr__(self, name: str) -> Any:
        importlib.import_module("torch._inductor.lowering")  # registers them
        return getattr(importlib.import_module(_KERNELS).extern_kernels, name)


def _loading(libraries: tuple[str, ...]) -> Any:
    """An ``AsyncCompile`` that loads kernels whose shared objects are where they were."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache, cache_dir

    load = getattr(CppPythonBindingsCodeCache, "_load_library", None)
    if load is None or list(inspect.signature(load).parameters) != ["path", "key"]:
        return AsyncCompile()
    paths = iter(libraries)
    ours = Path(cache_dir()).resolve()

    class Loading(AsyncCompile):  # type: ignore[misc]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            path = Path(next(paths, ""))
            if path.is_file() and path.resolve().is_relative_to(ours):
                entry = CppPythonBindingsCodeCache.entry_function
                return getattr(load(str(path), path.name.partition(".")[0]), entry)
            return super().cpp_pybinding(argtypes, source_code)

    return Loading()
