"""A graph's calls while ranks agree on it, simulated in one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fuseboard.backend import fuseboard
from fuseboard.errors import RankError
from fuseboard.ranks import job as job_module
from fuseboard.ranks.job import Job
from fuseboard.ranks.monitor import Monitor, Signs, wait_for
from fuseboard.workshop import life as lives_module
from fuseboard.workshop.life import Life
from tests.support.beside import life
from tests.test_ranks_simulated import MemoryStore

pytestmark = pytest.mark.usefixtures("as_users_run_it")

QUICK = {"backends": ["eager"], "measure_s": 0.01}


def graph_of(held: dict[str, Any]) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight") if held else graph.placeholder("weight")
    graph.output((graph.call_function(torch.matmul, (x, weight)),))
    return GraphModule(held, graph)


def job(size: int = 2, store: Any = None) -> Job:
    return Job(0, size, "simulated", store or MemoryStore(), 40.0)


@pytest.fixture
def agreeing(monkeypatch) -> tuple[Life, Any]:
    """A graph that two ranks have, and what Dynamo calls; nothing is done for it by itself."""
    monkeypatch.setattr(lives_module, "job_of", lambda limit_s: job())
    idle = SimpleNamespace(submit=lambda order: None, pay_for_trace=lambda: None)
    monkeypatch.setattr(lives_module, "desk", lambda: idle)
    x, weight = torch.randn(2, 3), torch.randn(3, 5, requires_grad=True)
    run = fuseboard(graph_of({}), [x, weight], options=QUICK)
    run(x, weight)
    return life(), run


def chosen(run: Any) -> Any:
    """What won in the workshop, as far as a decision looks at it."""
    return SimpleNamespace(
        compiled=SimpleNamespace(is_dynamo_graph=False),
        run=run,
        leave_to=lambda own: None,
        tell_wrong=lambda problem, name: None,
        lost=lambda problem: None,
    )


def test_calls_that_are_to_be_made_again_are_so_by_what_made_them(agreeing):
    """Also where they were made between the verdict and the call that ranks have agreed on."""
    graph, run = agreeing
    asked: list[str] = []

    def program(x, weight):
        asked.append("program")
        return (torch.matmul(x, weight),)

    x, weight = torch.randn(2, 3), torch.randn(3, 5, requires_grad=True)
    graph._chosen = chosen(program)
    swapped = graph.swap()
    result = checkpoint(lambda x: run(x, weight)[0].sin(), x, use_reentrant=False)
    graph._route.put(swapped)
    result.sum().backward()
    assert asked == []
    torch.testing.assert_close(weight.grad, x.T @ (x @ weight).cos())
    torch.testing.assert_close(run(x, weight)[0], x @ weight)
    assert asked == ["program"]


def test_other_ranks_are_told_that_a_proof_failed(agreeing, monkeypatch):
    """They would wait for this one to be ready."""
    graph, _ = agreeing
    told: list[str] = []
    monkeypatch.setattr(graph._together, "failed", told.append)
    graph._give_up(chosen(None), "an error of 0.3")
    assert told == ["an error of 0.3"]


def test_that_ranks_cannot_agree_is_raised_once(agreeing):
    """Dynamo's graph is right, and the user may go on, with another process group."""
    graph, run = agreeing
    x, weight = torch.randn(2, 3), torch.randn(3, 5)
    graph._together._failed(RankError("rank 1 is dead"))
    with pytest.raises(RankError, match="rank 1 is dead"):
        run(x, weight)
    torch.testing.assert_close(run(x, weight)[0], x @ weight)
    with pytest.raises(RankError, match="rank 1 is dead"):
        graph.settle()
    assert graph.settled
    torch.testing.assert_close(run(x, weight)[0], x @ weight)


class Group:
    """What is asked of a process group."""

    group_name = "0"

    def __init__(self, store: Any) -> None:
        self.get_group_store = lambda: store


@pytest.fixture
def group(monkeypatch) -> Any:
    """Puts this process into a group of two."""
    held: list[Any] = []

    def enter(store: Any) -> Any:
        made = Group(store)
        held.append(made)
        monkeypatch.setattr(job_module, "dist", joined(made))
        return made

    def joined(made: Any) -> Any:
        return SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_world_size=lambda: 2,
            get_rank=lambda: 0,
            get_backend=lambda: "gloo",
            group=SimpleNamespace(WORLD=made),
        )

    monkeypatch.setattr(job_module, "_parents", None)
    return enter


def test_a_job_has_a_connection_of_its_own(group):
    """For each process group one, which doesn't keep the group's server alive."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first = group(dist.PrefixStore("default", server))
    own = job_module.job_of(40.0)
    own.post("said", 7)
    assert first.get_group_store().check(["said"])
    assert job_module.job_of(40.0) == own
    assert own.store is not first.get_group_store()
    group(dist.PrefixStore("default", server))
    assert job_module.job_of(40.0).store is not own.store


def test_a_store_of_the_users_needs_no_clone(group):
    """The group's own serves then."""

    class Own(dist.Store):
        def set(self, key, value):
            said[key] = value

    said: dict[str, Any] = {}
    store = Own()
    group(store)
    job_module.job_of(40.0).post("said", 7)
    assert set(said) == {"said"}


def test_a_rank_that_was_dead_in_another_group_is_not_in_this(group):
    """A store may outlive a group, with what was said of its ranks."""
    store = dist.HashStore()
    group(store)
    clock = 0.0
    Signs(replace(job_module.job_of(40.0), rank=1), lambda: clock).tend()
    before = Signs(job_module.job_of(40.0), lambda: clock)
    before.tend()
    clock = 50.0
    with pytest.raises(RankError, match="rank 1 has given no sign of life"):
        before.tend()
    group(store)
    after = Signs(job_module.job_of(40.0), lambda: clock)
    for clock in (60.0, 70.0, 120.0):  # noqa: B007 - they look at it
        after.tend()


def test_a_forked_child_is_no_rank(group):
    """It has its parent's connections, and would talk in between."""
    group(dist.HashStore())
    assert job_module.several_ranks()
    job_module._after_fork()
    assert not job_module.several_ranks()
    group(dist.HashStore())  # one of its own
    assert job_module.several_ranks()


def test_a_forked_childs_calls_are_dynamos(agreeing):
    """Also those of a graph that waits for one of its calls."""
    graph, run = agreeing
    graph._wants_call = True
    graph.forked()
    seen = graph._together.calls()
    x, weight = torch.randn(2, 3), torch.randn(3, 5)
    torch.testing.assert_close(run(x, weight)[0], x @ weight)
    assert graph._together.calls() == seen


@pytest.mark.parametrize("raised", [LookupError("no such key"), ValueError("a bug")])
def test_whatever_an_agreement_raises_ends_it_alone(raised):
    """Its calls raise, the others' ranks are told, and further agreements are reached."""

    def failing():
        raise raised
        yield

    monitor, over = Monitor(job()), threading.Event()
    errors: list[RankError] = []
    left: list[bool] = []

    def failed(error: RankError) -> None:
        errors.append(error)

    def further():
        yield
        over.set()

    monitor.add(failing(), failed, lambda: left.append(True))
    monitor.add(further(), failed)
    assert over.wait(60)
    assert [str(error).split(": ", 1)[1] for error in errors] == [
        f"{type(raised).__name__}: {raised}"
    ]
    assert left == [True]


def test_a_store_that_raises_what_it_likes_keeps_no_call_waiting():
    """A store may be of a class of the user's."""

    class Gone(MemoryStore):
        def add(self, key, more):
            raise LookupError("no leader")

    one = job(store=Gone())

    def steps():
        one.count("came")
        yield

    with pytest.raises(RankError, match=r"can't reach the job's store.*no leader"):
        wait_for(one, steps())


def test_a_part_of_ddps_is_called_with_what_it_holds():
    """A parameter may be an attribute of Dynamo's graph, and inputs be fake when it is compiled."""
    weight = torch.nn.Parameter(torch.randn(3, 5))
    part = graph_of({"weight": weight})
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.empty(2, 3))
    with torch.no_grad():
        run = fuseboard(part, [fake], options=QUICK)
        for _ in range(2):
            given = torch.randn(2, 3)
            torch.testing.assert_close(run(given)[0], given @ weight)
