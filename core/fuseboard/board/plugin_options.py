"""A plugin's own options: from the raw table in the settings to the plugin's model."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from fuseboard.config.model import Settings
from fuseboard.config.sources import nearest
from fuseboard.contracts import BackendInfo
from fuseboard.errors import SettingsError


def plugin_options(plugin: str, info: BackendInfo | None, settings: Settings) -> Any:
    """The plugin's options model, filled from the settings; None where it has none.

    Text is read as what the option wants (``"1"`` as true), since the environment has only text.

    :raises SettingsError: an option is unknown or has the wrong type; names every problem.
    """
    given = settings.plugins.get(plugin, {})
    model: type[BaseModel] | None = info.options if info is not None else None
    if model is None:
        if given:
            key = next(iter(given))
            raise SettingsError(
                f"plugins.{plugin}.{key} = {given[key]!r}: plugin {plugin!r} has no options. "
                f"Set in {settings.origin(f'plugins.{plugin}.{key}')}; take it out."
            )
        return None
    problems = _unknown(plugin, given, model, settings)
    if not problems:
        try:
            return model.model_validate(given)
        except ValidationError as error:
            problems = [
                _problem(plugin, e["loc"], e["msg"], given, settings) for e in error.errors()
            ]
    raise SettingsError("\n".join(problems))


def _unknown(
    plugin: str, given: dict[str, Any], model: type[BaseModel], settings: Settings
) -> list[str]:
    """A problem for each key that the model doesn't know, however the model treats extra keys."""
    if model.model_config.get("extra") == "allow":
        return []
    known = {field.alias or name for name, field in model.model_fields.items()}
    return [
        f"plugins.{plugin}.{key} = {value!r}: plugin {plugin!r} has no option {key!r}."
        f"{nearest(key, known)} Its options are {', '.join(sorted(known)) or 'none'}. "
        f"Set in {settings.origin(f'plugins.{plugin}.{key}')}."
        for key, value in given.items()
        if key not in known and key not in model.model_fields
    ]


def _problem(
    plugin: str,
    loc: tuple[int | str, ...],
    message: str,
    given: dict[str, Any],
    settings: Settings,
) -> str:
    message = message.removeprefix("Value error, ")  # pydantic's, before what a validator says
    message += "" if message.endswith((".", "?", "!")) else "."
    if not loc:  # a rule of the model as a whole
        where = settings.origin(f"plugins.{plugin}")
        return f"plugins.{plugin} = {given!r}: {message} Set in {where}."
    key = ".".join(str(part) for part in loc)
    name = str(loc[0])
    if name not in given:
        return f"plugins.{plugin}.{key}: {message} It is set nowhere."
    where = settings.origin(f"plugins.{plugin}.{name}")
    return f"plugins.{plugin}.{key} = {given[name]!r}: {message} Set in {where}."
