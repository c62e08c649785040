"""Products with weights that are kept quantised, through mkldnn, against float64."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseboard_mkldnn._quantised_weight import bounds
from tests.support.backends import compiled, hoisted, last_graph
from tests.support.values import assert_closer, rnd, strides

K, N, GROUP = 256, 160, 32


def integers(low: int, high: int, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randint(low, high, sizes, generator=generator, dtype=dtype)


class Int8(nn.Module):
    """A number a byte, and a scale for each output."""

    def __init__(self, scaled: str = "weight", bias: bool = True, k: int = K, n: int = N) -> None:
        super().__init__()
        self.scaled = scaled
        self.register_buffer("weight", integers(-128, 128, n, k, dtype=torch.int8))
        self.register_buffer("scale", rnd(n).abs() / 100)
        self.bias = nn.Parameter(rnd(n)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        if self.scaled == "weight":
            return nn.functional.linear(x, weight * self.scale[:, None], self.bias)
        if self.scaled == "columns":
            return x @ (weight.t() * self.scale)
        product = nn.functional.linear(x, weight) * self.scale
        return product if self.bias is None else product + self.bias


class Int4(nn.Module):
    """Two numbers a byte, a scale and a zero point for each group of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", integers(0, 256, N, K // 2, dtype=torch.uint8))
        self.register_buffer("scale", rnd(N, K // GROUP).abs() / 100)
        self.register_buffer("zero", integers(0, 16, N, K // GROUP, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([self.weight & 15, self.weight >> 4], -1).view(N, -1, GROUP)
        weight = (numbers.to(x.dtype) - self.zero.to(x.dtype)[..., None]) * self.scale[..., None]
        return nn.functional.linear(x, weight.view(N, K))


class Packed(nn.Module):
    """Eight numbers in 32 bits, along the inputs, as GPTQ has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", integers(-(2**31), 2**31 - 1, K // 8, N, dtype=torch.int32))
        self.register_buffer("scale", rnd(K // GROUP, N).abs() / 100)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None])
        self.register_buffer("group", torch.arange(K) // GROUP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = ((self.weight[:, None] >> self.shifts) & 15).view(K, N)
        return x @ ((numbers - 8).to(x.dtype) * self.scale[self.group])


MODELS = {
    "int8": Int8,
    "int8-columns": lambda: Int8("columns", bias=False),
    "int8-result": lambda: Int8("result"),
    "int8-result-without-bias": lambda: Int8("result", bias=False),
    "int8-odd": lambda: Int8(k=331, n=77),
    "int4": Int4,
    "packed": Packed,
}


def check(
    model: nn.Module, x: torch.Tensor, kept: int | None = None, **options: object
) -> list[str]:
    """The result against eager's and float64's; the names of the rewrites.

    :param kept: how many values may be hoisted. None: numbers of 4 bits, as bytes, and no others.
    """
    if kept is None:
        kept = sum(isinstance(one, Int4 | Packed | Symmetric) for one in model.modules())
    with torch.no_grad():
        result = compiled(model, "mkldnn", on_failure="raise", plugins={"mkldnn": options})(x)
        rival = model(x)
        reference = copy.deepcopy(model).double()(x.double())
    assert_closer(result, reference=reference, rival=rival)
    assert strides(result) == strides(rival)
    assert hoisted() <= kept  # no float weight
    return [fusion.name for region in last_graph().regions for fusion in region.fusions]


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_weight_is_multiplied_without_being_kept_as_floats(name, dtype, shape):
    """Each way of storing it is found, and as accurate as eager; no float weight is hoisted.

    Numbers of 4 bits are kept as bytes, so that calls needn't unpack them.
    """
    model = MODELS[name]().to(dtype)
    x = rnd(*shape, model.weight.shape[1] if name == "int8-odd" else K).to(dtype)
    found = check(model, x)
    assert found in (["weight-only linear (rows)"], ["weight-only linear (int8)"])


@pytest.mark.parametrize("scaled", ["weight", "result"])
def test_the_integer_kernel(scaled, monkeypatch):
    """ATen's kernel of int8 weights is exact in bfloat16, wherever the scale is."""
    monkeypatch.setattr(
        "fuseboard_mkldnn._weight_only.remembered", lambda what, calls, budget: "int8"
    )
    for x in (rnd(1, K), rnd(7, K)):
        model = Int8(scaled).bfloat16()
        assert check(model, x.bfloat16()) == ["weight-only linear (int8)"]


class Symmetric(nn.Module):
    """Two numbers a byte, a scale for each group of inputs, and what is added to each group."""

    def __init__(self, shifts: str = "floats", zero: bool = True, n: int = 192) -> None:
        super().__init__()
        self.shifts, self.n = shifts, n
        self.register_buffer("weight", integers(0, 256, n, K // 2, dtype=torch.uint8))
        self.register_buffer("scale", rnd(n, K // GROUP).abs() / 100)
        self.register_buffer("zero", rnd(n, K // GROUP) / 100 if zero else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([self.weight & 15, self.weight >> 4], -1).view(self.n, -1, GROUP)
        if self.shifts == "floats":
            numbers = numbers.to(x.dtype) - 8
        else:
            numbers = (numbers.to(torch.int8) - 8).to(x.dtype)
        weight = numbers * self.scale[..., None]
        if self.zero is not None:
            weight = weight + self.zero[..., None]
        return nn.functional.linear(x, weight.view(self.n, K))


@pytest.mark.parametrize("zero", [True, False], ids=["zero", ""])
@pytest.mark.parametrize("shifts", ["floats", "integers"])
def test_the_kernel_of_4_bits(shifts, zero, monkeypatch):
    """ATen's kernel is given the weight that it computes, packed once."""
    monkeypatch.setattr(
        "fuseboard_mkldnn._weight_only.remembered", lambda what, calls, budget: "int4"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 6):
            model = Symmetric(shifts, zero).to(dtype)
            names = check(model, rnd(rows, K).to(dtype), kept=2)
            assert names == ["weight-only linear (int4)"]


def test_weights_of_4_bits_that_the_kernel_does_not_compute():
    """Sizes that it doesn't take, and zero points that vary."""
    assert check(Symmetric(n=200), rnd(2, K)) == ["weight-only linear (rows)"]
    assert check(Int4(), rnd(2, K)) == ["weight-only linear (rows)"]


def test_inputs_that_are_not_contiguous():
    """Elements are read where the strides say."""
    check(Int8(), rnd(K, 6).t())
    check(Int8().bfloat16(), rnd(K, 6).bfloat16().t())


def test_a_scale_of_the_whole_weight_and_one_that_isnt_a_weight():
    """Scales that can't be taken out, or aren't static, are computed as they are written."""

    class Scaled(Int8):
        def forward(self, x):
            weight = self.weight.to(x.dtype) * self.scale[0]
            return nn.functional.linear(x, weight) * x.mean()

    assert check(Scaled(), rnd(3, K)) == ["weight-only linear (rows)"]


def test_what_is_not_row_by_row_runs_as_in_eager():
    """A weight in two parts is computed as a whole in each call, and isn't packed."""

    class Parts(Int8):
        def forward(self, x):
            parts = [self.weight[:30].to(x.dtype), self.weight[30:].to(x.dtype)]
            return nn.functional.linear(x, torch.cat(parts))

    names = check(nn.Sequential(Parts(), nn.Linear(N, N)), rnd(3, K), packing="none")
    assert not any("weight-only" in name for name in names)


def test_no_rows():
    """An empty input has an empty result."""
    for model in (Int8(), Int8("result"), Int4()):
        check(nn.Sequential(model, nn.Linear(N, 3)), rnd(0, K), packing="none")


def test_a_weight_that_two_products_read():
    """Both rewrites stand, and what they share goes with the last."""

    class Twice(Int8):
        def forward(self, x):
            weight = self.weight.to(x.dtype) * self.scale[:, None]
            return nn.functional.linear(x, weight) + nn.functional.linear(x.sin(), weight)

    assert check(Twice(), rnd(3, K)) == ["weight-only linear (rows)"] * 2


def test_symbolic_rows():
    """One graph for any number of rows."""
    model = Int8()
    fn = compiled(model, "mkldnn", on_failure="raise", dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 1):
            x = rnd(rows, K)
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(fn(x), reference=reference, rival=model(x))


def test_blocks_of_rows(monkeypatch):
    """A weight that is made in several parts, the last of them shorter."""
    monkeypatch.setattr("fuseboard_mkldnn._weight_only.BLOCK_BYTES", 1 << 15)
    for name in ("int8", "int8-columns", "int4", "packed"):
        check(MODELS[name](), rnd(3, K))


@pytest.mark.thorough
def test_memory_holds_no_float_weight():
    """Calls of a product with 16 million int8 weights need less than half of their floats."""
    program = """
import resource, torch
from tests.plugins.test_mkldnn_weight_only import Int8, compiled
model, x = Int8("result", False, 4096, 4096), torch.randn(1, 4096)
small = Int8("result", False, 256, 160)
def run(model, x):
    with torch.no_grad():
        fn = compiled(model, "mkldnn", on_failure="raise", verify="off")
        fn(x), fn(x)
run(small, torch.randn(1, 256))
torch.compiler.reset()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(model, x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    unit = 1024 if sys.platform != "darwin" else 1
    assert int(found.stdout) * unit < 4096 * 4096 * 4 / 2, found.stderr


def test_torchaos_int8_weights():
    """What ``quantize_`` makes of linear layers is found, with its scale after the product."""
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, 128)).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    x = rnd(3, K)
    with torch.no_grad():
        result, rival = compiled(model, "mkldnn", on_failure="raise")(x), model(x)
    torch.testing.assert_close(result, rival)
    names = [fusion.name for region in last_graph().regions for fusion in region.fusions]
    assert [name.split(" (")[0] for name in names] == ["weight-only linear"] * 2
    assert hoisted() == 0


def test_onnxruntime_does_not_keep_float_weights():
    """It leaves to eager what makes floats of a quantised weight, which its sessions would keep."""
    pytest.importorskip("onnxruntime")
    model, x = Int8(), rnd(3, K)
    with torch.no_grad():
        result = compiled(model, "onnxruntime", on_failure="raise")(x)
        reference = copy.deepcopy(model).double()(x.double())
        assert_closer(result, reference=reference, rival=model(x))
    reasons = [node.declined.get("onnxruntime", "") for node in last_graph().nodes]
    assert "ONNX Runtime would keep a quantised weight as floats" in reasons


def test_integers_that_fit_a_byte_are_told_from_those_that_may_not():
    """By what makes them; what a dtype would cut off isn't known."""
    a, mode = torch.ops.aten, FakeTensorMode()
    graph = torch.fx.Graph()

    def node(target, *args, dtype, **kwargs):
        made = graph.call_function(target, args, kwargs) if target else graph.placeholder("x")
        with mode:
            made.meta["val"] = torch.empty(4, 8, dtype=dtype)
        return made

    words = node(None, dtype=torch.int32)
    small = node(a.bitwise_and.Scalar, words, 15, dtype=torch.int32)
    signed = node(a.sub.Tensor, small, 8, dtype=torch.int32)
    byte = node(a._to_copy.default, small, dtype=torch.uint8)
    wrapped = node(a.sub.Tensor, byte, 8, dtype=torch.uint8)
    doubled = node(a.sub.Tensor, small, 8, dtype=torch.int32, alpha=2)
    assert bounds(words) is None
    assert bounds(small) == bounds(byte) == (0, 15)
    assert bounds(signed) == (-8, 7)
    assert bounds(wrapped) == (0, 255)
    assert bounds(doubled) is None
    assert bounds(node(a._to_copy.default, signed, dtype=torch.float32)) is None
