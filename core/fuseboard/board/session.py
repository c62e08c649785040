"""Calls of the hooks of plugins, under one snapshot of the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from fuseboard.board.answers import check_answer
from fuseboard.board.deadline import deadline
from fuseboard.board.selection import ARGUMENTS, NEEDED, Selection
from fuseboard.contracts import Event
from fuseboard.errors import (
    ContractError,
    HookTimeout,
    LoweringError,
    PluginError,
    containable,
    error_text,
)
from fuseboard.torch_api.state import StateGuard
from fuseboard.totals import totals

log = logging.getLogger("fuseboard")

_current: ContextVar[Session | None] = ContextVar("session", default=None)


class Session(Selection):
    """What the pipeline sees of the board: a selection of plugins whose hooks it can call."""

    def call(self, hook: str, plugin: str, /, **arguments: Any) -> Any:
        """One plugin's answer, checked; None where it doesn't implement the hook.

        ``options`` is filled in where the hook takes it and the caller gave none; ``random``
        is the setting's.

        :raises PluginError: it raised; chained. LoweringError passes as it is.
        :raises HookTimeout: it took longer than ``hook_limit_s``.
        :raises ContractError: it answered with the wrong thing.
        """
        if not self.implements(plugin, hook):
            return None
        examined = self._entries[plugin].examined
        assert examined is not None
        if "options" in ARGUMENTS[hook] and "options" not in arguments:
            arguments["options"] = self.options(plugin)
        if "random" in ARGUMENTS[hook]:
            arguments["random"] = self.settings.random
        caller = getattr(examined.relay, hook)

        def ask() -> Any:
            answer = caller(**arguments)
            if caller.spec.opts.get("firstresult"):
                return answer
            return answer[0] if answer else None

        return self._guarded(plugin, hook, ask, arguments)

    def _guarded(
        self, plugin: str, hook: str, ask: Callable[[], Any], arguments: Mapping[str, Any]
    ) -> Any:
        """Run a plugin's code within its limit, and check what comes out."""
        limit_s = self.settings.hook_limit_s

        def late() -> Exception:
            origin = self.settings.origin("hook_limit_s")
            problem = f"no answer within hook_limit_s = {limit_s:g} (set in {origin})"
            return HookTimeout(plugin, hook, problem)

        within = _current.set(self)
        state = StateGuard()
        # A limit that cut off an import of torch's would break every later compile: what is built
        # in gets none.
        built_in = plugin in NEEDED
        try:
            with (
                nullcontext() if built_in else state,
                nullcontext() if built_in else deadline(limit_s, late),
            ):
                answer = ask()
                if answer is not None:
                    check_answer(plugin, hook, answer, arguments)
        except (LoweringError, HookTimeout, ContractError):
            raise
        except containable() as error:
            problem = f"it raised {error_text(error)}"
            raise PluginError(plugin, hook, problem) from error
        finally:
            _current.reset(within)
            self._note_surroundings(plugin, hook, state)
        if left := state.changed("answers"):
            raise ContractError(plugin, hook, f"it changed {left}, which was put back")
        return answer

    def _note_surroundings(self, plugin: str, hook: str, state: StateGuard) -> None:
        """Say once what a hook changed in the process that isn't a reason to do without it."""
        left = state.changed("surroundings")
        note = f"{plugin} changed {left} in {hook}: put back"
        if left and note not in self.notes:
            self.notes.append(note)
            log.info("fuseboard: %s", note)

    def overriding(self, hook: str, /, **arguments: Any) -> tuple[str, Any] | None:
        """Who decides a stage by the settings, and its answer; None where it leaves it to others.

        ``options`` and ``random`` are filled in as by :meth:`call`, which says what is raised.
        """
        override = self._overrides.get(hook)
        if isinstance(override, str):
            answer = self.call(hook, override, **arguments)
            return None if answer is None else (override, answer)
        if override is None:
            return None
        own = {"options": None, "random": self.settings.random, **arguments}
        given = {name: own[name] for name in override.arguments if name in own}
        function = override.function
        try:
            answer = self._guarded(override.path, hook, lambda: function(**given), arguments)
        except PluginError as error:
            where = self.override_origin(hook.removeprefix("fuseboard_"), override.path)
            problem = f"{error.problem} ({where})"
            raise type(error)(override.path, hook, problem) from error
        return None if answer is None else (override.path, answer)

    def first(self, hook: str, /, **arguments: Any) -> tuple[str, Any]:
        """Who answered first, and what: the override of settings, then plugins in order.

        An override that returns None leaves the decision to the plugins. Raises as :meth:`call`.
        """
        found = self.overriding(hook, **arguments)
        if found is not None:
            return found
        asked = self._overrides.get(hook)
        for plugin in (name for name in self._order if name != asked):
            answer = self.call(hook, plugin, **arguments)
            if answer is not None:
                return plugin, answer
        if hook == "fuseboard_on_failure":
            return "settings", self.settings.on_failure
        raise ContractError("defaults", hook, "nobody answered, the default neither")

    def notify(self, event: Event) -> None:
        """Count an event, tell observers. One that raises is named in ``notes`` and the log, once.

        In the workshop nobody is told: the process that asked it tells its own observers.
        """
        if not totals.happened(event):
            return
        for plugin in self._order:
            try:
                self.call("fuseboard_event", plugin, event=event)
            except containable() as error:
                if plugin not in self._muted:
                    self._muted.add(plugin)
                    self.notes.append(str(error))
                    log.warning("fuseboard: %s", error)


def current_session() -> Session | None:
    """The session whose hook is running in this thread; None outside of hooks."""
    return _current.get()
