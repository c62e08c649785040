"""A function for ``stages.measure``: what was compiled is faster, so that eager never wins."""

from __future__ import annotations

from typing import Any

import fuseboard

MEASURE = "tests.support.eager_loses:measure"


def measure(calls: Any) -> list[fuseboard.Measurement]:
    """Each is called once.

    Eager is the first of a graph's candidates, and the last of two where whole calls are compared.
    """
    for call in calls:
        call()
    times = [1000.0 / 2**number for number in range(len(calls))]
    whole = getattr(getattr(calls[0], "func", None), "__name__", "") in ("_step", "_alone")
    if whole:
        times.reverse()
    return [fuseboard.Measurement(us, us, us, calls=1) for us in times]
