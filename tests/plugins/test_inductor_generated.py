"""Inductor's generated modules load without the lowerings, and call what Inductor would call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.async_compile
import torch._inductor.codegen.memory_planning
from torch._inductor import lowering, select_algorithm  # noqa: F401  # registers kernels
from torch._inductor.codecache import CppPythonBindingsCodeCache, cache_dir

from fuseboard_inductor import _generated
from fuseboard_inductor._generated import Needs

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (_generated._KERNELS, _generated._ALIGN)
HEADER = """
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.select_algorithm import extern_kernels
import math
"""


@pytest.fixture
def fresh(monkeypatch):
    """A process that has imported neither of the heavy modules."""
    for name in HEAVY:
        monkeypatch.delitem(sys.modules, name)


def module_of(source: str, path: Path, needs: Needs):
    path.write_text(source)
    return _generated.load_module("key", str(path), needs)


@pytest.mark.usefixtures("fresh")
def test_no_heavy_module_is_imported_and_none_is_put_in_its_place(tmp_path):
    """Plain Inductor in the same process imports its own."""
    needs = Needs(("mm", "addmm"))
    module = module_of(HEADER, tmp_path / "made.py", needs)
    assert not set(HEAVY) & set(sys.modules)
    assert module.extern_kernels.mm is torch.mm
    assert module.extern_kernels.addmm is torch.addmm
    assert [module.align(n) for n in (1, 64, 65)] == [64, 64, 128]


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_isnt_torchs_own_is_inductors(tmp_path, monkeypatch):
    """Under the name ``bias_addmm`` there is a function of Inductor's."""
    module = module_of(HEADER, tmp_path / "made.py", Needs(("mm",)))
    monkeypatch.setitem(sys.modules, _generated._KERNELS, select_algorithm)  # imported only once
    inductors = select_algorithm.extern_kernels
    assert module.extern_kernels.bias_addmm is inductors.bias_addmm
    with pytest.raises(AttributeError, match="no_such_kernel"):
        _ = module.extern_kernels.no_such_kernel


def test_what_is_imported_already_is_used(tmp_path):
    """A process that compiles has Inductor's own namespace."""
    module = module_of(HEADER, tmp_path / "made.py", Needs())
    assert module.extern_kernels is select_algorithm.extern_kernels


def test_only_functions_of_torchs_are_noted():
    """Names under which Inductor has functions of its own come from Inductor."""

    class Compiled:
        cache_key = None
        source_code = "extern_kernels.mm(a, b)\nextern_kernels.bias_addmm(c)\nextern_kernels.gone()"

    assert _generated.needs_of(Compiled()) == Needs(("mm",), None)


KERNEL = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
kernel = async_compile.cpp_pybinding(['float*'], 'source')
"""


@pytest.mark.parametrize("where", ["elsewhere", "gone", "here"])
def test_a_library_is_loaded_where_it_lies_in_inductors_cache(where, tmp_path, monkeypatch):
    """One that is gone, or lies anywhere else, is looked for as Inductor does."""

    class Library:
        kernel = "loaded"

    calls = []
    monkeypatch.setattr(
        CppPythonBindingsCodeCache,
        "_load_library",
        lambda path, key: calls.append((path, key)) or Library,
    )
    monkeypatch.setattr(
        torch._inductor.async_compile.AsyncCompile,
        "cpp_pybinding",
        lambda self, argtypes, source: "compiled",
    )
    folder = Path(cache_dir()) if where == "here" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cabc{os.getpid()}.main.so"
    if where != "gone":
        path.touch()
    try:
        module = module_of(KERNEL, tmp_path / "made.py", Needs((), (str(path),)))
    finally:
        path.unlink(missing_ok=True)
    assert module.kernel == ("loaded" if where == "here" else "compiled")
    assert calls == ([(str(path), f"cabc{os.getpid()}")] if where == "here" else [])


PROGRAM = """
import json, sys, torch, fuseboard
torch.manual_seed(0)
class Chain(torch.nn.Linear):  # long enough to beat eager in the trial of whole calls, too
    def forward(self, x):
        y = super().forward(x)
        for step in range(12):
            y = y * 0.9 + step
        return y
model = Chain(5, 512).eval()
x = torch.randn(512, 5)
with torch.no_grad():
    run = torch.compile(model, backend="fuseboard", options={
        "backends": [sys.argv[1], "eager"], "cache_dir": sys.argv[2],
        "stages.measure": "tests.support.eager_loses:measure"})
    run(x)
    fuseboard.wait(progress=False)
    torch.testing.assert_close(run(x), model(x))
heavy = {"torch._inductor.lowering", "torch._inductor.ir", "setuptools"}
loaded = any(name.endswith(".kernel") for name in sys.modules)
print(json.dumps([loaded, sorted(heavy & set(sys.modules))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "inductor-freezing"])
def test_a_process_that_loads_imports_no_lowerings(backend, tmp_path):
    """Neither the one beside whose calls it was compiled, nor a later one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSEBOARD_")}
    environment = {**kept, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, backend, str(tmp_path)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[true, []]", done.stderr
