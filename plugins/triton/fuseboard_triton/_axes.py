"""Axes: the loops of a kernel, and how the dimensions of its values lie on them.

Each dimension of a value is *labelled* with the axes that it runs over, outermost first: none for
size 1, several where a view merged dimensions. Every tensor that is read brings axes of its own;
a pointwise op says that its operands' axes are the same, dimension by dimension. A view that
splits a dimension splits its axis. What can't be said so raises :class:`Conflict`: then the value
goes through memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseboard_triton._ir import Value, is_one, product, same
from fuseboard_triton._torch_internals import Size

#: The axes of one dimension, outermost first.
Label = tuple[int, ...]
Labels = tuple[Label, ...]


class Conflict(Exception):
    """Two values that don't fit into one kernel."""


class Axes:
    """The axes of one kernel."""

    def __init__(self) -> None:
        self.sizes: list[Size] = []
        self._became: dict[int, Label] = {}

    def copy(self) -> Axes:
        other = Axes()
        other.sizes = list(self.sizes)
        other._became = dict(self._became)
        return other

    def fresh(self, size: Size) -> Label:
        """A new axis; none for size 1."""
        if is_one(size):
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def fresh_labels(self, shape: Sequence[Size]) -> Labels:
        return tuple(self.fresh(size) for size in shape)

    def resolve(self, label: Label) -> Label:
        """The axes as they are now, after some were split or found to be one."""
        if not any(axis in self._became for axis in label):
            return label
        result: list[int] = []
        pending = list(reversed(label))
        while pending:
            axis = pending.pop()
            if axis in self._became:
                pending.extend(reversed(self._became[axis]))
            else:
                result.append(axis)
        return tuple(result)

    def resolve_all(self, labels: Labels) -> Labels:
        return tuple(self.resolve(label) for label in labels)

    def size(self, label: Label) -> Size:
        return product(self.sizes[axis] for axis in self.resolve(label))

    def _split(self, axis: int, inner: int) -> int:
        """Make ``axis`` an outer axis times ``inner``, an axis that exists; the outer one."""
        outer = self.fresh(_quotient(self.sizes[axis], self.sizes[inner]))
        self._became[axis] = (*outer, inner)
        return outer[0] if outer else -1

    def unify(self, one: Label, other: Label) -> Label:
        """State that two dimensions are the same.

        :raises Conflict: their sizes can't be laid on one another.
        """
        if one and other:
            self._unify(list(self.resolve(one)), list(self.resolve(other)))
        return self.resolve(one or other)

    def _unify(self, a: list[int], b: list[int]) -> None:
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            if same(self.sizes[x], self.sizes[y]):
                self._became[max(x, y)] = (min(x, y),)
                rest = None
            elif _divides(self.sizes[y], self.sizes[x]):
                rest = self._split(x, y)
                a.append(rest)
            elif _divides(self.sizes[x], self.sizes[y]):
                rest = self._split(y, x)
                b.append(rest)
            else:
                raise Conflict(f"sizes {self.sizes[x]} and {self.sizes[y]}")
            a, b = list(self.resolve(tuple(a))), list(self.resolve(tuple(b)))
        if a or b:
            raise Conflict("one runs over more than the other")

    def pointwise(self, operands: Sequence[Labels]) -> Labels:
        """The labels of what operands broadcast to."""
        rank = max((len(labels) for labels in operands), default=0)
        result: list[Label] = [()] * rank
        for labels in operands:
            for dim, label in enumerate(labels, rank - len(labels)):
                result[dim] = self.unify(result[dim], label)
        return self.resolve_all(tuple(result))

    def viewed(self, value: Value, labels: Labels) -> Labels:
        """The labels of a view of what has ``labels``."""
        if value.op == "permute":
            return tuple(labels[dim] for dim in value.param)
        if value.op == "expand":
            lead = len(value.shape) - len(labels)
            aligned = ((),) * lead + labels
            return tuple(
                label or self.fresh(size) for label, size in zip(aligned, value.shape, strict=True)
            )
        return self._reshaped(labels, value.shape)

    def _reshaped(self, labels: Labels, shape: tuple[Size, ...]) -> Labels:
        pending = [axis for label in self.resolve_all(labels) for axis in label]
        result: list[Label] = []
        for size in reversed(shape):
            taken: list[int] = []
            while not same(self.size(tuple(taken)), size):
                if not pending:
                    raise Conflict("a view that needs more than there is")
                rest = _quotient(size, self.size(tuple(taken)))
                axis = pending.pop()
                if _divides(self.sizes[axis], rest):
                    taken.insert(0, axis)
                else:
                    inner = self.fresh(rest)[0]
                    pending.append(self._split(axis, inner))
                    taken.insert(0, inner)
            result.append(tuple(taken))
        if pending:
            raise Conflict("a view that leaves something over")
        return self.resolve_all(tuple(reversed(result)))


def _divides(divisor: Size, size: Size) -> bool:
    """Whether a size is known to be a multiple of another one, and larger than nothing."""
    if isinstance(divisor, int) and isinstance(size, int):
        return divisor > 0 and size > 0 and size % divisor == 0
    return _exact(size, divisor) is not None


def _quotient(size: Size, divisor: Size) -> Size:
    if isinstance(size, int) and isinstance(divisor, int):
        if divisor == 0 or size % divisor:
            raise Conflict(f"size {size} isn't a multiple of {divisor}")
        return size // divisor
    exact = _exact(size, divisor)
    if exact is None:
        raise Conflict(f"size {size} isn't known to be a multiple of {divisor}")
    return exact


def _exact(size: Size, divisor: Size) -> Size | None:
    """The quotient of sizes where it is an integer whatever the symbols are."""
    import sympy

    numerator, denominator = sympy.fraction(sympy.cancel(sympy.sympify(size) / divisor))
    if denominator != 1 or numerator.is_integer is False:
        return None
    return int(numerator) if numerator.is_Integer else numerator
