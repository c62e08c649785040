"""The board: finds, orders, blocks and quarantines plugins, and opens sessions on them.

A plugin that can't be imported or breaks a rule is *quarantined* with the reason and doesn't
touch the others; only who names it gets the error. Calls of hooks go through a
:class:`~fuseboard.board.session.Session`, which holds one snapshot of the settings.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from fuseboard.board.deadline import deadline
from fuseboard.board.registration import (
    PluginState,
    RegisteredPlugin,
    State,
    examine,
    in_default_order,
)
from fuseboard.board.selection import NEEDED
from fuseboard.board.session import Session
from fuseboard.config.layers import resolve
from fuseboard.config.model import Settings
from fuseboard.config.sources import nearest
from fuseboard.errors import FuseboardError, RegistrationError, containable, error_text
from fuseboard.forks import fork_safe_lock
from fuseboard.torch_api.state import StateGuard

__all__ = ["Board", "PluginState", "Session", "board", "register", "unregister"]

log = logging.getLogger("fuseboard")

GROUP = "fuseboard"
BUILT_IN = {
    "eager": "fuseboard.run.eager",
    "attention": "fuseboard.fuse.attention",
    "linear_cross_entropy": "fuseboard.fuse.cross_entropy",
    "shared_heads": "fuseboard.fuse.shared_heads",
    "simplify": "fuseboard.fuse.simplify",
    "narrow": "fuseboard.fuse.narrow",
    "defaults": "fuseboard.defaults",
}
#: How long ``register`` waits for a plugin's description of itself.
REGISTER_LIMIT_S = 900.0


@dataclass(frozen=True)
class _Pending:
    """A plugin that was found and not imported yet."""

    name: str
    version: str
    source: str
    load: Callable[[], object]

    def state(self, state: State, reason: str) -> PluginState:
        return PluginState(self.name, self.version, self.source, state=state, reason=reason)

    def import_(self) -> object:
        """The plugin. What its import raises, ``sys.exit`` included, doesn't end the program.

        :raises RegistrationError: it raised something that isn't an :class:`Exception`.
        """
        try:
            return self.load()
        except Exception:
            raise  # the caller tells it, with its class
        except containable() as error:
            if isinstance(error, SystemExit):
                raised = f"called sys.exit({'' if error.code is None else repr(error.code)})"
            else:
                raised = f"raised {error_text(error).removesuffix(': ')}"
            raise RegistrationError(f"plugin {self.name!r}: its import {raised}") from error


class Board:
    """A registry of plugins. The process has one, :data:`board`; tests make their own.

    :param entry_points: finds the plugins of installed distributions; asked once, on first use.
    :param built_in: name → module of the plugins that come with the board.
    """

    def __init__(
        self,
        entry_points: Callable[[], Iterable[metadata.EntryPoint]] | None = None,
        built_in: Mapping[str, str] = BUILT_IN,
    ) -> None:
        self._lock = fork_safe_lock()
        self._find = entry_points or (lambda: metadata.entry_points(group=GROUP))
        self._built_in = dict(built_in)
        self._pending: dict[str, _Pending] | None = None
        self._entries: dict[str, RegisteredPlugin] = {}
        self._duplicates: list[PluginState] = []

    # --- finding and loading --------------------------------------------------------------------

    def _discover(self) -> dict[str, _Pending]:
        """Everything that is installed, by name; nothing is imported yet."""
        if self._pending is None:
            self._pending = {}
            version = _version("fuseboard")
            for name, module in self._built_in.items():
                load = _importer(module)
                self._pending[name] = _Pending(name, version, "built in", load)
            # The board's own distribution first: nobody else's plugin takes the name of one of its.
            for point in sorted(self._find(), key=lambda point: not _is_own(point)):
                self._add_entry_point(point, self._pending)
        return self._pending

    def _add_entry_point(self, point: metadata.EntryPoint, pending: dict[str, _Pending]) -> None:
        dist = point.dist
        found = _Pending(
            point.name,
            dist.version if dist else "",
            f"entry point of {dist.name}" if dist else f"entry point {point.value}",
            point.load,
        )
        first = pending.get(point.name)
        known = first.source if first else ""
        if not known and point.name in self._entries:
            known = self._entries[point.name].state.source
        if not known:
            pending[point.name] = found
            return
        reason = (
            f"the name {point.name!r} is taken ({known}); "
            "uninstall one of the two, or ask its author to rename the entry point"
        )
        self._duplicates.append(found.state("quarantined", reason))
        log.warning("fuseboard: plugin %r, %s: %s", point.name, found.source, reason)

    def _load(self, blocked: Iterable[str], limit_s: float) -> None:
        """Import what is pending, one by one, but for what is blocked."""
        pending = self._discover()
        skipped = set(blocked) - NEEDED
        for name in [name for name in pending if name not in skipped]:
            found = pending.pop(name, None)  # taken out first: the import may come back here
            if found is None:
                continue
            try:
                self._entries[name] = self._load_one(found, limit_s)
            except BaseException:  # KeyboardInterrupt and the like: as if it had not been tried
                pending[name] = found
                raise

    def _load_one(self, found: _Pending, limit_s: float) -> RegisteredPlugin:
        def late() -> Exception:
            return RegistrationError(f"plugin {found.name!r}: its import took over {limit_s:g} s")

        try:
            with _left_alone(found.name):
                with deadline(limit_s, late):
                    plugin = found.import_()
                return self._admit(plugin, found, limit_s)
        except Exception as error:
            text = str(error).removeprefix(f"plugin {found.name!r}").lstrip(":, ")
            known = isinstance(error, FuseboardError)
            reason = text if known else f"its import raised {type(error).__name__}: {text}"
            log.warning(
                "fuseboard: plugin %r is quarantined, and takes no part: %s", found.name, reason
            )
            return RegisteredPlugin(found.state("quarantined", reason), error=error)

    def _admit(self, plugin: object, found: _Pending, limit_s: float) -> RegisteredPlugin:
        """Examine a plugin, and say in which state it is."""
        examined = examine(plugin, found.name, limit_s)
        for name, entry in self._entries.items():
            if entry.plugin is plugin:
                problem = f"the same object is registered as {name!r}"
                raise RegistrationError(f"plugin {found.name!r}: {problem}")
        info = examined.info
        state = replace(
            found.state("ready", ""),
            stages=examined.stages,
            devices=tuple(sorted(info.device_types)) if info else (),
        )
        if info is not None and info.by_request:
            state = replace(state, takes_part="where the setting backends names it")
        elif info is not None and info.by_measurement:
            when = "where the setting backends names it, or under the policy 'measured'"
            state = replace(state, takes_part=when)
        if info is not None and not info.available:
            reason = info.reason or "it gave no reason"
            state = replace(state, state="unavailable", reason=reason)
        return RegisteredPlugin(state, plugin, examined)

    # --- registering at run time ----------------------------------------------------------------

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin at run time; it needs no entry point.

        :param name: what its backend calls itself, or else the module's name, if not given.
        :raises RegistrationError: the name is taken, or the plugin breaks a rule.
        """
        with self._lock:
            pending = self._discover()
            shown = name or getattr(plugin, "__name__", None) or type(plugin).__name__
            with _left_alone(shown):
                examined = examine(plugin, name, REGISTER_LIMIT_S)
            own = examined.info.name if examined.info else getattr(plugin, "__name__", None)
            name = name or own
            if not name:
                raise RegistrationError(
                    f"a plugin of type {type(plugin).__name__} without a backend has no name of "
                    f"its own; pass register(plugin, name=...)"
                )
            if name in pending or name in self._entries:
                taken = (
                    pending[name].source if name in pending else self._entries[name].state.source
                )
                raise RegistrationError(
                    f"the name {name!r} is taken ({taken}); pass another one, or call "
                    f"fuseboard.unregister({name!r}) first"
                )
            version = str(getattr(plugin, "__version__", ""))
            found = _Pending(name, version, "registered at run time", lambda: plugin)
            with _left_alone(name):
                entry = self._admit(plugin, found, REGISTER_LIMIT_S)
            self._entries[name] = entry

    def unregister(self, name: str) -> None:
        """Take a plugin off the board. What was compiled with it goes on working.

        :raises RegistrationError: there is no such plugin, or it is built in.
        """
        with self._lock:
            pending = self._discover()
            if name in self._built_in:
                raise RegistrationError(f"plugin {name!r} is built in and can't be taken off")
            if name not in pending and name not in self._entries:
                names = self.names()
                raise RegistrationError(
                    f"there is no plugin {name!r}.{nearest(name, names)} "
                    f"Plugins are {', '.join(names)}"
                )
            pending.pop(name, None)
            self._entries.pop(name, None)

    # --- looking --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every plugin that is installed or registered, loaded or not, sorted."""
        with self._lock:
            return sorted({*self._discover(), *self._entries})

    def states(self, settings: Settings | None = None) -> list[PluginState]:
        """What is on the board under these settings: backends in their order, then the rest."""
        settings = resolve() if settings is None else settings
        with self._lock:
            self._load(settings.block, settings.hook_limit_s)
            states = [self._state(entry.state, settings) for entry in self._entries.values()]
            states += [p.state("blocked", _blocked(settings)) for p in self._discover().values()]
            known = [entry.backend for entry in self._entries.values()]
            backends = [info for info in known if info is not None]
            order = {info.name: place for place, info in enumerate(in_default_order(backends))}
            order |= {name: place - 10_000 for place, name in enumerate(settings.backends or ())}
            states.sort(key=lambda s: (s.state == "quarantined", order.get(s.name, 10_000), s.name))
            return [*states, *self._duplicates]

    def _state(self, state: PluginState, settings: Settings) -> PluginState:
        if state.name in settings.block and state.name not in NEEDED:
            return replace(state, state="blocked", reason=_blocked(settings))
        return state

    def session(self, settings: Settings) -> Session:
        """The plugins under one snapshot of the settings, checked against what is installed.

        :raises SettingsError: the settings name what isn't there, or an option is wrong.
        :raises RegistrationError: the settings name a plugin that is quarantined.
        """
        with self._lock:
            self._load(settings.block, settings.hook_limit_s)
            known = {
                p.name: p.state("blocked", _blocked(settings)) for p in self._discover().values()
            }
            known |= {n: self._state(e.state, settings) for n, e in self._entries.items()}
            return Session(settings, dict(self._entries), known)


def _is_own(point: metadata.EntryPoint) -> bool:
    """Whether an entry point comes with the board."""
    return point.dist is not None and point.dist.name == "fuseboard"


@contextmanager
def _left_alone(plugin: str) -> Iterator[None]:
    """Hold a plugin's own code to leaving the process as it is, and put back what it changed.

    :raises RegistrationError: it changed something.
    """
    with StateGuard() as state:
        yield
    if left := state.changed("answers"):
        raise RegistrationError(
            f"plugin {plugin!r}: importing it, or its fuseboard_backend, changed {left}, which was "
            "put back"
        )


def _blocked(settings: Settings) -> str:
    return f"named by the setting 'block', set in {settings.origin('block')}"


def _importer(module: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(module)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return ""


board = Board()


def register(plugin: object, name: str | None = None) -> None:
    """Plug a backend, or any other plugin, into the board of this process.

    :param plugin: a module or object with functions marked ``@fuseboard.hookimpl``.
    :param name: what its backend calls itself, or else the module's name, if not given.
    :raises RegistrationError: the name is taken, or the plugin breaks a rule.
    """
    board.register(plugin, name)


def unregister(name: str) -> None:
    """Take a plugin off the board of this process.

    :raises RegistrationError: there is no such plugin, or it is built in.
    """
    board.unregister(name)
