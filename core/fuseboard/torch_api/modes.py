"""What a call of compiled code is made under: autocast, modes, hooks; and what its backward is.

Read against torch 2.13: ``torch/overrides.py``, ``torch/_vmap_internals.py``,
``torch/csrc/autograd/init.cpp``, ``torch/_dynamo/variables/torch_function.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from fuseboard.torch_api.compiles import untraced


def autocast_is_on() -> bool:
    """Whether autocast is on for any kind of device; AOTAutograd switches it off while it runs."""
    return torch._C._is_any_autocast_enabled()


#: How many modes of ``__torch_function__`` are on.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> list[Any]:
    """The modes of ``__torch_function__`` that the call which Dynamo compiles is made under.

    Dynamo takes them off while it traces (``torch/_dynamo/variables/torch_function.py``).
    """
    from torch._dynamo.variables import torch_function
    from torch.overrides import _get_current_function_mode_stack

    manager = getattr(torch_function, "torch_function_mode_stack_state_mgr", None)
    return [*_get_current_function_mode_stack(), *getattr(manager, "stack", ())]


def default_device_of(mode: object) -> torch.device | None:
    """The device of a mode that ``set_default_device`` or ``with torch.device`` entered."""
    from torch.utils._device import DeviceContext

    return torch.device(mode.device) if isinstance(mode, DeviceContext) else None


def takes_default_device(function: Any) -> bool:
    """Whether a function of torch's makes tensors where the default device says."""
    from torch.utils._device import _device_constructors

    return function in _device_constructors()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """The modes of ``__torch_function__`` off, for the block. Those of subclasses stay."""
    from torch.overrides import _pop_mode, _push_mode

    modes = [_pop_mode() for _ in range(function_mode_count())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def gradients_are_batched() -> bool:
    """Whether a backward is called under ``vmap``, torch.func's or that of ``is_grads_batched``.

    The latter is an older one (``torch/_vmap_internals.py``), whose level only counting tells.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level > 1 or torch._C._functorch.get_dynamic_layer_stack_depth() > 0


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode AD, is under way in this thread."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0 or forward_ad._current_level >= 0


def before_backward(results: Any, hook: Callable[[], None]) -> None:
    """Call a function before the backward of AOTAutograd's function that made these results."""
    nodes = {r.grad_fn for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn}
    made = {_made_by_aot_autograd(node) for node in nodes} - {None}
    for node in made:
        node.register_prehook(untraced(lambda gradients: hook()))


def before_any_backward(results: Any, hook: Callable[[], None]) -> None:
    """Call a function before the backward of what made each of these results."""
    nodes = {r.grad_fn for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn}
    for node in nodes:
        node.register_prehook(untraced(lambda gradients: hook()))


def _made_by_aot_autograd(node: Any) -> Any:
    """The node itself, or what it is a view of; None for other code's."""
    while node is not None and not type(node).__name__.startswith("CompiledFunction"):
        following = node.next_functions
        node = following[0][0] if len(following) == 1 else None
    return node


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast switched off, for the block."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def autocast_again() -> Iterator[None]:
    """Autocast on the CPU and on CUDA, which AOTAutograd has switched off, on for the block."""
    off = [name for name in ("cpu", "cuda") if not torch.is_autocast_enabled(name)]
    if len(off) < 2:  # it isn't off
        yield
        return
    try:
        for name in off:
            torch.set_autocast_enabled(name, True)
        yield
    finally:
        for name in off:
            torch.set_autocast_enabled(name, False)


def saved_tensor_hooks_are_set() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` (a checkpoint, say) is entered."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(False) is not None


def is_in_backward() -> bool:
    """Whether autograd's engine works in this thread."""
    return torch._C._current_graph_task_id() != -1
