"""``fuseboard new-plugin`` at a shell. tests/packaging installs what it writes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fuseboard.cli.main import app


@pytest.mark.parametrize("name", ["My-chip", "-chip", "chip-", "1chip", "my_chip", "../chip", ""])
def test_a_name_that_is_none(name, tmp_path):
    """Nothing is written for a name that couldn't stand in settings and in a package's name."""
    done = CliRunner().invoke(app, ["new-plugin", "-d", str(tmp_path / "new"), "--", name])
    assert done.exit_code == 2
    assert "lower-case letters" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["mkldnn", "eager"])
def test_a_name_that_is_taken(name, tmp_path):
    """Two backends of one name couldn't be told apart."""
    done = CliRunner().invoke(app, ["new-plugin", name, "-d", str(tmp_path / "new")])
    assert done.exit_code == 2
    assert "is installed already" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_directory_with_something_in_it_is_left_alone(tmp_path):
    """Nobody's files are overwritten; an empty directory may be filled."""
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["new-plugin", "mychip", "-d", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    done = CliRunner().invoke(app, ["new-plugin", "mychip", "-d", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "fuseboard_mychip" / "_lower.py").is_file()
