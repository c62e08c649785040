"""torch's structured trace (``TORCH_TRACE``)."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any


def traces_structured() -> bool:
    """Whether anybody listens to torch's structured trace (``TORCH_TRACE``).

    Its handler is always there at first, and takes itself away when something is logged that nobody
    wants; Dynamo logs before the backend is called.
    """
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: str, compile_id: str) -> None:
    """Put a text into the structured trace, as an artifact of a compile.

    :param encoding: ``json`` or ``string``, by which tlparse names and shows it.
    :param compile_id: Dynamo's, such as ``0/1``; it counts where no compile is under way. Another
        text is none.
    """
    from torch._guards import CompileId
    from torch._logging._internal import trace_structured

    keywords: dict[str, Any] = {}
    if compile_id and "compile_id" in inspect.signature(trace_structured).parameters:
        with contextlib.suppress(ValueError):  # not compiled by Dynamo, so there is none
            keywords["compile_id"] = CompileId.from_string(compile_id)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: payload,
        **keywords,
    )
