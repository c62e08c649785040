"""Where py-spy is, and why it can't be used. Nothing is run here."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib import metadata

INSTALL = "pip install 'fuseboard[pyspy]'"


def find() -> str | None:
    """The path of ``py-spy``: on PATH, or beside this Python, active or not."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))


def why_unavailable() -> str:
    """The reason, with what to do; "" where it can be used."""
    if sys.platform == "win32":
        return "py-spy is stopped by SIGINT, which can't be sent to a process on Windows"
    if find() is None:
        return f"py-spy isn't installed: {INSTALL}"
    return ""


def version() -> str:
    """Of the installed package; "" where py-spy came another way."""
    try:
        return metadata.version("py-spy")
    except metadata.PackageNotFoundError:
        return ""
