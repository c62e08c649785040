"""Which plugins take part, under one snapshot of the settings, and with which options.

Settings that only the installed plugins can judge (names of backends, plugins' options, stage
overrides) are all checked when a selection is made, before anything is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fuseboard import hookspecs
from fuseboard.board.overrides import Override, load_override
from fuseboard.board.pass_order import order_of_passes
from fuseboard.board.plugin_options import plugin_options
from fuseboard.board.registration import PluginState, RegisteredPlugin, in_default_order
from fuseboard.config.model import Settings
from fuseboard.config.sources import nearest
from fuseboard.contracts import BackendInfo
from fuseboard.errors import RegistrationError, SettingsError

#: What all else falls back to.
NEEDED = frozenset({"eager", "defaults"})

#: The hooks that rewrite whole graphs.
_PASSES = ("fuseboard_fuse_dynamo", "fuseboard_fuse")

#: Hook → its arguments.
ARGUMENTS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith("fuseboard_")
}


class Selection:
    """The plugins that take part under one snapshot of the settings, and how they are set.

    :ivar settings: the snapshot.
    :ivar backends: in order of priority; the last is always ``eager``, which takes whatever
        is left.
    :ivar eager_is_fallback_only: the user named backends, and ``eager`` not among them.
    :ivar notes: what the user should know, such as a named backend that had to be left out.
    """

    def __init__(
        self,
        settings: Settings,
        entries: Mapping[str, RegisteredPlugin],
        states: Mapping[str, PluginState],
    ) -> None:
        self.settings = settings
        self.notes: list[str] = []
        self._entries = entries
        self._states = states
        self._muted: set[str] = set()
        self._check_block()
        self._check_knapsack()
        self.backends = tuple(self._choose_backends())
        self.eager_is_fallback_only = "eager" not in (settings.backends or ("eager",))
        self._order = self._all_in_order()
        self._pass_orders = {hook: self._pass_order(hook) for hook in _PASSES}
        self._options = self._given_options()
        self._check_pins()
        #: The user's function that ``tolerance_metric`` names.
        self.metric = self._metric()
        self._overrides = {
            f"fuseboard_{stage}": self._override(stage, target)
            for stage, target in settings.stages.items()
        }

    # --- which plugins --------------------------------------------------------------------------

    def _choose_backends(self) -> list[BackendInfo]:
        infos = {name: e.backend for name, e in self._entries.items() if e.backend is not None}
        named = self.settings.backends
        if named is None:
            ready = [i for name, i in infos.items() if self._states[name].state == "ready"]
            measured = self.settings.policy == "measured"
            chosen = in_default_order(
                info
                for info in ready
                if not info.by_request and (measured or not info.by_measurement)
            )
        else:
            chosen = [infos[name] for name in self._usable(named)]
        if all(info.name != "eager" for info in chosen):
            self._require("eager", "the board needs it")
            chosen.append(infos["eager"])
        last = next(i for i, info in enumerate(chosen) if info.name == "eager")
        for info in chosen[last + 1 :]:
            self.notes.append(
                f"left out: {info.name!r} comes after 'eager', which takes everything"
            )
        return chosen[: last + 1]

    def left_out(self) -> dict[str, str]:
        """Installed backends that have no part in this, by name, with why."""
        here = {info.name for info in self.backends}
        why: dict[str, str] = {}
        for name, state in self._states.items():
            entry = self._entries.get(name)
            if state.state != "ready":
                known = entry is not None and (entry.info is not None or state.state == "blocked")
                if not known or entry is None or entry.backend is not None:
                    why[name] = f"{state.state}: {state.reason}"
            elif entry is not None and entry.backend is not None and name not in here:
                if self.settings.backends is not None:
                    why[name] = "the setting backends doesn't name it, or names it after eager"
                elif entry.backend.by_request:
                    why[name] = "it runs only where the setting backends names it"
                else:
                    why[name] = "it is a candidate under the policy 'measured' only"
        return why

    def _usable(self, named: tuple[str, ...]) -> list[str]:
        """The named backends that can be used; it is an error if none but eager is left."""
        usable, out = [], {}
        for name in named:
            where = self._where("backends", list(named))
            state = self._require(name, where)
            if state.state != "ready":
                out[name] = f"{name!r} is {state.state}: {state.reason}"
            elif self._entries[name].backend is None:
                raise SettingsError(
                    f"{where}: plugin {name!r} has no backend, it takes part in other stages "
                    f"({', '.join(state.stages)}) and does so without being named. Leave it out."
                )
            else:
                usable.append(name)
        if out and not set(usable) - {"eager"}:
            raise SettingsError(
                f"{self._where('backends', list(named))}: {'; '.join(out.values())}"
            )
        self.notes += [f"left out: {problem}" for problem in out.values()]
        return usable

    def _require(self, name: str, where: str) -> PluginState:
        """The state of a plugin that the user named.

        :raises SettingsError: it isn't installed.
        :raises RegistrationError: it is quarantined; chained to the reason.
        """
        state = self._states.get(name)
        if state is None:
            backends = sorted(n for n in self._states if n != "defaults")
            hint = f" Try: pip install 'fuseboard[{name}]'." if name in _extras() else ""
            raise SettingsError(
                f"{where}: no plugin named {name!r}.{nearest(name, backends)} "
                f"Installed: {', '.join(backends)}.{hint}"
            )
        if state.state == "quarantined":
            raise RegistrationError(
                f"{where}: plugin {name!r} ({state.source}) is quarantined: {state.reason}"
            ) from self._entries[name].error
        return state

    def _where(self, key: str, value: Any) -> str:
        return f"{key} = {value!r}, set in {self.settings.origin(key)}"

    def _all_in_order(self) -> tuple[str, ...]:
        """Active backends, then plugins without one, the defaults last."""
        active = [info.name for info in self.backends]
        others = [
            name
            for name, entry in self._entries.items()
            if entry.backend is None and self._states[name].state == "ready"
        ]
        return (*active, *sorted(others, key=lambda name: name == "defaults"))

    def _check_block(self) -> None:
        for name in self.settings.block:
            where = self._where("block", list(self.settings.block))
            if name in NEEDED:
                raise SettingsError(
                    f"{where}: {name!r} is what all else falls back to and can't be blocked."
                )
            if name not in self._states:
                near = nearest(name, self._states)
                self.notes.append(f"{where}: no plugin named {name!r} is installed.{near}")

    def _check_pins(self) -> None:
        """What ``pin`` and ``exclude`` name must be a backend that can run here."""
        settings = self.settings
        named: list[tuple[str, Any, str]] = [
            (f"pin.{pattern}", name, name) for pattern, name in settings.pin.items()
        ]
        named += [(f"exclude.{name}", list(own), name) for name, own in settings.exclude.items()]
        for key, value, name in named:
            where = self._where(key, value)
            state = self._require(name, where)
            if state.state != "ready":
                raise SettingsError(f"{where}: {name!r} is {state.state}: {state.reason}")
            if self._entries[name].backend is None:
                raise SettingsError(f"{where}: plugin {name!r} has no backend.")
            if key == "exclude.eager":
                raise SettingsError(f"{where}: 'eager' takes what no other backend does.")

    def _check_knapsack(self) -> None:
        if self.settings.knapsack == "ilp" and find_spec("scipy") is None:
            raise SettingsError(
                f"{self._where('knapsack', 'ilp')}: it needs scipy, which isn't installed. "
                "Try: pip install scipy; or use 'dp' or 'greedy'."
            )

    # --- options and overrides ------------------------------------------------------------------

    def _given_options(self) -> dict[str, Any]:
        """The options of each plugin that the settings give options to."""
        options: dict[str, Any] = {}
        for name in self.settings.plugins:
            origin = self.settings.origin(f"plugins.{name}")
            if name not in self._states:
                if origin.startswith("mode="):
                    continue  # a preset speaks of a plugin that this machine needn't have
                raise SettingsError(
                    f"plugins.{name}: no plugin named {name!r}.{nearest(name, self._states)} "
                    f"Installed: {', '.join(sorted(self._states))}. Set in {origin}."
                )
            state = self._states[name]
            if state.state != "ready" and self.settings.plugins[name]:
                self.notes.append(
                    f"plugins.{name}, set in {origin}, does nothing: {name!r} is {state.state}: "
                    f"{state.reason}"
                )
            entry = self._entries.get(name)
            if entry is not None and entry.examined is not None:
                options[name] = plugin_options(name, entry.info, self.settings)
        return options

    def options(self, plugin: str) -> Any:
        """A backend's options model, filled from the settings; None where it has no options."""
        if plugin not in self._options:
            self._options[plugin] = plugin_options(
                plugin, self._entries[plugin].info, self.settings
            )
        return self._options[plugin]

    def _override(self, stage: str, target: str) -> str | Override:
        """What a stage override means: a plugin's name, or a function of the user's."""
        where = self._where(f"stages.{stage}", target)
        hook = f"fuseboard_{stage}"
        if ":" in target:
            return load_override(target, where, ARGUMENTS[hook])
        if target not in self._states:
            raise SettingsError(
                f"{where}: {target!r} is neither an installed plugin nor a path "
                f"package.module:function.{nearest(target, self._states)} "
                f"Installed: {', '.join(sorted(self._states))}."
            )
        state = self._require(target, where)
        if state.state != "ready":
            raise SettingsError(f"{where}: {target!r} is {state.state}: {state.reason}")
        if not self.implements(target, hook):
            able = sorted(n for n in self._entries if self.implements(n, hook))
            raise SettingsError(
                f"{where}: plugin {target!r} has no {hook}. Plugins that have it: "
                f"{', '.join(able) or 'none'}."
            )
        return target

    def _metric(self) -> Override | None:
        path = self.settings.tolerance_metric
        if ":" not in path:
            return None
        return load_override(path, self._where("tolerance_metric", path), ("result", "reference"))

    def override(self, stage: str) -> str:
        """Who decides a stage by the settings; "" where they name nobody."""
        return self.settings.stages.get(stage, "")

    def _compile_overrides(self) -> dict[str, str | Override]:
        """Stage → who decides it, of the stages that compiled programs depend on."""
        named = {hook.removeprefix("fuseboard_"): one for hook, one in self._overrides.items()}
        return {stage: one for stage, one in named.items() if stage != "sampler"}

    def override_homes(self) -> dict[str, tuple[Path, ...]]:
        """Stage → where the code is of the function or plugin that the settings name for it.

        With the function of ``tolerance_metric``.
        """
        homes = {
            stage: one.homes if isinstance(one, Override) else self.homes(one)
            for stage, one in self._compile_overrides().items()
        }
        return homes if self.metric is None else {**homes, "tolerance_metric": self.metric.homes}

    def override_of_this_process(self) -> str:
        """A path among the settings that another process can't import; "" where there is none."""
        named = [*self._compile_overrides().values(), self.metric]
        paths = [one for one in named if isinstance(one, Override)]
        return next((one.path for one in paths if not one.is_importable_elsewhere), "")

    def override_origin(self, stage: str, who: str) -> str:
        """Where ``who`` was made to decide a stage; "" if no setting names it."""
        named = self.settings.stages.get(stage) == who
        return self._where(f"stages.{stage}", who) if named else ""

    def implements(self, plugin: str, hook: str) -> bool:
        """Whether an active plugin has a hook."""
        entry = self._entries.get(plugin)
        return entry is not None and entry.examined is not None and hook in entry.examined.hooks

    def has(self, plugin: str) -> bool:
        """Whether a plugin of this name is ready, active or not."""
        state = self._states.get(plugin)
        return state is not None and state.state == "ready"

    def fingerprint(self, plugin: str) -> str:
        """What a plugin's code is told from others by; "" where it doesn't say."""
        entry = self._entries.get(plugin)
        return entry.info.fingerprint if entry is not None and entry.info is not None else ""

    def bakes_constants(self, plugin: str) -> bool:
        """Whether a plugin's code holds the values of weights."""
        entry = self._entries.get(plugin)
        return entry is not None and entry.backend is not None and entry.backend.bakes_constants

    def homes(self, plugin: str) -> tuple[Path, ...]:
        """The packages and files that a plugin's code is in: its module's, hooks', patterns'."""
        entry = self._entries.get(plugin)
        return () if entry is None else entry.homes

    def module_name(self, plugin: str) -> str | None:
        """The module that another process must import and register to have a plugin.

        "" where its entry point does that, or it is built in; None where it is an object of this
        process.
        """
        entry = self._entries.get(plugin)
        return "" if entry is None else entry.module_name

    @property
    def plugins(self) -> tuple[str, ...]:
        """Every active plugin, in order."""
        return self._order

    @property
    def decides_on_failure(self) -> bool:
        """Whether a plugin or a function of the user's says what follows a failure."""
        hook = "fuseboard_on_failure"
        return hook in self._overrides or bool(self.with_hook(hook))

    def run_time_modules(self) -> tuple[tuple[str, str], ...]:
        """(module, name) of the active plugins that were registered at run time."""
        found = ((self.module_name(name), name) for name in self._order)
        return tuple((module, name) for module, name in found if module)

    def with_hook(self, hook: str) -> tuple[str, ...]:
        """The active plugins that implement a hook, in order."""
        order = self._pass_orders.get(hook, self._order)
        return tuple(plugin for plugin in order if self.implements(plugin, hook))

    def _pass_order(self, hook: str) -> tuple[str, ...]:
        """The active plugins that offer rewrites of whole graphs by a hook, in order.

        :raises SettingsError: the setting names what isn't there, or is part of a circle.
        :raises RegistrationError: what plugins say of themselves does.
        """
        wanted = self.settings.fuse_order
        where = self._where("fuse_order", list(wanted))
        for name in wanted:
            self._require(name, where)
        found = {name: self._entries[name].examined for name in self._order}
        plugins = {name: one for name, one in found.items() if one and hook in one.hooks}
        return order_of_passes(hook, plugins, sorted(self._states), wanted, where)


def _extras() -> list[str]:
    """The extras that the installed distribution declares."""
    try:
        return metadata.metadata("fuseboard").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return []
