"""Whether zentorch can be used here, told without loading its library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

import fuseboard

#: Its library is linked against one minor release of torch and loads under no other.
AT_LEAST, BELOW = "2.13", "2.14"
INSTALL = "pip install 'torch==2.13.*' 'zentorch==2.13.*'"


def why_unavailable() -> str:
    """What is missing and what to do; "" where nothing is."""
    engines = [fuseboard.Engine(name, AT_LEAST, BELOW) for name in ("zentorch", "torch")]
    reason = fuseboard.why_unavailable(*engines, install=INSTALL)
    if reason:
        return reason
    if _is_installed("zentorch-weekly"):
        return "zentorch-weekly is installed beside zentorch: pip uninstall zentorch-weekly"
    if not has_avx512():
        return (
            "zentorch's kernels need a CPU with AVX-512, and this one has none: use 'mkldnn' or "
            "'inductor' here"
        )
    return ""


def has_avx512() -> bool:
    """Whether this CPU has AVX-512.

    ``torch.cpu._is_avx512_supported`` (torch/cpu/__init__.py, read in 2.13) asks the CPU; the
    public ``torch.backends.cpu.get_cpu_capability`` answers what ``ATEN_CPU_CAPABILITY`` allows.
    """
    probe = getattr(torch.cpu, "_is_avx512_supported", None)
    if probe is None:
        return str(torch.backends.cpu.get_cpu_capability()) == "AVX512"
    return bool(probe())


def fingerprint() -> str:
    """Changes with whatever the code that is made depends on."""
    return f"zentorch {version('zentorch')}, torch {torch.__version__}"


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
