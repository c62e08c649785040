"""torch's switches that choose among kernels, or what they round to.

What is compiled and measured under one state of them isn't served under another: they are a part of
every key, and go along to child processes. Read against torch 2.13: the ``__init__.py`` of the
packages in ``torch/backends``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

Switch = tuple[Callable[[], Any], Callable[[Any], Any] | None]


def read_switches() -> dict[str, Any]:
    """Name → value, or the name of the exception that reading it raises.

    Some don't exist in every torch. ``float32_matmul_precision`` can't be read any more once a
    precision was set for one of the libraries.
    """
    return {name: read(name) for name in SWITCHES}


def set_switches(values: Mapping[str, Any]) -> None:
    """Bring the switches of this process to what :func:`read_switches` gave in another one."""
    for name, value in values.items():
        write(name, value)


class _Unread(str):
    """What a switch that can't be read has for a value."""


def read(name: str) -> Any:
    """One switch, as :func:`read_switches` gives it."""
    try:
        return SWITCHES[name][0]()
    except (AttributeError, RuntimeError) as error:
        return _Unread(type(error).__name__)


def write(name: str, value: Any) -> None:
    """Bring one switch to what :func:`read` gave, if it can be set, and isn't so already."""
    put = SWITCHES[name][1]
    if put is not None and value != read(name) and not isinstance(value, _Unread):
        put(value)


def _attribute(path: str) -> Switch:
    """One that is an attribute of ``torch``."""
    owner, _, name = path.rpartition(".")
    return (
        lambda: attrgetter(path)(torch),
        lambda value: setattr(attrgetter(owner)(torch), name, value),
    )


def _functions(get: str, put: str) -> Switch:
    """One that two functions of ``torch`` read and set."""
    return lambda: attrgetter(get)(torch)(), lambda value: attrgetter(put)(torch)(value)


def _precision(library: str, op: str) -> Switch:
    """What float32 is rounded to in a library's kernels: ``none``, ``ieee``, ``tf32``, ``bf16``."""
    native: Any = torch._C
    return (
        lambda: native._get_fp32_precision_getter(library, op),
        lambda value: native._set_fp32_precision_setter(library, op, value),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    enabled, warn_only = value
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _linear_algebra() -> str:
    native: Any = torch._C
    return str(native._get_linalg_preferred_backend())


#: The precision of all products comes first: setting it changes those of the libraries.
SWITCHES: dict[str, Switch] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (_deterministic, _set_deterministic),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    **{
        f"{library}.{op}.fp32_precision": _precision(library, op)
        for library, ops in {
            "generic": ("all",),
            "mkldnn": ("all", "matmul", "conv", "rnn"),
            "cuda": ("all", "matmul", "conv", "rnn"),
        }.items()
        for op in ops
    },
    **{
        path: _attribute(path)
        for path in (
            "utils.deterministic.fill_uninitialized_memory",
            "backends.mkldnn.enabled",
            "backends.mkldnn.deterministic",
            "backends.cudnn.enabled",
            "backends.cudnn.benchmark",
            "backends.cudnn.deterministic",
            "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
            "backends.cuda.matmul.allow_fp16_accumulation",
            "backends.opt_einsum.enabled",
            "backends.opt_einsum.strategy",
            "backends.quantized.engine",
        )
    },
    **{
        f"{kind}_sdp": _functions(
            f"backends.cuda.{kind}_sdp_enabled", f"backends.cuda.enable_{kind}_sdp"
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
    "attention_fast_path": _functions(
        "backends.mha.get_fastpath_enabled", "backends.mha.set_fastpath_enabled"
    ),
    # Set elsewhere than on an Intel GPU it warns; linear algebra is chosen for CUDA alone.
    "backends.mkldnn.allow_tf32": (_attribute("backends.mkldnn.allow_tf32")[0], None),
    "linear_algebra": (_linear_algebra, None),
}
