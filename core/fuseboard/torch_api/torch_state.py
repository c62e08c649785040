"""What torch can be left in: autograd's modes, levels, stacks of modes, autocast, switches.

Read against torch 2.13: ``torch/csrc/autograd/init.cpp``, ``torch/csrc/functorch/init.cpp``,
``torch/_C/_functorch.pyi``, ``torch/autograd/forward_ad.py``, ``torch/overrides.py``. Whatever a
version lacks is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from fuseboard.torch_api import switches as torch_switches
from fuseboard.torch_api.state_part import StatePart


def _pair(module: Any, getter: str, setter: str, name: str) -> Iterator[StatePart]:
    """A part with a getter and a setter, where this torch has both."""
    read, write = getattr(module, getter, None), getattr(module, setter, None)
    if read is not None and write is not None:
        yield StatePart(name, read, write)


def autograd_parts() -> Iterator[StatePart]:
    """Modes of autograd, its anomaly mode, hooks of saved tensors."""
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


def level_parts() -> Iterator[StatePart]:
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


def mode_parts() -> Iterator[StatePart]:
    """The default device, and the stacks of modes."""
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


def autocast_parts() -> Iterator[StatePart]:
    """Autocast by kind of device, its cache and its nesting."""
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


def number_parts() -> Iterator[StatePart]:
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
