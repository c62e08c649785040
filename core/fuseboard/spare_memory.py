"""Whether there is memory for what is prepared from weights: packed, it is about as large as they.

A model that fits needn't fit twice, and a process that takes all memory is killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

_MIB = 2**20

#: Where Linux tells the limits of a container, cgroups of version 2 and 1: what is allowed, what is
#: in use, and of that what would be given back (files that were read).
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def why_no_room(share: float, weights: Sequence[torch.Tensor]) -> str:
    """Why nothing as large as these weights should be made now; "" if it may.

    :param share: of the free memory of the weights' device that may be taken, 0 to 1.
    """
    needed: dict[torch.device, dict[int, int]] = {}
    for weight in weights:
        needed.setdefault(weight.device, {})[weight.data_ptr()] = weight.nbytes
    for device, sizes in needed.items():
        wanted = sum(sizes.values())
        free = free_bytes(device)
        if free is not None and wanted > share * free:
            return (
                f"what it prepares from weights takes about {wanted / _MIB:.0f} MiB, more than "
                f"the share {share:g} of the {free / _MIB:.0f} MiB that are free (prepare_memory)"
            )
    return ""


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a device; None where it can't be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    import psutil

    machine = int(psutil.virtual_memory().available)
    container = left_in_container(Path("/sys/fs/cgroup"))
    return machine if container is None else min(machine, container)


def left_in_container(root: Path) -> int | None:
    """What a container's limit leaves, in bytes; None where there is none.

    :param root: where cgroups are mounted.
    """
    for limit, used, stat, given_back in _CGROUPS:
        try:
            allowed = int((root / limit).read_text())  # "max" is no number
            in_use = int((root / used).read_text())
            lines = (root / stat).read_text().splitlines()
        except (OSError, ValueError):
            continue
        files = dict(line.split(" ", 1) for line in lines if " " in line).get(given_back, "0")
        return max(0, allowed - in_use + int(files))
    return None
