"""Settings of Inductor's that users give by name: known to it, and of the type that it wants.

Read against torch 2.13: ``torch/utils/_config_module.py`` (``get_config_copy``, ``get_type``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with values of Inductor's types: ``"8"`` is 8 where it wants a whole number.

    :raises ValueError: there is no such setting, or it can't have that value; names every problem.
    """
    if not given:
        return {}
    from torch._inductor import config

    known = config.get_config_copy()
    values: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        if name not in known:
            problems.append(f"Inductor has no setting {name!r}.{_nearest(name, known)}")
            continue
        try:
            values[name] = _as_wanted(value, config.get_type(name))
        except ValidationError as error:
            reasons = "; ".join(dict.fromkeys(one["msg"] for one in error.errors()))
            problems.append(f"{name} = {value!r}: {reasons}; it is {known[name]!r} by default")
    if problems:
        raise ValueError(" ".join(problems))
    return values


def _as_wanted(value: Any, kind: Any) -> Any:
    """
    :param kind: an annotation. That of None alone, and one in quotes, say nothing.
    """
    if kind in (None, type(None)) or isinstance(kind, str):
        return value
    try:
        wanted: TypeAdapter[Any] = TypeAdapter(kind, config=_ANY_CLASS)
    except PydanticUserError:
        try:
            wanted = TypeAdapter(kind)  # a class with a model of its own takes no configuration
        except PydanticUserError:
            return value
    return wanted.validate_python(value)


_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def _nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests what may have been meant; "" where nothing is near."""
    within = [one for one in known if one.startswith(f"{name}.")]
    if within:
        return f" It is a group: write {within[0]!r} and the like, in quotes."
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
