"""The order in which plugins are asked for rewrites of whole graphs.

It is the order of the plugins, changed as little as what plugins say of themselves
(:func:`fuseboard.pass_order`) and the setting ``fuse_order`` ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Precedence:
    """One plugin is asked before another.

    :ivar where: the place where that was set, for errors.
    """

    first: str
    then: str
    where: str


class CircleError(Exception):
    """Some plugins each have to be asked before the next, and the last before the first."""

    def __init__(self, circle: Sequence[Precedence]) -> None:
        names = [circle[0].first, *(step.then for step in circle)]
        steps = "; ".join(f"{s.first!r} before {s.then!r} ({s.where})" for s in circle)
        super().__init__(f"a circle, {' → '.join(names)}: {steps}. Take one of these out.")


def in_pass_order(plugins: Sequence[str], precedences: Iterable[Precedence]) -> tuple[str, ...]:
    """The plugins in their order, each preceded by those that have to come before it.

    Precedences of plugins that aren't among them are left out.

    :raises CircleError: there is no such order.
    """
    into: dict[str, list[Precedence]] = {name: [] for name in plugins}
    for one in precedences:
        if one.first in into and one.then in into:
            into[one.then].append(one)
    ordered: dict[str, None] = {}

    def place(name: str, waiting: tuple[Precedence, ...]) -> None:
        for number, one in enumerate(waiting):
            if one.then == name:
                raise CircleError(waiting[number:][::-1])
        for one in into[name]:
            if one.first not in ordered:
                place(one.first, (*waiting, one))
        ordered[name] = None

    for name in plugins:
        if name not in ordered:
            place(name, ())
    return tuple(ordered)
