"""``fuseboard profile``: a script runs as by itself, and its trace is written whatever it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from fuseboard.cli.main import app
from fuseboard.cli.profile import _pass_on, show
from fuseboard.profile.observe.trace import read_trace
from fuseboard.profile.observe.trace_summary import DeviceTime, RegionTime, Summary, summarise
from fuseboard.torch_api import profiler as torch_profiler

TRAINING = """
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)

net = torch.compile(Net(), backend="fuseboard", options={"backends": ["eager"]})
for _ in range(3):
    net(torch.ones(2, 8)).sum().backward()
print("the script's own output", sys.argv[1:], __name__)
sys.exit(int(sys.argv[1]))
"""

INTERRUPTED = """
import torch

f = torch.compile(torch.sin, backend="fuseboard", options={"backends": ["eager"]})
for step in range(9):
    f(torch.ones(3))
    if step == 3:
        raise KeyboardInterrupt
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from fuseboard.cli.main import app; app()", "profile"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, env=environment
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "step.py"
    path.write_text(text)
    return path


@pytest.mark.thorough
def test_a_training_script(tmp_path):
    """Its arguments, output and exit code pass; the trace has what was promised."""
    done = run(written(tmp_path, TRAINING), "--out", str(tmp_path / "new"), "--", "3", "-x")
    assert (done.returncode, done.stdout) == (
        3,
        "the script's own output ['3', '-x'] __main__\n",
    )
    path = tmp_path / "new" / "step.trace.json"
    trace, events = read_trace(path), json.loads(path.read_text())["traceEvents"]

    regions = [
        span for span in trace.of_kind("region") if span.parts["region"] == "forward1.region0"
    ]
    assert {(span.parts["backend"], span.parts["modules"]) for span in regions} == {
        ("eager", "second")
    }
    (source,) = regions[0].event["args"]["source"]
    assert source == f"{tmp_path / 'step.py'}:14"
    stages = {(span.parts["stage"], span.parts["what"]) for span in trace.of_kind("stage")}
    assert {("fuse", "joint0"), ("partition", "forward0"), ("lower", "backward1")} <= stages
    assert {e["ph"] for e in events if e["name"] == "memory allocated, cpu"} == {"C"}
    assert {e["ph"] for e in events if e.get("cat") == "fuseboard_fwdbwd"} == {"s", "f"}

    summary = summarise(trace)
    rows = {row.region: row.calls for row in summary.regions}
    assert rows == {f"{kind}{i}.region0": 2 for kind in ("forward", "backward") for i in (0, 1)}
    assert (summary.calls, summary.backwards, summary.resumed) == (2 + 4, 4, 2)
    assert summary.breaks[0]["source"] == f"{tmp_path / 'step.py'}:13"
    assert summary.peak_bytes["cpu"] > 0
    assert "forward1.region0" in done.stderr
    assert "Dynamo broke graphs: 1 further compiled piece ran in each call" in done.stderr
    assert str(path) in done.stderr


@pytest.mark.thorough
def test_ctrl_c_leaves_a_trace(tmp_path):
    """Of what ran until then; the traceback is the script's own."""
    script = written(tmp_path, INTERRUPTED)
    path = tmp_path / "t.json.gz"
    done = run(script, "--out", str(path), "--no-memory")
    assert done.returncode == 130
    assert (
        f'Traceback (most recent call last):\n  File "{script}", line 8, in <module>' in done.stderr
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    trace = read_trace(path)
    assert summarise(trace).calls == 3
    assert trace.memory() == {}


@pytest.mark.thorough
def test_a_script_with_a_profiler_of_its_own(tmp_path):
    """Only one can record: the script's own does, and it is said that there is no trace."""
    text = (
        "import torch\nwith torch.profiler.profile() as own:\n    torch.ones(3)\n"
        "print(len(own.events()) > 0)"
    )
    done = run(written(tmp_path, text), "--out", str(tmp_path / "t.json"))
    assert (done.returncode, done.stdout) == (2, "True\n")
    assert "uses a profiler of torch's itself" in done.stderr
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("out", ["a_file/trace.json", "a_file", "no/such/folder/t.json"])
def test_a_path_that_cannot_be_written(tmp_path, monkeypatch, out):
    """An error before the script runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    script = written(tmp_path, "open('it_ran', 'w')")
    result = CliRunner().invoke(app, ["profile", str(script), "--out", out])
    assert result.exit_code == 2
    assert f"--out '{out}'" in result.stderr
    assert "can't be written" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "step.py"]


def test_a_script_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "no.py")])
    assert result.exit_code == 2
    assert "there is no file" in result.stderr


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(7), 7),
        (SystemExit("a reason"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("mine"), 1),
    ],
)
def test_how_a_script_ends(problem, code, capsys):
    """The shell gets what it would get without the profiler."""
    with pytest.raises(typer.Exit) as end:
        _pass_on(problem)
    assert end.value.exit_code == code
    shown = capsys.readouterr().err
    assert ("a reason" in shown) == (str(problem) == "a reason")
    assert ("ValueError: mine" in shown) == isinstance(problem, ValueError)


def test_what_is_shown_of_an_accelerator(capsys):
    row = RegionTime("inference0.region0", "triton", "a", "/x/m.py:3", 4, 2000.0, 0.5, 8000.0)
    device = DeviceTime("0", 40, 6000.0, 4000.0, 30, 8.0)
    summary = Summary([row], calls=4, calls_us=4000.0, devices=[device], advice=["Do this."])
    show(summary, Console(width=100))
    shown = capsys.readouterr().out
    for text in ("a m.py:3", "2.00", "500", "50%", "8.00", "busy 6.00 ms, idle 40%", "- Do this."):
        assert text in shown


# --- old CUDA -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "kept"),
    [(None, False), ("12.6", False), ("13.0", False), ("12.4", True), ("11.8", True)],
)
def test_cupti_is_kept_on_old_cuda(monkeypatch, cuda: Any, kept):
    """What torch itself sets for Inductor's CUDA graphs; and it is said."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "unset")
    said = torch_profiler.keep_cupti()
    assert os.environ["DISABLE_CUPTI_LAZY_REINIT"] == ("1" if kept else "unset")
    assert os.environ["TEARDOWN_CUPTI"] == ("0" if kept else "unset")
    assert ("TEARDOWN_CUPTI=0" in said) == kept
