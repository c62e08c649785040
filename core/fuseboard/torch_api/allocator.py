"""The most that a call has allocated at once, as torch's allocators tell it.

On the CPU only a profiler is told of allocations. Kineto's (``torch.profiler``) is one for the
whole process: it can't be started inside of a user's call, when another thread may start one of its
own. The older one is a thread's own. torch keeps it under ``torch.autograd.profiler_legacy`` and
says that it will go; where it has gone, the peak isn't known.

Read against torch 2.13, ``torch/autograd/profiler_legacy.py``, ``_parse_legacy_records``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseboard.torch_api.profiler import is_recording

_start, _stop, _config, _state = (
    vars(torch.autograd).get(name)
    for name in (
        "_enable_profiler_legacy",
        "_disable_profiler_legacy",
        "ProfilerConfig",
        "ProfilerState",
    )
)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Make a call, and tell the most bytes it held at once, over what was allocated before.

    What engines allocate by themselves, past torch, isn't in it. The call should give back nothing
    that was there before: the CPU's allocator prints a warning, and counts it as still held.

    :param device: whose allocator is asked; on the CPU, for what this thread allocates.
    :returns: None where it can't be told, and then no call is made: another kind of device, a
        profiler that records this thread already, or a torch without what this needs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or is_recording() or not _start or not _stop:
        return None
    try:
        # CPU times; shapes no, memory yes; stacks, flops and modules no.
        extra = torch._C._profiler._ExperimentalConfig()
        config = _config(_state.CPU, False, True, False, False, False, extra)  # type: ignore[misc,union-attr]
    except (AttributeError, TypeError):
        return None
    _start(config)
    try:
        call()
    finally:
        records = _stop()
    now = peak = 0
    for thread in records:
        for event in thread:
            if event.kind() == "memory_alloc":
                now += event.cpu_memory_usage()
                peak = max(peak, now)
    return peak
