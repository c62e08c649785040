"""The life of a graph that is compiled beside its calls: its states, and how they change.

        ┌───────────┬────────────┬──────► refused
        │           │            │
    watching ◄──► loading ──► trialling
        │           │            │
        └───────────┴────────────┴──────► settled

One table says which change is possible; :class:`Life` is the only one to make it. Reports tell the
state and are never asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from fuseboard.forks import fork_safe_lock


class GraphState(Enum):
    """What becomes of a graph. The value is told to people."""

    WATCHING = "Dynamo's own graph answers calls while the workshop tries candidates"
    LOADING = "Dynamo's own graph answers calls while what was chosen is loaded"
    TRIALLING = "calls are answered by Dynamo's own graph and by what was chosen in turn"
    SETTLED = "decided"
    REFUSED = "Dynamo's own graph answers all calls"


#: From each state to those that may follow it.
TRANSITIONS: dict[GraphState, frozenset[GraphState]] = {
    GraphState.WATCHING: frozenset({GraphState.LOADING, GraphState.SETTLED, GraphState.REFUSED}),
    # Back again where what an earlier process kept can't be loaded any more.
    GraphState.LOADING: frozenset(
        {GraphState.TRIALLING, GraphState.SETTLED, GraphState.REFUSED, GraphState.WATCHING}
    ),
    GraphState.TRIALLING: frozenset({GraphState.SETTLED, GraphState.REFUSED}),
    GraphState.SETTLED: frozenset(),
    GraphState.REFUSED: frozenset(),
}


class WrongTransition(Exception):
    """A change of state that the table doesn't have: a bug of the board's."""


class StateMachine:
    """The state of one graph, changed by any thread, one change at a time.

    The lock is held for the change alone, never while code of a plugin's, an engine's or the user's
    runs. It is the last that a thread takes: nothing else is locked under it.
    """

    def __init__(self) -> None:
        self._state = GraphState.WATCHING
        self._lock = fork_safe_lock()
        #: Whether it is over, and in the reports: they are read right after the end.
        self.is_told = False

    @property
    def state(self) -> GraphState:
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether no change can follow."""
        return not TRANSITIONS[self._state]

    def change(
        self,
        to: GraphState,
        then: Callable[[], None] = lambda: None,
        tell: Callable[[], None] = lambda: None,
    ) -> bool:
        """Change the state and do what belongs to it, such as to let calls go elsewhere.

        :param then: takes no lock and calls nobody else's code.
        :param tell: puts it into reports; called behind the change, without the lock.
        :returns: False where the life is over already, as when two threads decide at once; nothing
            is changed then.
        :raises WrongTransition: the table has no such change.
        """
        with self._lock:
            if self.is_over:
                return False
            if to not in TRANSITIONS[self._state]:
                raise WrongTransition(f"from {self._state.name} to {to.name}")
            self._state = to
            then()
        try:
            tell()
        finally:
            self.is_told = not TRANSITIONS[to]
        return True
