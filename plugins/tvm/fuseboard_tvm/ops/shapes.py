"""Views, and what puts tensors together or takes them apart: elements from known places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from tvm import tirx

from fuseboard_tvm import _scalar as s
from fuseboard_tvm._values import (
    Gather,
    Index,
    Value,
    View,
    expand,
    narrow,
    number,
    permute,
    reshape,
    unravel,
    zero,
)
from fuseboard_tvm.ops.registry import (
    Arguments,
    Op,
    cast,
    dtype_of,
    emitter,
    named_arguments,
    register,
    shape_of,
)


@emitter("view _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims")
def _reshape(node: Node, a: Arguments) -> Value:
    return reshape(a["self"], shape_of(node))


@emitter("expand")
def _expand(node: Node, a: Arguments) -> Value:
    return expand(a["self"], shape_of(node))


@emitter("permute")
def _permute(node: Node, a: Arguments) -> Value:
    value = a["self"]
    return permute(value, [axis % len(value.shape) for axis in a["dims"]])


@emitter("transpose.int")
def _transpose(node: Node, a: Arguments) -> Value:
    value = a["self"]
    return _swapped(value, a["dim0"], a["dim1"])


@emitter("t")
def _t(node: Node, a: Arguments) -> Value:
    value = a["self"]
    return _swapped(value, 0, 1) if len(value.shape) == 2 else value


def _swapped(value: Value, first: int, second: int) -> Value:
    rank = len(value.shape)
    if not rank:
        return value
    order = list(range(rank))
    first, second = first % rank, second % rank
    order[first], order[second] = order[second], order[first]
    return permute(value, order)


@emitter("slice.Tensor")
def _slice(node: Node, a: Arguments) -> Value:
    value = a["self"]
    axis = a["dim"] % len(value.shape)
    start, _, step = slice(a["start"], a["end"], a["step"]).indices(value.shape[axis])
    return narrow(value, axis, start, step, shape_of(node)[axis])


@emitter("select.int")
def _select(node: Node, a: Arguments) -> Value:
    value = a["self"]
    return _selected(value, a["dim"] % len(value.shape), a["index"])


def _selected(value: Value, axis: int, place: int) -> Value:
    part = narrow(value, axis, place % value.shape[axis], 1, 1)
    return reshape_at(part, axis)


def reshape_at(value: Value, axis: int) -> Value:
    """Without an axis of size 1."""
    return reshape(value, (*value.shape[:axis], *value.shape[axis + 1 :]))


@emitter("split.Tensor split_with_sizes unbind.int")
def _parts(node: Node, a: Arguments) -> list[Value]:
    value = a["self"]
    axis = a["dim"] % len(value.shape)
    if "split_size" not in a and "split_sizes" not in a:
        return [_selected(value, axis, place) for place in range(value.shape[axis])]
    result, start = [], 0
    for part in node.meta["val"]:
        size = int(part.shape[axis])
        result.append(narrow(value, axis, start, 1, size))
        start += size
    return result


def _at_most(i: Any, top: int) -> Any:
    return tirx.Min(i, number(top))


def _within(i: Any, size: int) -> Any:
    """An index moved into bounds; what is loaded there isn't used."""
    return tirx.Max(_at_most(i, size - 1), zero())


@emitter("cat")
def _cat(node: Node, a: Arguments) -> Value:
    dtype = dtype_of(node)
    shape = shape_of(node)
    values = [cast(one, dtype) for one in a["tensors"] if one.shape != (0,)]
    axis = a["dim"] % len(shape)
    starts = [sum(one.shape[axis] for one in values[:place]) for place in range(len(values))]

    def compute(load: Any, index: Index) -> Any:
        result = None
        for place, (value, start) in reversed(list(enumerate(zip(values, starts, strict=True)))):
            own = _within(index[axis] - number(start), value.shape[axis])
            element = load(place, (*index[:axis], own, *index[axis + 1 :]))
            if result is None:
                result = element
            else:
                inside = index[axis] < number(start + value.shape[axis])
                result = s.select(inside, element, result)
        return result

    if len(values) == 1:
        return values[0]
    return Gather(shape, dtype, tuple(values), 2 * len(values), compute=compute)


def _many(node: Node) -> str | None:
    count = len(named_arguments(node)["tensors"])
    return f"{count} tensors are too many for one expression" if count > 16 else None


register("cat", Op(_cat, _many))


@emitter("constant_pad_nd")
def _pad(node: Node, a: Arguments) -> Value:
    value, shape, dtype = a["self"], shape_of(node), dtype_of(node)
    pads = list(a["pad"])
    before = [0] * len(shape)
    for place in range(len(pads) // 2):
        before[len(shape) - 1 - place] = pads[2 * place]
    fill = a["value"]

    def compute(load: Any, index: Index) -> Any:
        conditions, own = [], []
        for i, size, total, start in zip(index, value.shape, shape, before, strict=True):
            moved = i - number(start) if start else i
            own.append(_within(moved, size) if size != total or start else moved)
            if start > 0:
                conditions.append(i >= number(start))
            if start + size < total:
                conditions.append(i < number(start + size))
        element = load(0, tuple(own))
        if not conditions:
            return element
        inside = conditions[0]
        for condition in conditions[1:]:
            inside = tirx.And(inside, condition)
        return s.select(inside, element, s.const(fill, dtype))

    return Gather(shape, dtype, (cast(value, dtype),), 4, compute=compute)


@emitter("flip")
def _flip(node: Node, a: Arguments) -> Value:
    value = a["self"]
    axes = {axis % len(value.shape) for axis in a["dims"]} if value.shape else set()

    def index(where: Index) -> Index:
        return tuple(
            number(value.shape[axis] - 1) - i if axis in axes and value.shape[axis] > 1 else i
            for axis, i in enumerate(where)
        )

    keeps = min(axes, default=len(value.shape))
    return View(value.shape, value.dtype, (value,), 0, index=index, keeps=keeps)


@emitter("slice_scatter")
def _slice_scatter(node: Node, a: Arguments) -> Value:
    """``self`` with a slice of it replaced."""
    value, source, dtype = a["self"], cast(a["src"], dtype_of(node)), dtype_of(node)
    axis = a["dim"] % len(value.shape)
    start, _, step = slice(a["start"], a["end"], a["step"]).indices(value.shape[axis])
    size = source.shape[axis]

    def compute(load: Any, index: Index) -> Any:
        moved = index[axis] - number(start)
        place = _within(tirx.floordiv(moved, number(step)), size)
        inside = tirx.And(moved >= zero(), moved < number((size - 1) * step + 1))
        if step != 1:
            inside = tirx.And(inside, tirx.EQ(tirx.floormod(moved, number(step)), zero()))
        own = (*index[:axis], place, *index[axis + 1 :])
        return s.select(inside, load(1, own), load(0, index))

    return Gather(value.shape, dtype, (value, source), 4, compute=compute)


@emitter("diagonal")
def _diagonal(node: Node, a: Arguments) -> Value:
    value, shape = a["self"], shape_of(node)
    first, second = a["dim1"] % len(value.shape), a["dim2"] % len(value.shape)
    offset = a["offset"]

    def index(where: Index) -> Index:
        rest = iter(where[:-1])
        last = where[-1]
        found = []
        for axis in range(len(value.shape)):
            if axis == first:
                found.append(last + number(max(-offset, 0)))
            elif axis == second:
                found.append(last + number(max(offset, 0)))
            else:
                found.append(next(rest))
        return tuple(found)

    return View(shape, value.dtype, (value,), 0, index=index, keeps=min(first, second))


@emitter("unfold")
def _unfold(node: Node, a: Arguments) -> Value:
    value, shape = a["self"], shape_of(node)
    if not value.shape:
        return reshape(value, shape)
    axis = a["dimension"] % len(value.shape)
    step = a["step"]

    def index(where: Index) -> Index:
        place = where[axis] * number(step) + where[-1]
        return (*where[:axis], place, *where[axis + 1 : -1])

    return View(shape, value.dtype, (value,), 0, index=index, keeps=axis)


def _of_new_memory(node: Node) -> str | None:
    """Only what is computed in the graph, and row-major, is known to lie as its value does."""
    source = node.args[0]
    if not isinstance(source, Node) or source.op != "call_function":
        return "as_strided of an input"
    own = source.meta["val"]
    returns = getattr(getattr(source.target, "_schema", None), "returns", ())
    if not returns or returns[0].alias_info is not None or not own.is_contiguous():
        return "as_strided of a view"
    return None


@emitter("as_strided", why_not=_of_new_memory)
def _as_strided(node: Node, a: Arguments) -> Value:
    value, shape = a["self"], shape_of(node)
    strides, offset = tuple(a["stride"]), a["storage_offset"] or 0

    def index(where: Index) -> Index:
        position = number(offset)
        for i, stride, size in zip(where, strides, shape, strict=True):
            if size != 1 and stride:
                position = position + i * number(stride)
        return unravel(position, value.shape)

    return View(
        shape,
        value.dtype,
        (value,),
        0,
        index=index,
        strided=lambda tensor: tensor.as_strided(shape, strides, offset),
    )


# --- sequences of numbers ------------------------------------------------------------------------


def _sequence(shape: Sequence[int], dtype: str, start: Any, step: Any) -> Value:
    """``start + i * step``; floats in float64 and rounded once, as ATen does."""
    wide = "float64" if dtype in s.FLOATS else "int64"

    def compute(load: Any, index: Index) -> Any:
        place = s.cast(index[0], wide)
        return s.cast(place * s.const(step, wide) + s.const(start, wide), dtype)

    return Gather(tuple(shape), dtype, (), 3, compute=compute)


@emitter("arange arange.start arange.start_step")
def _arange(node: Node, a: Arguments) -> Value:
    return _sequence(shape_of(node), dtype_of(node), a.get("start", 0), a.get("step", 1))


@emitter("eye eye.m")
def _eye(node: Node, a: Arguments) -> Value:
    dtype = dtype_of(node)

    def compute(load: Any, index: Index) -> Any:
        on = tirx.EQ(index[0], index[1])
        return s.select(on, s.const(1, dtype), s.const(0, dtype))

    return Gather(shape_of(node), dtype, (), 2, compute=compute)


@emitter("prims.iota")
def _iota(node: Node, a: Arguments) -> Value:
    return _sequence(shape_of(node), dtype_of(node), a["start"], a["step"])
