"""A package computes what its model does, in another process, or isn't loaded."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fuseboard
from conftest import ROOT
from fuseboard.ahead import file as files
from fuseboard.ahead.program import PackagedModel
from fuseboard.cli.main import app
from fuseboard.profile.judge.accuracy import Budget, Metric
from fuseboard.run.runner import Runner
from tests.package import models

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def own_directory(tmp_path):
    """What the umask of whoever runs the tests lets others write isn't trusted."""
    tmp_path.chmod(0o700)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """A package of a small module with a batch that changes, and the module."""
    directory = tmp_path_factory.mktemp("linear")
    model = models.seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval())
    path = directory / "linear.fbp"
    batch = torch.export.Dim("batch", min=1, max=32)
    with fuseboard.settings(backends=["mkldnn", "eager"]):
        fuseboard.package(model, (torch.randn(5, 6),), path, dynamic_shapes=({0: batch},))
    return model, path


def kind_of(call):
    with pytest.raises(fuseboard.PackageError) as caught:
        call()
    return caught.value.kind


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fresh_process_computes_what_eager_does(tmp_path):
    """Results, structure, sharing, written inputs and buffers; read-only, elsewhere.

    And it imports no compiler, no tracer, and no plugin but those that made the packages.
    """
    packages = tmp_path / "packages"
    packages.mkdir(mode=0o700)
    paths = {}
    for name, (make, calls) in models.CASES.items():
        model, (args, kwargs) = models.seeded(make), calls[0]
        paths[name] = str(packages / f"{name}.fbp")
        backend = "onnxruntime" if name == "network" else "mkldnn"
        with fuseboard.settings(backends=[backend, "eager"]):
            fuseboard.package(model, args, paths[name], example_kwargs=kwargs)
    for path in packages.iterdir():
        path.chmod(0o400)
    packages.chmod(0o500)
    command = [sys.executable, "-m", "tests.package.child", json.dumps(paths)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"differences": {}, "imported": []}


@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_the_batch_may_change(linear, size):
    """Sizes of the range that was wanted are right, that of 1 included."""
    model, path = linear
    x = torch.randn(size, 6)
    torch.testing.assert_close(fuseboard.load(path)(x), model(x).detach())


@pytest.mark.parametrize("given", ["position", "name"])
def test_arguments_may_be_containers(tmp_path, given):
    """As many leaves as arguments doesn't mean that each argument is one."""

    def added(pair, nothing):
        return {"sum": pair[0] + pair[1], "nothing": nothing}

    fuseboard.package(added, ((torch.randn(3), torch.randn(3)), []), tmp_path / "added.fbp")
    packaged = fuseboard.load(tmp_path / "added.fbp")
    args = ((torch.ones(3), torch.ones(3)), [])
    result = packaged(*args) if given == "position" else packaged(nothing=args[1], pair=args[0])
    assert result["sum"].tolist() == [2, 2, 2]
    assert result["nothing"] == []
    with pytest.raises(TypeError):
        packaged(torch.ones(3), torch.ones(3))


def test_several_backends_and_random_numbers(tmp_path):
    """Eager draws the numbers, and comes before the backend that computes with them."""

    def noisy(x):
        return x * torch.rand_like(x) + 1

    with fuseboard.settings(backends=["onnxruntime", "eager"]):
        fuseboard.package(noisy, (torch.randn(8),), tmp_path / "noisy.fbp")
    packaged, x = fuseboard.load(tmp_path / "noisy.fbp"), torch.randn(8)
    backends = {region["backend"] for region in packaged.manifest["report"]["regions"]}
    assert backends == {"onnxruntime", "eager"}
    torch.manual_seed(7)
    want = noisy(x)
    torch.manual_seed(7)
    torch.testing.assert_close(packaged(x), want)


def test_threads_may_call_at_once(tmp_path):
    """No write to a buffer is lost."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += x.sum()
            return x + self.total

    fuseboard.package(Sum(), (torch.ones(3),), tmp_path / "sum.fbp")
    packaged = fuseboard.load(tmp_path / "sum.fbp")
    threads = [
        threading.Thread(target=lambda: [packaged(torch.ones(3)) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert packaged.weights["total"].item() == 600


def test_a_packages_buffers_are_its_own(tmp_path):
    """Neither the file nor the model has what calls wrote."""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    model = Count()
    fuseboard.package(model, (torch.ones(2),), tmp_path / "count.fbp")
    assert model.calls.tolist() == [0, 0]
    for _ in range(2):
        packaged = fuseboard.load(tmp_path / "count.fbp")
        assert packaged(torch.ones(2)).tolist() == [1, 1]
        assert packaged(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("backend", ["mkldnn", "onnxruntime"])
def test_weights_that_are_written_to_are_prepared_again(tmp_path, backend):
    """Packed weights and sessions follow the weights that a user loads into a package."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with fuseboard.settings(backends=[backend, "eager"]):
        fuseboard.package(linear, (x,), tmp_path / "linear.fbp")
    packaged = fuseboard.load(tmp_path / "linear.fbp")
    assert {region["backend"] for region in packaged.manifest["report"]["regions"]} == {backend}
    torch.testing.assert_close(packaged(x), linear(x).detach())
    with torch.no_grad():
        packaged.weights["weight"].mul_(-2)
        linear.weight.mul_(-2)
    torch.testing.assert_close(packaged(x), linear(x).detach())


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_both_names_of_a_weight_are_one(tmp_path, name):
    """What is prepared from it follows what is written by either."""
    embedding, head = nn.Embedding(8, 8), nn.Linear(8, 8)
    head.weight = embedding.weight
    model, ids = nn.Sequential(embedding, head), torch.arange(8)
    with fuseboard.settings(backends=["onnxruntime", "eager"], policy="priority"):
        fuseboard.package(model, (ids,), tmp_path / "tied.fbp")
    packaged = fuseboard.load(tmp_path / "tied.fbp")
    assert packaged.manifest["report"]["regions"][0]["hoisted"] == 1
    with torch.no_grad():
        packaged.weights[name].mul_(-2)
        embedding.weight.mul_(-2)
        torch.testing.assert_close(packaged(ids), model(ids))


class Fragile:
    """A backend whose code fails on some inputs."""

    @fuseboard.hookimpl
    def fuseboard_backend(self):
        return fuseboard.BackendInfo("fragile", compiles_quickly=True)

    @fuseboard.hookimpl
    def fuseboard_claim(self, graph):
        return fuseboard.claim_nodes(graph, lambda node: None)

    @fuseboard.hookimpl
    def fuseboard_lower(self, region):
        return fuseboard.LoweredRegion(FragileCall(fuseboard.lower_eagerly(region).call))


@dataclass
class FragileCall:
    call: Any

    def __call__(self, args):
        if args[0].sum() > 100:
            raise RuntimeError("too much")
        return self.call(args)


def test_code_that_fails_in_a_call_is_replaced(tmp_path, caplog):
    """The call is answered in eager, and so are later ones; a warning and the model say why."""
    fuseboard.register(Fragile(), "fragile")
    try:
        with fuseboard.settings(backends=["fragile", "eager"], policy="priority"):
            fuseboard.package(torch.sin, (torch.randn(3),), tmp_path / "sin.fbp")
        packaged = fuseboard.load(tmp_path / "sin.fbp")
    finally:
        fuseboard.unregister("fragile")
    assert packaged.trip == ""
    x = torch.full((3,), 50.0)
    torch.testing.assert_close(packaged(x), x.sin())
    assert "too much" in packaged.trip
    assert "too much" in caplog.text
    torch.testing.assert_close(packaged(x), x.sin())


class UnreadableCall(FragileCall):
    """It fails in each call once it was read back."""

    def __setstate__(self, state):
        self.call = None


def test_code_that_fails_once_it_was_read_back_is_no_package(tmp_path, monkeypatch):
    """Though eager answers in its place; nothing is written."""
    monkeypatch.setattr(sys.modules[__name__], "FragileCall", UnreadableCall)
    fuseboard.register(Fragile(), "fragile")
    try:
        with (
            fuseboard.settings(backends=["fragile", "eager"], policy="priority"),
            pytest.raises(fuseboard.PackageError, match="its code fails in a call"),
        ):
            fuseboard.package(torch.sin, (torch.randn(3),), tmp_path / "sin.fbp")
    finally:
        fuseboard.unregister("fragile")
    assert not list(tmp_path.iterdir())


def test_branches_run_in_the_regions_that_were_chosen(tmp_path):
    """The graphs that a higher-order op calls are carried, with what their backends made."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: self.down(x), (x,))

    model, x = Branches().eval(), torch.rand(4, 8)
    with fuseboard.settings(backends=["mkldnn", "eager"]):
        fuseboard.package(model, (x,), tmp_path / "branches.fbp")
    packaged = fuseboard.load(tmp_path / "branches.fbp")
    for one in (x, -x):
        torch.testing.assert_close(packaged(one), model(one).detach())


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, torch.export.Dim("batch", min=1, max=64)], ids=str)
def test_inductors_code_is_carried_as_an_archive(tmp_path, batch):
    """A library that calls no compiler, for one size and for several."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU()).eval()
    shapes = None if batch is None else ({0: batch},)
    with fuseboard.settings(backends=["inductor", "eager"]):
        fuseboard.package(model, (torch.randn(5, 6),), tmp_path / "m.fbp", dynamic_shapes=shapes)
    packaged = fuseboard.load(tmp_path / "m.fbp")
    assert {region["backend"] for region in packaged.manifest["report"]["regions"]} == {"inductor"}
    for size in (5,) if batch is None else (5, 1, 64):
        x = torch.randn(size, 6)
        torch.testing.assert_close(packaged(x), model(x).detach())


# --- calls that don't fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.randn(5, 7),), ValueError),
        ((torch.randn(33, 6),), ValueError),
        ((torch.randn(0, 6),), ValueError),
        ((torch.randn(6),), ValueError),
        ((torch.randn(5, 6, dtype=torch.float64),), TypeError),
        ((torch.randn(5, 6).to_sparse(),), TypeError),
        ((torch.randn(5, 6, device="meta"),), TypeError),
        (([[1.0] * 6] * 5,), TypeError),
        ((None,), TypeError),
        ((), TypeError),
        ((torch.randn(5, 6), torch.randn(5, 6)), TypeError),
        ((torch.randn(5, 6, requires_grad=True),), ValueError),
    ],
    ids=range(12),
)
def test_what_does_not_fit_is_refused(linear, arguments, error):
    """Shape, dtype, layout, device, class, number of arguments, gradients."""
    with pytest.raises(error):
        fuseboard.load(linear[1])(*arguments)


def test_surroundings_that_change_results_are_refused(linear):
    """Autocast, and transforms of torch.func."""
    packaged = fuseboard.load(linear[1])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        packaged(torch.randn(5, 6))
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(packaged)(torch.randn(3, 5, 6))


def test_inputs_that_lie_otherwise_are_right(linear):
    """Strides, offsets, conjugation: values are those of eager."""
    model, path = linear
    packaged = fuseboard.load(path)
    whole = torch.randn(13, 12)
    for x in (whole[:5, :6], whole.t()[:6, :6], whole[1:6, ::2], torch.randn(1, 6).expand(5, 6)):
        torch.testing.assert_close(packaged(x), model(x).detach())


def test_inputs_that_share_memory_with_a_written_one_are_refused(tmp_path):
    """The package was made for inputs that don't."""
    args = torch.randn(4, 3), torch.randn(4, 3)
    fuseboard.package(models.write_to_input, args, tmp_path / "write.fbp")
    packaged = fuseboard.load(tmp_path / "write.fbp")
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="share memory"):
        packaged(x, x)


def test_a_result_may_be_the_buffer_that_was_written_to(tmp_path):
    """It is the package's own buffer then, as it is the model's in eager."""

    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(x.sum(0))
            return self.total

    model, x = Total().eval(), torch.ones(4, 3)
    fuseboard.package(model, (x,), tmp_path / "total.fbp")
    packaged = fuseboard.load(tmp_path / "total.fbp")
    for count in (1, 2):
        assert packaged(x) is packaged.weights["total"]
        torch.testing.assert_close(packaged.weights["total"], torch.full((3,), 4.0 * count))
    torch.testing.assert_close(model.total, torch.zeros(3))


def test_a_budget_of_accuracy_holds_for_all_sizes(tmp_path, monkeypatch):
    """The other sizes that are tried may be as far from eager as the examples' may."""
    monkeypatch.setattr(PackagedModel, "_computed", slightly_off(PackagedModel._computed))
    monkeypatch.setattr(Runner, "budget", Budget(1e-2, Metric("norm")))
    model, path = nn.Linear(6, 4).eval(), tmp_path / "linear.fbp"
    shapes = ({0: torch.export.Dim("batch")},)
    fuseboard.package(model, (torch.randn(5, 6),), path, dynamic_shapes=shapes)
    fuseboard.load(path)(torch.randn(1, 6))
    monkeypatch.setattr(Runner, "budget", Budget(1e-4, Metric("norm")))
    with pytest.raises(fuseboard.PackageError, match="isn't the model"):
        fuseboard.package(model, (torch.randn(5, 6),), path, dynamic_shapes=shapes)


def slightly_off(computed):
    """Results of packages that are off by a thousandth."""
    return lambda self, inputs: [result * 1.001 for result in computed(self, inputs)]


# --- models that can't be packaged ----------------------------------------------------------------


def test_a_result_that_is_a_view_of_a_buffer_is_refused(tmp_path):
    """Eager's caller could write to the buffer by it."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(4))

        def forward(self, x):
            self.kept.copy_(x)
            return self.kept[1:]

    path = tmp_path / "held.fbp"
    with pytest.raises(fuseboard.PackageError, match="share memory") as caught:
        fuseboard.package(Held(), (torch.randn(4),), path)
    assert caught.value.kind == "model"
    assert not list(tmp_path.iterdir())


def test_a_model_that_reads_values_is_refused_with_the_reason(tmp_path):
    """What torch.export can't follow."""

    def branches(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(fuseboard.PackageError, match=r"torch\.export"):
        fuseboard.package(branches, (torch.randn(4),), tmp_path / "branches.fbp")


# --- files ----------------------------------------------------------------------------------------


def test_no_damaged_file_is_loaded(linear, tmp_path):
    """Bytes changed, cut out, cut off, added, moved: each is seen before anything is unpickled."""
    content = linear[1].read_bytes()
    numbers = random.Random(0)
    damages = [content[:-1], content + b"\0", content[1:], b"", content[: len(content) // 2]]
    for _ in range(100):
        place, count = numbers.randrange(len(content)), numbers.choice([1, 1, 2, 100])
        bad = bytearray(content)
        how = numbers.randrange(4)
        if how == 0:
            bad[place] ^= 1 << numbers.randrange(8)
        elif how == 1:
            bad[place : place + count] = numbers.randbytes(count)
        elif how == 2:
            del bad[place : place + count]
        else:
            bad[place:place] = numbers.randbytes(count)
        damages.append(bytes(bad))
    path = tmp_path / "damaged.fbp"
    for number, bad in enumerate(damages):
        if bad == content:
            continue
        path.write_bytes(bad)
        path.chmod(0o600)
        assert kind_of(lambda: fuseboard.load(path, fallback="compile")) == "damaged", number


def rewritten(path, target, change):
    """The package with another manifest, whose checksum is right."""
    opened = files.PackageFile(path, trust=True)
    manifest = {key: value for key, value in opened.manifest.items() if key != "members"}
    change(manifest)

    def member(name):
        def write(stream):
            stream.write(opened.member(name))
            return opened.returned(name)

        return write

    files.write(target, manifest, {name: member(name) for name in opened.manifest["members"]})


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda m: m["machine"].update(torch="2.9.9"), "machine", "torch '"),
        (lambda m: m["machine"].update(processor="a Z80"), "machine", "a Z80"),
        (lambda m: m["machine"].update(threads="99"), "machine", "set_num_threads"),
        (lambda m: m["plugins"].update(gone={"code": {"gone": ""}}), "plugins", "'gone' isn't ins"),
        (lambda m: m["plugins"]["mkldnn"]["code"].update(fuseboard_mkldnn="0"), "plugins", "code"),
        (
            lambda m: m["plugins"]["mkldnn"]["distributions"].update(torch="0"),
            "plugins",
            "distributions",
        ),
        (lambda m: m["op_modules"].append("no.such.module"), "plugins", r"no\.such\.module"),
    ],
)
def test_what_was_made_elsewhere_is_refused(linear, tmp_path, change, kind, said):
    """The error says what differs, and what can be done."""
    path = tmp_path / "foreign.fbp"
    rewritten(linear[1], path, change)
    with pytest.raises(fuseboard.PackageError, match=said) as caught:
        fuseboard.load(path)
    assert caught.value.kind == kind
    assert "fallback='compile'" in str(caught.value)


def test_what_was_made_elsewhere_can_be_compiled(linear, tmp_path, caplog):
    """By torch.compile, with the same checks of what it is called with; the log says why."""
    model, _ = linear
    path = tmp_path / "foreign.fbp"
    rewritten(linear[1], path, lambda m: m["machine"].update(torch="2.9.9"))
    compiled = fuseboard.load(path, fallback="compile")
    assert "2.9.9" in caplog.text
    for size in (5, 3):
        x = torch.randn(size, 6)
        torch.testing.assert_close(compiled(x), model(x).detach())
    with pytest.raises(ValueError, match="shape"):
        compiled(torch.randn(5, 7))


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_what_others_can_write_is_not_trusted(linear, tmp_path):
    """Neither a file nor one in a directory that others can write to; unless told so."""
    model, path = linear
    x = torch.randn(5, 6)
    copied = tmp_path / "linear.fbp"
    copied.write_bytes(path.read_bytes())
    copied.chmod(0o620)
    assert kind_of(lambda: fuseboard.load(copied)) == "trust"
    torch.testing.assert_close(fuseboard.load(copied, trust=True)(x), model(x).detach())
    copied.chmod(0o600)
    fuseboard.load(copied)
    tmp_path.chmod(0o777)
    assert kind_of(lambda: fuseboard.load(copied)) == "trust"
    tmp_path.chmod(0o1777)  # where nobody removes files of others
    fuseboard.load(copied)


def test_a_directory_is_not_written_to(tmp_path):
    """It is told before the model is exported."""
    with pytest.raises(fuseboard.PackageError, match="it is a directory"):
        fuseboard.package(nn.ReLU(), (torch.ones(2),), tmp_path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    """Not one of the operating system's."""
    with pytest.raises(fuseboard.PackageError, match=r"none\.fbp") as caught:
        fuseboard.load(tmp_path / "none.fbp")
    assert caught.value.kind == "file"


# --- the document and the command -----------------------------------------------------------------


def test_the_documents_example_runs(tmp_path, monkeypatch):
    """What a reader copies works as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")
    text = (ROOT / "docs" / "package.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    exec(compile(block, "docs/package.md", "exec"), {})


def test_the_command_writes_a_package(tmp_path, monkeypatch):
    """It loads, and the command says what runs in it."""
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")
    script, path = tmp_path / "script.py", tmp_path / "out.fbp"
    script.write_text("import torch\ndef main():\n    return torch.relu, (torch.randn(3),)\n")
    result = CliRunner().invoke(app, ["package", f"{script}:main", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "on eager" in result.stdout
    assert fuseboard.load(path)(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [0, 0, 1]
