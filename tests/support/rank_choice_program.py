"""One rank of a gloo job that compiles under ``ranks = "agree"``; prints what it saw as JSON.

Usage: python -m tests.support.rank_choice_program RANK SIZE STORE_FILE CACHE_DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fuseboard
from tests.support.backends import compiled, last_graph, observing, plugged

QUICK = {"compiles_quickly": True}


def main(rank: int, size: int, store: str, cache: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    options: dict[str, Any] = {"policy": "measured", "cache_dir": f"{cache}/{rank}"}
    measured: list[int] = []

    def measure(calls: Sequence[Callable[[], Any]]) -> list[fuseboard.Measurement]:
        """Rank 0 finds the second one faster, the others the first."""
        measured.append(len(calls))
        times = (30.0, 20.0) if rank == 0 else (20.0, 30.0)
        return [fuseboard.Measurement(us, us, us, 1) for us in times]

    seen: dict[str, Any] = {}
    x = torch.linspace(0, 1, 12).reshape(3, 4)
    with (
        observing("stopwatch", measure=measure),
        plugged("a", info=QUICK),
        plugged("b", info=QUICK),
        torch.no_grad(),
    ):
        right = torch.allclose(compiled(torch.sin, "a", "b", ranks="agree", **options)(x), x.sin())
        seen["agreed"] = [right, [r.backend for r in last_graph().regions], list(measured)]
        torch._dynamo.reset()
        compiled(torch.sin, "a", "b", **options)(x)
        seen["by priority"] = [last_graph().candidates, last_graph().notes]
        torch._dynamo.reset()
        other = torch.cos if rank == 0 else torch.exp
        try:
            compiled(other, "a", "b", ranks="agree", **options)(x)
        except Exception as error:  # torch wraps what a backend raises
            seen["different"] = str(error)
    print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
