"""One rank of a gloo job that trains in several ways, compiled and not; prints what it saw.

Usage: python -m tests.support.rank_training_program RANK SIZE STORE_FILE CACHE_DIR [WAY ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fuseboard
from fuseboard.report.data import ledger

WIDTH, STEPS = 32, 30
#: Rounding differs, and AdamW divides by the size of a gradient, however small: so all is float64.
DTYPE = torch.float64

Wrap = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = h.sin() * h.cos() + h.tanh()
        return x + self.down(nn.functional.gelu(self.up(h)))  # type: ignore[no-any-return]


def ddp(model: nn.Sequential, wrap: Wrap) -> Any:
    """Two parts, of a bucket each."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
    return wrap(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02))


def fsdp(model: nn.Sequential, wrap: Wrap) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return wrap(fully_shard(model))


def tensor_parallel(model: nn.Sequential, wrap: Wrap) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return wrap(model)


def batch(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=generator, dtype=DTYPE)


def trained(way: Callable[..., Any], wrap: Wrap) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the parameters in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(DTYPE)
    run = way(model, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = 0 if way is tensor_parallel else dist.get_rank()
    generator = torch.Generator().manual_seed(own)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run(batch(generator, 512)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 2 and wrap is compiled:
            assert fuseboard.wait(timeout_s=500), ledger.graphs()
    return losses, [_whole(p.detach()).clone() for p in model.parameters()]


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def joined(wrap: Wrap) -> list[torch.Tensor]:
    """Rank 0 has more steps than the others, of other sizes."""
    from torch.distributed.algorithms.join import Join

    torch.manual_seed(1)
    model = Block().to(DTYPE)
    parallel = nn.parallel.DistributedDataParallel(model)
    run = wrap(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Join([parallel]):
        for step in range(12 if dist.get_rank() == 0 else 8):
            optimizer.zero_grad()
            run(batch(generator, 5 + dist.get_rank() + step % 2)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def pipelined(wrap: Wrap) -> list[torch.Tensor]:
    """Each rank has a block, and parameters of its own; two microbatches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Block().to(DTYPE)
    stage = PipelineStage(wrap(model), rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        x, target = batch(generator, 16), batch(generator, 16)
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None)
        optimizer.step()
        if step == 2 and wrap is compiled:
            assert fuseboard.wait(timeout_s=500), ledger.graphs()
    return [p.detach().clone() for p in model.parameters()]


def plain(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="fuseboard", options={"cache_dir": cache})


def told() -> list[Any]:
    """What was decided about each graph, and trips; graphs are reported as they get ready."""
    graphs = [g for g in ledger.graphs() if g.kind != "joint"]
    ledger.clear()
    return [
        *sorted([g.kind, [r.backend for r in g.regions], bool(g.instead)] for g in graphs),
        *(str(trip) for g in graphs for trip in g.trips),
    ]


WAYS = {one.__name__: one for one in (ddp, fsdp, tensor_parallel)}


def main(rank: int, size: int, path: str, *ways: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    seen: dict[str, Any] = {}
    for name in ways:
        torch._dynamo.reset()
        if name in WAYS:
            expected, wanted = trained(WAYS[name], plain)
            losses, parameters = trained(WAYS[name], compiled)
            torch.testing.assert_close(losses, expected)
        else:
            run = {"joined": joined, "pipelined": pipelined}[name]
            wanted, parameters = run(plain), run(compiled)
        torch.testing.assert_close(parameters, wanted)
        seen[name] = told()
    dist.barrier()
    print(json.dumps(seen))


if __name__ == "__main__":
    number, world, place, cache, *names = sys.argv[1:]
    main(int(number), int(world), place, *names)
