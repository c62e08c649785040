"""One rank of a gloo job, for tests of what ranks agree on.

Runs every scenario in turn, since starting processes takes longer than they do. Prints what it saw
as one JSON line.

Usage: python -m tests.support.rank_program RANK SIZE STORE_FILE CACHE_DIR
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fuseboard
from fuseboard.errors import RankError
from fuseboard.ranks import agreement
from fuseboard.ranks.decisions import Decisions
from fuseboard.ranks.job import job_of
from fuseboard.report.data import ledger
from tests.support.backends import compiled, last_graph, observing, plugged

QUICK = {"compiles_quickly": True}


def about(named: str, **parts: str) -> Decisions:
    job = job_of(30.0)
    assert job is not None
    return Decisions(job, {"graph": named, **parts}, named)


def in_turn(scenario: Callable[[int], Any]) -> Callable[[int], Any]:
    """Rank 0 goes through a scenario first, then the others do."""

    @functools.wraps(scenario)
    def seen(rank: int) -> Any:
        if rank:
            dist.barrier()
        try:
            return scenario(rank)
        finally:
            if not rank:
                dist.barrier()

    return seen


@in_turn
def deciding(rank: int) -> Any:
    """Two decisions; only the rank that comes first is to call these."""
    calls: list[int] = []

    def decide() -> str:
        calls.append(rank)
        return f"decided by {rank}, {len(calls)}"

    decisions = about("deciding")
    return [decisions.decide(decide), decisions.decide(decide)], calls


@in_turn
def failing(rank: int) -> Any:
    def decide() -> None:
        raise ValueError("no candidate is left")

    try:
        about("failing").decide(decide)
    except ValueError as error:
        return f"itself: {error}"


def of_one_rank(rank: int) -> Any:
    """Rank 0 never comes."""
    return about("of one rank").decide(lambda: rank) if rank else "elsewhere"


def twice(rank: int) -> Any:
    """A second process group: entries of the first one don't count."""
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    taken = [about("twice").decide(lambda: "first")]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=dist_size)
    taken.append(about("twice").decide(lambda: "second"))
    return taken


def in_stages(rank: int) -> Any:
    """Each rank comes to another graph first, as a pipeline's stages do to their backwards."""
    forward, backward = about("forward"), about("backward")
    graphs = (backward, forward) if rank else (forward, backward)
    taken = []
    for graph in graphs:
        taken.append(graph.decide(lambda: rank))
        dist.barrier()
    return sorted(taken)


@in_turn
def in_calls(rank: int) -> Any:
    """Candidates of this process alone; the ranks' stopwatches tell different things."""
    measured: list[int] = []

    def measure(calls: Sequence[Callable[[], Any]]) -> list[fuseboard.Measurement]:
        measured.append(len(calls))
        times = (30.0, 20.0) if rank == 0 else (20.0, 30.0)
        return [fuseboard.Measurement(us, us, us, 1) for us in times]

    x = torch.linspace(0, 1, 12).reshape(3, 4)
    with (
        observing("stopwatch", measure=measure),
        plugged("a", info=QUICK),
        plugged("b", info=QUICK),
        torch.no_grad(),
    ):
        options: dict[str, Any] = {"policy": "measured", "cache_dir": f"{cache}/{rank}"}
        right = torch.allclose(compiled(torch.sin, "a", "b", **options)(x), x.sin())
        agreed = [right, [r.backend for r in last_graph().regions], list(measured)]
        torch._dynamo.reset()
        compiled(torch.sin, "a", "b", ranks="priority", **options)(x)
        notes = last_graph().notes
    return [agreed, any("job of several ranks" in note for note in notes)]


def other_settings(rank: int) -> Any:
    with plugged("a", info=QUICK), plugged("b", info=QUICK), torch.no_grad():
        options = {"policy": "measured", "margin": 0.1 if rank else 0.2}
        try:
            compiled(torch.exp, "a", "b", cache=False, **options)(torch.ones(3))
        except Exception as error:  # torch wraps what a backend raises
            return str(error)


def model() -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU()] * 3
    return torch.nn.Sequential(*layers).eval()


def beside(rank: int) -> Any:
    """Inference until it has settled, by the default settings but for the backends.

    Rank 1 has one call more at first, and one of another shape alone.
    """
    from fuseboard.workshop.together import Together

    at: list[int] = []
    put = Together.verdict

    def verdict(self: Together, goes: bool) -> None:
        put(self, goes)
        if goes and self._bound is not None:
            at.append(self._bound)

    Together.verdict = verdict  # type: ignore[method-assign]
    ledger.clear()
    eager = model()
    options = {"backends": ["mkldnn", "eager"], "cache_dir": cache, "pin": {"aten.addmm": "mkldnn"}}
    run = torch.compile(eager, backend="fuseboard", options=options)
    x = torch.linspace(-1, 1, 64 * 256).reshape(64, 256)
    with torch.no_grad():
        for _ in range(3 + rank):
            torch.testing.assert_close(run(x), eager(x))
        settled = fuseboard.wait(timeout_s=300)
        for _ in range(40):
            torch.testing.assert_close(run(x), eager(x))
        graphs = [(g.instead, [r.backend for r in g.regions], g.settled) for g in ledger.graphs()]
        if rank:
            agreement.GRACE_S = 2.0
            torch.testing.assert_close(run(x[:7]), eager(x[:7]))
            settled = settled and fuseboard.wait(timeout_s=300)
            torch.testing.assert_close(run(x[:7]), eager(x[:7]))
    return {"settled": settled, "graphs": graphs, "at": at[:1]}


SCENARIOS = (deciding, failing, of_one_rank, in_stages, in_calls, other_settings, beside, twice)


def main(rank: int, size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    seen = {}
    for scenario in SCENARIOS:
        dist.barrier()
        # Else rank 0 leads, however late it comes on a busy machine.
        agreement.GRACE_S = 2.0 if scenario is of_one_rank else 60.0
        try:
            seen[scenario.__name__] = scenario(rank)
        except RankError as error:
            seen[scenario.__name__] = f"RankError: {error}"
    dist.barrier()
    print(json.dumps(seen))


if __name__ == "__main__":
    dist_size, cache = int(sys.argv[2]), sys.argv[4]
    main(int(sys.argv[1]), dist_size, sys.argv[3])
