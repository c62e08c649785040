"""Many numbers as one, in an order that keeps the rounding error small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx import ForKind

from fuseboard_tvm import _scalar
from fuseboard_tvm._loops import Loops
from fuseboard_tvm._values import Expr, Reduce, number, zero

#: Numbers that are added to one another before their sum is added to others.
BLOCK = 64


class Sums(Loops):
    """Writes reductions into buffers, each lane of which is one of its own."""

    def each(self, buffer: Any, value: Callable[[Expr], Expr]) -> None:
        """Store a value in each lane of a buffer."""
        lanes = int(buffer.shape[0])
        kind = ForKind.VECTORIZED if lanes > 1 else ForKind.SERIAL
        self.statements.append(self.loop(lanes, lambda i: self.store(buffer, value(i), i), kind))

    def pile(
        self, member: Reduce, into: Any, steps: int, element: Callable[[Expr, Expr], Expr]
    ) -> None:
        """Add ``element(step, lane)`` of each step to the lanes of a buffer."""

        def step(k: Expr, target: Any) -> None:
            self.each(target, lambda i: _scalar.combine(member.how, target[i], element(k, i)))

        self.piles(member, into, steps, step)

    def piles(
        self,
        member: Reduce,
        into: Any,
        steps: int,
        step: Callable[[Expr, Any], None],
        first: Expr = None,
    ) -> None:
        """Steps that each add to a buffer: in blocks, and blocks of blocks, which are added up.

        So no number is the sum of many of about its own size, and the rounding error stays small.
        """
        start = zero() if first is None else first
        if steps <= BLOCK:
            self.statements.append(self.loop(steps, lambda k: step(plus(start, k), into)))
            return
        size = BLOCK
        while size * BLOCK < steps:
            size *= BLOCK

        def block(where: Expr, length: int) -> None:
            part = self.allocate(int(into.shape[0]), member.dtype)
            self.each(part, lambda i: _scalar.identity(member.how, member.dtype))
            self.piles(member, part, length, step, where)
            self.each(into, lambda i: _scalar.combine(member.how, into[i], part[i]))

        whole, rest = divmod(steps, size)
        turns = self.loop(whole, lambda b: block(plus(start, b * number(size)), size))
        self.statements.append(turns)
        if rest:
            self.statements += self.scope(lambda: block(plus(start, number(whole * size)), rest))


def plus(a: Expr, b: Expr) -> Expr:
    """A sum of indices."""
    return b if a is zero() else a + b
