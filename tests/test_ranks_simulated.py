"""Hundreds of ranks agree: simulated in one process, against a store in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fuseboard.errors import RankError
from fuseboard.ranks.agreement import GRACE_S, Agreement
from fuseboard.ranks.job import WAIT_S, Job
from fuseboard.ranks.monitor import Signs

PLACE = "fuseboard/graph/0"


class MemoryStore:
    """Like a ``torch.distributed.Store``; counts messages and bytes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.messages: Counter[str] = Counter()
        self.bytes = 0

    def set(self, key: str, value: str) -> None:
        self._count("set", len(key) + len(value))
        self.values[key] = value

    def get(self, key: str) -> str:
        self._count("get", len(key) + len(self.values[key]))
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._count("check", sum(map(len, keys)))
        return all(key in self.values for key in keys)

    def add(self, key: str, more: int) -> int:
        self._count("add", len(key) + 8)
        self.values[key] = self.values.get(key, 0) + more
        return self.values[key]

    def _count(self, operation: str, size: int) -> None:
        self.messages[operation] += 1
        self.bytes += size


class Rank:
    """One rank and its graph, which is called once a round."""

    def __init__(self, sim: Simulation, number: int, parts: dict[str, str]) -> None:
        self.job = Job(number, sim.size, "simulated", sim.store, 40.0)
        self.agreement = Agreement(self.job, PLACE, parts, "the graph", lambda: sim.clock)
        self.sim = sim
        self.count = 0
        self.bound: int | None = None
        self.goes = self.is_lead = False
        #: The call from which on the program answers, and why there is none.
        self.swapped: int | None = None
        self.refused = ""
        self.error = ""
        self.steps = self.agreement.steps(self)
        self.is_done = False

    # --- as a host ------------------------------------------------------------------------------

    def lead(self) -> None:
        self.is_lead = True
        self.agreement.answered("a program", swaps=True)
        self.agreement.loaded(self.sim.problems.get(self.job.rank, ""))

    def follow(self, answer: Any) -> None:
        assert answer == "a program"
        self.agreement.loaded(self.sim.problems.get(self.job.rank, ""))

    def calls(self) -> int:
        return self.count

    def bind(self, call: int) -> bool:
        if self.count > call:
            return False
        self.bound = call
        return True

    def verdict(self, goes: bool) -> None:
        self.goes = goes
        if not goes:
            self.bound = None

    def swap(self) -> None:
        self.swapped = self.count

    def refuse(self, problem: str) -> None:
        self.refused = problem

    # --- time -----------------------------------------------------------------------------------

    def step(self) -> None:
        if self.is_done:
            return
        try:
            next(self.steps)
        except StopIteration:
            self.is_done = True
        except RankError as error:
            self.is_done, self.error = True, str(error)

    def call(self) -> None:
        if self.bound is not None and self.count >= self.bound:
            if not self.goes:
                return  # it waits in the call
            if self.swapped is None:
                self.swapped = self.count
        self.count += 1


class Simulation:
    """
    :param come: ranks that have the graph, in the order in which they take steps.
    :param calls: how many calls a rank makes between two steps.
    """

    def __init__(self, size: int, come: Any = None, calls: Any = lambda rank: 1) -> None:
        self.size = size
        self.clock = 0.0
        self.store = MemoryStore()
        self.problems: dict[int, str] = {}
        self.calls = calls
        self.come = list(range(size) if come is None else come)
        self.parts = {rank: {"settings": '{"margin": 0.03}'} for rank in self.come}

    def run(self, rounds: int = 1000) -> dict[int, Rank]:
        ranks = {rank: Rank(self, rank, self.parts[rank]) for rank in self.come}
        for _ in range(rounds):
            for rank in ranks.values():
                rank.step()
                for _ in range(self.calls(rank.job.rank)):
                    rank.call()
            self.clock += 0.5
            if all(rank.is_done for rank in ranks.values()):
                break
        for rank in ranks.values():  # calls go on until the swap
            for _ in range(1000):
                rank.call()
        return ranks


@pytest.mark.parametrize("calls", [lambda rank: 1, lambda rank: 40, lambda rank: 1 + rank % 7])
def test_all_ranks_swap_at_the_same_call(calls):
    """However many calls they make between two looks at the store, and whichever they are at."""
    ranks = Simulation(256, calls=calls).run()
    assert [rank.is_lead for rank in ranks.values()] == [True] + 255 * [False]
    assert len({rank.swapped for rank in ranks.values()}) == 1
    assert ranks[0].swapped is not None


def test_messages_of_a_rank_do_not_grow_with_their_number():
    """Nor do bytes: no rank asks each of the others."""

    def sent(size: int) -> tuple[float, float]:
        sim = Simulation(size)
        sim.run()
        return sum(sim.store.messages.values()) / size, sim.store.bytes / size

    few, many = sent(4), sent(256)
    assert many[0] <= few[0] + 1
    assert many[1] <= few[1] + 200
    assert many[0] < 60  # looks that find nothing among them


def test_rank_0_leads_though_another_one_comes_first():
    ranks = Simulation(4, come=[3, 2, 1, 0]).run()
    assert [number for number, rank in ranks.items() if rank.is_lead] == [0]


def test_a_graph_that_some_ranks_have_is_theirs_to_decide():
    """As in a pipeline: nobody waits for those that don't come, longer than a while."""
    ranks = Simulation(8, come=[5, 6]).run()
    assert sum(rank.is_lead for rank in ranks.values()) == 1
    assert len({rank.swapped for rank in ranks.values()}) == 1
    assert not any(rank.error or rank.refused for rank in ranks.values())


def test_a_rank_that_comes_late_follows():
    """The others had swapped: it does as they did, as soon as it can."""
    sim = Simulation(4, come=[0, 1, 2])
    early = sim.run()
    sim.clock += 10 * GRACE_S
    sim.parts[3] = sim.parts[0]
    late = Rank(sim, 3, sim.parts[3])
    for _ in range(20):
        late.step()
        late.call()
    assert late.swapped is not None
    assert not late.is_lead
    assert all(rank.swapped is not None for rank in early.values())


def test_what_one_rank_cannot_load_no_rank_runs():
    sim = Simulation(16)
    sim.problems[7] = "no such file"
    for rank in sim.run().values():
        assert rank.swapped is None
        assert rank.refused == "rank 7: no such file"


def test_a_rank_that_comes_late_runs_nothing_that_the_others_refused():
    """What one of them can't load none runs."""
    sim = Simulation(4, come=[0, 1, 2])
    sim.problems[1] = "no such file"
    sim.run()
    sim.clock += 10 * GRACE_S
    late = Rank(sim, 3, {"settings": '{"margin": 0.03}'})
    for _ in range(20):
        late.step()
        late.call()
    assert late.is_done
    assert late.swapped is None
    assert late.refused == "rank 1: no such file"


@pytest.mark.parametrize("slow", [0, 2])
def test_however_long_a_rank_takes_itself_it_goes_on(slow):
    """The others have waited too long then, and run Dynamo's graph; no rank's calls raise."""
    sim = Simulation(3)
    ranks = {number: Rank(sim, number, sim.parts[number]) for number in sim.come}
    work = ranks[slow].lead if slow == 0 else lambda: ranks[slow].follow("a program")
    setattr(ranks[slow], "lead" if slow == 0 else "follow", lambda *answer: None)
    for second in range(0, int(WAIT_S) + 60, 30):
        sim.clock = float(second)
        for rank in ranks.values():
            rank.step()
            rank.call()
    work()
    for _ in range(10):
        for rank in ranks.values():
            rank.step()
            rank.call()
    for rank in ranks.values():
        assert rank.is_done
        assert rank.swapped is None
        assert f"waited {WAIT_S:g} s for other ranks to agree" in rank.refused
        assert not rank.error


def test_ranks_of_other_settings_are_named_on_every_rank():
    sim = Simulation(8)
    sim.parts[5] = {"settings": '{"margin": 0.1}'}
    for rank in sim.run().values():
        assert "rank 5 and rank 0 differ in settings: margin (0.03 on rank 0, 0.1 on rank 5)" in (
            rank.error
        )


def test_a_rank_that_ends_in_order_takes_nobody_down():
    """The others go on with Dynamo's graph."""
    sim = Simulation(3)
    ranks = {number: Rank(sim, number, sim.parts[number]) for number in range(3)}
    for rank in ranks.values():
        rank.step()
    ranks[1].agreement.leave()
    for _ in range(10):
        for number in (0, 2):
            ranks[number].step()
    for number in (0, 2):
        assert ranks[number].refused == "rank 1 left before ranks agreed"
        assert not ranks[number].error


@pytest.mark.parametrize("dead", [[3], [2, 3], [0]])
def test_ranks_see_that_others_are_dead(dead):
    """Within the limit and a half, by few messages; one that has nothing to agree on isn't."""
    store, clock, size = MemoryStore(), 0.0, 8
    signs = {r: Signs(Job(r, size, "simulated", store, 40.0), lambda: clock) for r in range(size)}
    for rank in signs:
        signs[rank].tend()
    signs.pop(5).rest()
    for rank in dead:
        del signs[rank]
    seen: dict[int, float] = {}
    problems: set[str] = set()
    store.messages.clear()
    while len(seen) < len(signs) and clock < 100:
        clock += 0.5
        for rank, own in signs.items():
            try:
                own.tend()
            except RankError as error:
                seen.setdefault(rank, clock)
                problems.add(str(error).split(" has given no sign of life")[0])
    assert seen.keys() == signs.keys()
    assert max(seen.values()) <= 60
    assert problems <= {f"rank {rank}" for rank in dead}
    assert sum(store.messages.values()) / size < 12 * 10  # at most six at a beat
