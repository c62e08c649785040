"""Where a package was made, and whether what is in it can run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fuseboard.board import Session, board
from fuseboard.lower.cache_keys import code_hash, machine_parts, plugin_options_text
from fuseboard.profile.costs.rows import differing

#: What is said of a difference, by its name.
_HELP = {
    "threads": "torch.set_num_threads() may be called before loading",
    "numerics": "torch's switches of precision may be set before loading",
}


def machine() -> dict[str, str]:
    """What code depends on, of this machine, this torch and this process."""
    return machine_parts()


def plugins_of(session: Session, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """What the code of some backends is made by."""
    infos = {info.name: info for info in session.backends}
    return {
        name: {
            "fingerprint": infos[name].fingerprint,
            "code": " ".join(map(code_hash, session.homes(name))),
            "options": plugin_options_text(session.options(name)),
        }
        for name in names
    }


def why_other_machine(made: Mapping[str, str]) -> str:
    """What differs from where a package was made; "" if nothing does."""
    here = machine()
    names = differing(made, here)
    said = [
        f"{name} {here.get(name, 'unknown')!r} instead of {made.get(name, 'unknown')!r}"
        for name in names
    ]
    helps = [_HELP[name] for name in names if name in _HELP]
    return "; ".join([", ".join(said), *helps]) if said else ""


def why_no_plugins(wanted: Iterable[str]) -> str:
    """Which backends aren't ready here, and why; "" if all are."""
    states = {state.name: state for state in board.states()}
    missing = []
    for name in wanted:
        state = states.get(name)
        if state is None:
            missing.append(f"the plugin {name!r} isn't installed")
        elif state.state != "ready":
            missing.append(f"the plugin {name!r} isn't ready: {state.reason}")
    return "; ".join(missing)


def why_other_plugins(session: Session, made: Mapping[str, Mapping[str, Any]]) -> str:
    """Which backends are others than those that made a package; "" if none is."""
    here = plugins_of(session, made)
    said = [
        f"the plugin {name!r} has another {' and '.join(names)}"
        for name, parts in made.items()
        if (names := differing(parts, here[name]))
    ]
    return "; ".join(said)
