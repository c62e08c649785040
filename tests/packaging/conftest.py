"""Wheels built from this checkout, and virtual environments that hold them and not the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuseboard.cli.new_plugin import plugin_files

ROOT = Path(__file__).parents[2]


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed.

    :raises AssertionError: it failed; the message holds all of its output.
    """
    hidden = ("PYTHON", "FUSEBOARD_", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment with wheels installed, and a working directory outside the checkout.

    It sees the packages of the environment that runs the tests (torch alone is hundreds of
    megabytes), but not this checkout: the editable install is a ``.pth`` file there, and Python
    follows ``.pth`` files only in its own site-packages.
    """

    directory: Path

    @property
    def bin(self) -> Path:
        return self.directory / "venv" / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *command: str | Path) -> str:
        """Run a command of this environment and return what it printed."""
        return call(self.bin / command[0], *command[1:], cwd=self.directory)

    def install(self, wheel: Path, *options: str) -> None:
        """Install with the pip of the tests, offline."""
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        call(*pip, "install", "--quiet", "--no-index", *options, wheel, cwd=self.directory)

    def python(self, program: str) -> str:
        """Run a program, from a file: Dynamo needs its source."""
        script = self.directory / "program.py"
        script.write_text(program)
        return self.run("python", "-P", script)


def build_wheel(source: Path, destination: Path) -> Path:
    """Build the wheel of a project directory as pip does, offline, with the installed hatchling."""
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    pip = (sys.executable, "-m", "pip", "wheel", *options)
    call(*pip, "--wheel-dir", destination, source, cwd=destination)
    (wheel,) = destination.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def fuseboard_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("fuseboard-wheel"))


@pytest.fixture(scope="session")
def new_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``fuseboard new-plugin my-npu`` writes."""
    directory = tmp_path_factory.mktemp("new-plugin")
    for path, text in plugin_files("my-npu").items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


@pytest.fixture(scope="session")
def plugin_wheel(tmp_path_factory: pytest.TempPathFactory, new_plugin: Path) -> Path:
    return build_wheel(new_plugin, tmp_path_factory.mktemp("plugin-wheel"))


@pytest.fixture(scope="session")
def environment(
    tmp_path_factory: pytest.TempPathFactory, fuseboard_wheel: Path, plugin_wheel: Path
) -> Environment:
    """Fuseboard's wheel, then the new plugin's with its requirements resolved by pip."""
    place = Environment(tmp_path_factory.mktemp("environment").resolve())
    # Without a pip of its own, whose old setuptools would come before the one that torch requires.
    venv = (sys.executable, "-m", "venv", "--without-pip", "venv")
    call(*venv, cwd=place.directory)
    place.install(fuseboard_wheel, "--no-deps")
    # From here on the other packages are in sight, after this environment's own.
    purelib = place.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(purelib.strip(), "packages_of_the_tests.pth").write_text("\n".join(others) + "\n")
    place.install(plugin_wheel)
    return place
