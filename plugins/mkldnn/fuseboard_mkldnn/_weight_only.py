"""Products with weights that are kept quantised, of integers that are scaled to floats.

The float weight is never there as a whole: either a kernel reads the integers, or some rows at a
time are made, multiplied and forgotten (:mod:`fuseboard_mkldnn._quantised_weight`). A kernel that
rounds the activations isn't taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _int4, _ops
from fuseboard_mkldnn._graph import (
    Editor,
    argument,
    aten,
    calls,
    is_contiguous,
    is_empty,
    is_view,
    same_sizes,
    sole_user,
    tensor,
)
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import COMPARED_ROWS, LARGEST_WORK, Budget, error_of, remembered
from fuseboard_mkldnn._quantised_weight import (
    QuantisedWeight,
    depend_on_integers,
    in_a_byte,
    quantised_weight,
    rows_function,
    widened,
)

#: Bytes of all that is made of some rows: they stay in the cache.
BLOCK_BYTES = 1 << 22

#: How many columns of a product are compared with float64.
COMPARED_COLUMNS = 256

#: What the integer kernel's vectors divide.
_K_MULTIPLE, _N_MULTIPLE = 64, 32


@dataclass
class WeightOnly:
    """One product with a quantised weight.

    :ivar nodes: all that a rewrite replaces, in graph order: the product, and a multiplication
        by ``late_scale`` after it.
    """

    product: Node
    weight: QuantisedWeight
    nodes: list[Node]
    late_scale: Node | None = None

    @property
    def scale(self) -> Node | None:
        """The one scale of the columns of the result, or None where there is none or two."""
        scales = [one for one in (self.weight.scale, self.late_scale) if one is not None]
        return scales[0] if len(scales) == 1 else None


def find_weight_only(graph: GraphModule, static: set[Node] | None = None) -> list[WeightOnly]:
    """Products of two dimensions whose weight is computed row by row from quantised numbers.

    :param static: what depends on static inputs alone; None where that isn't known yet.
    """
    stored: set[Node] | None = None
    found = []
    for node in graph.graph.nodes:
        if not _is_product(node):
            continue
        columns = node.args[-1]
        if stored is None:
            stored = depend_on_integers(graph)
        weight = quantised_weight(columns, stored)
        if weight is None or (static is not None and columns not in static):
            continue
        one = WeightOnly(node, weight, [node])
        _take_scale(one, static)
        found.append(one)
    return found


def _is_product(node: Node) -> bool:
    if calls(node, aten.addmm.default):
        if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
            return False
    elif not calls(node, aten.mm.default):
        return False
    values = [tensor(node), *map(tensor, node.args)]
    if any(one is None or one.device.type != "cpu" or is_empty(one) for one in values):
        return False
    floats = values[0].dtype.is_floating_point
    return floats and all(type(size) is int for size in values[-1].shape)


def _take_scale(one: WeightOnly, static: set[Node] | None) -> None:
    """Note a scale that the result is multiplied by, as torchao's products are."""
    if not calls(one.product, aten.mm.default):
        return
    user = sole_user(one.product)
    if user is None or not calls(user, aten.mul.Tensor):
        return
    scale = user.args[1] if user.args[0] is one.product else user.args[0]
    factor, product = tensor(scale), tensor(one.product)
    if factor is None or factor.dtype != product.dtype or factor.dim() not in (1, 2):
        return
    if not same_sizes(factor.shape, (1, product.shape[1])[-factor.dim() :]):
        return
    if static is None or scale in static:
        one.nodes.append(user)
        one.late_scale = scale


def fuse_weight_only(
    graph: GraphModule, static: set[Node], taken: set[Node], options: Options, budget: Budget
) -> list[fuseboard.Fusion]:
    """A fusion for each product with a quantised weight; nodes are added to ``taken``."""
    fusions = []
    for one in find_weight_only(graph, static):
        if one.product in taken:
            continue
        kernel = _kernel(one, options, budget)
        if kernel != "int8":
            del one.nodes[1:]
        taken.update(one.nodes)
        fusions.append(
            fuseboard.Fusion(
                name=f"weight-only linear ({kernel})",
                nodes=tuple(node.name for node in one.nodes),
                apply=lambda one=one, kernel=kernel: _apply(one, kernel),
            )
        )
    return fusions


def _kernel(one: WeightOnly, options: Options, budget: Budget) -> str:
    """``int8``, ``int4``: ATen's kernels. ``rows``: some rows of the weight at a time."""
    if options.packing != "none" and _ops.int4_product() is not None:
        four = _int4.grouped(one.weight)
        if four is not None:
            return _kernel_of_int4(one, four, options, budget)
    integers, x = one.weight.stored_as_int8(), tensor(one.product.args[-2])
    kernel = _ops.int8_product()
    if kernel is None or integers is None or one.scale is None or options.packing == "none":
        return "rows"
    n, k = tensor(integers).shape
    m = _ops.size_hint(x.shape[0])
    if m is None or k % _K_MULTIPLE or n % _N_MULTIPLE or not is_contiguous(x):
        return "rows"
    what = ("weight-only", m or 1, k, n, x.dtype, options.max_error)
    found = remembered(what, lambda: _calls(m or 1, k, n, x.dtype, options.max_error), budget)
    return "int8" if found == "int8" else "rows"


def _kernel_of_int4(one: WeightOnly, four: _int4.Grouped, options: Options, budget: Budget) -> str:
    x = tensor(one.product.args[-2])
    m = _ops.size_hint(x.shape[0])
    if m is None or not is_contiguous(x) or x.dtype == torch.float16:
        return "rows"
    what = ("int4", m or 1, four.k, four.n, four.groups, x.dtype, options.max_error)
    found = remembered(what, lambda: _int4_calls(m or 1, four, x.dtype, options.max_error), budget)
    return "int4" if found == "int4" else "rows"


def _int4_calls(
    m: int, four: _int4.Grouped, dtype: torch.dtype, max_error: float
) -> dict[str, Callable[[], Any]]:
    """As :func:`_calls`, for some of the N."""
    n, k = min(four.n, COMPARED_COLUMNS), four.k
    m = max(1, min(m, LARGEST_WORK // (k * n)))
    memory = ((n, four.groups, k // four.groups), dtype, 0)
    rows = RowProduct(_int4.scaled, (0, 0), n, 2 * k * dtype.itemsize, [memory])
    with fuseboard.real_tensors():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(m, k, generator=generator, device="cpu").to(dtype)
        found, weight = _int4.calls_to_compare(x, n, four.groups, rows)
        exact = x[:COMPARED_ROWS].double() @ weight
        if error_of(found["int4"], exact) > max_error * error_of(found["rows"], exact):
            del found["int4"]
    return found


def _calls(
    m: int, k: int, n: int, dtype: torch.dtype, max_error: float
) -> dict[str, Callable[[], Any]]:
    """Both kernels on random tensors; the integer one where it is precise enough."""
    generator = torch.Generator().manual_seed(0)
    m = max(1, min(m, LARGEST_WORK // (k * n)))
    with fuseboard.real_tensors():
        x = torch.randn(m, k, generator=generator, device="cpu").to(dtype)
        integers = torch.randint(
            -128, 128, (n, k), dtype=torch.int8, generator=generator, device="cpu"
        )
        scale = torch.rand(n, generator=generator, device="cpu").to(dtype)
        memory = ((n, k), dtype, 0)
        rows = RowProduct(_floats, (0,), n, k * dtype.itemsize, [memory])
        found = {
            "rows": lambda: rows(x, integers).mul_(scale),
            "int8": lambda: _ops.int8_product()(x, integers, scale),
        }
        few = slice(COMPARED_COLUMNS)
        exact = (x[:COMPARED_ROWS].double() @ integers[few].double().t()) * scale[few].double()
        allowed = max_error * error_of(lambda: found["rows"]()[:, few], exact)
        if error_of(lambda: found["int8"]()[:, few], exact) > allowed:
            del found["int8"]
    return found


def _floats(integers: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory.copy_(integers).t()


class RowProduct:
    """A product with a weight that is made some rows at a time. It is called as an op is.

    :param make: makes columns of the weight, (K, how many), of the same parts of its leaves.
    :param dims: the dimension of each leaf that holds the N; None where it is read as a whole.
    :param row_bytes: the bytes of all that ``make`` makes of one row.
    :param memory: shape, dtype and dimension that holds the N of tensors that ``make`` takes after
        the leaves and writes over: memory that is new in each turn would take longer.
    """

    __name__ = "row_product"
    __module__ = __name__

    def __init__(
        self,
        make: Callable[..., torch.Tensor],
        dims: tuple[int | None, ...],
        n: int,
        row_bytes: int,
        memory: Sequence[tuple[Sequence[int], torch.dtype, int]] = (),
    ) -> None:
        self._make = make
        self._dims = dims
        self._n = n
        self._rows = max(1, min(n, BLOCK_BYTES // max(row_bytes, 1)))
        self._memory = [
            ([self._rows if at == dim else size for at, size in enumerate(shape)], dtype, dim)
            for shape, dtype, dim in memory
        ]

    def __call__(self, x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        """``x`` is (M, K), the result (M, N)."""
        result = x.new_empty(x.shape[0], self._n)
        memory = [(x.new_empty(shape, dtype=dtype), dim) for shape, dtype, dim in self._memory]
        for start in range(0, self._n, self._rows):
            count = min(self._rows, self._n - start)
            parts = [
                leaf if dim is None else leaf.narrow(dim, start, count)
                for leaf, dim in zip(leaves, self._dims, strict=True)
            ]
            parts += [one.narrow(dim, 0, count) for one, dim in memory]
            torch.mm(x, self._make(*parts), out=result.narrow(1, start, count))
        return result


def _apply(one: WeightOnly, kernel: str) -> None:
    """Replace a product by calls of one kernel."""
    edit, weight, product = Editor(one.nodes[-1]), one.weight, tensor(one.product)
    x, n = one.product.args[-2], product.shape[1]
    if kernel == "int8":
        scale = edit.call(aten.reshape.default, (one.scale, [n]), tensor(one.scale).reshape(n))
        args = (x, weight.stored_as_int8(), scale)
        result = edit.call(_ops.int8_product(), args, product)
    elif kernel == "int4":
        four = _int4.grouped(weight)
        result = _int4.emit(edit, four, x, product)
    else:
        for part in widened(weight):
            integers = part.integers
            if part.shift or tensor(integers).dtype != part.dtype:
                held = tensor(integers).to(part.dtype)
                integers = edit.call(in_a_byte, (integers, part.shift, part.dtype), held)
            weight.hold(part.floats, integers)
        leaves = weight.leaves
        memory = [
            (tuple(tensor(floats).shape), tensor(floats).dtype, weight.rows[floats])
            for floats in weight.held
        ]
        made = sum(tensor(floats).nbytes for floats in weight.held)
        made += sum(tensor(node).nbytes for node in weight.nodes if not is_view(node.target))
        dims = tuple(weight.rows[leaf] for leaf in leaves)
        target = RowProduct(rows_function(weight), dims, n, made // n, memory)
        result = edit.call(target, (x, *leaves), product)
        if weight.scale is not None:
            flat = tensor(weight.scale).reshape(n)
            scale = edit.call(aten.reshape.default, (weight.scale, [n]), flat)
            result = edit.call(torch.Tensor.mul_, (result, scale), product)
    if len(one.product.args) == 3:
        result = edit.call(aten.add.Tensor, (result, one.product.args[0]), product)
    edit.replace(result, one.nodes)
