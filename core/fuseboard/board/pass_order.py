"""The order in which plugins are asked for rewrites of whole graphs.

It is the order of the plugins, changed as little as what plugins say of themselves
(:func:`fuseboard.pass_order`) and the setting ``fuse_order`` ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fuseboard.board.registration import Examined
from fuseboard.config.sources import nearest
from fuseboard.errors import RegistrationError, SettingsError


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


def order_of_passes(
    hook: str,
    plugins: Mapping[str, Examined],
    installed: Collection[str],
    wanted: Sequence[str],
    where: str,
) -> tuple[str, ...]:
    """The plugins in the order in which a hook of theirs is called.

    :param plugins: those that have the hook, in their order.
    :param wanted: what the setting ``fuse_order`` names, which is set in ``where``.
    :raises SettingsError: the setting is part of a circle.
    :raises RegistrationError: what plugins say of themselves is, or names what isn't installed.
    """
    own = list(_own_precedences(hook, plugins, installed))
    by_user = [Precedence(*pair, where) for pair in itertools.combinations(wanted, 2)]
    try:
        in_pass_order([*plugins], own)
    except CircleError as error:
        raise RegistrationError(f"the order of {hook} is {error}") from error
    try:
        return in_pass_order([*plugins], [*own, *by_user])
    except CircleError as error:
        raise SettingsError(f"the order of {hook} is {error}") from error


def _own_precedences(
    hook: str, plugins: Mapping[str, Examined], installed: Collection[str]
) -> Iterator[Precedence]:
    for plugin, examined in plugins.items():
        order = examined.pass_order(hook)
        if order is None:
            continue
        for kind, names in (("before", order.before), ("after", order.after)):
            for name in names:
                where = f"{kind}={name!r} of {hook}, {order.where}"
                if name not in installed:
                    raise RegistrationError(
                        f"plugin {plugin!r}, {where}: no plugin named {name!r}."
                        f"{nearest(name, installed)} Installed: {', '.join(sorted(installed))}."
                    )
                pair = (plugin, name) if kind == "before" else (name, plugin)
                yield Precedence(*pair, where)


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
