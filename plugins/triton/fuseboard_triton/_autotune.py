"""Block sizes and numbers of warps: which are tried, and which was fastest for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuseboard_triton._math import INTERPRETING
from fuseboard_triton.kernels._launching import power_of_two

#: Reduced places that one tile may hold: rows side by side in memory, and columns.
PERSISTENT_ROWS, PERSISTENT_COLUMNS = 8192, 128
#: Elements of one tile: beyond it registers spill.
TILE = 16384

if INTERPRETING:  # a program costs milliseconds, whatever its size; both kinds are to be seen
    PERSISTENT_ROWS = PERSISTENT_COLUMNS = 64


@dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    :ivar reduced_block: None for a kernel without reductions.
    """

    persistent: bool
    outer_block: int
    reduced_block: int | None
    num_warps: int


def configs(outer: int, reduced: int | None, columns: bool) -> list[Config]:
    """What to try for these sizes, the likeliest first."""
    if INTERPRETING:
        return [_interpreted(outer, reduced, columns)]
    if reduced is None:
        return _pointwise(outer)
    return _columns(outer, reduced) if columns else _rows(outer, reduced)


def _pointwise(outer: int) -> list[Config]:
    tried = [(1024, 4), (512, 4), (2048, 8), (256, 4), (1024, 8)]
    fitting = [(block, warps) for block, warps in tried if block <= max(outer, 256)]
    return [Config(False, block, None, warps) for block, warps in fitting]


def _rows(outer: int, reduced: int) -> list[Config]:
    found = []
    if reduced <= PERSISTENT_ROWS:
        block = power_of_two(reduced)
        usual = min(max(block // 512, 1), 16)
        most = max(TILE // block // 4, 1)
        for rows in (1, 2, 4, 8, 32):
            if rows == 1 or (rows <= most and rows * 64 <= outer and rows * block <= 4096):
                warps = min(max(usual, rows * block // 512, 1), 8)
                found.append(Config(True, rows, block, max(warps, usual)))
        if block >= 1024:
            found.append(Config(True, 1, block, max(usual // 2, 1)))
            found.append(Config(True, 1, block, min(usual * 2, 16)))
    if reduced > 2048:
        found += [Config(False, 1, block, warps) for block, warps in ((2048, 8), (4096, 16))]
        found.append(Config(False, 1, 1024, 4))
    if outer == 1:
        found = [config for config in found if config.outer_block == 1]
    return list(dict.fromkeys(found))


def _columns(outer: int, reduced: int) -> list[Config]:
    found = []
    if reduced <= PERSISTENT_COLUMNS:
        block = power_of_two(reduced)
        for columns in (32, 64, 128):
            if columns * block <= TILE // 2:
                found.append(Config(True, columns, block, 4 if columns * block <= 4096 else 8))
    found += [Config(False, 64, 16, 4), Config(False, 32, 64, 8), Config(False, 128, 16, 8)]
    return found


def _interpreted(outer: int, reduced: int | None, columns: bool) -> Config:
    if reduced is None:
        return Config(False, 128, None, 4)
    persistent = reduced <= (PERSISTENT_COLUMNS if columns else PERSISTENT_ROWS)
    block = power_of_two(reduced) if persistent else 32
    return Config(persistent, min(power_of_two(outer), 32 if columns else 8), block, 4)


def fastest(candidates: list[Config], run: Callable[[Config], Any]) -> Config:
    """Time each; one that doesn't compile or launch is left out.

    :raises Exception: what the last one raised, if none works.
    """
    from triton.testing import do_bench

    best: tuple[float, Config] | None = None
    problem: Exception | None = None
    for config in candidates:
        try:
            run(config)
            taken = do_bench(lambda config=config: run(config), warmup=2, rep=10)
        except Exception as error:  # too many registers, too much shared memory: told by the driver
            problem = error
            continue
        if best is None or taken < best[0]:
            best = (taken, config)
    if best is None:
        assert problem is not None
        raise problem
    return best[1]
