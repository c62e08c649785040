"""The op layer: how each ATen op is computed by TVM.

One module a family; each fills :data:`fuseboard_tvm.ops.registry.OPS`.
"""

from fuseboard_tvm.ops import arithmetic, externs, functions, pointwise, reductions, shapes
from fuseboard_tvm.ops.registry import OPS, Op

__all__ = ["OPS", "Op", "arithmetic", "externs", "functions", "pointwise", "reductions", "shapes"]
