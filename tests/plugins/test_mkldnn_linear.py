"""Linear layers through oneDNN and MKL: every kernel and post-operation against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.backends import compiled, hoisted, last_graph
from tests.support.half_types import HALVES
from tests.support.values import assert_closer, assert_same, rnd, strides

PACKINGS = ["onednn", "mkl", "none"]

POST_OPS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "hardtanh": nn.Hardtanh(-0.5, 0.25),
    "relu6": nn.ReLU6(),
    "leaky_relu": nn.LeakyReLU(0.2),
}


class Residual(nn.Module):
    """A linear layer whose result is added to something, with an op after that."""

    def __init__(self, width: int, after: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        self.after = after

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = y + self.linear(x)
        return total if self.after is None else self.after(total)


class ColumnWeight(nn.Module):
    """A weight that lies in memory as (K, N), as GPT-2's do."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(rnd(k, n)), nn.Parameter(rnd(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.addmm(self.bias, x, self.weight))


def run(model: nn.Module, *inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """The result through mkldnn, held against eager's and float64's; inputs must stay."""
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        result = compiled(
            model, "mkldnn", "eager", on_failure="raise", plugins={"mkldnn": options}
        )(*inputs)
        rival = model(*inputs)
        reference = copy.deepcopy(model).double()(*[x.double() for x in inputs])
    assert_closer(result, reference=reference, rival=rival)
    assert strides(result) == strides(rival)
    assert all(map(torch.equal, inputs, before))
    return result


def fusions() -> list[str]:
    return [fusion.name for region in last_graph().regions for fusion in region.fusions]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", POST_OPS)
def test_a_post_operation_is_as_accurate_as_eagers(name, packing):
    """Each op after a linear layer is recognised and computed right by each kernel."""
    model = nn.Sequential(nn.Linear(37, 19), copy.deepcopy(POST_OPS[name]), nn.Linear(19, 8))
    run(model, rnd(5, 37), packing=packing)
    expected = "hardtanh" if name == "relu6" else name
    assert any(found.startswith(f"linear+bias+{expected} ") for found in fusions())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "shape", [(37,), (1, 37), (1, 1, 37), (2, 5, 37), (2, 3, 5, 37), (0, 37), (3, 0, 37)]
)
def test_any_number_of_leading_dimensions(shape, packing):
    """Inputs of one to four dimensions, of one row and of none."""
    model = nn.Sequential(nn.Linear(37, 19), nn.GELU(), nn.Linear(19, 8, bias=False))
    run(model, rnd(*shape), packing=packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "x",
    [
        rnd(37, 6).t(),
        rnd(37, 6, 4).permute(2, 1, 0),
        rnd(6, 4, 37).permute(1, 0, 2),
        rnd(1, 37).expand(6, 37),
        rnd(6, 80)[:, :74:2],
        rnd(6, 80)[:, 3:40],
    ],
    ids=["transposed", "permuted", "batch-second", "expanded", "strided", "slice"],
)
def test_inputs_that_are_not_contiguous(x, packing):
    """Kernels read the elements that strides say, whatever lies in between."""
    run(nn.Sequential(nn.Linear(37, 19), nn.Tanh(), nn.Linear(19, 3)), x, packing=packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("after", [None, nn.ReLU()], ids=["", "relu"])
@pytest.mark.parametrize(
    "y",
    [rnd(3, 7, 32), rnd(3, 32, 7).transpose(1, 2), rnd(7, 32), rnd(32)],
    ids=["same", "transposed", "broadcast", "row"],
)
def test_a_residual_is_added_and_left_alone(y, after, bias, packing):
    """The sum is right for each form of the other operand, which isn't written to."""
    run(Residual(32, after, bias), rnd(3, 7, 32, seed=1), y, packing=packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("swapped", [False, True], ids=["from_the_layer", "from_the_residual"])
def test_a_residual_is_subtracted(swapped, packing):
    """What is subtracted from a layer is a part of it; what a layer is subtracted from isn't."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(37, 33)

        def forward(self, x, y):
            own = self.linear(x)
            return (y - own if swapped else own - y).relu()

    run(Difference(), rnd(3, 7, 37, seed=1), rnd(3, 7, 33), packing=packing)
    assert any("+sub+relu" in name for name in fusions()) == (not swapped)


def test_a_residual_that_is_the_input_itself():
    """Writing the sum over its operand would change the input."""
    x = rnd(3, 7, 32)
    run(Residual(32), x, x, packing="onednn")
    assert fusions() == ["linear+bias+add (onednn_fused)"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_weight_that_lies_as_columns(packing):
    """MKL's packing reads memory as rows of the weight; a (K, N) weight is turned first."""
    run(ColumnWeight(19, 13), rnd(5, 19), packing=packing)


@pytest.mark.parametrize("packing", PACKINGS)
def test_batch_sizes_that_change(packing):
    """One compile serves further batch sizes, each as accurate as eager."""
    model = nn.Sequential(nn.Linear(37, 19), nn.GELU(), nn.Linear(19, 8))
    options = {"plugins": {"mkldnn": {"packing": packing}}}
    fast = compiled(model, "mkldnn", "eager", on_failure="raise", dynamic=True, **options)
    for rows in (4, 9, 17):
        x = rnd(rows, 37)
        with torch.no_grad():
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(fast(x), reference=reference, rival=model(x))


def test_a_result_that_is_used_twice_is_kept():
    """A value that is returned, or read again, isn't fused away or written over."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            hidden = self.linear(x)
            active = torch.relu(hidden)
            return hidden, active, active + hidden, hidden.view(-1)

    model, x = Model(), rnd(4, 16)
    with torch.no_grad():
        for got, want in zip(
            compiled(
                model,
                "mkldnn",
                "eager",
                on_failure="raise",
                plugins={"mkldnn": {"packing": "none"}},
            )(x),
            model(x),
            strict=True,
        ):
            assert_same(got, want)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_changed_weight_is_seen(packing):
    """Packed weights follow the parameters: in-place updates and loaded state."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    fast = compiled(
        model, "mkldnn", "eager", on_failure="raise", plugins={"mkldnn": {"packing": packing}}
    )
    x = rnd(5, 16)
    with torch.no_grad():
        fast(x)
        model[0].weight.mul_(-2)
        assert_closer(fast(x), reference=copy.deepcopy(model).double()(x.double()), rival=model(x))
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
        assert_closer(fast(x), reference=copy.deepcopy(model).double()(x.double()), rival=model(x))
    assert hoisted() == (0 if packing == "none" else 2)


def test_eval_dropout_stands_in_nobodys_way():
    """Dropout leaves a copy in inference graphs; bias, post-operation and residual still fuse."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x):
            return x + self.dropout(self.linear(x))

    run(Block().eval(), rnd(2, 5, 16), packing="onednn")
    assert fusions() == ["linear+bias+add (onednn_fused)"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", POST_OPS)
def test_half_types_are_as_accurate_as_eagers(name, dtype):
    """The same holds for them, where oneDNN has kernels for them."""
    model = nn.Sequential(nn.Linear(64, 48), copy.deepcopy(POST_OPS[name]), nn.Linear(48, 8))
    run(model.to(dtype), rnd(5, 64, dtype=dtype), packing="onednn")
    assert any(found.startswith("linear+bias") for found in fusions())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_without_hardware_run_as_in_eager(dtype, monkeypatch):
    """Where oneDNN has no kernels for them, there is nothing to claim; the bits are eager's."""
    from fuseboard_mkldnn import _ops

    monkeypatch.setattr(_ops, "has_kernels", lambda dtype: dtype == torch.float32)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 8)).to(dtype)
    x = rnd(5, 64, dtype=dtype)
    with torch.no_grad():
        assert_same(compiled(model, "mkldnn", "eager", on_failure="raise")(x), model(x))
    assert {node.backend for node in last_graph().nodes} <= {"eager", "board"}


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX-512 or AMX"
)
def test_weights_that_are_cast_in_the_graph_are_packed():
    """As those of a float32 model are which ``tolerance`` allows to be bfloat16."""
    linear = nn.Linear(64, 48).eval()

    def cast(x):
        weight, bias = linear.weight.bfloat16(), linear.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), weight, bias).float()

    x = rnd(5, 64)
    with torch.no_grad():
        got = compiled(cast, "mkldnn", plugins={"mkldnn": {"packing": "onednn"}})(x)
        half = copy.deepcopy(linear).bfloat16()  # rounded, and exact from there on
        exact, eager = half.double()(x.bfloat16().double()), cast(x)
    assert_closer(got, reference=exact, rival=eager)
    assert any(found.startswith("linear+bias") for found in fusions())
