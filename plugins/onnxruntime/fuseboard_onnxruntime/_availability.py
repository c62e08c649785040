"""Whether the packages are there; nothing of them is imported."""

from __future__ import annotations

from importlib import metadata

#: Package → lowest version that is supported.
NEEDED = {"onnx": (1, 19), "onnxruntime": (1, 22), "onnxscript": (0, 5)}
#: Distributions that bring the module onnxruntime.
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")

_PIP = "pip install 'fuseboard[onnxruntime]'"


def versions() -> dict[str, str]:
    """What is installed of the needed packages: package → version."""
    found = {}
    for package in NEEDED:
        for name in RUNTIMES if package == "onnxruntime" else (package,):
            try:
                found[package] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def why_unavailable() -> str:
    """What is missing or too old, or an empty string."""
    there = versions()
    problems = []
    for package, least in NEEDED.items():
        wanted = ".".join(map(str, least))
        if package not in there:
            problems.append(f"{package} isn't installed")
        elif _parsed(there[package]) < least:
            problems.append(f"{package} is {there[package]}, needed: {wanted} or later")
    return f"{'; '.join(problems)}: {_PIP}" if problems else ""


def _parsed(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:2]:
        digits = "".join(ch for ch in part if ch.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)
