"""Whether Triton can run here. Nothing of Triton is imported."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import torch

#: Triton versions that the tests ran against, from the first to before the second.
OLDEST, NEXT = (3, 6), (4, 0)

INSTALL = "pip install 'triton>=3.6,<4'"


def interpreting() -> bool:
    """Whether kernels are interpreted on the CPU: for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def installed() -> str:
    """Triton's version; "" if it isn't there."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def why_unavailable() -> str:
    """What is missing, and what to do; "" if nothing is."""
    found = installed()
    if not found:
        return f"Triton is missing: {INSTALL}"
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not OLDEST <= numbers < NEXT:
        return f"Triton {found} isn't supported, 3.6 and later 3.x are: {INSTALL}"
    if interpreting():
        return ""
    if not torch.cuda.is_available():
        return "no CUDA GPU was found"
    if torch.version.hip is not None:
        return "AMD GPUs aren't supported"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return ""


def fingerprint() -> str:
    """What the generated code depends on."""
    target = "interpreter"
    if not interpreting():
        target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"triton {installed()} {target} torch {torch.__version__} kernels 1"
