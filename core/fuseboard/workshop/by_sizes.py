"""What was chosen for a graph with symbolic sizes, and for which sizes it is known to be right.

It was judged on one call's inputs, and code may be wrong for sizes that it wasn't judged on. So
Dynamo's own graph answers calls of sizes unlike all before; the inputs of one are kept, and the two
are compared on them beside the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuseboard.capture.side_runs import CannotCompare
from fuseboard.errors import containable
from fuseboard.forks import fork_safe_lock
from fuseboard.pipeline.call import Compiled
from fuseboard.run.failure import describe
from fuseboard.torch_api import modes as torch_modes
from fuseboard.workshop.admission import why_not_kept
from fuseboard.workshop.kept_call import CannotKeep, KeptCall
from fuseboard.workshop.proving import difference_on
from fuseboard.workshop.sizes import SizeCondition, SizeRoute
from fuseboard.workshop.trial import Trial

Run = Callable[..., Any]

#: Characters of a condition that are told.
_MOST_TOLD = 500


class BySizes:
    """Answers calls by what was chosen where it is known to be right, else by Dynamo's graph.

    :param own: Dynamo's graph.
    :param keep: keeps a call's inputs.
    :param submit: has :meth:`compare` called beside the calls.
    :ivar run: what a call executes.
    :ivar sizes_of: a function of a call's arguments: what is equal for the same sizes.
    :ivar put: lets calls that are good for what was chosen go to another program.
    """

    def __init__(
        self,
        compiled: Compiled,
        condition: SizeCondition,
        own: Run,
        keep: Callable[[tuple[Any, ...]], KeptCall],
        submit: Callable[[], None],
    ) -> None:
        self._compiled = compiled
        self._condition = condition
        self._own = own
        self._keep = keep
        self._submit = submit
        self._notes = compiled.runners[0].report.notes
        self._trial: Trial | None = None
        self._lock = fork_safe_lock()
        #: The call that is to be compared, and the bucket of its sizes.
        self._pending: tuple[Any, KeptCall] | None = None
        #: Buckets that Dynamo's graph answers for good.
        self._left: set[Any] = set()
        self._is_told = False
        self._route = SizeRoute(condition, compiled.run, self._outside, self._unseen)
        self.run, self.put = self._route.run, self._route.put
        self.sizes_of = condition.sizes_of()

    def is_right_for(self, inputs: Sequence[Any]) -> None:
        """The two were compared on these inputs, or can't be before a call of the user's."""
        self._route.seen.add(self._condition.bucket_of()(inputs))

    def begin(self, trial: Trial) -> None:
        """Let a trial answer the calls that are good for what was chosen, and hear of others."""
        self._trial = trial
        self.put(trial.call)

    def forked(self) -> None:
        """In a forked child, where nobody compares what its parent has kept."""
        self._pending = None

    # --- in a call ------------------------------------------------------------------------------

    def _outside(self, *args: Any) -> Any:
        if not self._is_told:
            self._is_told = True
            self._notes.append(
                "Dynamo's own graph answers calls of other sizes than it was compiled for: it is "
                f"for those where {self._condition.described()[:_MOST_TOLD]}"
            )
        return self._owns_results(*args)

    def _owns_results(self, *args: Any) -> Any:
        results = self._own(*args)
        if self._trial is not None:
            self._trial.pass_by()
        return results

    def _unseen(self, bucket: Any, *args: Any) -> Any:
        results = self._owns_results(*args)
        if torch_modes.saved_tensor_hooks_are_set():
            # A checkpoint's call is made again, and the two calls have to save the same tensors.
            self._left.add(bucket)
        elif bucket not in self._left and self._pending is None:
            self._compare_later(bucket, args)
        return results

    def _compare_later(self, bucket: Any, args: tuple[Any, ...]) -> None:
        why = next(filter(None, map(why_not_kept, args)), "")
        with self._lock:
            if self._pending is not None:
                return
            try:
                kept = None if why else self._keep(args)
            except CannotKeep as error:
                kept, why = None, str(error)
            if kept is None:
                self._left.add(bucket)
                self._notes.append(
                    f"Dynamo's own graph answers calls like one that can't be kept: {why}"
                )
                return
            self._pending = bucket, kept
        self._submit()

    # --- beside the calls -----------------------------------------------------------------------

    def compare(self) -> str:
        """Compare the two on the call that was kept. Returns what is wrong, or ""."""
        pending = self._pending
        if pending is None:  # forked meanwhile
            return ""
        bucket, kept = pending
        problem = ""
        buckets = [runner.context.buckets for runner in self._compiled.runners]
        before = [set(one) for one in buckets]
        try:
            problem = difference_on(self._compiled, kept)
        except CannotKeep:
            return ""  # switches were changed: another call may do
        except CannotCompare:  # the next call of such sizes is to check each region
            for known, those in zip(buckets, before, strict=True):
                known.intersection_update(those)
        except containable() as error:
            problem = describe(error)
        finally:
            self._pending = None
        if not problem and bucket not in self._left:
            self._route.seen.add(bucket)
        return problem and f"for sizes of a later call, {problem}"
