"""A bisection of a script, from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fuseboard.bisection.run import Outcome, Step, run_script
from fuseboard.bisection.search import Culprit, Search


def bisect(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    trips: bool = False,
    limit_s: float = 600.0,
    max_runs: int = 20,
    reproduction: Path | None = None,
    done: Callable[[Step, Outcome], object] | None = None,
) -> Culprit:
    """Find the plugin, the stage, and the rewrite or the op that make a script fail.

    The script runs again and again, each time in a process of its own, with something switched off.
    A run fails if it ends as the first one did: by an exception of the same class, the same exit
    status or signal.

    :param script: ends with an exception or an exit status where something is wrong.
    :param args: its arguments.
    :param trips: a failure of a plugin that the board contained counts as well.
    :param limit_s: seconds; a run that takes longer fails.
    :param max_runs: how many runs there may be; then what is known by then is returned.
    :param reproduction: where to write a script with the ops that are to blame and nothing else.
        It is run once, and what it shows is among what ``done`` is told.
    :param done: is told each run.
    :raises FileNotFoundError: there is no such script.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {str(path)!r}")

    def run(step: Step, path: Path = path, args: Sequence[str] = args) -> Outcome:
        outcome = run_script(step, path, args, limit_s, trips)
        if done is not None:
            done(step, outcome)
        return outcome

    found = Search(run, max_runs).find()
    if reproduction is not None and found.reproduction:
        reproduction.write_text(found.reproduction, encoding="utf-8")
        run(Step(f"{reproduction}, the reproduction"), reproduction, ())
    return found
