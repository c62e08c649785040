"""The states of a graph that is compiled beside its calls: the table, and nothing but the table."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fuseboard.run.route import Route
from fuseboard.workshop.states import TRANSITIONS, GraphState, StateMachine, WrongTransition

ROOT = Path(__file__).parents[1]
OVER = {state for state, following in TRANSITIONS.items() if not following}


def test_every_state_can_be_reached_and_has_an_end():
    """From the first one all others follow, and from each an end does."""
    assert set(TRANSITIONS) == set(GraphState)
    reached = {GraphState.WATCHING}
    while more := {to for state in reached for to in TRANSITIONS[state]} - reached:
        reached |= more
    assert reached == set(GraphState)
    ends = set(OVER)
    while more := {s for s, following in TRANSITIONS.items() if following & ends} - ends:
        ends |= more
    assert ends == set(GraphState)


def test_the_design_shows_the_table():
    """docs/design.md has each transition, and no other one."""
    text = (ROOT / "docs" / "design.md").read_text()
    for state, following in TRANSITIONS.items():
        names = ", ".join(sorted(to.name.lower() for to in following)) or "none"
        assert f"| {state.name.lower()} | {state.value} | {names} |" in text


class Changes(RuleBasedStateMachine):
    """Any changes in any order: the machine makes those of the table and refuses the others."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = StateMachine()
        self.done: list[GraphState] = []
        self.known = GraphState.WATCHING
        self.changes: list[GraphState] = []

    @rule(to=st.sampled_from(GraphState))
    def change(self, to):
        def then():
            self.done.append(to)

        if self.known in OVER:
            assert self.machine.change(to, then) is False
        elif to in TRANSITIONS[self.known]:
            assert self.machine.change(to, then) is True
            self.known = to
            self.changes.append(to)
        else:
            with pytest.raises(WrongTransition):
                self.machine.change(to, then)

    @invariant()
    def agrees(self):
        assert self.machine.state is self.known
        assert self.machine.is_over == (self.known in OVER)
        assert self.machine.is_told == (self.known in OVER)
        assert self.done == self.changes


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=50, stateful_step_count=12, deadline=None)


def test_of_two_threads_that_decide_one_does():
    """What belongs to the change that lost isn't done."""
    for _ in range(50):
        machine, done, start = StateMachine(), [], threading.Barrier(2)

        def decide(to, machine=machine, done=done, start=start):
            start.wait()
            machine.change(to, lambda: done.append(to))

        ends = (GraphState.SETTLED, GraphState.REFUSED)
        threads = [threading.Thread(target=decide, args=(to,)) for to in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [machine.state]


def test_a_life_is_settled_once_reports_tell_it():
    """Who waits for the end reads them next. No lock is held meanwhile."""
    machine, seen = StateMachine(), []
    machine.change(GraphState.LOADING, tell=lambda: seen.append(machine.is_told))
    assert not machine.is_told

    def tell():
        seen.append(machine.is_told)
        assert machine.change(GraphState.REFUSED) is False

    machine.change(GraphState.SETTLED, tell=tell)
    assert seen == [False, False]
    assert machine.is_told


def test_a_route_sends_calls_to_what_was_put_last():
    """The function that Dynamo holds stays the same."""
    route = Route(lambda x: ("first", x))
    run = route.run
    assert run(1) == ("first", 1)
    route.put(lambda x: ("second", x))
    assert run(2) == ("second", 2)
    assert route.run is run
