"""What a process can be left in: modes, levels, switches, generators; read, compared and put back.

A hook, or compiled code that is only tried, may change what the rest of the program runs under:
``torch.set_num_threads``, an ``autocast`` that is entered and not left, a functorch level that an
exception left open. :class:`StateGuard` reads all that torch and Python let one read before a
block, puts back what differs after it, and says what that was. Past 400 lines: one table, and what
reads it.

Some of it belongs to the thread (modes, most levels), some to the process. What another thread
changes of the latter while the block runs is taken for the block's own; so a thread beside the
user's calls looks at its own parts alone.

Read against torch 2.13: ``torch/csrc/autograd/init.cpp``, ``torch/csrc/functorch/init.cpp``,
``torch/_C/_functorch.pyi``, ``torch/autograd/forward_ad.py``, ``torch/overrides.py``. Whatever a
version lacks is left out.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fuseboard.beside import is_beside
from fuseboard.torch_api import switches as torch_switches

#: What a change of a part means. ``answers``: the program may compute something else, or otherwise
#: than its author wants. ``surroundings``: it is the process's, and an engine may change it when it
#: is imported. ``draws``: numbers were drawn from a generator.
Kind = Literal["answers", "surroundings", "draws"]


@dataclass(frozen=True)
class StatePart:
    """One thing that can be read and put back.

    :ivar name: as people write it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    kind: Kind = "answers"

    @property
    def is_of_thread(self) -> bool:
        """Whether each thread has its own."""
        return self.name in _OF_THREAD or "autocast" in self.name


#: What C++ and Python keep in thread-local variables; autocast's parts on top. All else belongs to
#: the process: its other threads read and change it at any time, so a thread beside them may
#: neither write it, nor blame anyone for a change that it sees.
_OF_THREAD = frozenset(
    {
        *("the inference mode", "the grad mode", "forward-mode AD", "multithreaded autograd"),
        *("view replay", "hooks of saved tensors", "why saved tensors' hooks are disabled"),
        *("the number of open levels of torch.func", "inplace requires grad allowed"),
        *("single level autograd function allowed", "the default device"),
        *("the torch-function modes", "the torch-dispatch modes", "__torch_function__"),
        *("torch.set_num_threads", "sys.settrace", "sys.setprofile"),
        "torch.set_flush_denormal",
    }
)


@dataclass(frozen=True)
class StateChange:
    """A part that differs from what it was."""

    part: StatePart
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.part.kind == "draws" or self.part.name == "warnings.filters":
            return self.part.name
        if isinstance(self.was, dict) and isinstance(self.now, dict):
            return ", ".join(
                f"{self.part.name}[{os.fsdecode(key)!r}]"
                for key in sorted({*self.was, *self.now})
                if self.was.get(key) != self.now.get(key)
            )
        return f"{self.part.name} from {_shown(self.was)} to {_shown(self.now)}"


def _shown(value: Any) -> str:
    if isinstance(value, DeviceContext):
        value = value.device
    text = str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- what there is --------------------------------------------------------------------------------


def _pair(module: Any, getter: str, setter: str, name: str) -> Iterator[StatePart]:
    """A part with a getter and a setter, where this torch has both."""
    read, write = getattr(module, getter, None), getattr(module, setter, None)
    if read is not None and write is not None:
        yield StatePart(name, read, write)


def _autograd_parts() -> Iterator[StatePart]:
    own = torch._C
    # The inference mode first: leaving it sets the grad mode, too.
    yield StatePart("the inference mode", torch.is_inference_mode_enabled, _set_inference_mode)
    yield StatePart("the grad mode", torch.is_grad_enabled, own._set_grad_enabled)
    yield from _pair(own, "_is_fwd_grad_enabled", "_set_fwd_grad_enabled", "forward-mode AD")
    yield from _pair(
        own, "_is_multithreading_enabled", "_set_multithreading_enabled", "multithreaded autograd"
    )
    yield from _pair(own, "_is_view_replay_enabled", "_set_view_replay_enabled", "view replay")
    yield StatePart(
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    hooks = own._autograd
    if hasattr(hooks, "_saved_tensors_hooks_get_disabled_error_message"):
        yield StatePart(
            "why saved tensors' hooks are disabled",
            hooks._saved_tensors_hooks_get_disabled_error_message,
            _disable_hooks,
        )
    if hasattr(hooks, "_top_saved_tensors_default_hooks"):
        yield StatePart("hooks of saved tensors", _top_hooks, _pop_hooks)


#: Guards whose end would set the mode once more.
_inference_modes: list[Any] = []


def _set_inference_mode(value: bool) -> None:
    guard = torch.inference_mode(value)
    guard.__enter__()
    _inference_modes.append(guard)


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # while tracing, too


def _pop_hooks(was: Any) -> None:
    """Take away what was pushed; what was popped can't be pushed again in its place."""
    while (top := _top_hooks()) is not None and top != was:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _disable_hooks(message: str | None) -> None:
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)


def _level_parts() -> Iterator[StatePart]:
    """Levels of ``torch.func`` and of forward-mode AD; an inner one goes before an outer one."""
    own: Any = torch._C._functorch
    if hasattr(own, "pop_dynamic_layer_stack_and_undo_to_depth"):
        yield StatePart(
            "the number of open levels of torch.func", own.get_dynamic_layer_stack_depth, _undo_to
        )
    yield StatePart("the level of forward-mode AD", _dual_level, _close_dual_levels)
    for name in ("inplace_requires_grad_allowed", "single_level_autograd_function_allowed"):
        yield from _pair(own, f"get_{name}", f"set_{name}", name.replace("_", " "))


def _undo_to(depth: int) -> None:
    if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _dual_level() -> int:
    """How many levels are open: one at most, and ``_current_level`` only counts Python's own."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # "Nested forward mode AD is not supported at the moment"
        return 1
    torch._C._exit_dual_level(level=level)
    return int(level)


def _close_dual_levels(was: int) -> None:
    if was == 0:
        torch._C._exit_dual_level(level=0)
        forward_ad._current_level = -1


def _mode_parts() -> Iterator[StatePart]:
    yield StatePart("the default device", _device_context, _set_device_context)
    for kind in ("function", "dispatch"):
        size = getattr(torch._C, f"_len_torch_{kind}_stack", None)
        at = getattr(torch._C, f"_get_{kind}_stack_at", None)
        pop = _pop_of(kind)
        push = getattr(torch._C, f"_push_on_torch_{kind}_stack", None)
        if size and at and pop and push:
            stack = _ModeStack(size, at, pop, push)
            yield StatePart(f"the torch-{kind} modes", stack.read, stack.write)
    yield from _pair(
        torch._C, "_get_torch_function_state", "_set_torch_function_state", "__torch_function__"
    )


def _pop_of(kind: str) -> Callable[[], Any] | None:
    pop = getattr(torch._C, f"_pop_torch_{kind}_stack", None)
    if pop is None or kind == "function":
        return pop
    return partial(pop, None)  # None: the uppermost, of whatever kind of mode


@dataclass(frozen=True)
class _ModeStack:
    size: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def read(self) -> tuple[Any, ...]:
        return tuple(map(self.at, range(self.size())))

    def write(self, modes: tuple[Any, ...]) -> None:
        """Pop what lies above what the stacks have in common, and push what is missing."""
        now = self.read()
        same = 0
        while same < min(len(now), len(modes)) and now[same] is modes[same]:
            same += 1
        for _ in now[same:]:
            self.pop()
        for mode in modes[same:]:
            self.push(mode)


def _device_context() -> Any:
    """What ``set_default_device`` left; its mode is also among the torch-function modes."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_device_context(context: Any) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context


def _autocast_parts() -> Iterator[StatePart]:
    for device in ("cpu", "cuda"):
        yield StatePart(
            f"autocast on {device}", partial(_autocast, device), partial(_set_autocast, device)
        )
    yield StatePart(
        "autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    )
    yield StatePart("the nesting of autocast", _autocast_nesting, _set_autocast_nesting)


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, value[0])
    torch.set_autocast_dtype(device, value[1])


def _autocast_nesting() -> int:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def _set_autocast_nesting(nesting: int) -> None:
    while (now := _autocast_nesting()) != nesting:
        if now > nesting:
            torch.autocast_decrement_nesting()
        else:
            torch.autocast_increment_nesting()
    if nesting == 0:
        torch.clear_autocast_cache()


_SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _number_parts() -> Iterator[StatePart]:
    """What results, and the time that they take, depend on."""
    yield StatePart("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads)
    for name, (_, put) in torch_switches.SWITCHES.items():
        if put is not None:
            text = _SWITCHES.get(name, f"torch.{name}")
            yield StatePart(
                text, partial(torch_switches.read, name), partial(torch_switches.write, name)
            )
    for name, text in _FURTHER_SWITCHES.items():
        yield from _pair(torch._C, f"_get_{name}", f"_set_{name}", text)
    yield from _pair(
        torch._C,
        "_check_sparse_tensor_invariants",
        "_set_check_sparse_tensor_invariants",
        "torch.sparse.check_sparse_tensor_invariants",
    )
    if torch.set_flush_denormal(_flushes_denormals()):  # else this CPU doesn't
        yield StatePart("torch.set_flush_denormal", _flushes_denormals, _set_flush_denormals)


#: The smallest normal float64; half of it is a denormal.
_SMALLEST = sys.float_info.min


def _flushes_denormals() -> bool:
    """Whether this thread computes 0 where a result is denormal. Python's floats are C's."""
    return _SMALLEST * 0.5 == 0.0


def _set_flush_denormals(value: bool) -> None:
    torch.set_flush_denormal(value)


#: Names for people, of switches that aren't attributes of ``torch``.
_SWITCHES = {
    "default_dtype": "the default dtype",
    "deterministic": "torch.use_deterministic_algorithms",
    "float32_matmul_precision": "torch.set_float32_matmul_precision",
    **{f"{kind}_sdp": f"torch.backends.cuda.enable_{kind}_sdp" for kind in _SDP_KERNELS},
    "attention_fast_path": "torch.backends.mha.set_fastpath_enabled",
}
#: Nothing that is compiled depends on these.
_FURTHER_SWITCHES = {
    "warnAlways": "torch.set_warn_always",
    "autograd_fallback_mode": "the fallback of autograd",
    "nnpack_enabled": "torch.backends.nnpack",
}


def _python_parts() -> Iterator[StatePart]:
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


def _generator_parts() -> Iterator[StatePart]:
    yield StatePart("torch's generator", _torchs_draws, _set_torchs_draws, "draws")
    yield StatePart("random's generator", random.getstate, random.setstate, "draws")


def _torchs_draws() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_torchs_draws(data: bytes) -> None:
    state = torch.default_generator.get_state()
    ctypes.memmove(state.data_ptr(), data, len(data))
    torch.default_generator.set_state(state)


def _all_parts() -> Iterator[StatePart]:
    # Levels first: the code that closes them runs under the modes that it was opened under.
    yield from _level_parts()
    yield from _mode_parts()
    yield from _autograd_parts()
    yield from _autocast_parts()
    yield from _number_parts()
    yield from _python_parts()
    yield from _generator_parts()


def _readable(part: StatePart) -> bool:
    try:
        part.read()
    except Exception:  # this build of torch has no such backend, whatever it raises
        return False
    return True


#: In the order in which they are put back.
PARTS: tuple[StatePart, ...] = tuple(filter(_readable, _all_parts()))

#: What a call of compiled code may not change; it may draw random numbers.
CALL_PARTS = tuple(part for part in PARTS if part.kind != "draws")

#: What results depend on, of what can be entered anew in another call.
ANSWER_PARTS = tuple(filter(_readable, (*_autocast_parts(), *_number_parts())))

#: What the code of ``torch.func`` and of autograd's contexts switches on and off.
AUTOGRAD_PARTS = tuple(filter(_readable, (*_level_parts(), *_autograd_parts())))


# --- reading and putting back ---------------------------------------------------------------------


def read_state(parts: Sequence[StatePart] = PARTS) -> list[Any]:
    """Their values, now and in this thread."""
    return [part.read() for part in parts]


def put_back(before: list[Any], parts: Sequence[StatePart] = PARTS) -> list[StateChange]:
    """Make the state what it was, as far as it can be; what differed, in order."""
    changes = []
    for part, was in zip(parts, before, strict=True):
        now = part.read()
        if now is was or now == was:
            continue
        changes.append(StateChange(part, was, now))
        part.write(was)
    return changes


class StateGuard:
    """A block after which the process is as it was before.

    Beside the user's calls, what belongs to the whole process is neither read nor put back.

    :ivar changes: what had to be put back, once the block is over.
    """

    def __init__(self, parts: Sequence[StatePart] = PARTS) -> None:
        self.changes: list[StateChange] = []
        self._parts = parts

    def __enter__(self) -> StateGuard:
        if is_beside():
            self._parts = tuple(part for part in self._parts if part.is_of_thread)
        self._before = read_state(self._parts)
        return self

    def __exit__(self, *error: object) -> None:
        self.changes = put_back(self._before, self._parts)

    def changed(self, kind: Kind) -> str:
        """The changes of one kind as a part of a sentence; "" for none."""
        return "; ".join(str(change) for change in self.changes if change.part.kind == kind)


@contextmanager
def under_state(state: list[Any]) -> Iterator[None]:
    """What results depend on as it was when ``state`` was read, for the block."""
    with StateGuard(ANSWER_PARTS):
        for part, value in zip(ANSWER_PARTS, state, strict=True):
            if part.read() != value:
                part.write(value)
        yield
