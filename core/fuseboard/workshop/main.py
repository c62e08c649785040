"""The workshop: tries candidates for graphs of another process, and keeps what it finds.

``python -m fuseboard.workshop.main`` reads directories, one a line, each with a ``request`` and the
files of its inputs. It makes the file ``started`` when the graph could be read, writes ``answer``,
and a line on its standard output. What it compiled and decided, the other process finds in the
cache and in the cost database. It ends when its standard input is closed.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuseboard.workshop.request import Answer, Request

#: So much less of the processor it gets than what doesn't ask for less.
_NICENESS = 10
#: After how many new objects garbage is looked for (``gc.set_threshold``): graphs live on, so it is
#: seldom found. Preparing a Llama-style model of 8 layers takes 5 to 9 % less of the processor than
#: with Python's own.
_COLLECTS_AFTER = (20_000, 20, 50)


def main() -> None:
    """Answer requests until nobody asks."""
    from fuseboard.lower.isolated import be_killed_with_parent

    be_killed_with_parent()
    _be_ended_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    gc.set_threshold(*_COLLECTS_AFTER)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print
    requests: queue.SimpleQueue[Path] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    from fuseboard.workshop.happenings import sent_through
    from fuseboard.workshop.rehearsal import answer  # torch loads here

    while True:
        directory = requests.get()
        with sent_through(directory):
            found = _answer(directory, answer)
        unfinished = directory / "unfinished"
        unfinished.write_bytes(pickle.dumps(found))
        os.replace(unfinished, directory / "answer")
        answers.write(b"\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[Path]) -> None:
    for line in sys.stdin.buffer:
        requests.put(Path(os.fsdecode(line.rstrip(b"\n"))))
    os.killpg(0, signal.SIGKILL)  # and with it what compilers run


def _answer(directory: Path, answer) -> Answer:  # type: ignore[no-untyped-def]
    from fuseboard.errors import containable
    from fuseboard.run.failure import describe
    from fuseboard.workshop.request import Answer

    try:
        request: Request = pickle.loads((directory / "request").read_bytes())
        return answer(request, directory)  # type: ignore[no-any-return]
    except containable() as error:  # a plugin's, torch's or the user's
        traceback.print_exc()
        return Answer(problem=describe(error))


def _be_ended_first() -> None:
    """Where memory is short, the system is to end this process before the user's."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:  # there is no such file outside of Linux
        pass


if __name__ == "__main__":
    # By its full name: what is pickled is the package's module, not ``__main__``.
    importlib.import_module("fuseboard.workshop.main").main()
