"""One rank of a job of which another one is killed while they settle; prints what it saw.

Nothing but the agreement tells: the ranks' graphs have no collectives.

Usage: python -m tests.support.killed_rank_program RANK SIZE STORE CACHE_DIR KILLED
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import fuseboard
from fuseboard.workshop.together import Together

#: All ranks have the graph.
have_it = threading.Event()


def killed(self: Together, *_: Any) -> None:
    have_it.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def main(rank: int, size: int, store: str, cache: str, victim: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    if rank == victim:
        Together.follow = Together.lead = killed  # type: ignore[assignment, method-assign]
    options = {"backends": ["mkldnn", "eager"], "cache_dir": cache, "rank_limit_s": 4.0}
    options["pin"] = {"aten.addmm": "mkldnn"}
    model = torch.nn.Linear(64, 64)
    run = torch.compile(model, backend="fuseboard", options=options)
    x = torch.ones(16, 64)
    seen = ["nothing", "nothing"]
    with torch.no_grad():
        run(x)
        dist.barrier()
        have_it.set()
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                run(x)
            except fuseboard.RankError as error:
                seen[0] = str(error)
                break
            time.sleep(0.01)
        try:
            fuseboard.wait(timeout_s=30)
        except fuseboard.RankError as error:
            seen[1] = str(error)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    number, world, place, directory, one = sys.argv[1:]
    address = place if place.startswith("tcp") else f"file://{place}"
    main(int(number), int(world), address, directory, int(one))
