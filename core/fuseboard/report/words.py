"""How reports say things, in text and on the page alike."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fuseboard.report.data import FusionReport

#: More ops, lines or names than this are counted instead of listed.
SHOWN = 5

NOTHING = (
    "Nothing was compiled with fuseboard. Either no tensor op was reached, or Dynamo left all of "
    "them to Python, or the work runs code that another backend had compiled before."
)


def many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def at(backend: str) -> str:
    return "by the board itself" if backend == "board" else f"on {backend}"


def first(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def short_op(op: str) -> str:
    """An op without its namespace and overload, where it is one of torch's own."""
    namespace, _, rest = op.partition(".")
    inner = rest and namespace in ("aten", "prims")
    return rest.partition(".")[0] if inner else op.removeprefix("operator.")


def ops(counts: Mapping[str, int]) -> str:
    """Ops by their short names, the most frequent first."""
    short: Counter[str] = Counter()
    for op, count in counts.items():
        short[short_op(op)] += count
    if len(short) > 1:
        del short["getitem"]  # what takes one result of an op that has several
    return first([f"{name} ×{count}" if count > 1 else name for name, count in short.most_common()])


def fusions(fusions: Iterable[FusionReport]) -> str:
    """Rewrites by name, with counts; those switched off are counted apart."""
    fusions = list(fusions)
    applied = Counter(fusion.name for fusion in fusions if fusion.applied)
    off = sum(not fusion.applied for fusion in fusions)
    text = first([f"{n} ×{c}" if c > 1 else n for n, c in applied.most_common()]) or "nothing"
    return f"{text} ({off} switched off)" if off else text


def places(sources: Sequence[str]) -> list[str]:
    """``file:line`` places by file, each with its range of lines; other places as they are."""
    lines: dict[str, list[int]] = {}
    found = []
    for source in sources:
        file, _, line = source.rpartition(":")
        if file and line.isdigit():
            lines.setdefault(file, []).append(int(line))
        else:
            found.append(source)
    for file, numbers in lines.items():
        low, high = min(numbers), max(numbers)
        found.append(f"{shorten(file)}:{low}" + (f"-{high}" if high > low else ""))
    return found


def shorten(text: str) -> str:
    """Paths in a text as short as they stay clear: from here, or the end of an installed one's."""
    # Installed files first: they may be below this directory, in its virtual environment.
    text = re.sub(r"/\S*/(?:site|dist)-packages/(?:\S*/)?([^/\s]+/[^/\s]+)", r"\1", text)
    return text.replace(os.getcwd() + os.sep, "")
