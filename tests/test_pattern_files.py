"""Traced patterns as files: read in place of a trace, and whether they are current."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from fuseboard import Pattern, Patterns
from fuseboard.cli.main import app
from fuseboard.errors import PatternError
from fuseboard.fuse.patterns import pattern as pattern_module
from fuseboard.fuse.patterns.form import form_as_text, forms_from_text


def normed(x, weight, eps):
    wide = x.to(torch.float32)
    made = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return made.to(x.dtype) * weight


def made(directory, search=normed, replace=normed):
    examples = [torch.empty(2, 8).half(), torch.empty(8).half(), 1e-5]
    return Patterns([Pattern("normed", search, examples, replace)], directory)


def written(directory):
    patterns = made(directory)
    patterns.files.write(patterns.patterns[0])
    return directory / "normed.pattern"


def test_text_says_what_the_form_is():
    """Read and written again it is the same, of inference and training."""
    (pattern,) = made(None).patterns
    for kind in ("inference", "joint"):
        text = form_as_text(pattern.form(kind, {}), kind)
        assert f"def {kind}(eps, x, weight" in text
        assert "aten.add.Tensor(mean, eps)" in text
        assert form_as_text(forms_from_text(text)[kind], kind) == text


def test_odd_values_survive():
    """Infinities, devices, negative numbers, texts."""
    text = (
        "def inference(x):\n"
        "    a = aten.full_like.default(x, number('-inf'), device=device('cpu'))\n"
        "    b = aten.gelu.default(a, approximate='tanh')\n"
        "    c = aten.mean.dim(b, [-1, 2], dtype=torch.float64)\n"
        "    return [c], []\n"
    )
    assert form_as_text(forms_from_text(text)["inference"], "inference") == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os\n", "line 1: not a form"),
        ("def inference(x):\n    print(x)\n    return [x], []\n", "not an assignment of a call"),
        (
            "def inference(x):\n    a = aten.nosuch.default(x)\n    return [a], []\n",
            "no op aten.nos",
        ),
        ("def inference(x):\n    a = aten.sin.default(y)\n    return [a], []\n", "is called 'y'"),
    ],
)
def test_other_text_is_an_error(text, problem):
    with pytest.raises(ValueError, match=problem):
        forms_from_text(text)


def test_with_a_file_nothing_is_traced_at_the_start(tmp_path, monkeypatch):
    """Nor when the plugin is checked."""
    written(tmp_path)
    patterns = made(tmp_path)

    def traces(*arguments):
        raise AssertionError("traced")

    monkeypatch.setattr(pattern_module, "trace_forward", traces)
    monkeypatch.setattr(pattern_module, "trace_joint", traces)
    patterns.check()
    with pytest.raises(PatternError, match="search can't be traced: AssertionError: traced"):
        made(tmp_path / "none").check()


def test_what_is_found_is_the_same_with_a_file(tmp_path):
    """For other sizes, another dtype and another number."""
    written(tmp_path)
    x, w = torch.randn(3, 4).bfloat16(), torch.randn(4).bfloat16()
    with torch.no_grad():
        graph = make_fx(lambda x, w: normed(x, w, 0.1), tracing_mode="fake")(x, w)
    for patterns in (made(None), made(tmp_path)):
        (match,) = patterns.find(graph, "inference")
        assert len(match.nodes) == 8
        assert match.value("eps") == 0.1


def replaced(text, old, new):
    assert old in text
    return text.replace(old, new)


STALE = {
    "not there": (lambda path: path.unlink(), "not there; pattern 'normed' is traced"),
    "another torch": (
        lambda path: path.write_text(replaced(path.read_text(), "# For torch ", "# For torch 1")),
        "written for other functions or examples, or another torch",
    ),
    "another trace": (
        lambda path: path.write_text(replaced(path.read_text(), "rsqrt.default", "sqrt.default")),
        "this torch traces pattern 'normed' otherwise",
    ),
    "one too many": (
        lambda path: path.with_name("gone.pattern").write_text(""),
        "gone.pattern: of no pattern",
    ),
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_file_is_named(name, tmp_path, monkeypatch):
    """By the command, which writes it anew, too."""
    change, problem = STALE[name]
    path = written(tmp_path)
    module = ModuleType("pattern_holder")
    module.NORMS = made(tmp_path)
    monkeypatch.setitem(sys.modules, "pattern_holder", module)
    run = lambda *options: CliRunner().invoke(app, ["patterns", "pattern_holder", *options])  # noqa: E731
    assert run().exit_code == 0
    change(path)
    result = run()
    assert result.exit_code == 1
    assert problem in result.output
    assert run("--write").exit_code == 0
    left = [line for line in run().output.splitlines() if problem in line]
    assert len(left) == (name == "one too many")


def test_a_stale_file_is_not_used(tmp_path):
    """A pattern whose function has changed is traced."""
    written(tmp_path)
    other = made(tmp_path, search=lambda x, weight, eps: (x + eps) * weight)
    other.check()
    assert len(other.patterns[0].form("inference", {}).calls) == 2


def test_a_module_without_patterns_is_an_error():
    result = CliRunner().invoke(app, ["patterns", "json"])
    assert result.exit_code == 2
    assert "module 'json' has no attribute of type fuseboard.Patterns" in result.output


@pytest.mark.parametrize("module", ["norms", "rotary"])
def test_the_files_of_what_ships_are_current(module):
    """For the installed torch; if it is another release, they are at least found to be void."""
    patterns = importlib.import_module(f"fuseboard.fuse.composites.{module}").PATTERNS
    problems = list(patterns.files.problems(patterns.patterns))
    written = next(patterns.files.directory.glob("*.pattern")).read_text()
    release = ".".join(torch.__version__.split(".")[:2])
    if f"# For torch {release}," in written:
        assert problems == []
    else:
        assert all("another torch" in problem for problem in problems)
