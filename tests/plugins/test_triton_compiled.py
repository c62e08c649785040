"""Generated and written kernels are compiled for GPUs that aren't here.

What the interpreter can't show: that the compiler takes the kernels, reads memory in wide steps,
and has enough registers.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton", reason="needs Triton")
tl = triton.language

from tests.plugins.triton_interpreted.lowering import trace  # noqa: E402 - after the skip

TARGETS = [80, 90]
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(function: Any, types: list[str], constants: dict[str, Any], target: int, warps: int):
    """A kernel for a target; pointers and ints are told to be multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name in inspect.signature(function.fn).parameters if name not in constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    order = list(inspect.signature(function.fn).parameters)
    aligned = {
        (order.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or kind == "i32"
    }
    return triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )


def check(kernel: Any, tmp_path: Path, vector: bool = True) -> None:
    """There is code; loads take 16 bytes at once; nothing spills."""
    assert kernel.asm["cubin"]
    ptx = kernel.asm["ptx"]
    if vector:
        assert re.search(r"ld\.global[^ ]*\.v[248]\.", ptx), "no vector loads"
    if DISASSEMBLER.exists():
        path = tmp_path / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [DISASSEMBLER, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", shown)
        assert found is not None, shown
        assert (int(found[2]), int(found[3])) == (0, 0), f"it spills: {found[0]}"


# --- generated ------------------------------------------------------------------------------------


def chain(x, y, w):
    return F.gelu(x) * y + torch.tanh(x)


def norms(x, y, w):
    total = x + y
    return F.layer_norm(total, w.shape, w, w), total


def softmaxes(x, y, w):
    return torch.softmax(x, -1), x.argmax(-1), torch.log_softmax(y, -1)


def sums(x, y, w):
    return (x * y).sum(0), x.amax(0), x.float().sum(), (x > 0).any(-1), x.var(0)


def integers(x, y, w):
    k = x.int()
    return k // 7, k % 3, (k & 5) == 1, k.sum(), torch.remainder(x, 3), x.round() + x.trunc()


@pytest.mark.parametrize(("dtype", "target"), [(torch.float32, 90), (torch.bfloat16, 80)])
@pytest.mark.parametrize("function", [chain, norms, softmaxes, sums, integers])
def test_generated(function, dtype, target, tmp_path):
    """The first configuration of each kernel."""
    from fuseboard_triton._autotune import configs
    from fuseboard_triton._launch import function_of
    from fuseboard_triton._lower import plan_region, sources_of

    x, w = torch.empty(4096, 1024, dtype=dtype), torch.empty(1024, dtype=dtype)
    sources = sources_of(plan_region(trace(function, [x, x, w])))
    assert sources
    for source in sources:
        assert not source.numbers
        config = configs(source.outer, source.reduced, source.columns)[0]
        function = function_of(source.persistent if config.persistent else source.looped)
        constants = {"INDEX": tl.int32, "XBLOCK": config.outer_block}
        if config.reduced_block is not None:
            constants["RBLOCK"] = config.reduced_block
        types = [POINTERS[value.dtype] for value in (*source.inputs, *source.outputs)]
        kernel = compiled(function, types, constants, target, config.num_warps)
        large = any(value.shape == (4096, 1024) for value in source.inputs)
        check(kernel, tmp_path, vector=large)


def test_symbolic_sizes(tmp_path):
    """Sizes and numbers as arguments; loops over rows and columns; integers, single numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fuseboard_triton._launch import function_of
    from fuseboard_triton._lower import plan_region, sources_of

    def function(x, k, number):
        return (
            *(torch.softmax(x * number, -1), x.mean(-1), x.sum(0), k.amax(1), (k > 2).all(0)),
            *(x.argmax(-1), torch.where(k > 0, x, number).sum(), torch.maximum(k, k * 2)),
        )

    x, k, number = torch.empty(64, 96), torch.empty(64, 96, dtype=torch.int32), torch.empty(())
    graph = make_fx(function, tracing_mode="symbolic")(x, k, number)
    sources = sources_of(plan_region(graph))
    assert any(source.numbers for source in sources)
    for source in sources:
        types = [POINTERS[value.dtype] for value in (*source.inputs, *source.outputs)]
        types += ["i32"] * len(source.numbers)
        texts = {source.looped: 32, source.persistent: 128}
        for text, block in texts.items():
            if not text:
                continue
            constants = {"INDEX": tl.int32, "XBLOCK": 16}
            if source.reduced is not None:
                constants["RBLOCK"] = block
            check(compiled(function_of(text), types, constants, 90, 4), tmp_path, vector=False)


def test_indices_of_64_bits(tmp_path):
    """Tensors of more than 2**31 elements are reached with wide indices."""
    from fuseboard_triton._launch import NARROW, function_of
    from fuseboard_triton._lower import plan_region, sources_of

    graph = trace(lambda x: torch.relu(x) * 2, [torch.empty(2**16, 2**16, device="meta")])
    (source,) = sources_of(plan_region(graph))
    assert source.extents == (2**32 - 1, 2**32 - 1)
    assert max(source.extents) > NARROW
    constants = {"INDEX": tl.int64, "XBLOCK": 1024}
    check(compiled(function_of(source.looped), ["*fp32", "*fp32"], constants, 90, 4), tmp_path)


# --- written --------------------------------------------------------------------------------------


def written() -> dict[str, tuple[Any, list[str], dict[str, Any], int]]:
    """Each kernel with the types of its arguments and its constants, for rows of 4096."""
    from fuseboard_triton.kernels import (
        cross_entropy,
        norms,
        rotary,
    )

    half, full, long = "*bf16", "*fp32", "*i64"
    rms, layer = {"CENTRED": False}, {"CENTRED": True}
    return {
        "rms_norm": (
            *(norms._forward, [half] * 5 + [full, full, half, "i32", "fp32"]),
            {**rms, "RESIDUAL": True, "WEIGHT": True, "BIAS": False, "BLOCK": 4096},
        ),
        "rms_norm_backward": (
            *(norms._backward, [half] * 3 + [full, full, half, full, full, "i32", "i32"]),
            {**rms, "WEIGHT": True, "BLOCK": 4096},
        ),
        "layer_norm": (
            *(norms._forward, [half] * 5 + [full, full, half, "i32", "fp32"]),
            {**layer, "RESIDUAL": True, "WEIGHT": True, "BIAS": True, "BLOCK": 4096},
        ),
        "layer_norm_backward": (
            *(norms._backward, [half] * 3 + [full, full, half, full, full, "i32", "i32"]),
            {**layer, "WEIGHT": True, "BLOCK": 4096},
        ),
        "cross_entropy": (
            *(cross_entropy._forward, [half, long, full, half, "i32", "i32"]),
            {"WRITE": True, "BLOCK": 4096},
        ),
        "cross_entropy_backward": (
            *(cross_entropy._backward, [full, full, half, long, half, "i32", "i32"]),
            {"MEAN": True, "BLOCK": 4096},
        ),
        "rotary": (
            *(rotary._rotate, [half] * 4 + ["i32"] * 20),
            {"BACKWARD": False, "ROWS": 16, "HALF": 64},
        ),
    }


NAMES = (
    *("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"),
    *("cross_entropy", "cross_entropy_backward", "rotary"),
)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_written(name, target, tmp_path):
    """Each with the number of warps that it is launched with."""
    from fuseboard_triton.kernels._launching import warps_for

    function, types, constants = written()[name]
    warps = 4 if name == "rotary" else warps_for(constants["BLOCK"])
    # The strides of a rotary embedding's operands are arguments: their unit isn't known here.
    check(compiled(function, types, constants, target, warps), tmp_path, vector=name != "rotary")
