"""``fuseboard export``: files that ONNX Runtime runs alone; and artifacts in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import fuseboard
from fuseboard.cli.main import app

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

import onnx
import onnxruntime

import fuseboard_onnxruntime as plugin
from fuseboard_onnxruntime import _export
from fuseboard_onnxruntime._model import Model

MODELS = """
import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    return nn.Sequential(*layers).eval(), (torch.ones(3, 8),)


def channels_last():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)
    return model, (torch.ones(2, 3, 9, 9),)


def draws():
    return (lambda x: x + torch.rand_like(x)), (torch.ones(3),)


def branches():
    return (lambda x: x.relu() if x.sum() > 0 else x), (torch.ones(3, 3),)


def counts():
    norm = nn.BatchNorm1d(3)
    return norm.train(), (torch.ones(4, 3),)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "export_these.py"
    path.write_text(MODELS)
    return path


def run(script: Path, name: str, out: Path):
    return CliRunner().invoke(app, ["export", f"{script}:{name}", str(out)])


def models(script: Path):
    space: dict = {}
    exec(script.read_text(), space)
    return space


@pytest.mark.parametrize("name", ["mlp", "channels_last"])
def test_the_file_computes_what_the_model_does(script, tmp_path, name):
    """ONNX Runtime alone, from the file, on other numbers than those of the export."""
    out = tmp_path / "out.onnx"
    result = run(script, name, out)
    assert result.exit_code == 0, result.output
    assert "from eager" in result.output
    onnx.checker.check_model(str(out))
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    model, (example,) = models(script)[name]()
    x = torch.randn(example.shape)
    with torch.no_grad():
        expected = model(x)
    (got,) = session.run(None, {given.name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), expected)


@pytest.mark.parametrize("policy", ["measured", "priority"])
def test_a_model_is_one_graph_whatever_the_policy(script, tmp_path, monkeypatch, policy):
    """Under the default policy, too, the model is called once and nothing is measured."""
    monkeypatch.setenv("FUSEBOARD_POLICY", policy)
    result = run(script, "mlp", tmp_path / "out.onnx")
    assert result.exit_code == 0, result.output
    assert "from eager" in result.output


def test_weights_have_their_names(script, tmp_path):
    """As in the state dict; other inputs and the outputs are numbered."""
    run(script, "mlp", tmp_path / "out.onnx")
    graph = onnx.load(tmp_path / "out.onnx").graph
    assert [value.name for value in graph.input] == ["input_0"]
    assert [value.name for value in graph.output] == ["output_0"]
    assert sorted(value.name for value in graph.initializer) == sorted(
        ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    )


def test_large_weights_lie_beside_the_model(script, tmp_path, monkeypatch):
    """The way of models over 2 GB, with a limit of 100 bytes."""
    monkeypatch.setattr(_export, "MOST_INSIDE", 100)
    out = tmp_path / "out.onnx"
    assert run(script, "mlp", out).exit_code == 0
    proto = onnx.load(out, load_external_data=False)
    assert all(
        value.data_location == onnx.TensorProto.EXTERNAL for value in proto.graph.initializer
    )
    sizes = sum(p.numel() * 4 for p in models(script)["mlp"]()[0].parameters())
    assert (tmp_path / "out.onnx.data").stat().st_size == sizes
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    model, (x,) = models(script)["mlp"]()
    (got,) = session.run(None, {"input_0": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), model(x))


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("draws", "out.onnx", "it draws random numbers"),
        ("branches", "out.onnx", "torch.export can't export the model"),
        ("counts", "out.onnx", "a call of the model writes to its inputs or buffers"),
        ("mlp", "out.pt", "writes .pt"),
        ("mlp", "nowhere/out.onnx", "there is no directory"),
        ("absent", "out.onnx", "has no function 'absent'"),
    ],
)
def test_what_cannot_be_written_is_said(script, tmp_path, name, file, said):
    """One line in the end, exit status 2, no file."""
    result = run(script, name, tmp_path / file)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / file).exists()


def test_a_wrong_file_is_an_error(script, tmp_path, monkeypatch):
    """The results of the file are held against eager's."""
    real = _export._add_weights

    def wrong(proto, values, path):
        real(proto, [(name, value * 1.5) for name, value in values], path)

    monkeypatch.setattr(_export, "_add_weights", wrong)
    result = run(script, "mlp", tmp_path / "out.onnx")
    assert result.exit_code == 2
    assert "output 0 differs from eager's" in " ".join(result.output.split())


SERVED = """
import json
import torch
from torch import nn
import fuseboard
from fuseboard_onnxruntime import _convert

converted = []
convert = _convert.convert
_convert.convert = lambda *args: converted.append(1) or convert(*args)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
with torch.no_grad():
    model[0].weight += SHIFT
x = torch.randn(3, 8)
options = {"backends": ["onnxruntime", "eager"], "on_failure": "raise"}
call = torch.compile(model, backend="fuseboard", options=options)
with torch.no_grad():
    difference = float((call(x) - model(x)).abs().max())
(region,) = fuseboard.last_report().graphs[0].regions
print(json.dumps([len(converted), region.loaded, region.backend, difference]))
"""


@pytest.mark.thorough
def test_another_process_converts_nothing(tmp_path):
    """The model comes from the cache, the weights from the process: they may be others."""
    found = []
    for shift in ("0.0", "0.5"):
        printed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SERVED.replace("SHIFT", shift)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(printed.stdout.splitlines()[-1]))
    assert [result[:3] for result in found] == [
        [1, False, "onnxruntime"],
        [0, True, "onnxruntime"],
    ]
    assert all(difference < 1e-5 for *_, difference in found)


def test_an_artifact_holds_no_weights():
    """Its size doesn't grow with them, and it is read as it was written."""
    sizes = []
    for width in (8, 512):
        inputs = torch.randn(2, width), torch.randn(width, width)
        graph = make_fx(lambda x, w: (torch.mm(x, w),), tracing_mode="fake")(*inputs)
        region = fuseboard.Region("r", "onnxruntime", "inference", graph, "s")
        artifact = plugin.fuseboard_lower(region, []).artifact
        sizes.append(len(artifact))
        assert Model.from_bytes(artifact).to_bytes() == artifact
    assert abs(sizes[0] - sizes[1]) < 64
