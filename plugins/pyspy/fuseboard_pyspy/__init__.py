"""py-spy as the sampler of profiling sessions. Needs the ``pyspy`` extra.

Options: ``[tool.fuseboard.plugins.pyspy]``.
"""

from __future__ import annotations

from typing import Any

import fuseboard
from fuseboard_pyspy._options import Options


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Ready where py-spy's executable is found; it runs no ops."""
    from fuseboard_pyspy import _executable

    reason = _executable.why_unavailable()
    return fuseboard.BackendInfo(
        name="pyspy",
        wraps_only=True,
        available=not reason,
        reason=reason,
        fingerprint=_executable.version(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_sampler(options: Any) -> fuseboard.Sampler | None:
    """``py-spy record`` on this process."""
    from fuseboard_pyspy._executable import find
    from fuseboard_pyspy._sampler import PySpy

    executable = find()
    return PySpy(executable, options.native, options.blocking) if executable else None
