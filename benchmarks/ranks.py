"""A training step under DDP on several ranks: by fuseboard, Inductor and eager, in turn.

Each rank has one copy of the model for each of them, and all make a step of each in every round, so
that what the machine does meanwhile hits all alike. A step ends when all ranks have: it is timed on
rank 0. As a program, with arguments, the module is one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.processes import ROOT, empty_caches, worker_environment
from benchmarks.stats import Estimate, median_with_interval

ARMS = ("eager", "inductor", "fuseboard")
ROUNDS = 60
_LIMIT_S = 900.0


@dataclass(frozen=True)
class RankStep:
    """What a step takes by one arm.

    :ivar step_ms: milliseconds, in the clock.
    :ivar ratio: of eager's step in the same round over this one's.
    :ivar settled_s: from the first step's start until the last graph had settled.
    :ivar runs: the backends of its graphs' regions, where these are known.
    """

    arm: str
    step_ms: Estimate
    ratio: Estimate
    settled_s: float
    runs: str


def measure_ranks(size: int, report: Callable[[str], None]) -> list[RankStep]:
    """Start the ranks, one thread each, with empty caches.

    :raises RuntimeError: one of them failed.
    """
    report(f"{size} ranks")
    with empty_caches() as caches:
        folder = Path(caches.folder)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", f"{rank}", f"{size}", f"{folder}/store"],
                cwd=ROOT,
                env=worker_environment(1, caches),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            ends = [rank.communicate(timeout=_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, problems) in zip(ranks, ends, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank failed:\n{problems}")
    seen = json.loads(ends[0][0].splitlines()[-1])
    eager = seen["seconds"]["eager"]
    return [
        RankStep(
            arm=arm,
            step_ms=median_with_interval([1e3 * s for s in seen["seconds"][arm]]),
            ratio=median_with_interval(
                [one / s for one, s in zip(eager, seen["seconds"][arm], strict=True)]
            ),
            settled_s=seen["settled_s"].get(arm, 0.0),
            runs=seen["runs"] if arm == "fuseboard" else "",
        )
        for arm in ARMS
    ]


def ranks_table(steps: Sequence[RankStep], size: int) -> Table:
    table = Table(title=f"a step of DDP on {size} ranks, one thread each")
    for name in ("arm", "step", "x eager", "settled", "runs"):
        table.add_column(name)
    for one in steps:
        ratio = f"{one.ratio.value:.2f} ({one.ratio.low:.2f}-{one.ratio.high:.2f})"
        row = (f"{one.step_ms.value:.1f} ms", ratio, f"{one.settled_s:.0f} s", one.runs)
        table.add_row(one.arm, *row)
    return table


def _rank(rank: int, size: int, store: str) -> None:
    """One rank: a perceptron with norms, whose gradients fill some buckets."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import fuseboard
    from fuseboard.report.data import ledger

    class Perceptron(nn.Module):
        """Dynamo compiles no frames of torch's own, such as those of a Sequential."""

        def __init__(self, layers: Sequence[nn.Module]) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    steps: dict[str, Callable[[], None]] = {}
    settled_s: dict[str, float] = {}
    for arm in ARMS:
        torch.manual_seed(0)
        width = 384
        layers = [
            layer
            for _ in range(4)
            for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        ]
        model = nn.parallel.DistributedDataParallel(Perceptron(layers), bucket_cap_mb=1)
        run = model if arm == "eager" else torch.compile(model, backend=arm)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(256, width)

        def step(
            run: Callable[..., torch.Tensor] = run,
            optimizer: torch.optim.Optimizer = optimizer,
            x: torch.Tensor = x,
        ) -> None:
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()

        start = time.perf_counter()
        step()
        if arm == "fuseboard":
            fuseboard.wait()
            for _ in range(20):  # the call at which ranks swap
                step()
        settled_s[arm] = time.perf_counter() - start
        steps[arm] = step
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(ROUNDS):
        for place in range(len(ARMS)):
            arm = ARMS[(number + place) % len(ARMS)]
            dist.barrier()
            start = time.perf_counter()
            steps[arm]()
            dist.barrier()
            seconds[arm].append(time.perf_counter() - start)
    names = {region.backend for graph in ledger.graphs() for region in graph.regions}
    instead = any(graph.instead for graph in ledger.graphs())
    runs = ", ".join(sorted(names) + ["Dynamo's own graph"] * instead)
    print(json.dumps({"seconds": seconds, "settled_s": settled_s, "runs": runs}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
