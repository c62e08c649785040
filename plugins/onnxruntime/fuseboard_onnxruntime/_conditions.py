"""When an op of the table is taken: functions from a node to the reason to decline it, or None.

Past 400 lines: one short function for each way in which an op differs, to be looked up by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fuseboard_onnxruntime._layout import is_row_major, lies_as
from fuseboard_onnxruntime._torch_internals import has_unbacked_symbols, known_equal, known_true

__all__ = ["has_unbacked_symbols"]

aten: Any = torch.ops.aten

#: ONNX Runtime adds up one by one, eager in pairs. Of equal numbers a thousand are off by 1e-5.
MOST_TERMS = 1024

Condition = Callable[[Node], str | None]

#: The board plans with the strides of fake values, and users see those of eager's kernels. Torch
#: 2.13 has decompositions in place of these kernels when it computes fake values.
_UNKNOWN_STRIDES = "torch's fake result has other strides than eager's"


def tensor(arg: Any) -> torch.Tensor | None:
    """The fake tensor of an argument that is a node with one."""
    found = arg.meta.get("val") if isinstance(arg, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _result(node: Node) -> torch.Tensor | None:
    """The first result."""
    value = node.meta["val"]
    return value[0] if isinstance(value, list | tuple) else value


def _is_float(arg: Any) -> bool:
    found = tensor(arg)
    return isinstance(arg, float) or (found is not None and found.is_floating_point())


def _is_bool(arg: Any) -> bool:
    found = tensor(arg)
    return found is not None and found.dtype == torch.bool


def no_bool(node: Node) -> str | None:
    """Not arithmetic on booleans, which ONNX hasn't."""
    if any(map(_is_bool, _flat(node.args))) and _is_bool(node):
        return "arithmetic on booleans has no ONNX form"
    return None


def _flat(args: Any) -> list[Any]:
    return [x for arg in args for x in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def floats_only(node: Node) -> str | None:
    """Floating-point inputs."""
    if not all(_is_float(arg) for arg in _flat(node.args) if tensor(arg) is not None):
        return "proven for floating-point inputs only"
    return None


def comparison(node: Node) -> str | None:
    """Numbers on both sides; a constant that the other side's dtype has."""
    if any(map(_is_bool, node.args)):
        return "a comparison of booleans"
    value, number = tensor(node.args[0]), node.args[1]
    if value is not None and not value.is_floating_point() and isinstance(number, int):
        limits = torch.iinfo(value.dtype)
        if not limits.min <= number <= limits.max:
            return f"a comparison with a number beyond {value.dtype}"
    return None


def no_bool_result(node: Node) -> str | None:
    """Numbers to choose from."""
    if _is_bool(node):
        return "ONNX Runtime has no kernel that chooses among booleans"
    return None


def bools_only(node: Node) -> str | None:
    """Booleans."""
    if not all(_is_bool(arg) for arg in node.args):
        return "logic on numbers"
    return None


def matrices(node: Node) -> str | None:
    """float32, int64 or bool."""
    value = tensor(node.args[0])
    if value is None or value.dtype not in (torch.float32, torch.int64, torch.bool):
        return "a triangle of another dtype than float32, int64 or bool"
    return None


def known_parts(node: Node) -> str | None:
    """A dimension of known size."""
    value, dim = tensor(node.args[0]), argument(node, 2, "dim", 0)
    sizes = (node.args[1], value.shape[dim] if value is not None else None)
    return None if all(isinstance(size, int) for size in sizes) else "a split of symbolic size"


def known_shifts(node: Node) -> str | None:
    """Shifts that are numbers."""
    shifts = argument(node, 1, "shifts")
    known = all(isinstance(shift, int) for shift in _flat([shifts]))
    return None if known else "a shift of symbolic size"


def known_count(node: Node) -> str | None:
    """A dimension of known size."""
    value, dim = tensor(node.args[0]), argument(node, 1, "dim", 0)
    known = value is not None and isinstance(value.shape[dim], int)
    return None if known else "a split of symbolic size"


def whole_steps(node: Node) -> str | None:
    """Whole numbers below 2^24, which float32 holds."""
    for number in node.args:
        if isinstance(number, int | float) and not (number % 1 == 0 and abs(number) < 2**24):
            return "a range by fractions: ONNX Runtime may round to one element more or less"
    return None


def mean_loss(node: Node) -> str | None:
    """Floats, 1 to 1024 of them."""
    value = tensor(node.args[0])
    if value is None or not known_true(value.numel() > 0):
        return "a loss over nothing"
    return _why_long(value.numel()) or floats_only(node)


def safe_division(node: Node) -> str | None:
    """Integers, divided by a constant that is neither 0 nor -1."""
    divisor = node.args[1]
    if any(map(_is_float, node.args)) or _is_float(node):
        return "floor of a quotient: infinities come out as NaN in ONNX Runtime"
    if not isinstance(divisor, int) or divisor in (0, -1):
        return "an integer division by zero would end the process in ONNX Runtime"
    return no_bool(node)


def power(node: Node) -> str | None:
    """Of integers: a constant exponent that isn't negative."""
    exponent = node.args[1]
    if not _is_float(node) and not (isinstance(exponent, int) and exponent >= 0):
        return "an integer power whose exponent may be negative"
    return no_bool(node)


def _reduced(node: Node, position: int = 1) -> Any:
    """How many elements each result of a reduction is made of.

    :param position: of the dimensions among the arguments.
    """
    value = tensor(node.args[0])
    assert value is not None
    dims = argument(node, position, "dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return value.numel()
    return math.prod(
        value.shape[d] for d in (dims if isinstance(dims, list | tuple) else (dims,)) if value.dim()
    )


def _why_long(count: Any) -> str | None:
    if not known_true(count <= MOST_TERMS):
        return f"it may sum over {MOST_TERMS} numbers, which ONNX Runtime adds up one by one"
    return None


def short(node: Node) -> str | None:
    """Over at most 1024 elements."""
    return _why_long(_all_or_reduced(node))


def _all_or_reduced(node: Node) -> Any:
    """How many elements each result of a reduction is made of."""
    target: Any = node.target
    value = tensor(node.args[0])
    assert value is not None
    named = [a.name for a in target._schema.arguments]
    return _reduced(node) if "dim" in named else value.numel()


def sum_of(node: Node) -> str | None:
    """Over at most 1024 elements: floats, or integers that are narrower than their sum."""
    value, result = tensor(node.args[0]), tensor(node)
    assert value is not None
    assert result is not None
    if not result.is_floating_point() and value.dtype.itemsize >= result.dtype.itemsize:
        return "ONNX Runtime adds up integers as floats: they don't wrap around, nor keep all bits"
    return short(node)


def not_empty(node: Node) -> str | None:
    """Over at least one element."""
    if not known_true(_all_or_reduced(node) > 0):
        return "it may reduce over no elements, which ONNX Runtime answers with a number"
    return None


def has_dimensions(node: Node) -> str | None:
    """A tensor with dimensions."""
    value = tensor(node.args[0])
    if value is None or value.dim() == 0:
        return "a tensor without dimensions, of which torch allows to name one"
    return None


def over_a_dimension(node: Node) -> str | None:
    """A tensor with dimensions, over at least one element."""
    return has_dimensions(node) or not_empty(node)


def something(node: Node) -> str | None:
    """A result with elements."""
    value = tensor(node)
    if value is None or any(known_equal(size, 0) for size in value.shape):
        return "a result without elements"
    return None


def mean_of(node: Node) -> str | None:
    """Floats, over 1 to 1024 elements."""
    return not_empty(node) or short(node) or floats_only(node)


def variance(node: Node) -> str | None:
    """Floats, over at most 1024 elements and more than the correction."""
    correction = argument(node, 2, "correction", None)
    correction = 1 if correction is None else correction
    if not isinstance(correction, int | float) or not known_true(_reduced(node) > correction):
        return "it may reduce over too few elements"
    return has_dimensions(node) or short(node) or floats_only(node)


def extremes(node: Node) -> str | None:
    """Integers, over at least one element."""
    if _is_float(node.args[0]):
        return "ONNX Runtime's reductions to an extreme ignore NaN"
    if _is_bool(node.args[0]):
        return "a reduction of booleans"
    return not_empty(node)


def elu(node: Node) -> str | None:
    """No scales."""
    if argument(node, 2, "scale", 1) != 1 or argument(node, 3, "input_scale", 1) != 1:
        return "elu with scales; torchlib ignores them"
    return None


def norm_order(node: Node) -> str | None:
    """The 1- and 2-norm of at most 1024 floats."""
    if argument(node, 1, "ord", 2) not in (1, 2):
        return "a norm of another order than 1 or 2"
    return has_dimensions(node) or _why_long(_reduced(node, 2)) or floats_only(node)


def real_index(node: Node) -> str | None:
    """Integer indices, side by side, row-major."""
    indices = node.args[1]
    given = [index for index in indices if index is not None]  # type: ignore[union-attr]
    if any(_is_bool(index) or tensor(index) is None for index in given):
        return "an index by a mask: its result has a size that only data decide"
    places = [i for i, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    if places != list(range(places[0], places[0] + len(places))):
        return "indices with a gap between them"
    if not all(lies_as(tensor(index)) for index in given):
        return "indices that aren't row-major: " + _UNKNOWN_STRIDES
    return None


def attention(node: Node) -> str | None:
    """No dropout; as many heads in keys and values, and in queries, too, if a backward follows."""
    if argument(node, 3, "dropout_p", 0.0) != 0.0:
        return "attention with dropout draws random numbers"
    if argument(node, 4, "is_causal", False) and node.kwargs.get("attn_mask") is not None:
        return "both causal and masked"
    grouped = one_result(node) is None
    return _why_odd_heads(*node.args[:3], node.kwargs.get("attn_mask"), grouped)


def one_result(node: Node) -> str | None:
    """In inference: what an op of the board's keeps for its backward is that op's alone."""
    if any(user.args[1] != 0 for user in node.users):
        return "its backward reads what it keeps"
    return None


def _why_odd_heads(
    query: Any, key: Any, value: Any, mask: Any, grouped: bool = False
) -> str | None:
    """:param grouped: whether some heads of queries may share one of keys and values."""
    q, k, v, m = map(tensor, (query, key, value, mask))
    assert q is not None
    assert k is not None
    assert v is not None
    if not isinstance(q.shape[-1], int):
        return "heads of symbolic size"
    heads = (q.shape[1], k.shape[1])
    shared = (
        grouped and all(type(size) is int and size for size in heads) and not q.shape[1] % heads[1]
    )
    alike = [(q.shape[0], k.shape[0]), (k.shape[0], v.shape[0]), (k.shape[1], v.shape[1])]
    if not all(known_equal(*pair) for pair in alike) or not (shared or known_equal(*heads)):
        return "queries, keys and values may differ in batch or heads"
    full = (*q.shape[:3], k.shape[2])
    given = () if m is None else zip(reversed(m.shape), reversed(full), strict=False)
    if not all(known_equal(size, 1) or known_equal(size, whole) for size, whole in given):
        return "a mask that may be of another size"
    return None if m is None or m.is_floating_point() else "a mask of booleans"


def attention_backward(node: Node) -> str | None:
    """No dropout; as many heads in queries, keys and values."""
    if argument(node, 6, "dropout_p", 0.0) != 0.0:
        return "attention with dropout"
    return _why_odd_heads(*node.args[1:4], node.kwargs.get("attn_mask"))


def convolution(node: Node) -> str | None:
    """Floats, not transposed; with a batch and elements."""
    value = tensor(node.args[0])
    if value is None or not known_true(value.numel() > 0):
        return "a convolution of nothing"
    if argument(node, 6, "transposed"):
        return "a transposed convolution"
    if value.dim() not in (3, 4, 5):
        return "an input without a batch"
    return floats_only(node)


def pooling(node: Node) -> str | None:
    """(N, C, H, W), no `ceil_mode`, indices not read."""
    if any(user.users and user.args[1] == 1 for user in node.users):
        return "the indices of max pooling: another convention in ONNX"
    if argument(node, 5, "ceil_mode", False):
        return "pooling with ceil_mode: another number of windows in ONNX Runtime"
    return _batched(node)


def average_pooling(node: Node) -> str | None:
    """(N, C, H, W), no `ceil_mode`, no divisor of its own."""
    if argument(node, 4, "ceil_mode", False):
        return "pooling with ceil_mode: another number of windows in ONNX Runtime"
    if argument(node, 6, "divisor_override") is not None:
        return "a divisor of its own"
    return _batched(node)


def _batched(node: Node) -> str | None:
    value = tensor(node.args[0])
    if value is None or value.dim() != 4 or not known_true(value.numel() > 0):
        return "an input that isn't (N, C, H, W) with elements"
    return floats_only(node)


def adaptive_pooling(node: Node) -> str | None:
    """(N, C, H, W) to (1, 1), of at most 1024 elements."""
    if list(node.args[1]) != [1, 1]:  # type: ignore[arg-type]
        return "adaptive pooling to more than one element"
    value = tensor(node.args[0])
    assert value is not None
    return _batched(node) or _why_long(math.prod(value.shape[-2:]))


def batch_norm(node: Node) -> str | None:
    """A tensor with elements, row-major or channels-last."""
    # The input is the second argument of the gradient's op.
    value = tensor(node.args[1 if "backward" in str(node.target) else 0])
    if value is None or value.dim() < 2 or not known_true(value.numel() > 0):
        return "batch norm of nothing"
    channels_last = (0, *range(2, value.dim()), 1)
    order = channels_last if value.dim() > 3 and is_row_major(value, channels_last) else ()
    return None if lies_as(_result(node), order) else _UNKNOWN_STRIDES


def group_norm(node: Node) -> str | None:
    """A tensor with elements."""
    value = tensor(node.args[0])
    return None if value is not None and known_true(value.numel() > 0) else "a norm of nothing"


def statistics(node: Node) -> str | None:
    """1 to 1024 elements a channel, row-major or channels-last."""
    value = tensor(node.args[0])
    assert value is not None
    channels = value.shape[1] if value.dim() > 1 else 1
    return batch_norm(node) or _why_long(value.numel() // channels)


def rows(node: Node) -> str | None:
    """At most 1024 rows of elements, row-major."""
    value = tensor(node.args[0])
    assert value is not None
    if not lies_as(_result(node)):
        return _UNKNOWN_STRIDES
    normalized = argument(node, 2, "normalized_shape")
    return layer_norm(node) or _why_long(value.numel() // math.prod(normalized))


def items(node: Node) -> str | None:
    """At most 1024 items."""
    target = tensor(node.args[-5 if "backward" in str(node.target) else 1])
    return _why_long(target.numel()) if target is not None else "no target"


def softmax_gradient(node: Node) -> str | None:
    """Over at most 1024 floats, row-major."""
    value, dim = tensor(node.args[0]), argument(node, 2, "dim")
    assert value is not None
    if not lies_as(_result(node)):
        return _UNKNOWN_STRIDES
    return _why_long(value.shape[dim] if value.dim() else 1) or floats_only(node)


def equal_strides(node: Node) -> str | None:
    """Floating-point inputs of equal strides."""
    first, second = map(tensor, node.args[:2])
    assert first is not None
    assert second is not None
    pairs = zip(first.shape, first.stride(), second.stride(), strict=True)
    if not all(known_equal(size, 1) or known_equal(m, n) for size, m, n in pairs):
        return _UNKNOWN_STRIDES
    return floats_only(node)


def layer_norm(node: Node) -> str | None:
    """A tensor with elements."""
    value = tensor(node.args[0])
    if value is None or not known_true(value.numel() > 0):
        return "layer norm of nothing"
    return None


def zero_dims(node: Node) -> str | None:
    """A tensor with elements."""
    value, result = tensor(node.args[0]), tensor(node)
    if value is None or result is None or not known_true(value.numel() > 0):
        return "padding of nothing"
    return None


def known_grid(node: Node) -> str | None:
    """Between float32 and uint8 or int8, one scale and one zero point that are numbers."""
    made, held = tensor(node), tensor(node.args[0])
    if made is None or held is None or {made.dtype, held.dtype} - _GRID != {torch.float32}:
        return "quantised to another dtype than uint8 or int8, of another than float32"
    return None


def known_channels(node: Node) -> str | None:
    """int8 to float32, a scale and a zero point for each channel."""
    made, held, scales = tensor(node), tensor(node.args[0]), tensor(node.args[1])
    dtypes = [None if one is None else one.dtype for one in (held, scales, made)]
    if dtypes != [torch.int8, torch.float32, torch.float32]:
        return "dequantised from another dtype than int8, or to another than float32"
    return None if tensor(node.args[2]) is not None else "without zero points"


_GRID = {torch.uint8, torch.int8}
