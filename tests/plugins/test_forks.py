"""What plugins hold outlives the end of a forked child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKING = """
import os, sys
from {module} import {name}
sampler = {name}(*{arguments})
if not os.fork():
    sys.exit(0)
os.wait()
assert sampler._folder.is_dir()
print(sampler._folder)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("fuseboard_pyspy._sampler", "PySpy", ("py-spy", False)),
        ("fuseboard_perf._sampler", "Perf", ("perf", "fp")),
    ],
)
@pytest.mark.thorough
def test_a_samplers_folder_goes_with_its_own_process(module, name, arguments):
    """Not with one that was forked from it, as a TemporaryDirectory does."""
    program = FORKING.format(module=module, name=name, arguments=arguments)
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.path.exists(done.stdout.strip())
