"""The settings that hold now, and where each value of them came from.

Later wins; tables are merged key by key: defaults, ``[tool.fuseboard]`` of the nearest
pyproject.toml, the nearest fuseboard.toml, ``FUSEBOARD_*`` in the environment,
``with fuseboard.settings(...)``, ``torch.compile(mode=...)``, ``torch.compile(options={...})``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from fuseboard.config.model import PRESETS, STAGES, Settings, unknown_key
from fuseboard.config.sources import (
    TABLES,
    RawSource,
    environment_variables,
    find_upwards,
    nearest,
    read_environment,
    read_toml_file,
)
from fuseboard.errors import SettingsError


class _FromEnvironment(BaseSettings, Settings):  # type: ignore[misc] # model_config: merged
    """The same fields, in the form that pydantic-settings' reader of the environment takes."""


@dataclass(frozen=True)
class Layer:
    """Checked values from one place, and for each dotted key where it was set."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]


@dataclass(frozen=True)
class SettingRow:
    """One line of ``fuseboard settings``."""

    key: str
    value: Any
    origin: str
    description: str


# --- from raw values to a layer -----------------------------------------------------------------


def check(source: RawSource) -> Layer:
    """A source's values, checked against the model.

    :raises SettingsError: names every problem of the source, one a line.
    """
    values, problems = _nest(source)
    problems += _unknown_stages(values, source)
    if not problems:
        try:
            model = Settings.model_validate(values, strict=not source.text)
        except ValidationError as error:
            problems = [_problem(e["loc"], values, source) for e in error.errors()]
    if problems:
        raise SettingsError("\n".join(dict.fromkeys(problems)))
    checked = {name: getattr(model, name) for name in model.model_fields_set}
    return Layer(checked, {key: source.where(key) for key, _ in _leaves(checked)})


def _nest(source: RawSource) -> tuple[dict[str, Any], list[str]]:
    """Values with dotted keys unfolded, lists as tuples; and a problem for each unknown key."""
    values: dict[str, Any] = {}
    problems = []
    for key, value in source.values.items():
        head, _, rest = str(key).partition(".")
        if head not in Settings.model_fields or (rest and head not in TABLES):
            problems.append(
                f"{key} = {value!r}: {unknown_key(str(key))} {_set_in(source, str(key))}"
            )
            continue
        value = tuple(value) if isinstance(value, list) else _copied(value)
        if rest and head == "plugins":
            plugin, _, option = rest.partition(".")
            value = {plugin: {option: value} if option else value}
        elif rest:
            value = {rest: value}
        _merge(values, {head: value})
    return values, problems


def _copied(value: Any) -> Any:
    """Tables and lists copied, so that nobody's later change reaches a snapshot."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Lay ``values`` over ``into``: tables key by key, a plugin's options too."""
    for key, value in values.items():
        old = into.get(key)
        if key == "plugins" and isinstance(value, dict) and isinstance(old, dict):
            for plugin, options in value.items():
                both = isinstance(options, dict) and isinstance(old.get(plugin), dict)
                old[plugin] = {**old[plugin], **options} if both else options
        elif key in TABLES and isinstance(value, dict) and isinstance(old, dict):
            old.update(value)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == "plugins":
            for plugin, options in value.items():
                yield from ((f"plugins.{plugin}.{k}", v) for k, v in options.items())
        elif key in TABLES and isinstance(value, Mapping):
            yield from ((f"{key}.{item}", v) for item, v in value.items())
        else:
            yield key, value


# --- messages -----------------------------------------------------------------------------------


def _set_in(source: RawSource, key: str) -> str:
    return f"Set in {source.where(key)}; correct it there."


def _unknown_stages(values: Mapping[str, Any], source: RawSource) -> list[str]:
    stages = values.get("stages")
    if not isinstance(stages, dict):
        return []
    return [
        f"stages.{stage} = {name!r}: there is no stage {stage!r} to override."
        f"{nearest(stage, STAGES)} Stages are {', '.join(STAGES)}. "
        f"{_set_in(source, f'stages.{stage}')}"
        for stage, name in stages.items()
        if stage not in STAGES
    ]


def _problem(loc: tuple[int | str, ...], values: Mapping[str, Any], source: RawSource) -> str:
    """One line for one error of pydantic's: key, value, what is allowed, where it was set."""
    field = str(loc[0])
    key, value = field, values[field]
    if field in TABLES and isinstance(value, dict):
        item = next((part for part in loc[1:] if part in value), None)
        if item is not None:
            key, value = f"{field}.{item}", value[item]
    where = _set_in(source, key)
    info = Settings.model_fields[field]
    extra = info.json_schema_extra
    allowed = extra["allowed"] if isinstance(extra, dict) else ""
    choices = [c for c in get_args(info.annotation) if isinstance(c, str)]
    return f"{key} = {value!r}: allowed: {allowed}.{nearest(value, choices)} {where}"


# --- the sources in order -----------------------------------------------------------------------

_file_layers: dict[Path, tuple[tuple[int, int], Layer | None]] = {}
_enforced: Layer | None = None
_context: ContextVar[tuple[Layer, ...]] = ContextVar("fuseboard_settings", default=())


def _file_layer(path: Path | None, table: tuple[str, ...] = ()) -> Layer | None:
    if path is None:
        return None
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size)
    cached = _file_layers.get(path)
    if cached is None or cached[0] != stamp:
        source = read_toml_file(path, table)
        cached = _file_layers[path] = (stamp, check(source) if source else None)
    return cached[1]


@lru_cache(maxsize=8)
def _environment_layer(variables: tuple[tuple[str, str], ...]) -> Layer | None:
    source = read_environment(_FromEnvironment, variables)
    return check(source) if source else None


def _given_layer(values: Mapping[str, Any], where: str) -> Layer:
    return check(RawSource(values, lambda key: where))


def resolve(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Settings:
    """The settings that hold now, as a snapshot.

    ``options`` and ``mode`` are what ``torch.compile`` was given. Keys of ``options`` may be
    dotted (``"plugins.inductor.max_autotune"``), and ``"mode"`` is accepted among them, since
    torch refuses the two keywords together.

    :raises SettingsError: a key or value is wrong; says where it was set and what is allowed.
    """
    found = [
        _file_layer(find_upwards("pyproject.toml"), ("tool", "fuseboard")),
        _file_layer(find_upwards("fuseboard.toml")),
        _environment_layer(environment_variables()),
        *_context.get(),
        _given_layer({"mode": mode}, "torch.compile(mode=)") if mode is not None else None,
        _given_layer(options, "torch.compile(options=)") if options else None,
        _enforced,
    ]
    layers = [layer for layer in found if layer is not None]
    for place in reversed(range(len(layers))):
        chosen = layers[place].values.get("mode")
        if chosen is not None:
            layers.insert(place, _given_layer(PRESETS[chosen], f"mode={chosen!r}"))
            break
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(values, _copied(dict(layer.values)))
        origins.update(layer.origins)
    settings = Settings.model_construct(**values)  # each layer was checked on its own
    settings._origins.update(origins)
    return settings


def enforce(**values: Any) -> None:
    """Settings above all other sources, in all threads, for as long as this process lives.

    Whoever searches for a fault in somebody's script switches things off with it.

    :raises SettingsError: a key or value is wrong.
    """
    global _enforced
    _enforced = _given_layer(values, "a run of a bisection")


def settings(**overrides: Any) -> _GeneratorContextManager[None]:
    """Settings for the ``torch.compile`` calls whose graphs are compiled inside the context.

    ``with fuseboard.settings(backends=["eager"]):``, or as a decorator. Contexts nest. Compiled
    code keeps the settings that it was compiled under; a new thread starts without them.

    :raises SettingsError: at once, for a wrong key or value.
    """
    return _applied(_given_layer(overrides, "fuseboard.settings(...)"))


@contextmanager
def _applied(layer: Layer) -> Iterator[None]:
    token = _context.set((*_context.get(), layer))
    try:
        yield
    finally:
        _context.reset(token)


def describe(settings: Settings | None = None) -> list[SettingRow]:
    """Every setting with its value, where it was set and what it is for."""
    settings = resolve() if settings is None else settings
    rows = []
    for name, info in Settings.model_fields.items():
        value = getattr(settings, name)
        leaves = list(_leaves({name: value})) or [(name, value)]
        text = info.description or ""
        rows += [SettingRow(key, leaf, settings.origin(key), text) for key, leaf in leaves]
    return rows
