"""A program whose results may have an error, held against Dynamo's graph before it answers calls.

It was judged on one call's inputs. Dynamo's own graph answers some further calls, whose inputs are
kept, and the two are compared on them beside the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuseboard.capture.side_runs import CannotCompare
from fuseboard.errors import containable
from fuseboard.forks import fork_safe_lock
from fuseboard.pipeline.call import Compiled
from fuseboard.run.failure import describe
from fuseboard.run.proof import FURTHER_CALLS
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.views import eager_strides
from fuseboard.workshop.admission import why_not_kept
from fuseboard.workshop.kept_call import CannotKeep, KeptCall
from fuseboard.workshop.sizes import SizeCondition

Run = Callable[..., Any]


class Proving:
    """
    :param condition: which calls the program answers; None where sizes are plain.
    :param own: Dynamo's graph.
    :param keep: keeps a call's inputs.
    :param submit: has :meth:`compare` called beside the calls.
    :ivar left: how many calls are still to be compared.
    """

    def __init__(
        self,
        compiled: Compiled,
        condition: SizeCondition | None,
        own: Run,
        keep: Callable[[Sequence[Any]], KeptCall],
        submit: Callable[[], None],
    ) -> None:
        self.left = FURTHER_CALLS
        self._compiled = compiled
        self._fits = (lambda args: True) if condition is None else condition.holds()
        self._own = own
        self._keep = keep
        self._submit = submit
        self._lock = fork_safe_lock()
        #: A call that is to be compared, or why none can be.
        self._pending: KeptCall | str = ""

    def run(self, *args: Any) -> Any:
        """Answer a call by Dynamo's graph."""
        results = self._own(*args)
        with self._lock:
            if self._pending or not self._fits(args):
                return results
            self._pending = next(filter(None, map(why_not_kept, args)), "")
            try:
                self._pending = self._pending or self._keep(args)
            except CannotKeep as error:
                self._pending = str(error)
        self._submit()
        return results

    def forked(self) -> None:
        """In a forked child, where nobody compares what its parent has kept."""
        self._pending = ""

    def compare(self) -> str:
        """Compare the two on the call that was kept. Returns what is wrong, or ""."""
        kept, problem = self._pending, ""
        if isinstance(kept, str):  # "" where it was forked meanwhile
            return kept
        try:
            problem = difference_on(self._compiled, kept)
            self.left -= 1
        except CannotKeep:
            pass  # switches were changed: another call may do
        except CannotCompare as why:
            problem = f"its error in further calls isn't known: {why}"
        except containable() as error:
            problem = describe(error)
        finally:
            self._pending = ""
        return problem


def difference_on(compiled: Compiled, kept: KeptCall) -> str:
    """What a program computes otherwise than Dynamo's graph on a call that was kept, or "".

    :raises CannotKeep: the call can't be made any more.
    :raises CannotCompare: the two can't be compared.
    """
    inputs = kept.inputs()
    if inputs is None:
        return ""  # a weight is gone, and nobody will call
    with kept.entered(), StateGuard(), eager_strides():
        return compiled.capture_check().difference_as_it_runs(inputs, {})
