"""ONNX Runtime under torch.compile: models, changing weights, threads, sizes, options."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from importlib import metadata

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseboard.report.data import ledger
from fuseboard.torch_api.pattern_traces import fake_like, trace_forward
from tests.support import models
from tests.support.backends import all_trips, compiled, hoisted, last_graph
from tests.support.values import assert_closer, rnd, strides

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

import fuseboard_onnxruntime as plugin
from fuseboard_onnxruntime import _torch_internals
from fuseboard_onnxruntime._convert import convert, with_initializers
from fuseboard_onnxruntime._session import SessionSettings, make_session

BACKENDS = ("onnxruntime", "eager")


def through(target, **options):
    return compiled(target, *BACKENDS, on_failure="raise", **options)


def share(kind: str = "inference") -> float:
    """The share of a graph's nodes that ran here; what the board runs itself doesn't count."""
    nodes = [node for node in last_graph(kind).nodes if node.backend != "board"]
    return sum(node.backend == "onnxruntime" for node in nodes) / len(nodes)


class Block(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


# --- models ---------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert():
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return BertModel(BertConfig(**SMALL, max_position_embeddings=16)), {
        "input_ids": ids,
        "attention_mask": mask,
    }


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    config = GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), {"input_ids": ids, "use_cache": False}


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1])
    return ResNetForImageClassification(config), {"pixel_values": rnd(2, 3, 32, 32)}


def vit():
    from transformers import ViTConfig, ViTModel

    sizes = {key: SMALL[key] for key in SMALL if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=32, patch_size=8)
    return ViTModel(config), {"pixel_values": rnd(2, 3, 32, 32)}


def double(tree):
    return pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree
    )


@pytest.mark.parametrize("make", [bert, gpt2, resnet, vit], ids=lambda make: make.__name__)
@pytest.mark.thorough
def test_a_model_runs_here_whole(make):
    """At least 95% of the nodes, in one region, as near to float64 as eager."""
    model, inputs = make()
    model.eval()
    with torch.no_grad():
        result = through(model)(**inputs).to_tuple()
        rival = model(**inputs).to_tuple()
        reference = copy.deepcopy(model).double()(**double(inputs)).to_tuple()
    assert_closer(result, reference=reference, rival=rival)
    assert share() >= 0.95
    assert len(last_graph().regions) == 1
    assert not all_trips()


@pytest.mark.parametrize("name", ["bert", "resnet18"])
@pytest.mark.thorough
def test_a_training_step_runs_here_in_part(name):
    """Loss and gradients with the declined ops in eager; some of the backward runs here."""
    task = models.TASKS[name]
    model = task.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    exact = copy.deepcopy(model).double()
    rival = copy.deepcopy(model)
    batch = task.batch(0)

    def step(target, inputs):
        loss = target(*inputs)
        loss.backward()
        return loss.detach()

    losses = [
        step(through(model), batch),
        step(rival, batch),
        step(exact, tuple(double(list(batch)))),
    ]
    torch.testing.assert_close(losses[0], losses[2].float())
    for (key, got), other, want in zip(
        model.named_parameters(), rival.parameters(), exact.parameters(), strict=True
    ):
        if want.grad is not None:
            # Small gradients are sums that cancel: eager's own error is the measure.
            error = (got.grad.double() - want.grad).abs().max()
            allowed = 4 * (other.grad.double() - want.grad).abs().max() + 1e-6
            assert error <= allowed, key
    assert share("forward") >= 0.9
    assert share("backward") >= 0.5
    assert not all_trips()


@pytest.mark.parametrize("training", [False, True])
def test_half_of_what_a_gelu_reads_is_read_elsewhere(training):
    """What ONNX Runtime shares between a gelu and another op survives the fusion."""

    def halves(x):
        return nn.functional.gelu(x, approximate="tanh") + (x * 0.5).exp()

    x = rnd(5, 24).requires_grad_(training)
    rival, reference = (t.detach().requires_grad_(training) for t in (x, x.double()))
    results = [through(halves)(x), halves(reference), halves(rival)]
    if training:
        results = [
            torch.autograd.grad(result.sum(), t)
            for result, t in zip(results, (x, reference, rival), strict=True)
        ]
    assert_closer(results[0], reference=results[1], rival=results[2])
    assert not all_trips()


VIEWS = {
    "detach": torch.Tensor.detach,
    "diagonal": torch.diagonal,
    "unfold": lambda y: y.unfold(0, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_the_caller_gets_may_be_read(view):
    """Whoever reads it has a copy of the view's op, and is only here if that has a form."""

    def program(x):
        y = x @ x
        v = VIEWS[view](y)
        return y, v, v.exp()

    x = rnd(5, 5)
    with torch.no_grad():
        for result, expected in zip(through(program)(x), program(x), strict=True):
            assert_close(result, expected)
    backends = {node.op: node.backend for node in last_graph("inference").nodes}
    assert backends["aten.exp.default"] == ("onnxruntime" if view == "detach" else "eager")
    assert not all_trips()


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_in_a_session():
    """One value is hoisted: what stands for the session."""
    block = Block()
    x = rnd(5, 24)
    with torch.no_grad():
        assert_close(through(block)(x), block(x))
    assert hoisted() == 1


def assert_close(result, expected):
    torch.testing.assert_close(result, expected)
    assert strides(result) == strides(expected)


def test_a_weight_of_which_nothing_but_the_shape_is_read():
    """It is no input of the model: ONNX Runtime has no such initializer."""

    def model(x, w, b):
        return ((x @ w).relu() * (b + 1).new_ones(2),)

    graph = trace_forward(model, fake_like((rnd(3, 4), rnd(4, 2), rnd(2))), {})
    output = graph.graph.output_node()
    output.args = (tuple(output.args[0]),)
    converted = with_initializers(convert(graph), (1, 2))
    assert [spec.position for spec in converted.inputs] == [0, 1]
    names = [spec.name for spec in converted.inputs]
    session = make_session(converted, SessionSettings(), [rnd(4, 2)], names[1:])
    (found,) = session.run(None, {names[0]: rnd(3, 4).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), (rnd(3, 4) @ rnd(4, 2)).relu())


@pytest.mark.parametrize("change", ["copy_", "load", "load_assign", "replace", "data", "optimizer"])
def test_a_changed_weight_is_noticed(change):
    """No result is computed from an old weight."""
    block, x = Block(), rnd(5, 24)
    call = through(block)
    with torch.no_grad():
        before = call(x)
        state = {key: value + 0.25 for key, value in block.state_dict().items()}
        if change == "copy_":
            block.up.weight.copy_(state["up.weight"])
        elif change in ("load", "load_assign"):
            block.load_state_dict(state, assign=change == "load_assign")
        elif change == "replace":
            block.up.weight = nn.Parameter(state["up.weight"])
        elif change == "data":
            block.up.weight.data = state["up.weight"]
        else:
            for parameter in block.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD(block.parameters(), lr=0.1).step()
        after = call(x)
        assert not torch.equal(before, after)
        assert_close(after, block(x))


def test_each_instance_has_its_weights():
    """Two instances share a compiled graph, in turn."""
    first, second = Block(), Block()
    x = rnd(5, 24)
    calls = [through(first), through(second)]
    with torch.no_grad():
        for _ in range(2):
            for call, block in zip(calls, (first, second), strict=True):
                assert_close(call(x), block(x))


def test_without_hoisting_weights_are_inputs():
    """The setting hoist=False leaves nothing to keep."""
    block, x = Block(), rnd(5, 24)
    call = through(block, hoist=False)
    with torch.no_grad():
        assert_close(call(x), block(x))
        block.up.weight.mul_(2)
        assert_close(call(x), block(x))
    assert hoisted() == 0
    assert share() == 1


def test_a_buffer_that_the_graph_writes_stays_an_input():
    """Its new value is seen by the next call."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.linear(x) + self.count

    module, x = Counting(), rnd(2, 3)
    other = copy.deepcopy(module)
    call = through(module)
    with torch.no_grad():
        for _ in range(3):
            assert_close(call(x), other(x))


# --- calls ----------------------------------------------------------------------------------------


def test_threads_may_call_at_once():
    """Each gets the result of its own inputs."""
    block = Block()
    call = through(block)
    inputs = [rnd(5, 24, seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [block(x) for x in inputs]
        call(inputs[0])
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(50):
                    assert_close(call(inputs[number]), expected[number])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_sizes_may_be_symbolic():
    """One compiled graph is right at several sizes; 0 and 1 are compiled for themselves."""
    block = Block()
    call = through(block, dynamic=True)
    with torch.no_grad():
        for rows in (5, 7, 64, 1, 0, 3):
            x = rnd(2, rows, 24, seed=rows)
            assert_close(call(x), block(x))
    symbolic = [graph for graph in ledger.graphs() if any("s" in str(n.value) for n in graph.nodes)]
    assert symbolic
    assert not all_trips()


def test_a_size_may_be_a_number_in_the_graph():
    """A SymInt becomes an input without dimensions."""

    def f(x):
        return (x @ x.t()) * x.shape[0] + torch.arange(x.shape[0])

    call = through(f, dynamic=True)
    for rows in (5, 8):
        assert_close(call(rnd(rows, 6)), f(rnd(rows, 6)))


def test_results_keep_eagers_strides():
    """Transposed and channels-last results, and the same value twice."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def f(x):
        y = conv(x)
        z = torch.relu(y)
        return z, z.transpose(1, 2) * 2, z

    x = rnd(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for got, want in zip(through(f)(x), f(x), strict=True):
            assert_close(got, want)


def test_inputs_may_lie_anyhow():
    """With gaps, expanded, transposed, not aligned to a vector."""

    def f(x, w):
        return torch.softmax(x @ w, -1)

    layouts = [
        rnd(6, 8)[::2, ::2],
        rnd(1, 4).expand(3, 4),
        rnd(4, 3).t(),
        rnd(13)[1:].view(3, 4),
    ]
    for x in layouts:
        torch._dynamo.reset()
        assert_close(through(f)(x, rnd(4, 5)), f(x, rnd(4, 5)))


@pytest.mark.parametrize(
    ("given", "dilation"), [("relu", 1), ("relu", 2), ("sigmoid", 1), ("cat", 1), ("neg", 1)]
)
def test_a_pool_keeps_what_is_not_a_number(given, dilation):
    def before(x):
        if given == "cat":
            return torch.cat([x.relu(), x.abs()], 1)
        return getattr(torch, given)(x)

    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 16, 3, padding=1)
    with torch.no_grad():
        convolution.weight[:, :, 0, 0] = 0.0

    def f(x):
        pooled = nn.functional.max_pool2d(before(convolution(x)), 3, 2, 1, dilation)
        return pooled, nn.functional.max_pool2d(before(x), 3, 2, 1, dilation)

    x = rnd(2, 3, 17, 17)
    for place, value in ((0, float("nan")), (5, float("inf")), (6, -float("inf")), (11, 3e38)):
        x[0, 0, place, place] = value
        x[1, 2, place, 3] = value
    with torch.no_grad():
        torch.testing.assert_close(through(f)(x), f(x), equal_nan=True)
    assert share() == 1


@pytest.mark.parametrize("kernel", [2, 3])
def test_a_pool_of_nothing_but_minus_infinity_is_that(kernel):
    """Its kernel begins with the lowest finite number; that one stays what it is."""

    def f(x):
        return nn.functional.max_pool2d(x, kernel, 2, kernel // 2)

    fn = through(f)
    fn(rnd(1, 2, 6, 7))
    x = torch.full((1, 2, 6, 7), -float("inf"))
    x[0, 1, 2:] = torch.finfo(torch.float32).min
    x[0, 1, 4, 4], x[0, 1, 0, 0] = 2.5, float("nan")
    torch.testing.assert_close(fn(x), f(x), equal_nan=True, rtol=0, atol=0)
    assert share() == 1


def test_the_default_device_of_the_caller_is_no_matter():
    """Results, sessions and copies are in the CPU's memory, which is where they are computed."""
    block, x = Block().eval(), rnd(3, 5, 24)

    def function(x):
        return block(x).transpose(0, 1), x.size(0) * block(x.transpose(0, 1))

    fn = through(function)
    with torch.no_grad():
        want = function(x)
        for _ in range(2):
            with torch.device("meta"):
                got = fn(x)
            torch.testing.assert_close(got, want)
            assert [*map(strides, got)] == [*map(strides, want)]
        block.up.weight.mul_(2)
        want = function(x)
        with torch.device("meta"):
            torch.testing.assert_close(fn(x), want)
    assert share() == 1


def test_an_index_out_of_range_raises_as_in_eager(capfd):
    """Too large, and negative ones that ONNX would count from the end; its logger says nothing."""
    embedding = nn.Embedding(5, 3)
    call = compiled(embedding, *BACKENDS)
    with torch.no_grad():
        assert_close(call(torch.tensor([0, 4])), embedding(torch.tensor([0, 4])))
        for bad in (5, -1):
            with pytest.raises(IndexError, match="index out of range in self"):
                call(torch.tensor([0, bad]))
    assert share() == 1
    assert "onnxruntime" not in capfd.readouterr().err


def test_random_numbers_are_eagers():
    """What draws is declined, with the reason."""

    def f(x):
        return torch.relu(x @ x) + torch.rand_like(x)

    x = rnd(4, 4)
    torch.manual_seed(3)
    expected = f(x)
    torch.manual_seed(3)
    assert_close(through(f)(x), expected)
    reasons = [n.declined.get("onnxruntime", "") for n in last_graph().nodes]
    assert any("random" in reason for reason in reasons)


def test_a_normalised_result_stays_in_its_model():
    """Its least divisor, ``clamp_min``, cuts no graph in two."""
    layer = nn.Linear(8, 8)
    x = rnd(3, 8)
    with torch.no_grad():
        result = through(lambda x: nn.functional.normalize(layer(x), dim=-1))(x)
        torch.testing.assert_close(result, nn.functional.normalize(layer(x), dim=-1))
    (region,) = last_graph().regions
    assert region.backend == "onnxruntime"


def test_pointwise_work_is_not_native():
    """A chain alone goes to a later backend that gains by it."""

    def f(x):
        return torch.sin(x) * torch.cos(x) + 1

    through(f)(rnd(8, 8))
    (region,) = last_graph().regions
    assert region.backend == "onnxruntime"
    captured = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(rnd(8, 8))
    (claim,) = plugin.fuseboard_claim(captured, "inference")
    assert len(claim.nodes) == 4
    assert not claim.native


def test_a_quotient_of_sizes_is_of_the_dtype_of_the_tensor_beside_it(policy_measured):
    """A batch norm in training divides by sizes, and multiplies by a quotient: doubles in ONNX."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    plain = copy.deepcopy(net)
    fn = through(net, settle="first_call", measure_s=0.01)
    for batch in (2, 3, 4):
        x = rnd(batch, 2, 6, 6)
        got, want = fn(x), plain(x)
        torch.testing.assert_close(got, want)
        got.pow(2).sum().backward()
        want.pow(2).sum().backward()
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
    rows = [row for graph in ledger.graphs() for row in graph.candidates]
    assert any("onnxruntime" in row.name for row in rows)
    assert not all_trips()


def test_tanh_is_left_to_eager_where_gradients_magnify_its_error():
    """1 - y * y of a y that is 4 units in the last place off; inference takes it."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(approximate="tanh"))
    training = through(net)
    training(rnd(2, 8)).sum().backward()
    graphs = last_graph("forward"), last_graph("backward")
    placed = {(n.op, n.backend) for graph in graphs for n in graph.nodes if "tanh" in n.op}
    assert placed
    assert ("aten.tanh.default", "onnxruntime") not in placed
    assert share("forward") > 0.5
    with torch.no_grad():
        through(net)(rnd(2, 8))
    assert share() == 1


# --- options, packages ----------------------------------------------------------------------------


def test_options_reach_the_session(monkeypatch):
    """Level, threads, providers, spinning."""
    import onnxruntime

    seen = []
    make = onnxruntime.InferenceSession

    def recorded(proto, settings, providers):
        seen.append((settings, providers))
        return make(proto, settings, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", recorded)
    options = {"optimization": "basic", "threads": 1, "allow_spinning": False}
    block = Block()
    with torch.no_grad():
        through(block, plugins={"onnxruntime": options})(rnd(3, 24))
    ((settings, providers),) = seen
    assert settings.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert settings.intra_op_num_threads == 1
    assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert providers == ["CPUExecutionProvider"]


def test_a_provider_that_is_not_there_is_an_error():
    """It lists those that are."""
    options = {"plugins": {"onnxruntime": {"providers": ["CUDAExecutionProvider"]}}}
    with pytest.raises(Exception, match=r"CUDAExecutionProvider.*CPUExecutionProvider"):
        compiled(Block(), *BACKENDS, **options)(rnd(3, 24))


def test_missing_packages_are_named(monkeypatch):
    """Unavailable, with the line that helps; an old version likewise."""

    def version(name):
        if name == "onnxscript":
            raise metadata.PackageNotFoundError(name)
        return "1.20.1" if name == "onnxruntime" else "1.23.0"

    monkeypatch.setattr(metadata, "version", version)
    info = plugin.fuseboard_backend()
    assert not info.available
    assert "onnxscript isn't installed" in info.reason
    assert "onnxruntime 1.20.1 isn't supported, only 1.22 or later" in info.reason
    assert info.reason.endswith("pip install 'fuseboard[onnxruntime]'")


def test_another_torch_is_served_by_the_public_exporter(monkeypatch):
    """Static sizes; symbolic ones go to the next backend, with the reason."""
    monkeypatch.setattr(_torch_internals, "has_core", lambda: False)
    block = Block()
    with torch.no_grad():
        assert_close(through(block)(rnd(5, 24)), block(rnd(5, 24)))
        assert share() == 1
        torch._dynamo.reset()
        ledger.clear()
        assert_close(compiled(block, *BACKENDS, dynamic=True)(rnd(6, 24)), block(rnd(6, 24)))
    assert "static sizes only" in all_trips()[0].error


@pytest.mark.thorough
def test_importing_the_plugin_loads_no_engine():
    """Discovery is cheap."""
    code = (
        "import sys, fuseboard_onnxruntime as p; p.fuseboard_backend(); "
        "print([m for m in ('onnx', 'onnxruntime', 'onnxscript') if m in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "[]"
