"""The packages that this plugin needs; nothing of them is imported."""

from __future__ import annotations

from functools import cache

import fuseboard

ENGINES = (
    fuseboard.Engine("onnx", at_least="1.19"),
    fuseboard.Engine(
        "onnxruntime",
        at_least="1.22",
        distributions=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"),
    ),
    fuseboard.Engine("onnxscript", at_least="0.5"),
)


def why_unavailable() -> str:
    """What is missing or too old, or an empty string."""
    return fuseboard.why_unavailable(*ENGINES, install="pip install 'fuseboard[onnxruntime]'")


@cache
def fingerprint() -> str:
    """What is installed: models and their numbers depend on it."""
    return ", ".join(f"{engine.name} {engine.version}" for engine in ENGINES)


def runtime() -> tuple[str, ...]:
    """The distribution that brings what runs a converted model."""
    return ENGINES[1].installed
