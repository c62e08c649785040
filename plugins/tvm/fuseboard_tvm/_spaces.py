"""The schedules among which tuning searches: tiles of ``O`` in registers, in two orders of loops.

Sizes of tiles are sampled, so MetaSchedule can change them; all else is fixed for each workload, as
the replay of a trace needs it to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuseboard_tvm._workloads import VECTOR, WIDTHS, Workload

#: Part of the records' keys: raised whenever a trace may mean something else.
VERSION = "1"
#: Rows and vectors of a tile; those that don't fit in registers are slow, and lose.
MOST_ROWS, MOST_VECTORS = 14, 6


def space(workload: Workload) -> Callable[[Any], list[Any]]:
    """The function that MetaSchedule asks for schedules."""

    def schedules(fresh: Any) -> list[Any]:
        made = []
        for rows_outside in (False, True):
            schedule = fresh.copy()
            _tile(schedule, workload, rows_outside)
            made.append(schedule)
        return made

    return schedules


def _tile(s: Any, workload: Workload, rows_outside: bool) -> None:
    lanes = VECTOR // WIDTHS[workload.dtype]
    product, result = s.get_sblock("O"), s.get_sblock("C")
    _, _, _, term, *_ = s.get_loops(product)
    blocks, _ = s.split(term, [None, workload.block])
    part = s.rfactor(blocks, 0)
    s.set_scope(part, 0, "local")
    batch, row, column, blocks = s.get_loops(product)
    rows = s.split(row, s.sample_perfect_tile(row, 3, max_innermost_factor=MOST_ROWS))
    vectors, lane = s.split(column, [None, lanes])
    tiles = s.split(vectors, s.sample_perfect_tile(vectors, 3, max_innermost_factor=MOST_VECTORS))
    outer = [tiles[0], rows[0], rows[1], tiles[1]]
    if rows_outside:
        outer = [rows[0], tiles[0], tiles[1], rows[1]]
    s.reorder(batch, *outer, blocks, rows[2], tiles[2], lane)
    stored = s.cache_write(product, 0, "local")
    if workload.exact:
        s.reverse_compute_inline(result)
    s.reverse_compute_at(stored, outer[-1], preserve_unit_loops=True)
    s.compute_at(part, blocks, preserve_unit_loops=True)
    s.parallel(s.fuse(batch, outer[0]))
    _unrolled(s, rows[2], tiles[2], lane)
    _unrolled(s, *s.get_loops(s.decompose_reduction(product, blocks))[-3:])
    *_, row, column, term = s.get_loops(part)[: -workload.nested or None]
    inner = s.get_loops(part)[len(s.get_loops(part)) - workload.nested :]
    vectors, lane = s.split(column, [None, lanes])
    s.reorder(term, *inner, row, vectors, lane)
    _unrolled(s, row, vectors, lane)
    _unrolled(s, *s.get_loops(s.decompose_reduction(part, term))[-3:])
    *_, row, column = s.get_loops(stored)
    _unrolled(s, row, *s.split(column, [None, lanes]))
    if not workload.exact:
        s.parallel(s.fuse(*s.get_loops(result)[:-1]))
    if workload.packs:
        _pack(s, workload.line)


def _unrolled(s: Any, row: Any, vectors: Any, lane: Any) -> None:
    """A tile in registers: constant places only."""
    s.vectorize(lane)
    s.unroll(vectors)
    s.unroll(row)


def _pack(s: Any, line: int) -> None:
    """The padded copy of an input."""
    loops = s.get_loops(s.get_sblock("P"))
    if line:
        s.split(loops[-1], [None, line])
    s.parallel(s.fuse(*loops[:2]))
