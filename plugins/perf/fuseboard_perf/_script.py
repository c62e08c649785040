"""What ``perf script`` prints, as samples."""

from __future__ import annotations

import re
from collections.abc import Iterable

import fuseboard

#: ``comm tid time:`` above each stack; a thread's name may hold spaces.
_HEAD = re.compile(r"^(?P<comm>\S.*?)\s+(?P<tid>\d+)\s+[\d.]+:")
#: ``address symbol+offset (object)``; the offset is missing where no symbol is known.
_CALL = re.compile(r"^\s+[0-9a-f]+ (?P<symbol>.*?)(?:\+0x[0-9a-f]+)? \((?P<object>.*)\)$")
#: How Python 3.12 names its calls where it runs with ``-X perf``.
_PYTHON = re.compile(r"^py::(?P<name>.*?):(?P<file>.*)$")


def read_script(lines: Iterable[str]) -> list[fuseboard.StackSample]:
    """Samples in the order of the text, which is that of time. perf has innermost calls first."""
    samples: list[fuseboard.StackSample] = []
    thread = ""
    calls: list[fuseboard.StackFrame] = []
    for line in [*lines, ""]:
        if not line.strip():
            if calls:
                samples.append(fuseboard.StackSample(tuple(reversed(calls)), thread))
            calls = []
        elif (call := _CALL.match(line.rstrip())) is not None:
            calls.append(_frame(call["symbol"], call["object"]))
        elif (head := _HEAD.match(line)) is not None:
            thread = f"{head['comm']} {head['tid']}"
    return samples


def _frame(symbol: str, owner: str) -> fuseboard.StackFrame:
    python = _PYTHON.match(symbol)
    if python is not None:
        return fuseboard.StackFrame(python["name"], python["file"])
    return fuseboard.StackFrame(symbol, owner)
