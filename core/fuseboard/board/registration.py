"""Look at a plugin before it is registered: its hooks, their arguments, what it says of itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pluggy

from fuseboard import hookspecs
from fuseboard.board.answers import check_answer
from fuseboard.board.deadline import deadline
from fuseboard.board.overrides import homes_of
from fuseboard.config.sources import nearest
from fuseboard.contracts import BackendInfo, CheckedWhenRegistered
from fuseboard.errors import FuseboardError, HookTimeout, RegistrationError, containable, error_text

#: Hook → the stage that it belongs to, in the order in which stages follow one another.
STAGE_OF = {
    "fuseboard_backend": "",
    "fuseboard_decompositions": "capture",
    "fuseboard_partition_joint": "partition",
    "fuseboard_claim": "partition",
    "fuseboard_plan": "partition",
    "fuseboard_fuse_dynamo": "fuse",
    "fuseboard_fuse": "fuse",
    "fuseboard_narrow": "fuse",
    "fuseboard_lower": "lower",
    "fuseboard_load": "lower",
    "fuseboard_wrap": "lower",
    "fuseboard_export": "lower",
    "fuseboard_verify": "profile",
    "fuseboard_measure": "profile",
    "fuseboard_sampler": "profile",
    "fuseboard_on_failure": "failure",
    "fuseboard_event": "events",
}


State = Literal["ready", "unavailable", "blocked", "quarantined"]


@dataclass(frozen=True)
class PluginState:
    """One line of ``fuseboard plugins``.

    :ivar source: ``entry point of DIST``, ``registered at run time`` or ``built in``.
    :ivar stages: the stages whose hooks it implements.
    :ivar reason: why it is not ready; "" where it is.
    :ivar takes_part: when, where it is ready and not always a candidate; else "".
    """

    name: str
    version: str
    source: str
    stages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    state: State = "ready"
    reason: str = ""
    takes_part: str = ""


@dataclass(frozen=True)
class Examined:
    """What a plugin turned out to be.

    :ivar functions: its hooks, and what its patterns are made of; wherever they are defined.
    :ivar relay: calls this plugin's hooks and nobody else's. Each plugin has a manager of its
        own, so a session goes on working after the plugin has been taken off the board.
    """

    hooks: frozenset[str]
    relay: pluggy.HookRelay
    info: BackendInfo | None
    functions: tuple[Callable[..., Any], ...] = ()

    def pass_order(self, hook: str) -> hookspecs.PassOrder | None:
        """What the plugin says of the order of a hook's rewrites; None where it says nothing."""
        implementations = getattr(self.relay, hook).get_hookimpls() if hook in self.hooks else ()
        found = [getattr(one.function, "fuseboard_pass_order", None) for one in implementations]
        return found[0] if found else None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that it takes part in, in order."""
        return tuple(dict.fromkeys(s for h, s in STAGE_OF.items() if s and h in self.hooks))


@dataclass(frozen=True)
class RegisteredPlugin:
    """A plugin on the board.

    :ivar plugin: None where it is quarantined, and then so is ``examined``.
    :ivar error: why it is quarantined; raised for users who name it.
    """

    state: PluginState
    plugin: object | None = None
    examined: Examined | None = None
    error: Exception | None = None

    @property
    def info(self) -> BackendInfo | None:
        return self.examined.info if self.examined else None

    @property
    def backend(self) -> BackendInfo | None:
        """What has a place in the order of backends: not what only wraps others' regions."""
        return None if self.info is None or self.info.wraps_only else self.info

    @property
    def homes(self) -> tuple[Path, ...]:
        """The packages and files that its code is in: its module's, hooks', patterns'."""
        if self.examined is None:
            return ()
        owner = self.plugin
        if not isinstance(owner, ModuleType):
            owner = sys.modules.get(type(owner).__module__)
        names = [getattr(one, "__module__", None) for one in self.examined.functions]
        return homes_of(owner, *(sys.modules.get(name or "") for name in names))

    @property
    def module_name(self) -> str | None:
        """The module that another process must import and register to have it.

        "" where its entry point does that, or it is built in; None where it is an object of this
        process.
        """
        if self.state.source.startswith(("entry point", "built in")):
            return ""
        return self.plugin.__name__ if isinstance(self.plugin, ModuleType) else None


def in_default_order(infos: Iterable[BackendInfo]) -> list[BackendInfo]:
    """Those that compile quickly first, eager last, by name within a class after those whose place
    only measuring decides.

    What takes part by request only comes after eager: listed, but out of turn.
    """
    return sorted(
        infos,
        key=lambda i: (
            i.by_request,
            i.name == "eager",
            not i.compiles_quickly,
            i.by_measurement,
            i.name,
        ),
    )


def examine(plugin: object, name: str | None, limit_s: float) -> Examined:
    """Check a plugin's hooks, and ask what it says of its backend.

    :raises RegistrationError: what is wrong with it, and what to change.
    """
    shown = name or getattr(plugin, "__name__", None) or type(plugin).__name__
    for problem in _problems(plugin):
        raise RegistrationError(f"plugin {shown!r}: {problem}")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=shown)
    except (pluggy.PluginValidationError, ValueError, TypeError) as error:
        raise RegistrationError(f"plugin {shown!r}: {error}") from error
    declared = _checked_attributes(plugin, shown, limit_s)
    callers = manager.get_hookcallers(plugin) or []
    functions = [one.function for caller in callers for one in caller.get_hookimpls()]
    functions += [function for one in declared for function in one.functions]
    return Examined(
        hooks=frozenset(caller.name for caller in callers),
        relay=manager.hook,
        info=_describe(manager, shown, name, limit_s),
        functions=tuple(functions),
    )


def _checked_attributes(plugin: object, shown: str, limit_s: float) -> list[CheckedWhenRegistered]:
    """What a plugin has declared beside its hooks, such as patterns.

    :raises RegistrationError: it can't be used.
    """

    def late() -> Exception:
        return RegistrationError(f"plugin {shown!r}: checking it took over {limit_s:g} s")

    attributes = [inspect.getattr_static(plugin, name) for name in dir(plugin)]
    found = [one for one in attributes if isinstance(one, CheckedWhenRegistered)]
    for declared in found:
        try:
            with deadline(limit_s, late):
                declared.check()
        except RegistrationError:
            raise
        except FuseboardError as error:
            raise RegistrationError(f"plugin {shown!r}: {error}") from error
    return found


def _describe(
    manager: pluggy.PluginManager, shown: str, name: str | None, limit_s: float
) -> BackendInfo | None:
    """The plugin's answer to ``fuseboard_backend``, checked."""
    hook = "fuseboard_backend"
    try:
        with deadline(limit_s, lambda: HookTimeout(shown, hook, f"no answer in {limit_s:g} s")):
            answers = manager.hook.fuseboard_backend()
    except HookTimeout as error:
        raise RegistrationError(str(error)) from error
    except containable() as error:
        problem = f"{hook} raised {error_text(error)}"
        raise RegistrationError(f"plugin {shown!r}: {problem}") from error
    if not answers:
        return None
    info = answers[0]
    try:
        check_answer(shown, hook, info, {})
    except containable() as error:
        raise RegistrationError(str(error)) from error
    assert isinstance(info, BackendInfo)
    if name is not None and info.name != name:
        raise RegistrationError(
            f"plugin {name!r}: {hook} calls itself {info.name!r}; the two names must be equal. "
            f"Rename the entry point (or the argument of register) or BackendInfo.name."
        )
    return info


def _problems(plugin: object) -> Iterator[str]:
    """What pluggy would let pass, or say in too few words."""
    try:
        hash(plugin)
    except TypeError:
        yield f"it is a {type(plugin).__name__}, which can't be hashed; give it a __hash__"
    implementations = 0
    for attribute in dir(plugin):
        function = inspect.getattr_static(plugin, attribute)
        if isinstance(function, (staticmethod, classmethod)) or inspect.ismethod(function):
            function = function.__func__
        if not inspect.isfunction(function):
            continue
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if options is None:
            if attribute in STAGE_OF:
                yield f"{attribute} lacks @fuseboard.hookimpl, so that nobody would call it"
            continue
        implementations += 1
        hook = options.get("specname") or attribute
        if hook not in STAGE_OF and not options.get("optionalhook"):
            known = nearest(hook, STAGE_OF) or f" Hooks are {', '.join(STAGE_OF)}."
            yield f"there is no hook {hook!r}.{known}"
        elif hook in STAGE_OF:
            yield from _argument_problems(hook, function)
    if not implementations:
        yield "it implements no hook; decorate functions of it with @fuseboard.hookimpl"


def _argument_problems(hook: str, function: Any) -> Iterator[str]:
    allowed = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in allowed:
            if parameter.default is not parameter.empty:
                yield (
                    f"argument {parameter.name!r} of {hook} has a default, so pluggy would never "
                    f"fill it; leave the default out"
                )
        elif parameter.name not in ("self", "cls") and parameter.default is parameter.empty:
            takes = ", ".join(allowed) or "none"
            yield (
                f"{hook} has no argument {parameter.name!r}.{nearest(parameter.name, allowed)} "
                f"Its arguments are: {takes}"
            )
