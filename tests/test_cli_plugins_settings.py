"""``fuseboard plugins`` and ``fuseboard settings``, as a user at a shell sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fuseboard.board
from fuseboard.cli.main import COMMANDS, app
from fuseboard.config import Settings
from tests.board_fakes import FakeEntryPoint, a_board, backend

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    """A terminal wide enough for whole cells, and no settings of the checkout."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def board(monkeypatch):
    """In place of the process's board: one plugin for each state."""
    board = a_board(
        FakeEntryPoint("quick", backend("quick", {"lower": lambda region: None})),
        FakeEntryPoint("tvm", backend("tvm", available=False, reason="try [tvm] from pip")),
        FakeEntryPoint("broken", ImportError("no libfoo")),
    )
    monkeypatch.setattr(fuseboard.board, "board", board)
    return board


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def cells(text: str) -> list[list[str]]:
    """The rows of a table, as lists of cells."""
    return [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_plugins_prints_a_row_for_each(board):
    """Name, version, stages, devices and state; below them the reasons, brackets and all."""
    result = run("plugins")
    assert result.exit_code == 0
    version = metadata.version("fuseboard")
    rows = cells(result.stdout)
    assert ["quick", "1.2", "lower", "cpu", "ready"] in rows
    assert ["tvm", "1.2", "", "cpu", "unavailable"] in rows
    assert ["broken", "1.2", "", "", "quarantined"] in rows
    assert ["defaults", version, "partition, profile, events", "", "ready"] in rows
    assert result.stdout.splitlines()[-2:] == [
        "tvm is unavailable: try [tvm] from pip",
        "broken is quarantined: its import raised ImportError: no libfoo",
    ]


def test_plugins_that_do_not_always_take_part_say_when(monkeypatch):
    """Ready, and still in no candidate: by request, or only where measuring decides."""
    board = a_board(
        FakeEntryPoint("shy", backend("shy", by_request=True)),
        FakeEntryPoint("odd", backend("odd", by_measurement=True)),
    )
    monkeypatch.setattr(fuseboard.board, "board", board)
    assert run("plugins").stdout.splitlines()[-2:] == [
        "odd takes part where the setting backends names it, or under the policy 'measured'",
        "shy takes part where the setting backends names it",
    ]


def test_reasons_are_not_folded(board, monkeypatch):
    """What they tell to run can be copied from a narrow terminal, or found by grep."""
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("plugins").stdout.splitlines()
    assert "broken is quarantined: its import raised ImportError: no libfoo" in lines
    assert "│ broken " in "\n".join(lines)


def test_plugins_follows_the_settings(board, tmp_path):
    """Order and block of the directory's settings hold."""
    (tmp_path / "fuseboard.toml").write_text('backends = ["eager"]\nblock = ["quick"]\n')
    shown = run("plugins").stdout
    rows = cells(shown)
    assert rows[0][0] == "eager"
    expected = f"named by the setting 'block', set in {tmp_path}/fuseboard.toml"
    assert next(row[4] for row in rows if row[0] == "quick") == "blocked"
    assert f"quick is blocked: {expected}" in shown.splitlines()


def test_plugins_as_json(board):
    """A list of objects with every field of PluginState."""
    states = {state["name"]: state for state in json.loads(run("plugins", "--json").stdout)}
    assert states["quick"] == {
        "name": "quick",
        "version": "1.2",
        "source": "entry point of fake-dist",
        "stages": ["lower"],
        "devices": ["cpu"],
        "state": "ready",
        "reason": "",
        "takes_part": "",
    }
    assert states["broken"]["state"] == "quarantined"


def test_settings_prints_value_origin_and_description(tmp_path, monkeypatch):
    """For each setting and each key of a table."""
    (tmp_path / "fuseboard.toml").write_text('backends = ["mkldnn", "eager"]\n')
    monkeypatch.setenv("FUSEBOARD_PLUGINS__INDUCTOR__MAX_AUTOTUNE", "1")
    result = run("settings")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f'backends = ["mkldnn", "eager"]  (set in {tmp_path}/fuseboard.toml)' in lines
    assert "fuse_limit = not set  (default)" in lines
    assert "hoist = true  (default)" in lines
    origin = "environment FUSEBOARD_PLUGINS__INDUCTOR__MAX_AUTOTUNE"
    assert any(
        line.startswith("plugins.inductor.max_autotune = ") and line.endswith(f"(set in {origin})")
        for line in lines
    )
    keys = {line.partition(" = ")[0] for line in lines if " = " in line and line[0] != " "}
    assert set(Settings.model_fields) - {"plugins"} <= keys
    assert "    Plugins that take no part; they are not even imported." in map(str.rstrip, lines)


def test_settings_can_be_read_on_a_narrow_terminal(monkeypatch):
    """Values are on lines of their own, and descriptions below them."""
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("settings").stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) < 5 * len(Settings.model_fields)


def test_settings_as_json():
    """A list of objects: key, value, origin, description."""
    rows = {row["key"]: row for row in json.loads(run("settings", "--json").stdout)}
    assert (rows["hook_limit_s"]["value"], rows["hook_limit_s"]["origin"]) == (900.0, "default")
    assert rows["block"]["value"] == []


def test_settings_check_asks_the_plugins(board, tmp_path):
    """Notes are shown, and what only the plugins can tell is an error."""
    (tmp_path / "fuseboard.toml").write_text('backends = ["tvm", "quick"]\n')
    result = run("settings", "--check")
    assert (result.exit_code, "left out: 'tvm' is unavailable" in result.stderr) == (0, True)
    (tmp_path / "fuseboard.toml").write_text('backends = ["quik"]\n')
    assert run("settings").exit_code == 0
    result = run("settings", "--check")
    assert result.exit_code == 2
    assert "no plugin named 'quik'. Did you mean 'quick'?" in result.stderr


@pytest.mark.parametrize("command", ["plugins", "settings"])
def test_a_mistake_in_the_settings_is_one_line_and_exit_code_2(command, tmp_path):
    """On stderr, without a traceback; nothing on stdout."""
    (tmp_path / "fuseboard.toml").write_text("hoist 3\n")
    result = run(command)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"fuseboard: {tmp_path}/fuseboard.toml, line 1: not valid TOML")
    assert len(result.stderr.splitlines()) == 1


def test_other_errors_are_not_dressed_up(board, monkeypatch):
    """A bug keeps its traceback."""
    monkeypatch.setattr(board, "states", lambda: 1 / 0)
    assert isinstance(run("plugins").exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["explain", "export", "memory"])
def test_help_is_folded_by_the_terminal_alone(command):
    """The line breaks of a docstring are none in its paragraphs."""
    lines = [line.strip() for line in run(command, "--help").stdout.splitlines()]
    (paragraph,) = (line for line in lines if line.startswith("FUNCTION returns"))
    assert paragraph.endswith(".")


def test_the_module_is_the_command(tmp_path):
    """``python -m fuseboard``: the same output, name and exit codes."""
    command = [sys.executable, "-m", "fuseboard"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, run("--version").stdout)
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True)
    assert done.returncode == run("nonsense").exit_code == 2
    assert "Usage: fuseboard [OPTIONS]" in done.stderr
    (tmp_path / "fuseboard.toml").write_text("hoist 3\n")
    done = subprocess.run([*command, "settings"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fuseboard: ")


def test_help_and_version_need_no_torch():
    """They, and ``settings``, answer at once: torch's import alone takes seconds."""
    code = (
        "import sys; from typer.testing import CliRunner; from fuseboard.cli.main import app;"
        "out = [CliRunner().invoke(app, [a]) for a in ('--help', '--version', 'settings')];"
        "assert 'torch' not in sys.modules; print(*(o.exit_code for o in out));"
        "print(out[0].output, out[1].output, sep='\\n')"
    )
    env = {**os.environ, "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    codes, *rest = done.stdout.splitlines()
    assert codes == "0 0 0"
    assert all(any(name in line for line in rest) for name in COMMANDS)
    assert f"fuseboard {metadata.version('fuseboard')}, torch {metadata.version('torch')}" in rest


def test_an_unknown_command_is_refused():
    """By typer, with exit code 2."""
    assert run("plugin").exit_code == 2


@pytest.mark.thorough
def test_the_log_does_not_repeat_the_table():
    """Quarantine is logged for programs; the command says it in the table."""
    code = (
        "import fuseboard.board; from tests.board_fakes import *;"
        "fuseboard.board.board = a_board(FakeEntryPoint('broken', ImportError('no libfoo')));"
        "from fuseboard.cli.main import app; app(['plugins'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "quarantined" in done.stdout
    assert done.stderr == ""
