"""Fake results have the strides of real ones, and so has what is compiled for them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fuseboard
from fuseboard.torch_api import views as torch_views
from fuseboard.torch_api.symbols import in_the_example
from fuseboard.torch_api.views import eager_strides, why_not_installed
from tests.support.backends import (
    all_trips,
    compiled,
    forget_other_graphs,
    last_graph,
    plugged,
)
from tests.support.values import assert_closer, assert_same, rnd

aten = torch.ops.aten

# --- the strides ----------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A tensor whose dimensions lie in some order, and a shape that it can be viewed in."""
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    back = sorted(range(len(order)), key=order.__getitem__)
    tensor = torch.empty([shape[dim] for dim in order]).permute(back)
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(draw(st.integers(0, len(shape))))[..., :1]
    other = draw(st.permutations(list(shape)))
    split = [n for size in other for n in draw(st.sampled_from(_SPLITS[size]))]
    return tensor, [n for n in split if n > 1 or draw(st.booleans())]


_SPLITS = {1: [[1], []], 2: [[2], [1, 2]], 3: [[3]], 4: [[4], [2, 2], [2, 1, 2]], 6: [[6], [3, 2]]}


@pytest.mark.parametrize("op", [aten.view.default, aten._unsafe_view.default], ids=str)
@settings(deadline=None)
@given(data=st.data())
def test_fake_views_have_real_strides(op, data):
    tensor, shape = data.draw(views())
    if tensor.numel() != torch.Size(shape).numel():
        shape = list(tensor.shape)
    try:
        real = op(tensor, shape)
    except RuntimeError:
        return  # a copy would be needed
    with FakeTensorMode() as mode, eager_strides():
        fake = op(mode.from_tensor(tensor), shape)
    assert fake.shape == real.shape
    assert fake.stride() == real.stride()
    assert fake.storage_offset() == real.storage_offset()


W = torch.ones(8)
FORMATTED = {
    "inference": lambda x: aten._native_batch_norm_legit_no_training(x, W, W, W, W, 0.1, 1e-5)[0],
    "training": lambda x: aten._native_batch_norm_legit_functional(x, W, W, W, W, True, 0.1, 1e-5)[
        0
    ],
    "no_stats": lambda x: aten._native_batch_norm_legit(x, W, W, True, 0.1, 1e-5)[0],
    "gradient": lambda x: aten.native_batch_norm_backward(
        x.contiguous(), x, W, W, W, W, W, True, 1e-5, [True] * 3
    )[0],
    "roll": lambda x: aten.roll(x, [1, 1], [0, 1]),
    "channel_shuffle": lambda x: aten.channel_shuffle(x, 2) if x.dim() > 2 else x,
    "mse_loss": lambda x: aten.mse_loss_backward(W[0], x, x.contiguous(), 1),
    "smooth_l1_loss": lambda x: aten.smooth_l1_loss_backward(W[0], x, x.contiguous(), 1, 1.0),
    "huber_loss": lambda x: aten.huber_loss_backward(W[0], x, x.contiguous(), 1, 1.0),
}
LAID_OUT = {
    "rows": rnd(4, 8, 5),
    "tokens": rnd(4, 5, 8).transpose(1, 2),
    "columns": rnd(8, 4).t(),
    "channels_last": rnd(2, 3, 5, 8).permute(0, 3, 1, 2),
    "some_channels": rnd(2, 3, 5, 16).permute(0, 3, 1, 2)[:, :8],
    "channels_last_3d": rnd(2, 3, 5, 2, 8).permute(0, 4, 1, 2, 3),
    "another_order": rnd(5, 8, 2, 6).transpose(0, 2),
    "gaps": rnd(2, 8, 3, 10)[..., ::2],
    "one_element_each": rnd(2, 8, 1, 1),
}


@pytest.mark.parametrize("given", LAID_OUT)
@pytest.mark.parametrize("op", FORMATTED)
@pytest.mark.whole
def test_fake_results_in_a_memory_format_lie_as_real_ones(op, given):
    x = LAID_OUT[given]
    real = FORMATTED[op](x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, eager_strides():
        fake = FORMATTED[op](mode.from_tensor(x))
    assert fake.shape == real.shape
    assert fake.stride() == real.stride()


def test_a_codebook_is_trained_as_captured():
    """The gradient of a loss of permuted codes is viewed in the backward, as eager's can be."""

    def loss(codes, x):
        return torch.nn.functional.mse_loss(codes.view(2, 4, 4, 8).permute(0, 3, 1, 2), x)

    codes, x = rnd(32, 8).requires_grad_(), rnd(2, 8, 4, 4, seed=1)
    (got,) = torch.autograd.grad(compiled(loss)(codes, x), codes)
    exact = codes.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(loss(exact, x.double()), exact)
    torch.testing.assert_close(got, want.float())
    assert not all_trips()


def test_symbolic_strides_are_found_without_guards():
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = mode.from_tensor(torch.empty(1, 256, 32), symbolic_context=context)
    size = x.shape[1]
    with mode, eager_strides():
        view = x.transpose(1, 2).view(1, 32, 1, size)
        norm = aten._native_batch_norm_legit_no_training(
            x.transpose(1, 2), *(torch.ones(32),) * 4, 0.1, 1e-5
        )[0]
    assert [str(n) for n in view.stride()] == ["32", "1", f"32*{size}", "32"]
    assert [str(n) for n in norm.stride()] == [f"32*{size}", f"{size}", "1"]
    assert not env.guards


def strides_of_a_view() -> tuple[int, ...]:
    with FakeTensorMode():
        return torch.empty(1, 6, 4).transpose(1, 2).view(1, 4, 2, 3).stride()


def test_outside_of_the_board_s_compiles_they_are_torch_s_own():
    """Neither leaks what it found to the other, though torch keeps the results of fake ops."""
    assert why_not_installed() == ""
    own = strides_of_a_view()
    for _ in range(2):
        with eager_strides():
            assert strides_of_a_view() == (4, 1, 12, 4)
        assert strides_of_a_view() == own
    assert own != (4, 1, 12, 4), "torch has mended it: the patch can go"


def test_other_backends_see_torch_s_own():
    """What they compile, and keep, is what it would be without the board."""
    seen = []

    def look(graph, inputs):
        def compiler(graph, inputs):
            views = graph.graph.find_nodes(op="call_function", target=aten.view.default)
            seen.extend(view.meta["val"].stride() for view in views)
            return make_boxed_func(graph.forward)

        return aot_module_simplified(graph, inputs, fw_compiler=compiler)

    def tokens(x):
        return x.transpose(1, 2).view(1, 4, 2, 3).exp()

    own = strides_of_a_view()
    with torch.no_grad():
        compiled(tokens)(rnd(1, 6, 4))
        torch._dynamo.reset()
        torch.compile(tokens, backend=look)(rnd(1, 6, 4))
    assert seen == [own]


def test_dynamo_sees_eager_s_where_it_traces_for_the_board():
    """Behind such a convolution its own fake value couldn't be viewed, where eager's can."""
    conv = nn.Conv2d(4, 4, 1)

    def flat(x):
        y = conv(x.transpose(1, 2).view(1, 4, 2, 3)).view(1, -1)
        return y if y.stride(0) == 24 else -y

    x = rnd(1, 6, 4)
    with torch.no_grad():
        fn = torch.compile(flat, backend="fuseboard", fullgraph=True)
        torch.testing.assert_close(fn(x), flat(x))


def test_what_can_t_be_installed_is_told(monkeypatch):
    """Where torch has its fake views elsewhere, reports say what follows."""
    monkeypatch.setattr("torch._subclasses.fake_impls.op_implementations_dict", {})
    monkeypatch.setattr(torch_views, "why_not_installed", why_not_installed.__wrapped__)
    monkeypatch.setattr("fuseboard.backend.why_not_installed", why_not_installed.__wrapped__)
    with torch.no_grad():
        compiled(lambda x: x.exp())(rnd(3))
    assert any("fake views" in note for note in last_graph().notes)


# --- what is compiled for them --------------------------------------------------------------------


class Tokens(nn.Module):
    """Tokens as an image, as in SegFormer: by torch's own fake values this is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = self.norm(x).transpose(1, 2)
        return self.conv(x.view(x.shape[0], 6, x.shape[2] // 4, 4)).relu()


@pytest.fixture
def _measured(monkeypatch, tmp_path):
    """Each test with a cost database of its own."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    forget_other_graphs(monkeypatch)


def as_planned(eager_call, region):
    """Laid out as the fake values say, as compilers do."""
    (output,) = region.graph.graph.find_nodes(op="output")
    fake = [node.meta["val"] for node in output.args[0]]

    def run(args):
        return [_laid_out(*pair) for pair in zip(eager_call(args), fake, strict=True)]

    return run


def _laid_out(result, like):
    """With the dimensions in the order of the fake strides, which may be symbolic."""
    strides = [in_the_example(number) for number in like.stride()]
    order = sorted(range(result.dim()), key=strides.__getitem__, reverse=True)
    back = sorted(range(result.dim()), key=order.__getitem__)
    return result.permute(order).contiguous().permute(back)


def states() -> dict[str, str]:
    return {told.name: told.state for told in last_graph().candidates}


@pytest.mark.usefixtures("_measured")
def test_what_is_compiled_for_them_is_laid_out_as_eagers():
    """In the call that compares, in those after it, and where the cost database decides."""
    model, x = Tokens().eval(), rnd(1, 16, 6)
    with plugged("other", call=as_planned, info={"compiles_quickly": True}), torch.no_grad():
        for decided in ("measured in a call", "taken from the cost database"):
            torch._dynamo.reset()
            fn = compiled(model, "other", "eager", measure_s=0.1)
            for _ in range(3):
                assert_same(fn(x), model(x))
                assert model(x).stride() == (96, 16, 4, 1)
            assert last_graph().decided == decided
            assert states()["other"] != "failed"
    assert not all_trips()


@pytest.mark.usefixtures("_measured")
@pytest.mark.thorough
def test_symbolic_sizes():
    """Those that come later are laid out as eager's, too; a batch of 2 is channels last."""
    model = Tokens().eval()
    with plugged("other", call=as_planned, info={"compiles_quickly": True}), torch.no_grad():
        fn = compiled(model, "other", "eager", measure_s=0.1, dynamic=True)
        for batch, tokens in [(1, 16), (1, 32), (2, 16), (1, 24), (3, 32), (2, 24)]:
            x = rnd(batch, tokens, 6)
            for _ in range(2):
                assert_same(fn(x), model(x))
        assert states()["other"] != "failed"
    assert not all_trips()


class NormOfTokens(nn.Module):
    """A batch norm over tokens, as in PatchTST: row-major in eager, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.norm(x.transpose(1, 2))
        return self.linear(y.transpose(1, 2)), y.flatten(1) * 2


@pytest.mark.parametrize(
    "backend", ["mkldnn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("inductor", "tvm"))]
)
@pytest.mark.whole
def test_a_norm_of_transposed_tokens(backend):
    """Also for those that decompose it, whose result the graph's view is none of."""
    if backend == "tvm":
        pytest.importorskip("tvm", reason="needs the extra tvm")
    model, x = NormOfTokens().eval(), rnd(4, 5, 6)
    with torch.no_grad():
        fn = compiled(model, backend, "eager", min_region_us=0)
        exact = copy.deepcopy(model).double()(x.double())
        for found, rival, reference in zip(fn(x), model(x), exact, strict=True):
            assert_closer(found, reference=reference, rival=rival)
            assert found.stride() == rival.stride()
    assert {region.backend for region in last_graph("inference").regions} == {backend}
    assert not all_trips()


@pytest.mark.parametrize("backend", ["inductor", "mkldnn", "onnxruntime"])
@pytest.mark.usefixtures("_measured")
@pytest.mark.thorough
def test_backends(backend):
    model, x = Tokens().eval(), rnd(1, 16, 6)
    fn = compiled(model, backend, "eager", measure_s=0.1)
    with torch.no_grad():
        for _ in range(3):
            assert fn(x).stride() == model(x).stride() == (96, 16, 4, 1)
            fuseboard.wait()
    assert states()[backend] in ("chosen", "slower")
    assert not all_trips()


@pytest.mark.usefixtures("_measured")
def test_training():
    """Results, what is saved for the backward, and gradients."""
    model, x = Tokens(), rnd(1, 16, 6).requires_grad_()
    with plugged("other", call=as_planned, info={"compiles_quickly": True}):
        fn = compiled(model, "other", "eager", measure_s=0.1)
        for _ in range(3):
            assert_same(fn(x), model(x))
            (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (fn, model))
            assert_same(got, want)
        forward = {told.name: told.state for told in last_graph("forward").candidates}
    assert forward["other"] != "failed"
