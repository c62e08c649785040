"""One rank of a gloo job, for tests of what ranks agree on.

Runs every scenario for that many ranks in turn, since starting processes takes longer than they
do. Prints what it saw as one JSON line.

Usage: python -m tests.support.rank_program RANK SIZE STORE_FILE
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fuseboard.errors import RankError
from fuseboard.profile.choose.ranks import check_ranks_agree, decide_on_first_rank


def agree(value: Any, what: str, **how: Any) -> Any:
    """Rank 0's value, on every rank."""
    return decide_on_first_rank(lambda: value, what, **how)


def agreeing(rank: int) -> Any:
    """Decisions in turn, of two names, the second asked for in another order."""
    taken = [agree(f"decided by {rank}", "first") for _ in range(2)]
    names = ["left", "right"] if rank == 0 else ["right", "left"]
    crossed = {name: agree((name, rank), name) for name in names}
    return {"taken": taken, "crossed": crossed}


def deciding(rank: int) -> Any:
    """Only rank 0 is to call this."""
    calls = []

    def decide() -> dict[str, int]:
        calls.append(rank)
        time.sleep(0.3)
        return {"winner": rank}

    return {"decided": decide_on_first_rank(decide, "a winner of deciding"), "calls": calls}


def failing(rank: int) -> Any:
    def decide() -> None:
        raise ValueError("no candidate is left")

    try:
        decide_on_first_rank(decide, "a winner of failing", wait_s=60.0)
    except ValueError as error:
        return f"itself: {error}"


def same(rank: int) -> Any:
    check_ranks_agree({"graph": "abc", "threads": "2"}, "the graph of same")
    return "same"


def different(rank: int) -> Any:
    check_ranks_agree({"graph": f"of {rank % 2}", "threads": "2"}, "the graph of different")


def absent(rank: int) -> Any:
    """Rank 1 never asks."""
    if rank == 1:
        return "elsewhere"
    # Rank 2 comes within that time, however busy the machine is.
    check_ranks_agree({"graph": "abc"}, "the graph of absent", wait_s=3.0)


def late(rank: int) -> Any:
    """Rank 0 never decides."""
    if rank == 0:
        return "elsewhere"
    agree("own", "a winner of late", wait_s=0.5)


def twice(rank: int) -> Any:
    """A second process group: entries of the first one don't count."""
    store = dist.group.WORLD.get_group_store()
    taken = [agree(f"first {rank}", "a winner of twice")]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    taken.append(agree(f"second {rank}", "a winner of twice"))
    return taken


def of_a_group(rank: int) -> Any:
    """Ranks 1 and 2 are a group; rank 0 isn't in it and keeps its own."""
    group = dist.new_group([1, 2])
    return agree(rank, "a winner of of_a_group", group=group)


SCENARIOS: dict[int, tuple[Callable[[int], Any], ...]] = {
    2: (agreeing, deciding, failing, same, late, twice),
    3: (different, absent, of_a_group),
}


def main(rank: int, size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    told = {}
    for scenario in SCENARIOS[size]:
        dist.barrier()
        start = time.monotonic()
        try:
            seen, error = scenario(rank), ""
        except RankError as raised:
            seen, error = None, str(raised)
        waited_s = time.monotonic() - start
        told[scenario.__name__] = {"seen": seen, "error": error, "waited_s": waited_s}
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
