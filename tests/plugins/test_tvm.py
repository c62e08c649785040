"""The plugin ``tvm`` in whole graphs: how much it takes, training, layouts, threads, artifacts."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from tests.support.models import TASKS

tvm_plugin = pytest.importorskip("fuseboard_tvm")
pytest.importorskip("tvm", reason="needs the extra tvm")
transformers = pytest.importorskip("transformers")

OPTIONS = {"backends": ["tvm", "eager"], "on_failure": "raise", "cache": False}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def compiled(model):
    return torch.compile(model, backend="fuseboard", options=OPTIONS)


def lowered(call, *inputs):
    graph = make_fx(lambda *args: (call(*args),), tracing_mode="fake")(*inputs)
    region = fuseboard.Region("test.region0", "tvm", "inference", graph, "test")
    return tvm_plugin.fuseboard_lower(region, inputs)


def bert():
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.BertModel(config), torch.arange(26).reshape(2, 13)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=1, n_head=2, n_positions=16, use_cache=False
    )
    return transformers.GPT2Model(config), torch.arange(26).reshape(2, 13)


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"
    )
    return transformers.ResNetModel(config), torch.linspace(-1, 1, 6144).reshape(2, 3, 32, 32)


def vit():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTModel(config), torch.linspace(-1, 1, 6144).reshape(2, 3, 32, 32)


@pytest.mark.parametrize("make", [bert, gpt2, resnet, vit])
@pytest.mark.thorough
def test_it_takes_nearly_all_of_a_model(make):
    """95% of the nodes of an inference graph, and the result is eager's."""
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    with torch.no_grad():
        got = compiled(model)(inputs).last_hidden_state
        exact = model.double()(
            inputs.double() if inputs.is_floating_point() else inputs
        ).last_hidden_state
    torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-5)
    nodes = [node for graph in fuseboard.last_report().graphs for node in graph.nodes]
    taken = [node for node in nodes if node.backend == "tvm"]
    assert len(nodes) > 30
    assert len(taken) >= 0.95 * len(nodes)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", ["bert", "resnet18-silu"])
@pytest.mark.thorough
def test_gradients(name):
    """Gradients of a training step are those that float64 gives. Without dropout."""
    task = TASKS[name]
    batch = task.batch(0)
    model, exact = without_dropout(task.model()), without_dropout(task.model()).double()
    compiled(model)(*batch).backward()
    exact(*(one.double() if one.is_floating_point() else one for one in batch)).backward()
    backward = [g for g in fuseboard.last_report().graphs if g.name.startswith("backward")]
    nodes = [node for graph in backward for node in graph.nodes]
    assert sum(node.backend == "tvm" for node in nodes) > 0.9 * len(nodes) > 0
    wanted = {name: one.grad for name, one in exact.named_parameters() if one.grad is not None}
    # Some gradients are zero but for rounding, such as that of a key's bias.
    largest = max(one.abs().max().item() for one in wanted.values())
    for label, one in model.named_parameters():
        if label in wanted:
            torch.testing.assert_close(
                one.grad, wanted[label].float(), rtol=1e-3, atol=1e-5 * largest, msg=label
            )


SUMS = {
    "all": (lambda x: x.sum(), (1 << 20,)),
    "many short rows": (lambda x: x.sum(), (99_991, 7)),
    "rows": (lambda x: x.sum(1), (2, (1 << 18) + 15)),
    "columns": (lambda x: x.sum(0), (1 << 18, 5)),
    "a middle axis": (lambda x: x.sum(1), (2, 1 << 17, 3)),
    "of a function of the C library": (lambda x: torch.lgamma(x + 1).sum(), (1 << 18,)),
}


@pytest.mark.parametrize("name", SUMS)
def test_long_sums(name):
    """Within 2e-6, with equal terms, whose rounding errors all have one sign.

    A sum in blocks of 64 has at most 64 eps for each level of blocks; with two levels it had 1e-5.
    """
    call, shape = SUMS[name]
    x = torch.full(shape, 0.1)
    (got,) = lowered(call, x).call([x])
    torch.testing.assert_close(got.double(), call(x.double()), rtol=2e-6, atol=0)


def test_inputs_that_lie_badly():
    """Unaligned and non-contiguous inputs are copied; TVM's code would end the process."""
    compute = lowered(lambda x, y: x.exp() + y, torch.randn(33, 7), torch.randn(33, 7)).call
    x = torch.randn(33 * 7 + 1)[1:].view(33, 7)
    y = torch.randn(7, 33).t()
    assert x.data_ptr() % 64
    (got,) = compute([x, y])
    torch.testing.assert_close(got, x.exp() + y)


def test_an_input_that_requires_a_gradient():
    """It is read as a plain tensor; the result isn't tied to it."""
    compute = lowered(torch.exp, torch.randn(5)).call
    x = torch.randn(5, requires_grad=True)
    (got,) = compute([x])
    torch.testing.assert_close(got, x.detach().exp())
    assert not got.requires_grad


def test_results_share_no_memory():
    """A copy is a copy, of an input and of another result."""
    graph = make_fx(lambda x: (x.clone(), x.clone(), x.t(), x + 0), tracing_mode="fake")(
        torch.randn(3, 4)
    )
    region = fuseboard.Region("test.region0", "tvm", "inference", graph, "test")
    x = torch.randn(3, 4)
    results = tvm_plugin.fuseboard_lower(region, [x]).call([x])
    pointers = [one.data_ptr() for one in results]
    assert pointers[2] == x.data_ptr()  # the graph says that it is a view
    assert len({*pointers}) == 4
    assert results[2].stride() == (1, 4)


def test_the_list_is_emptied():
    """Boxed: the caller's list doesn't keep inputs alive."""
    args = [torch.randn(3)]
    lowered(torch.exp, *args).call(args)
    assert args == []


def test_calls_from_several_threads():
    """Each thread gets its own result."""
    compute = lowered(lambda x: (x @ x).softmax(-1), torch.randn(64, 64)).call
    inputs = [torch.full((64, 64), float(n)).tril() / 64 for n in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        wanted = (inputs[number] @ inputs[number]).softmax(-1)
        for _ in range(20):
            (got,) = compute([inputs[number]])
            if not torch.allclose(got, wanted, atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_more_than_one_thread(monkeypatch):
    """Kernels that are split among TVM's workers, beside torch's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 400)
        compute = lowered(lambda x: ((x @ x.t()).exp() * 2).sum(0), x / 100).call
        for _ in range(5):
            (got,) = compute([x / 100])
        x = x.double() / 100
        torch.testing.assert_close(got, ((x @ x.t()).exp() * 2).sum(0).float())
    finally:
        torch.set_num_threads(before)


STATE = """
import faulthandler, os, pathlib, sys
import torch

def state():
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return {
        "hook": sys.excepthook,
        "environment": dict(os.environ),
        # Not SigQ, which counts what is queued for all processes of the user.
        "signals": [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "processors": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    }

def function(x):
    return torch.softmax(x, -1) + 1

x = torch.randn(64, 64)
torch.compile(function, backend="fuseboard", options={"backends": ["eager"]})(x)
torch.compiler.reset()
before = state()
options = {"backends": ["tvm", "eager"], "on_failure": "raise", "cache": False}
compiled = torch.compile(function, backend="fuseboard", options=options)
torch.testing.assert_close(compiled(x), function(x))
assert "tvm" in sys.modules
after = state()
print([name for name in before if before[name] != after[name]])
"""


@pytest.mark.thorough
def test_the_process_is_left_as_it_was():
    """TVM takes signals and exceptions over, and ties threads to processors; here it doesn't."""
    run = subprocess.run(
        [sys.executable, "-c", STATE], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.splitlines()[-1] == "[]"


def test_an_index_out_of_bounds_raises():
    """Eager's error, not a read of other memory."""
    compute = lowered(lambda x, i: x[i] * 2, torch.randn(5), torch.tensor([0, 1])).call
    with pytest.raises(IndexError, match="out of"):
        compute([torch.randn(5), torch.tensor([0, 5])])


LOADS = """
import sys
import torch
import fuseboard, fuseboard_tvm
from torch.fx import Graph, GraphModule

region = fuseboard.Region("r", "tvm", "inference", GraphModule({}, Graph()), "s")
with open(sys.argv[1], "rb") as file:
    call = fuseboard_tvm.fuseboard_load(file.read(), region, []).call
x = torch.arange(12.0).reshape(3, 4)
print(*(value for one in call([x]) for value in one.flatten().tolist()))
"""


@pytest.mark.thorough
def test_an_artifact_in_another_process(tmp_path):
    """What was compiled here gives the same results elsewhere, calls of torch included."""
    x = torch.arange(12.0).reshape(3, 4)

    def f(x):
        return torch.tanh(x @ x.t()).t(), (x * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(1)

    graph = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    region = fuseboard.Region("test.region0", "tvm", "inference", graph, "test")
    artifact = tvm_plugin.fuseboard_lower(region, [x]).artifact
    assert artifact is not None
    file = tmp_path / "artifact"
    file.write_bytes(artifact)
    command = [sys.executable, "-c", LOADS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    got = torch.tensor([float(word) for word in done.stdout.split()])
    wanted = torch.cat([torch.tanh(x @ x.t()).t().flatten(), torch.tensor([20.0, 60.0, 100.0])])
    torch.testing.assert_close(got, wanted)


def test_constants_of_a_graph(tmp_path):
    """They keep their values on the way through the artifact, here and in a later compile."""

    def f(x):
        return x[[0, 2, 0]] * torch.tensor([1.0, 2.0, 4.0])

    x = torch.arange(9.0).reshape(3, 3)
    for loaded in (False, True):
        torch.compiler.reset()
        options = {**OPTIONS, "cache": True, "cache_dir": str(tmp_path)}
        got = torch.compile(f, backend="fuseboard", options=options)(x)
        torch.testing.assert_close(got, f(x))
        (graph,) = fuseboard.last_report().graphs
        assert [region.loaded for region in graph.regions] == [loaded]
        assert [region.backend for region in graph.regions] == ["tvm"]


def test_kernels_call_no_allocator():
    """Vectors and short rows lie in registers or on the stack; else all takes 20 times as long."""
    from fuseboard_tvm import _decompose, _graph, _program

    def f(x, y):
        return ((x + y).softmax(-1) * x.tanh(), (x * y).sum(0))

    inputs = torch.randn(33, 77), torch.randn(33, 77)
    graph = fuseboard.decompose(make_fx(f, tracing_mode="fake")(*inputs), _decompose.table())
    module, _ = _program.build(_graph.read(graph), 1)
    (code,) = _program.compile_module(module, 1).mod.imports
    text = code.inspect_source("ll")
    assert "x float>" in text  # vectors
    assert "AllocWorkspace" not in text


def test_without_a_compiler_nothing_is_stored(monkeypatch):
    """The region runs all the same, and the report says why it isn't kept."""
    from fuseboard_tvm import _artifact

    monkeypatch.setattr(_artifact.shutil, "which", lambda name: None)
    result = lowered(torch.exp, torch.zeros(3))
    assert result.artifact is None
    assert "g++" in result.notes[0]
    assert result.call([torch.zeros(3)])[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("version", ["", "0.26.1", "0.28"])
def test_a_version_that_is_not_supported(monkeypatch, version):
    """Unavailable, with what to do about it."""
    from fuseboard_tvm import _engine

    monkeypatch.setattr(type(_engine.TVM), "version", version)
    info = tvm_plugin.fuseboard_backend()
    assert not info.available
    assert info.reason.endswith("pip install 'fuseboard[tvm]'")
    assert version in info.reason
