"""A graph's calls while ranks agree on it, simulated in one process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fuseboard.backend import fuseboard
from fuseboard.errors import RankError
from fuseboard.ranks.job import Job
from fuseboard.ranks.monitor import Monitor, wait_for
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
