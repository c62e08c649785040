"""The tutorial, from its first command to its last, in an environment with fuseboard's wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.packaging.conftest import ROOT

BLOCK = re.compile(r'^```(python|console)(?: title="(.*?)")?\n(.*?)^```', re.M | re.S)
#: An editable install without a package index, by the pip of the tests.
INSTALL = "-m pip --python {python} install --quiet --no-index --no-build-isolation"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler called cc")
def test_the_tutorial_leads_to_a_conforming_backend(environment, tmp_path):
    """Each block works in its turn: files are written, commands succeed and print what is shown."""
    python = environment.bin / "python"
    # The environment has neither a pip nor a pytest of its own.
    programs = {
        "pip install": f"{sys.executable} {INSTALL.format(python=python)}",
        "pytest": f"{python} -m pytest",
    }
    where = tmp_path
    written = set()
    for _, title, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if title:
            path = where / title
            before = path.read_text() + "\n\n" if title in written else ""
            path.write_text(before + text)
            written.add(title)
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", text, re.M):
            if command.startswith("cd "):
                where /= command.removeprefix("cd ")
                continue
            for program, instead in programs.items():
                command = re.sub(rf"^{program}\b", instead, command)
            printed = run(command, environment, where)
            for line in shown.splitlines():
                assert generalised(line) in generalised(printed), f"{command}\n{printed}"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "uninstall", "-qy", "fuseboard-loops"],
        check=True,
    )


def run(command, environment, where):
    """What a command prints at a shell with the environment's programs."""
    hidden = ("PYTHON", "FUSEBOARD_", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environ["PATH"] = f"{environment.bin}{os.pathsep}{environ['PATH']}"
    environ["FUSEBOARD_CACHE_DIR"] = str(where / "cache")
    done = subprocess.run(
        command, shell=True, cwd=where, env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def generalised(text):
    """Without what differs from run to run: numbers, and how wide columns are."""
    return " ".join(re.sub(r"\d+", "0", text).split())
