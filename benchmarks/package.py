"""What a package costs: its start-up beside warm Inductor's, its call beside ONNX Runtime's own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, empty_caches, worker_environment
from benchmarks.stats import Estimate, median_with_interval

REPEATS = 5

_MODELS = """
import time; now = time.process_time; start = now()
import torch; torch_s = now() - start
torch.manual_seed(0)
def bert():
    from transformers import BertConfig, BertModel
    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                        intermediate_size=1024)
    return BertModel(config).eval(), torch.randint(0, 30000, (1, 128))
def mlp():
    layers = [part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).eval(), torch.randn(64, 256)
"""
_PACKAGE = """
import fuseboard, os, sys
os.umask(0o022)
with fuseboard.settings(backends=["onnxruntime", "eager"], policy="priority"):
    for make in (bert, mlp):
        model, x = make()
        fuseboard.package(model, (x,), f"{sys.argv[1]}/{make.__name__}.fbp")
"""
_LOADED = """
import fuseboard, sys
model = fuseboard.load(f"{sys.argv[1]}/bert.fbp")
model(torch.zeros((1, 128), dtype=torch.int64))
print(now() - start - torch_s)
"""
_INDUCTOR = """
model, x = bert()
with torch.no_grad():
    torch.compile(model, backend="inductor")(x)
print(now() - start - torch_s)
"""
_CALLS = """
import fuseboard, onnxruntime, statistics, sys
model, x = mlp()
packaged = fuseboard.load(f"{sys.argv[1]}/mlp.fbp")
torch.onnx.export(model, (x,), f"{sys.argv[1]}/mlp.onnx", dynamo=True, verbose=False)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(f"{sys.argv[1]}/mlp.onnx", options)
name = session.get_inputs()[0].name
def direct():
    return torch.from_numpy(session.run(None, {name: x.numpy()})[0])
torch.testing.assert_close(packaged(x), direct())
def timed(call):
    begin = now()
    for _ in range(20):
        call()
    return (now() - begin) / 20
for _ in range(20):
    timed(direct), timed(lambda: packaged(x))
pairs = [(timed(direct), timed(lambda: packaged(x))) for _ in range(150)]
print(1e6 * statistics.median(a for a, _ in pairs), 1e6 * statistics.median(b for _, b in pairs),
      statistics.median(b / a for a, b in pairs))
"""


@dataclass(frozen=True)
class PackageCost:
    """CPU time of one thread.

    :ivar loaded_s: the first result of a BERT's package, after torch was imported.
    :ivar inductor_s: that of ``torch.compile`` with Inductor's caches filled, likewise.
    :ivar direct_us: a call of an MLP by ONNX Runtime.
    :ivar call_us: a call of its package, on ONNX Runtime, too.
    :ivar ratio: the median of the latter over the former, in turn.
    """

    loaded_s: Estimate
    inductor_s: Estimate
    direct_us: float
    call_us: float
    ratio: float


def measure_package(repeats: int, report: Callable[[str], None]) -> PackageCost:
    """Packages, then starts processes in turn; the first of each fills caches and is left out."""
    loaded: list[float] = []
    inductor: list[float] = []
    with tempfile.TemporaryDirectory() as folder, empty_caches() as caches:
        environment = worker_environment(1, caches)
        report("packaging")
        _run(_PACKAGE, folder, environment)
        for repeat in range(repeats + 1):
            report(f"start-up · {repeat} of {repeats}")
            one, other = (_run(code, folder, environment)[0] for code in (_LOADED, _INDUCTOR))
            if repeat:
                loaded.append(one)
                inductor.append(other)
        report("calls")
        direct_us, call_us, ratio = _run(_CALLS, folder, environment)
    started = median_with_interval(loaded), median_with_interval(inductor)
    return PackageCost(*started, direct_us, call_us, ratio)


def _run(code: str, folder: str, environment: dict[str, str]) -> Sequence[float]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MODELS + code, str(Path(folder).resolve())],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [float(word) for word in answer.stdout.split()] if "print(" in code else ()
