"""Where settings come from: TOML files near the working directory, and the environment.

What is read here is raw. :mod:`fuseboard.config` checks it against the model and merges it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from fuseboard.errors import SettingsError

ENV_PREFIX = "FUSEBOARD_"
ENV_DELIMITER = "__"

#: Settings that are tables, merged key by key. A key is what follows the first dot, dots and all.
TABLES = ("stages", "plugins", "pin", "exclude", "tolerance")


@dataclass(frozen=True)
class RawSource:
    """Values as somebody wrote them.

    :ivar values: nested, unchecked.
    :ivar where: dotted key → where it was set, for messages.
    :ivar text: every value came as text, so that ``"1"`` may stand for a number.
    """

    values: Mapping[str, Any]
    where: Callable[[str], str]
    text: bool = False


def nearest(name: object, known: Iterable[str]) -> str:
    """A sentence that suggests the known name nearest to ``name``; "" where none is near."""
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[close[0]]!r}?" if close else ""


# --- TOML files ---------------------------------------------------------------------------------


def find_upwards(name: str) -> Path | None:
    """The nearest file of this name in the working directory or a directory above it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working directory was deleted: then no file is near
        return None
    return next((d / name for d in (here, *here.parents) if (d / name).is_file()), None)


def read_toml_file(path: Path, table: tuple[str, ...] = ()) -> RawSource | None:
    """The settings in a TOML file, or in one table of it; None where the table isn't there.

    :raises SettingsError: the file can't be read, or isn't TOML.
    """
    where = f"{path} [{'.'.join(table)}]" if table else str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: can't read the settings in this file: {error}") from error
    try:
        values: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if table and "fuseboard" not in text:
            return None  # somebody else's broken file: it is not for us to complain about
        raise SettingsError(_toml_problem(path, text, error)) from error
    for key in table:
        values = values.get(key) if isinstance(values, dict) else None
    if values is None:
        return None
    if not isinstance(values, dict):
        name = ".".join(table)
        raise SettingsError(f"{path}: {name} = {values!r} must be a table: [{name}]")
    return RawSource(values, lambda key: where)


def _toml_problem(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    """One line: file, line, what is wrong there, and the line itself."""
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
    lines = text.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    what = str(error)[: found.start()] if found else str(error)
    shown = lines[min(number, len(lines)) - 1].strip()
    return f"{path}, line {number}: not valid TOML: {what}: {shown!r}. Correct this line."


# --- the environment ----------------------------------------------------------------------------


class _Environment(EnvSettingsSource):
    """pydantic-settings' reader, which here also takes ``FUSEBOARD_BACKENDS=mkldnn,eager``."""

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        if (
            field is not None
            and "tuple" in str(field.annotation)
            and not value.lstrip().startswith("[")
        ):
            return [part.strip() for part in value.split(",") if part.strip()]
        return _from_json(value)


def _from_json(value: Any) -> Any:
    """Text that is a JSON list or table, decoded; anything else as it is, for the check to see."""
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def environment_variables() -> tuple[tuple[str, str], ...]:
    """The variables that are ours, which is also the key under which they can be cached."""
    return tuple((k, v) for k, v in sorted(os.environ.items()) if k.upper().startswith(ENV_PREFIX))


def read_environment(
    model: type[BaseSettings], variables: tuple[tuple[str, str], ...]
) -> RawSource | None:
    """The settings in ``FUSEBOARD_*``, read into the fields of ``model``.

    :raises SettingsError: a variable belongs to no setting.
    """
    if not variables:
        return None
    names: dict[str, str] = {}
    for name, value in variables:
        key = name[len(ENV_PREFIX) :].lower().replace(ENV_DELIMITER, ".")
        _check_variable(name, value, key, set(model.model_fields))
        names[key] = name

    def where(key: str) -> str:
        while key not in names and "." in key:  # one variable may hold a whole JSON table
            key = key.rpartition(".")[0]
        return f"environment {names.get(key, ENV_PREFIX + key.upper())}"

    source = _Environment(
        model, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER, case_sensitive=False
    )
    return RawSource(_from_json(source()), where, text=True)


def _check_variable(name: str, value: str, key: str, known: set[str]) -> None:
    head = key.partition(".")[0]
    if head in known and (head == key or head in TABLES):
        return
    variables = {ENV_PREFIX + field.upper() for field in known}
    near = nearest(ENV_PREFIX + head.upper(), variables)
    raise SettingsError(
        f"{name} = {value!r}: there is no such setting.{near} "
        f"Set in environment {name}; correct or unset it. "
        f"Variables of fuseboard: {', '.join(sorted(variables))}; a plugin's option is "
        f"{ENV_PREFIX}PLUGINS__NAME__OPTION."
    )
