"""Where a package was made, and whether what is in it can run here."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseboard.errors import PackageError, containable, error_text
from fuseboard.lower.machine import code_hash, machine_parts

if TYPE_CHECKING:
    from fuseboard.board import Session

#: What is said of a difference, by its name.
_HELP = {
    "threads": "torch.set_num_threads() may be called before loading",
    "numerics": "torch's switches of precision may be set before loading",
}


def machine() -> dict[str, str]:
    """What code depends on, of this machine, this torch and this process."""
    return machine_parts()


def why_other_machine(made: Mapping[str, str]) -> str:
    """What differs from where a package was made; "" if nothing does."""
    here = machine()
    names = _differing(made, here)
    said = [
        f"{name} {here.get(name, 'unknown')!r} instead of {made.get(name, 'unknown')!r}"
        for name in names
    ]
    helps = [_HELP[name] for name in names if name in _HELP]
    return "; ".join([", ".join(said), *helps]) if said else ""


def plugins_of(session: Session, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the code of some backends is made by: their modules with a hash of each, and more."""
    infos = {info.name: info for info in session.backends}
    made = {}
    for name in names:
        parts: dict[str, Any] = {
            "code": {_module_at(home): code_hash(home) for home in session.homes(name)}
        }
        distributions = infos[name].distributions
        if distributions is None:
            parts["fingerprint"] = infos[name].fingerprint
        else:
            parts["distributions"] = _versions(distributions)
        made[name] = parts
    return made


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    found = dict.fromkeys(distributions, "")
    for name in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _module_at(home: Path) -> str:
    """The name of the module that is in a package's folder, or in a file."""
    names = [name for name, one in sys.modules.items() if _home_of(one) == str(home)]
    return min(names, key=len)


def _home_of(module: Any) -> str:
    known = getattr(module, "__dict__", {})  # some modules answer to any name
    return str(next(iter(known.get("__path__") or ()), known.get("__file__")))


def why_other_plugins(made: Mapping[str, Mapping[str, Any]]) -> str:
    """Which backends are missing, or others than those that made a package; "" if none is.

    No plugin is imported but these.
    """
    said = []
    for name, parts in made.items():
        try:
            here = _plugin(parts)
        except PackageError as error:
            said.append(f"the plugin {name!r} {error}")
            continue
        if others := _differing(parts, here):
            said.append(f"the plugin {name!r} has another {' and '.join(others)}")
    return "; ".join(said)


def _plugin(made: Mapping[str, Any]) -> dict[str, Any]:
    """The same parts of a plugin here.

    :raises PackageError: it can't be imported, or isn't ready.
    """
    modules = {name: imported(name) for name in made["code"]}
    parts: dict[str, Any] = {
        "code": {name: code_hash(Path(_home_of(one))) for name, one in modules.items()}
    }
    if "distributions" in made:
        return {**parts, "distributions": _versions(made["distributions"])}
    hooks = [getattr(one, "fuseboard_backend", None) for one in modules.values()]
    for describe in filter(None, hooks):
        info = describe()
        if not info.available:
            raise PackageError("plugins", f"isn't ready: {info.reason}")
        parts["fingerprint"] = info.fingerprint
    # Where the plugin is no module but an object in one, its code's hash is all that tells.
    return {"fingerprint": made.get("fingerprint"), **parts}


def imported(name: str) -> Any:
    """A module.

    :raises PackageError: it can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise PackageError("plugins", f"isn't installed: {error}") from error
    except containable() as error:  # importing runs its code
        raise PackageError("plugins", f"can't be imported: {error_text(error)}") from error


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if one.get(name) != other.get(name)]
