"""Stage overrides that name a function of the user's: ``plan = "mypackage.placement:plan"``.

What is decided by one is found again only as long as its code is the same, and another process has
to be able to import it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseboard.config.sources import nearest
from fuseboard.errors import SettingsError, containable, error_text


@dataclass(frozen=True)
class Override:
    """A function that answers a hook.

    :ivar arguments: the hook's arguments that it takes.
    """

    path: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def is_importable_elsewhere(self) -> bool:
        """Whether another process finds the same function under its path."""
        found = sys.modules.get(self.module)
        return self.module != "__main__" and getattr(found, "__spec__", None) is not None

    @property
    def homes(self) -> tuple[Path, ...]:
        """The package or file that its code is in; none where it is in no file."""
        return homes_of(sys.modules.get(self.module))


def homes_of(*modules: Any) -> tuple[Path, ...]:
    """The packages that modules are in, or their files. torch's own is told by its version."""
    found: dict[Path, None] = {}
    for module in modules:
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).is_file() or module.__name__.partition(".")[0] == "torch":
            continue
        found[Path(file).parent if getattr(module, "__package__", None) else Path(file)] = None
    return tuple(one for one in found if found.keys().isdisjoint(one.parents))


def load_override(path: str, where: str, allowed: Sequence[str]) -> Override:
    """Import the function, and see which of the hook's ``allowed`` arguments it takes.

    :raises SettingsError: it can't be imported, or takes what the hook doesn't give.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise SettingsError(f"{where}: a path is written package.module:function")
    try:
        module = importlib.import_module(module_name)
    except containable() as error:  # importing runs the user's code: anything may be raised
        problem = f"importing {module_name!r} raised {error_text(error)}"
        raise SettingsError(f"{where}: {problem}") from error
    function = getattr(module, name, None)
    if function is None:
        near = nearest(name, [n for n in vars(module) if not n.startswith("_")])
        raise SettingsError(f"{where}: module {module_name!r} has no {name!r}.{near}")
    if not callable(function):
        raise SettingsError(f"{where}: {path} is a {type(function).__name__}, not a function")
    return Override(path, function, _taken(function, where, allowed))


def _taken(function: Callable[..., Any], where: str, allowed: Sequence[str]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some functions that are written in C don't say
        raise SettingsError(f"{where}: can't tell which arguments it takes: {error}") from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(allowed)
    for parameter in parameters:
        needed = (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        )
        if needed and (
            parameter.name not in allowed or parameter.kind is parameter.POSITIONAL_ONLY
        ):
            raise SettingsError(
                f"{where}: it takes {parameter.name!r}, which isn't passed to it by keyword."
                f"{nearest(parameter.name, allowed)} It may take: {', '.join(allowed)}."
            )
    names = {p.name for p in parameters}
    return tuple(name for name in allowed if name in names)
