"""Linux's ``perf`` as the sampler of profiling sessions: native stacks, of all threads.

Options: ``[tool.fuseboard.plugins.perf]``.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

import fuseboard
from fuseboard_perf._options import Options

#: Distributions package it by the kernel's version; this is what most call it.
INSTALL = "install it with the system's package manager (Debian: linux-perf, Fedora: perf)"


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Ready where ``perf`` is on PATH; it runs no ops."""
    reason = ""
    if not sys.platform.startswith("linux"):
        reason = "perf is a part of Linux"
    elif shutil.which("perf") is None:
        reason = f"perf isn't on PATH: {INSTALL}"
    return fuseboard.BackendInfo(
        name="perf", wraps_only=True, available=not reason, reason=reason, options=Options
    )


@fuseboard.hookimpl
def fuseboard_sampler(options: Any) -> fuseboard.Sampler | None:
    """``perf record`` on this process."""
    from fuseboard_perf._sampler import Perf

    executable = shutil.which("perf")
    return Perf(executable, options.call_graph) if executable else None
