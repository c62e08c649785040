"""The triton backend's values, in Triton's interpreter on CPU tensors.

A process either interprets kernels or compiles them: ``TRITON_INTERPRET`` is read when they are
defined. So the tests in ``triton_interpreted/`` run in a process of their own for each file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

HERE = Path(__file__).parent / "triton_interpreted"
#: The conformance suite takes five minutes.
SLOW = ("interpreted_conformance.py",)
FILES = [
    pytest.param(path.name, marks=[pytest.mark.slow] if path.name in SLOW else [])
    for path in sorted(HERE.glob("interpreted_*.py"))
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.thorough
def test_interpreted(name):
    """Every test of the file passes with ``TRITON_INTERPRET=1``."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
