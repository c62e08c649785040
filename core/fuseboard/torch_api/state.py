"""What a process can be left in: modes, levels, switches, generators; read, compared and put back.

A hook, or compiled code that is only tried, may change what the rest of the program runs under:
``torch.set_num_threads``, an ``autocast`` that is entered and not left, a functorch level that an
exception left open. :class:`StateGuard` reads all that torch and Python let one read before a
block, puts back what differs after it, and says what that was. The parts are those of
:mod:`~fuseboard.torch_api.torch_state` and :mod:`~fuseboard.torch_api.process_state`.

Some of it belongs to the thread (modes, most levels), some to the process. What another thread
changes of the latter while the block runs is taken for the block's own; so a thread beside the
user's calls looks at its own parts alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import DeviceContext

from fuseboard.beside import is_beside
from fuseboard.torch_api.process_state import generator_parts, python_parts
from fuseboard.torch_api.state_part import Kind, StatePart
from fuseboard.torch_api.torch_state import (
    autocast_parts,
    autograd_parts,
    level_parts,
    mode_parts,
    number_parts,
)


@dataclass(frozen=True)
class StateChange:
    """A part that differs from what it was."""

    part: StatePart
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.part.kind == "draws" or self.part.name == "warnings.filters":
            return self.part.name
        if isinstance(self.was, dict) and isinstance(self.now, dict):
            return ", ".join(
                f"{self.part.name}[{os.fsdecode(key)!r}]"
                for key in sorted({*self.was, *self.now})
                if self.was.get(key) != self.now.get(key)
            )
        return f"{self.part.name} from {_shown(self.was)} to {_shown(self.now)}"


def _shown(value: Any) -> str:
    if isinstance(value, DeviceContext):
        value = value.device
    text = str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _all_parts() -> Iterator[StatePart]:
    # Levels first: the code that closes them runs under the modes that it was opened under.
    yield from level_parts()
    yield from mode_parts()
    yield from autograd_parts()
    yield from autocast_parts()
    yield from number_parts()
    yield from python_parts()
    yield from generator_parts()


def _readable(part: StatePart) -> bool:
    try:
        part.read()
    except Exception:  # this build of torch has no such backend, whatever it raises
        return False
    return True


#: In the order in which they are put back.
PARTS: tuple[StatePart, ...] = tuple(filter(_readable, _all_parts()))

#: What a call of compiled code may not change; it may draw random numbers.
CALL_PARTS = tuple(part for part in PARTS if part.kind != "draws")

#: What results depend on, of what can be entered anew in another call.
ANSWER_PARTS = tuple(filter(_readable, (*autocast_parts(), *number_parts())))

#: What the code of ``torch.func`` and of autograd's contexts switches on and off.
AUTOGRAD_PARTS = tuple(filter(_readable, (*level_parts(), *autograd_parts())))


# --- reading and putting back ---------------------------------------------------------------------


def read_state(parts: Sequence[StatePart] = PARTS) -> list[Any]:
    """Their values, now and in this thread."""
    return [part.read() for part in parts]


def put_back(before: list[Any], parts: Sequence[StatePart] = PARTS) -> list[StateChange]:
    """Make the state what it was, as far as it can be; what differed, in order."""
    changes = []
    for part, was in zip(parts, before, strict=True):
        now = part.read()
        if now is was or now == was:
            continue
        changes.append(StateChange(part, was, now))
        part.write(was)
    return changes


class StateGuard:
    """A block after which the process is as it was before.

    Beside the user's calls, what belongs to the whole process is neither read nor put back.

    :ivar changes: what had to be put back, once the block is over.
    """

    def __init__(self, parts: Sequence[StatePart] = PARTS) -> None:
        self.changes: list[StateChange] = []
        self._parts = parts

    def __enter__(self) -> StateGuard:
        if is_beside():
            self._parts = tuple(part for part in self._parts if part.is_of_thread)
        self._before = read_state(self._parts)
        return self

    def __exit__(self, *error: object) -> None:
        self.changes = put_back(self._before, self._parts)

    def changed(self, kind: Kind) -> str:
        """The changes of one kind as a part of a sentence; "" for none."""
        return "; ".join(str(change) for change in self.changes if change.part.kind == kind)


@contextmanager
def under_state(state: list[Any]) -> Iterator[None]:
    """What results depend on as it was when ``state`` was read, for the block."""
    with StateGuard(ANSWER_PARTS):
        for part, value in zip(ANSWER_PARTS, state, strict=True):
            if part.read() != value:
                part.write(value)
        yield
