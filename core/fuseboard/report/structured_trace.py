"""Reports in torch's structured trace, where tools such as tlparse show them beside torch's own.

The trace is on where the environment variable ``TORCH_TRACE`` names a directory.
"""

from __future__ import annotations

import json

from fuseboard.report.data import GraphReport
from fuseboard.torch_api import traces as torch_traces


def emit(report: GraphReport) -> None:
    """Write a graph's report as it is now, as JSON and as text; nothing where nobody traces."""
    if not torch_traces.traces_structured():
        return
    compile_id = report.frame.partition(" ")[0]
    name = f"fuseboard_{report.name}"
    for encoding, write in (("json", _json), ("string", _text)):
        torch_traces.trace_artifact(name, encoding, write(report), compile_id)


def _json(report: GraphReport) -> str:
    return json.dumps(report.as_dict(), indent=1)


def _text(report: GraphReport) -> str:
    # Importing rich draws from Python's generator of random numbers, and takes its time.
    from rich.console import Group

    from fuseboard.report.graph_text import graph_parts, plain

    text = plain(Group(*graph_parts(report)))
    # A file's name may hold bytes that are no text; Python has them as lone surrogates.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
