"""zentorch's operators, without zentorch's Python package.

``import zentorch`` changes the process: it registers a backend and Inductor lowerings, adds
operators to Inductor's fallbacks, and changes two of its settings (read in zentorch 2.13.0.2,
``zentorch/{__init__,_compile_backend,_lowerings,_meta_registrations}.py``). None of that is needed
to call the operators, so only the shared library is loaded, which registers them with torch and
nothing else. A later ``import zentorch`` finds it loaded, and works.

Operators that take a weight as it is aren't used (``zentorch_mm``, ``zentorch_addmm``,
``zentorch_baddbmm``, and ``zentorch_linear_unary`` without ``is_weight_prepacked``). ZenDNN packs
the weight on its own and keeps that by the weight's *address*: it goes on using it after the weight
has changed or another tensor lies there. Where packing needs no more memory, it writes over the
weight itself. (``ZENDNNL_MATMUL_WEIGHT_CACHE=0`` in the environment switches both off.)
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: Operator → argument names that the rewrites rely on, in order.
EXPECTED = {
    "zentorch_bmm": ("self", "mat2", "zentorch_op_name"),
    "zentorch_linear_unary": (
        *("input", "weight", "bias"),
        *("is_weight_prepacked", "post_op", "zentorch_op_name"),
    ),
    "zentorch_linear_unary_binary": (
        *("input", "weight", "binary_input", "bias"),
        *("is_weight_prepacked", "post_op_1", "post_op_2", "zentorch_op_name"),
    ),
    "zentorch_sdpa": (
        *("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"),
        "zentorch_op_name",
    ),
    "zentorch_weight_prepack_for_linear": ("weight", "zentorch_op_name"),
}


def operator(name: str) -> Any:
    """The overload of an operator in :data:`EXPECTED`, after :func:`problem` found it there."""
    return getattr(torch.ops.zentorch, f"zentorch_{name}").default


@cache
def problem() -> str:
    """Load the library and look at what it brought. Why it can't be used, or ""."""
    if not _is_loaded():
        found = importlib.util.find_spec("zentorch")  # finds the package without importing it
        if found is None or found.origin is None:
            return "zentorch's package is missing"
        library = Path(found.origin).with_name("libzentorch.so")
        try:
            torch.ops.load_library(str(library))
        except OSError as error:  # what ctypes raises
            return f"zentorch's library doesn't load: {error}"
    other = sorted(name for name, names in EXPECTED.items() if _differs(name, names))
    if other:
        return f"this zentorch has other operators than expected: {', '.join(other)}"
    if not torch.ops.zentorch.zentorch_is_avx512_supported():
        return "zentorch finds no AVX-512 on this CPU"
    return ""


@cache
def supports_bfloat16() -> bool:
    """Whether ZenDNN has bfloat16 kernels for this CPU."""
    return not problem() and bool(torch.ops.zentorch.zentorch_is_bf16_supported())


def _is_loaded() -> bool:
    """By us, or by the user's ``import zentorch``."""
    return hasattr(torch.ops.zentorch, "zentorch_bmm")


def _differs(name: str, expected: tuple[str, ...]) -> bool:
    overload = getattr(getattr(torch.ops.zentorch, name, None), "default", None)
    return overload is None or tuple(a.name for a in overload._schema.arguments) != expected
