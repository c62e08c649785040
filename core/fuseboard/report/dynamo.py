"""Graph breaks: where and why Dynamo ends graphs, or leaves functions to Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuseboard.module_names import readable
from fuseboard.report.data import Break
from fuseboard.torch_api.compiles import CompileRecords, compile_records

# --- what happened ------------------------------------------------------------------------------


@dataclass
class BreakWatch:
    """What Dynamo did while :func:`watch` was open; complete once it is closed."""

    breaks: list[Break] = field(default_factory=list)


@contextmanager
def watch() -> Iterator[BreakWatch]:
    """Note where and why Dynamo ends graphs, or leaves functions to Python."""
    seen = BreakWatch()
    records = CompileRecords()
    try:
        with compile_records(records):
            yield seen
    finally:
        ended, failed = map(_ended_graph, records.ended), map(_left_to_python, records.failed)
        seen.breaks = _counted([*ended, *failed])


def _ended_graph(reason: Any) -> Break:
    """A break from Dynamo's ``GraphCompileReason``."""
    own = [f for f in reason.user_stack if not f.filename.startswith(torch.__path__[0])]
    frames = own or list(reason.user_stack)
    last = frames[-1] if frames else None
    title, explanation, hints = _parts(reason.reason)
    return Break(
        reason=title,
        explanation=explanation,
        hints=hints,
        function=readable(last.name) if last else "",
        source=f"{last.filename}:{last.lineno}" if last else "",
        stack=tuple(f"{f.filename}:{f.lineno} in {readable(f.name)}" for f in frames),
    )


def _left_to_python(metrics: Any) -> Break:
    """A break from the ``CompilationMetrics`` of a compilation that failed."""
    title, explanation, hints = _parts(metrics.fail_reason)
    file = metrics.fail_user_frame_filename or metrics.co_filename
    line = metrics.fail_user_frame_lineno or metrics.co_firstlineno
    return Break(
        reason=title,
        explanation=explanation,
        hints=hints,
        function=readable(metrics.co_name or ""),
        source=f"{file}:{line}",
        uncompiled=True,
    )


def _counted(breaks: Sequence[Break]) -> list[Break]:
    """Each place once.

    A break inside a function that Dynamo had inlined is met again when that function is compiled
    by itself: the first of the two, which knows the way there, stands for both.
    """
    first: dict[tuple[str, str, bool], Break] = {}
    times: Counter[tuple[str, str, bool]] = Counter()
    inner = {(b.reason, b.source) for b in breaks if len(b.stack) > 1}
    for found in breaks:
        key = (found.reason, found.source, found.uncompiled)
        first.setdefault(key, found)
        if len(found.stack) != 1 or (found.reason, found.source) not in inner:
            times[key] += 1
    return [replace(found, count=max(times[key], 1)) for key, found in first.items()]


def _parts(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Title, explanation and hints of a message of Dynamo's."""
    title = text.strip().partition("\n")[0].strip()
    if title.startswith("generic_jump"):  # what 2.13 calls it in the structured reason
        return (
            "Data-dependent branching",
            "The condition of an if, a while or an assert is a tensor's value, which is known only "
            "when the call runs.",
            ("Use torch.where, or torch.cond, to keep both branches in one graph.",),
        )
    explanation = re.search(r"^ *Explanation: (.*?)(?=^ *Hint:|^ *$)", text, re.M | re.S)
    hints = re.findall(r"^ *Hint: (.*?)(?=^ *Hint:|^ *$)", text, re.M | re.S)
    shown = [" ".join(hint.split()) for hint in hints]
    return (
        title,
        " ".join(explanation[1].split()) if explanation else "",
        tuple(hint for hint in shown if "report an issue to PyTorch" not in hint),
    )
