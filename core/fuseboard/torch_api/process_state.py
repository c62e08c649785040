"""What Python and the process can be left in, and the generators of random numbers."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fuseboard.torch_api.state_part import StatePart


def python_parts() -> Iterator[StatePart]:
    """Switches of the interpreter, and what belongs to the process."""
    yield StatePart("the working directory", _working_directory, os.chdir)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None:
            yield StatePart(
                f"the handler of {name}",
                partial(signal.getsignal, number),
                partial(_set_handler, number),
            )
    yield StatePart("sys.settrace", sys.gettrace, sys.settrace, "surroundings")
    yield StatePart("sys.setprofile", sys.getprofile, sys.setprofile, "surroundings")
    for name in ("stdout", "stderr", "excepthook", "displayhook"):
        yield StatePart(
            f"sys.{name}", partial(getattr, sys, name), partial(setattr, sys, name), "surroundings"
        )
    yield StatePart(
        "logging.disable",
        partial(getattr, logging.root.manager, "disable"),
        logging.disable,
        "surroundings",
    )
    yield StatePart("os.environ", _environment, _set_environment, "surroundings")
    yield StatePart("warnings.filters", _filters, _set_filters, "surroundings")
    yield StatePart("gc", _collector, _set_collector, "surroundings")
    yield StatePart(
        "sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit, "surroundings"
    )
    yield StatePart(
        "sys.setswitchinterval", sys.getswitchinterval, sys.setswitchinterval, "surroundings"
    )


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return None


def _set_handler(number: int, handler: Any) -> None:
    # Python lets the main thread alone set handlers, and can't put back one that C code set.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


#: How Inductor's compiled code finds a function of torch's (``torch/_inductor/codecache.py``).
_INDUCTORS_OWN = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


def _environment() -> dict[Any, Any]:
    """The environment as the system has it; decoding would take ten times as long as the rest."""
    data = getattr(os.environ, "_data", None)
    held = dict(os.environ) if data is None else dict(data)
    for name in (_INDUCTORS_OWN, os.fsencode(_INDUCTORS_OWN)):
        held.pop(name, None)
    return held


def _set_environment(values: dict[Any, Any]) -> None:
    decode = getattr(os.environ, "decodekey", str) if hasattr(os.environ, "_data") else str
    wanted = {decode(name): decode(value) for name, value in values.items()}
    for name in [name for name in os.environ if name not in {*wanted, _INDUCTORS_OWN}]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _filters() -> list[Any]:
    return list(warnings.filters)


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]  # typeshed has it as a Sequence
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _collector() -> tuple[Any, ...]:
    return (gc.isenabled(), *gc.get_threshold())


def _set_collector(value: tuple[Any, ...]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1:])


def generator_parts() -> Iterator[StatePart]:
    """Generators of random numbers that everything draws from."""
    yield StatePart("torch's generator", _torchs_draws, _set_torchs_draws, "draws")
    yield StatePart("random's generator", random.getstate, random.setstate, "draws")


def _torchs_draws() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_torchs_draws(data: bytes) -> None:
    state = torch.default_generator.get_state()
    ctypes.memmove(state.data_ptr(), data, len(data))
    torch.default_generator.set_state(state)
