"""Settings under which the same has to hold, by what they are about."""

from __future__ import annotations

from typing import Any

QUICK = ["mkldnn", "eager"]
#: One backend, with eager for what it declines alone.
ALONE: dict[str, dict[str, Any]] = {
    name: {"backends": [name]} for name in ("mkldnn", "onnxruntime", "eager")
}
IN_CALLS: dict[str, Any] = {"settle": "in_calls", "backends": QUICK}
