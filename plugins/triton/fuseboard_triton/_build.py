"""From ATen nodes to values. What can't be computed raises :class:`Unsupported` with the reason.

The same code decides about claims, one node at a time, and builds regions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton import _torch_internals
from fuseboard_triton._ir import (
    COMPUTE,
    HALF,
    STORED,
    Unsupported,
    Value,
    cast,
    const,
    pointwise,
    product,
    reduce,
    reshape,
    rounded,
    view,
)
from fuseboard_triton._pointwise import DEFAULT, JUMPS, ROUNDING, SIMPLE, TO_BOOL, TO_FLOAT
from fuseboard_triton._torch_internals import computation_dtype, size_of

aten = torch.ops.aten
prims = torch.ops.prims

#: ATen op → function of (node, operands as values and numbers) → value or several.
BUILDERS: dict[Any, Callable[..., Any]] = {}


def builder(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what builds these ops."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        BUILDERS.update(dict.fromkeys(targets, function))
        return function

    return register


def build(node: Node, values: Callable[[Node], Any]) -> Any:
    """What a node computes: a value, or a tuple of them.

    :param values: what an input node stands for: a value, a tuple, or a number's expression.
    :raises Unsupported: kernels don't compute this.
    """
    if node.target is operator.getitem:
        source = values(node.args[0])  # type: ignore[arg-type]
        if not isinstance(source, tuple):
            raise Unsupported("an item of what is no tuple of tensors")
        return source[node.args[1]]  # type: ignore[index]
    function = BUILDERS.get(node.target)
    if function is None and node.target in SIMPLE:
        function = _simple
    if function is None:
        raise Unsupported(f"{node.target} has no kernel here")
    args = torch.fx.map_arg(node.args, values)
    kwargs = torch.fx.map_arg(node.kwargs, values)
    result = function(node, *args, **kwargs)
    metas = node.meta["val"]
    if isinstance(result, tuple):
        return tuple(_owned(v, m, node) for v, m in zip(result, metas, strict=True))
    return _owned(result, metas, node)


def _owned(value: Value | None, meta: Any, node: Node) -> Value | None:
    """A node's value with the strides that it has in memory."""
    if value is None:
        return None
    if value.dtype != meta.dtype or len(value.shape) != meta.dim():
        raise AssertionError(f"{node.target}: {value.dtype} {value.shape}, ATen's is {meta}")
    if node.target in VIEWS:
        return value
    if value.kind == "view" or value.meta is not None:
        value = copied(value)
    value.meta = meta
    return value


def buffer(meta: torch.Tensor) -> Value:
    """A tensor in memory.

    :raises Unsupported: kernels don't read it.
    """
    if meta.dtype not in STORED:
        raise Unsupported(f"dtype {str(meta.dtype).removeprefix('torch.')} isn't supported")
    if meta.layout != torch.strided or meta.is_conj() or meta.is_neg():
        raise Unsupported("tensors that aren't plain strided ones aren't supported")
    return Value("buffer", meta.dtype, shape_of(meta), meta=meta)


def shape_of(meta: torch.Tensor) -> tuple[Any, ...]:
    return tuple(size_of(size) for size in meta.shape)


def meta_of(node: Node) -> torch.Tensor:
    """The fake result of a node of one result."""
    meta = node.meta["val"]
    if meta.dtype not in STORED:
        raise Unsupported(f"dtype {str(meta.dtype).removeprefix('torch.')} isn't supported")
    return meta  # type: ignore[no-any-return]


# --- pointwise ------------------------------------------------------------------------------------


def _operand(given: Any, dtype: torch.dtype) -> Value:
    """An operand as a value: numbers take the dtype in which the op computes."""
    if isinstance(given, Value):
        return given
    if isinstance(given, bool | int | float):
        return const(given, dtype)
    raise Unsupported(f"an operand of type {type(given).__name__} isn't supported")


def _example(given: Any) -> Any:
    """An operand as torch's promotion sees it."""
    if isinstance(given, Value) and given.kind == "symbol":
        return 1
    if isinstance(given, Value):
        # Only the dtype and whether there are dimensions matter.
        return torch.empty([1] * len(given.shape), dtype=given.dtype, device="meta")
    return given


def elementwise(node: Node, op: str, operands: Sequence[Any], kind: str = DEFAULT) -> Value:
    """A pointwise op under ATen's promotion."""
    examples = [_example(operand) for operand in operands]
    # A comparison's own result is boolean; its operands are promoted as those of a sum are.
    compute = computation_dtype(examples, DEFAULT if kind == TO_BOOL else kind)
    if compute not in COMPUTE:
        raise Unsupported(f"computing in {compute} isn't supported")
    values = tuple(_operand(operand, compute) for operand in operands)
    if op in JUMPS:
        values = tuple(rounded(value) for value in values)
    if compute == torch.bool:
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "invert": "not"}.get(
            op, op
        )
        if op in ("neg", "sub", "abs", "sign", "relu"):
            raise Unsupported(f"{op} of booleans isn't supported")
    dtype = torch.bool if kind == TO_BOOL else compute
    return pointwise(op, values, dtype, compute)


def _simple(node: Node, *operands: Any, **keywords: Any) -> Value:
    if keywords:
        raise Unsupported(f"keyword arguments aren't supported: {', '.join(sorted(keywords))}")
    meta_of(node)
    op, kind = SIMPLE[node.target]
    return elementwise(node, op, operands, kind)


@builder(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _add(node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    meta_of(node)
    op = "add" if node.target in (aten.add.Tensor, aten.add.Scalar) else "sub"
    compute = computation_dtype([_example(a), _example(b)], DEFAULT)
    if alpha != 1:
        if not isinstance(alpha, int | float):
            raise Unsupported("alpha is a size")
        b = pointwise("mul", (_operand(b, compute), const(alpha, compute)), compute, compute)
    return elementwise(node, op, (a, b))


@builder(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    meta_of(node)
    if alpha != 1:
        raise Unsupported("rsub with alpha isn't supported")
    return elementwise(node, "sub", (b, a))


@builder(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def _logical(node: Node, a: Value, b: Value) -> Value:
    op = str(node.target).split("_")[1].split(".")[0]
    truths = tuple(truth(value) for value in (a, b))
    return pointwise(op, truths, torch.bool, torch.bool)


def truth(value: Value) -> Value:
    """Whether a value isn't zero."""
    if value.dtype == torch.bool:
        return value
    value = rounded(value)
    return pointwise("ne", (value, const(0, value.dtype)), torch.bool, value.dtype)


@builder(aten.bitwise_not.default)
def _invert(node: Node, a: Value) -> Value:
    return elementwise(node, "invert", (a,))


@builder(*ROUNDING)
def _rounding(node: Node, a: Value) -> Value:
    if not a.dtype.is_floating_point:
        return copied(a)
    return elementwise(node, ROUNDING[node.target], (a,))


@builder(aten.reciprocal.default)
def _reciprocal(node: Node, a: Value) -> Value:
    return elementwise(node, "div", (1.0, a), TO_FLOAT)


@builder(aten.square.default)
def _square(node: Node, a: Value) -> Value:
    return elementwise(node, "mul", (a, a))


@builder(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(node: Node, condition: Value, a: Any, b: Any) -> Value:
    dtype = meta_of(node).dtype
    return where(truth(condition), _operand(a, dtype), _operand(b, dtype), dtype)


def where(condition: Value, a: Value, b: Value, dtype: torch.dtype) -> Value:
    return pointwise("where", (condition, a, b), dtype, dtype)


@builder(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(node: Node, a: Value, mask: Value, filling: Any) -> Value:
    dtype = meta_of(node).dtype
    return where(truth(mask), _operand(filling, dtype), a, dtype)


@builder(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(node: Node, a: Value, low: Any = None, high: Any = None) -> Value:
    if node.target == aten.clamp_max.default:
        low, high = None, low
    bounds = [bound for bound in (low, high) if bound is not None]
    dtype = meta_of(node).dtype
    result = cast(a, dtype) if a.dtype != dtype else a
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            result = pointwise(op, (result, _operand(bound, dtype)), dtype, dtype)
    return result if bounds else copied(a)


def copied(value: Value) -> Value:
    """A value that is computed again rather than a tensor that is handed on."""
    return pointwise("keep", (value,), value.dtype, value.dtype)


@builder(aten.pow.Tensor_Scalar)
def _pow(node: Node, a: Value, exponent: Any) -> Value:
    dtype = meta_of(node).dtype
    if not isinstance(exponent, int | float) or isinstance(exponent, bool):
        raise Unsupported("an exponent that is a size isn't supported")
    if a.dtype == torch.bool or (not dtype.is_floating_point and exponent not in (1, 2, 3)):
        raise Unsupported("powers of integers other than 1, 2, 3 aren't supported")

    def times(x: Value, y: Value) -> Value:
        return pointwise("mul", (x, y), dtype, dtype)

    one = const(1, dtype)
    if exponent == 2:
        return times(a, a)
    if exponent == 3:
        return times(times(a, a), a)
    if exponent == 1:
        return pointwise("keep", (a,), dtype, dtype)
    if exponent == 0.5:
        return pointwise("sqrt", (a,), dtype, dtype)
    if exponent == -0.5:
        return pointwise("rsqrt", (a,), dtype, dtype)
    if exponent == -1:
        return pointwise("div", (one, a), dtype, dtype)
    if exponent == -2:
        return pointwise("div", (one, times(a, a)), dtype, dtype)
    return pointwise("pow", (a, const(float(exponent), dtype)), dtype, dtype)


@builder(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _general_pow(node: Node, a: Any, b: Any) -> Value:
    if not meta_of(node).dtype.is_floating_point:
        raise Unsupported("powers of integers with a tensor as exponent aren't supported")
    return elementwise(node, "pow", (a, b))


@builder(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _divide(node: Node, a: Any, b: Any, rounding_mode: str | None = "floor") -> Value:
    if rounding_mode is None:
        return elementwise(node, "div", (a, b), TO_FLOAT)
    if not meta_of(node).dtype.is_floating_point:
        op = "div_int" if rounding_mode == "trunc" else "floor_divide_int"
        return elementwise(node, op, (a, b))
    if rounding_mode == "trunc":
        quotient = elementwise(node, "div", (a, b))
        return pointwise("trunc", (quotient,), quotient.dtype, quotient.dtype)
    return _floor_divide(node, a, b)


def _floor_divide(node: Node, a: Any, b: Any) -> Value:
    """``div_floor_floating`` of ``c10/util/generic_math.h``: exact where ``floor(a / b)`` isn't."""
    dtype = meta_of(node).dtype
    x, y = (rounded(_operand(operand, dtype)) for operand in (a, b))

    def op(name: str, *operands: Any) -> Value:
        kind = torch.bool if name in ("ne", "lt", "gt", "eq", "and", "xor") else torch.float32
        compute = torch.bool if name in ("and", "xor") else torch.float32
        return pointwise(name, tuple(_operand(o, torch.float32) for o in operands), kind, compute)

    def choose(condition: Value, yes: Any, no: Any) -> Value:
        yes, no = (_operand(o, torch.float32) for o in (yes, no))
        return where(condition, yes, no, torch.float32)

    rest = op("fmod", x, y)
    quotient = op("div", op("sub", x, rest), y)
    below = op("and", op("ne", rest, 0.0), op("xor", op("lt", y, 0.0), op("lt", rest, 0.0)))
    quotient = choose(below, op("sub", quotient, 1.0), quotient)
    down = op("floor", quotient)
    near = choose(op("gt", op("sub", quotient, down), 0.5), op("add", down, 1.0), down)
    # The sign of a zero quotient is that of a / b.
    zero = op("mul", op("div", x, y), 0.0)
    result = choose(op("ne", quotient, 0.0), near, zero)
    result = choose(op("eq", y, 0.0), op("div", x, y), result)
    return as_dtype(result, dtype)


@builder(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(node: Node, a: Any, b: Any) -> Value:
    dtype = meta_of(node).dtype
    if not dtype.is_floating_point:
        return elementwise(node, "remainder_int", (a, b))
    x, y = (rounded(_operand(operand, dtype)) for operand in (a, b))
    rest = pointwise("fmod", (x, y), torch.float32, torch.float32)
    zero = const(0.0, torch.float32)
    signs = [pointwise("lt", (v, zero), torch.bool, torch.float32) for v in (y, rest)]
    differ = pointwise("xor", tuple(signs), torch.bool, torch.bool)
    some = pointwise("ne", (rest, zero), torch.bool, torch.float32)
    moved = pointwise("add", (rest, y), torch.float32, torch.float32)
    both = pointwise("and", (some, differ), torch.bool, torch.bool)
    return as_dtype(where(both, moved, rest, torch.float32), dtype)


@builder(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(node: Node, a: Any, b: Any) -> Value:
    if not meta_of(node).dtype.is_floating_point:
        raise Unsupported("fmod of integers isn't supported")
    return elementwise(node, "fmod", (a, b))


def as_dtype(value: Value, dtype: torch.dtype) -> Value:
    """A float32 value as an op's result: the next op in the kernel reads it unrounded."""
    if value.dtype == dtype:
        return value
    return pointwise("keep", (value,), dtype, torch.float32)


@builder(aten._to_copy.default, prims.convert_element_type.default)
def _to_copy(node: Node, a: Value, *others: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    if source.device != meta.device:
        raise Unsupported("copies between devices aren't supported")
    if a.dtype == meta.dtype:
        return copied(a)
    if meta.dtype == torch.bool:
        return truth(a)
    return cast(rounded(a), meta.dtype)


@builder(aten.clone.default, aten.lift_fresh_copy.default)
def _clone(node: Node, a: Value, **keywords: Any) -> Value:
    return copied(a)


@builder(aten.alias.default, aten.detach.default)
def _alias(node: Node, a: Value) -> Value:
    return view("reshape", a, a.shape)


#: What hands its operand on under other sizes.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
    }
)


# --- views ----------------------------------------------------------------------------------------


@builder(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
)
def _reshape(node: Node, a: Value, *others: Any) -> Value:
    return view("reshape", a, shape_of(meta_of(node)))


@builder(aten.expand.default)
def _expand(node: Node, a: Value, *others: Any, **keywords: Any) -> Value:
    return view("expand", a, shape_of(meta_of(node)))


@builder(aten.permute.default)
def _permute(node: Node, a: Value, dims: Sequence[int]) -> Value:
    return permuted(a, [dim % len(a.shape) for dim in dims])


@builder(aten.transpose.int)
def _transpose(node: Node, a: Value, first: int, second: int) -> Value:
    order = list(range(len(a.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return permuted(a, order)


@builder(aten.t.default)
def _t(node: Node, a: Value) -> Value:
    return permuted(a, list(reversed(range(len(a.shape)))))


def permuted(value: Value, order: Sequence[int]) -> Value:
    shape = tuple(value.shape[dim] for dim in order)
    return view("permute", value, shape, tuple(order))


# --- what reads no tensor -------------------------------------------------------------------------


def _filled(node: Node, number: Any) -> Value:
    meta = meta_of(node)
    if not isinstance(number, bool | int | float):
        raise Unsupported("filling with what isn't a plain number isn't supported")
    if meta.dtype in HALF:  # as memory would hold it
        number = torch.tensor(number, dtype=meta.dtype).item()
    return const(number, meta.dtype, shape_of(meta))


@builder(aten.full.default, aten.new_full.default)
def _full(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, args[-1])


@builder(aten.full_like.default)
def _full_like(node: Node, a: Value, number: Any, **keywords: Any) -> Value:
    return _filled(node, number)


@builder(aten.scalar_tensor.default)
def _scalar_tensor(node: Node, number: Any, **keywords: Any) -> Value:
    return _filled(node, number)


@builder(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, 0)


@builder(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, 1)


@builder(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(node: Node, *args: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else 1
    if meta.dtype not in (torch.int32, torch.int64):
        raise Unsupported("ranges of floats aren't supported")
    return _positions(meta, start, step)


@builder(prims.iota.default)
def _iota(node: Node, length: Any, start: Any, step: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    if meta.dtype not in (torch.int32, torch.int64):
        raise Unsupported("ranges of this dtype aren't supported")
    return _positions(meta, start, step)


def _positions(meta: torch.Tensor, start: Any, step: Any) -> Value:
    dtype = meta.dtype
    result = Value("index", torch.int64, shape_of(meta), param=0)
    for op, number in (("mul", step), ("add", start)):
        if number != (1 if op == "mul" else 0):
            result = pointwise(
                op, (result, _operand(number, torch.int64)), torch.int64, torch.int64
            )
    return cast(result, dtype)


@builder(aten.tril.default, aten.triu.default)
def _triangle(node: Node, a: Value, diagonal: int = 0) -> Value:
    dtype = meta_of(node).dtype
    rank = len(a.shape)
    row, column = (Value("index", torch.int64, a.shape, param=rank - k) for k in (2, 1))
    edge = pointwise("add", (row, const(diagonal, torch.int64)), torch.int64, torch.int64)
    op = "le" if node.target == aten.tril.default else "ge"
    inside = pointwise(op, (column, edge), torch.bool, torch.int64)
    return where(inside, a, const(0, dtype), dtype)


# --- reductions -----------------------------------------------------------------------------------


def dims_of(value: Value, dims: Any) -> tuple[int, ...]:
    """Reduced dimensions as numbers from the left; none given means all."""
    rank = len(value.shape)
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return tuple(range(rank))
    return tuple(sorted(dim % rank for dim in dims)) if rank else ()


def count_of(value: Value, dims: tuple[int, ...]) -> Value:
    """The number of elements that a reduction takes in, as a float."""
    count = product(value.shape[dim] for dim in dims)
    if isinstance(count, int):
        return const(float(count), torch.float32)
    return cast(Value("symbol", torch.int64, (), param=count), torch.float32)


def total(value: Value, dims: tuple[int, ...], compute: torch.dtype = torch.float32) -> Value:
    """A sum that keeps the reduced dimensions."""
    return reduce("sum", value, dims, compute)


def mean_of(value: Value, dims: tuple[int, ...]) -> Value:
    sums = total(value, dims)
    return pointwise("div", (sums, count_of(value, dims)), torch.float32, torch.float32)


def shaped(value: Value, meta: torch.Tensor) -> Value:
    """A reduction's result with the shape that ATen gives it."""
    return reshape(value, shape_of(meta))


@builder(aten.sum.default, aten.sum.dim_IntList)
def _sum(node: Node, a: Value, dims: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    meta = meta_of(node)
    compute = torch.float32 if meta.dtype.is_floating_point else meta.dtype
    if a.dtype == torch.bool:
        a = cast(a, torch.int64)
    result = total(a, dims_of(a, dims), compute)
    return shaped(as_dtype(result, meta.dtype), meta)


@builder(aten.mean.default, aten.mean.dim)
def _mean(node: Node, a: Value, dims: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    meta = meta_of(node)
    return shaped(as_dtype(mean_of(a, dims_of(a, dims)), meta.dtype), meta)


def extreme(op: str, value: Value, dims: tuple[int, ...]) -> Value:
    """The largest (``max``) or smallest (``min``), NaN where there is one."""
    if value.dtype == torch.bool:
        raise Unsupported("the largest of booleans isn't supported")
    result = reduce(op, value, dims, value.dtype)
    return result


@builder(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(node: Node, a: Value, dims: Any = None, keepdim: bool = False) -> Value:
    op = "max" if node.target in (aten.amax.default, aten.max.default) else "min"
    return shaped(extreme(op, a, dims_of(a, dims)), meta_of(node))


def position_of(op: str, value: Value, dims: tuple[int, ...]) -> tuple[Value, Value]:
    """The extreme along dimensions, and the first flat position of it, or of NaN."""
    value = rounded(value)
    best = extreme(op, value, dims)
    if len(dims) > 1 or len(value.shape) == 0:
        flat = reshape(value, (product(value.shape),))
        place = Value("index", torch.int64, flat.shape, param=0)
        source, found, along = flat, reshape(best, (1,)), (0,)
    else:
        place = Value("index", torch.int64, value.shape, param=dims[0])
        source, found, along = value, best, dims
    hit = pointwise("eq", (source, found), torch.bool, value.dtype)
    if value.dtype.is_floating_point:
        spoilt = [pointwise("isnan", (v,), torch.bool, value.dtype) for v in (source, found)]
        both = pointwise("and", tuple(spoilt), torch.bool, torch.bool)
        hit = pointwise("or", (hit, both), torch.bool, torch.bool)
    nowhere = const(2**62, torch.int64)
    first = reduce("min", where(hit, place, nowhere, torch.int64), along, torch.int64)
    return best, first


@builder(aten.max.dim, aten.min.dim)
def _with_indices(node: Node, a: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    op = "max" if node.target == aten.max.dim else "min"
    metas = node.meta["val"]
    if not a.shape:
        raise Unsupported("the largest of one number isn't supported")
    best, first = position_of(op, a, dims_of(a, dim))
    return shaped(best, metas[0]), shaped(first, metas[1])


@builder(aten.argmax.default, aten.argmin.default)
def _argmax(node: Node, a: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    op = "max" if node.target == aten.argmax.default else "min"
    _, first = position_of(op, a, dims_of(a, dim))
    return shaped(first, meta_of(node))


@builder(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim)
def _any(node: Node, a: Value, dims: Any = None, keepdim: bool = False) -> Value:
    op = "max" if "any" in str(node.target) else "min"
    flags = cast(truth(a), torch.int32)
    result = reduce(op, flags, dims_of(a, dims), torch.int32)
    # Of nothing, the largest is the least number there is and the smallest the greatest.
    positive = pointwise("gt", (result, const(0, torch.int32)), torch.bool, torch.int32)
    return shaped(positive, meta_of(node))


def variance(value: Value, dims: tuple[int, ...], correction: float = 0.0) -> tuple[Value, Value]:
    """Variance and mean, in two passes: the mean is subtracted before squaring."""
    f32 = torch.float32
    mean = mean_of(value, dims)
    centred = pointwise("sub", (value, mean), f32, f32)
    squares = total(pointwise("mul", (centred, centred), f32, f32), dims)
    count = count_of(value, dims)
    if correction:
        less = pointwise("sub", (count, const(float(correction), f32)), f32, f32)
        count = pointwise("maximum", (less, const(0.0, f32)), f32, f32)
    return pointwise("div", (squares, count), f32, f32), mean


@builder(aten.var_mean.correction, aten.var.correction, aten.std.correction)
def _var(node: Node, a: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False):
    correction = 1 if correction is None else correction
    both = variance(a, dims_of(a, dims), correction)
    if node.target == aten.var_mean.correction:
        metas = node.meta["val"]
        return tuple(shaped(as_dtype(v, m.dtype), m) for v, m in zip(both, metas, strict=True))
    meta, result = meta_of(node), both[0]
    if node.target == aten.std.correction:
        result = pointwise("sqrt", (result,), torch.float32, torch.float32)
    return shaped(as_dtype(result, meta.dtype), meta)


def why_unbuildable(node: Node) -> str | None:
    """Why a node can't be built; None if it can."""

    def stand_in(used: Node) -> Any:
        meta = used.meta.get("val")
        if isinstance(meta, torch.Tensor):
            return buffer(meta)
        if isinstance(meta, torch.SymInt):
            return Value("symbol", torch.int64, (), param=meta.node.expr)
        if isinstance(meta, tuple | list):
            return tuple(buffer(m) if isinstance(m, torch.Tensor) else None for m in meta)
        raise Unsupported(f"an argument of type {type(meta).__name__} isn't supported")

    metas = node.meta.get("val")
    for meta in metas if isinstance(metas, tuple | list) else [metas]:
        if _torch_internals.has_unbacked(meta):
            return "its size is known only from data"
    try:
        build(node, stand_in)
    except Unsupported as reason:
        return str(reason)
    return None
