"""One thing that a process can be left in, to be read and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: What a change of a part means. ``answers``: the program may compute something else, or otherwise
#: than its author wants. ``surroundings``: it is the process's, and an engine may change it when it
#: is imported. ``draws``: numbers were drawn from a generator.
Kind = Literal["answers", "surroundings", "draws"]


@dataclass(frozen=True)
class StatePart:
    """One thing that can be read and put back.

    :ivar name: as people write it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    kind: Kind = "answers"

    @property
    def is_of_thread(self) -> bool:
        """Whether each thread has its own."""
        return self.name in _OF_THREAD or "autocast" in self.name


#: What C++ and Python keep in thread-local variables; autocast's parts on top. All else belongs to
#: the process: its other threads read and change it at any time, so a thread beside them may
#: neither write it, nor blame anyone for a change that it sees.
_OF_THREAD = frozenset(
    {
        *("the inference mode", "the grad mode", "forward-mode AD", "multithreaded autograd"),
        *("view replay", "hooks of saved tensors", "why saved tensors' hooks are disabled"),
        *("the number of open levels of torch.func", "inplace requires grad allowed"),
        *("single level autograd function allowed", "the default device"),
        *("the torch-function modes", "the torch-dispatch modes", "__torch_function__"),
        *("torch.set_num_threads", "sys.settrace", "sys.setprofile"),
        "torch.set_flush_denormal",
    }
)
