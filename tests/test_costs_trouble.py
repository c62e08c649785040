"""A cost database whose files are damaged, or can't be used: nothing is lost that needn't be."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.costs import database as costs_module
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.report.data import GraphReport
from tests.support.costs import decision, files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "costs"


@pytest.fixture
def costs(path):
    return CostDatabase(path)


@pytest.fixture
def warnings(caplog):
    """The texts of fuseboard's warnings so far."""
    caplog.set_level(logging.WARNING, logger="fuseboard")
    return lambda: [record.getMessage() for record in caplog.records]


def file_of(path, graph):
    (found,) = path.rglob(f"{decision(graph).key}.*.json")
    return found


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no decision at all", bytes(4096)])
def test_a_damaged_file_is_set_aside(costs, path, warnings, content):
    """It is renamed with one warning; the others are as they were, and a new one serves at once."""
    costs.record(decision("a"))
    costs.record(decision("b"))
    file = file_of(path, "a")
    file.write_bytes(content)
    assert costs.find(decision("a").key) is None
    assert costs.decisions() == [decision("b")]
    aside = file.with_name(f"{file.name}.damaged")
    assert aside.read_bytes() == content
    (told,) = warnings()
    assert "set aside, it has another checksum" in told
    assert str(aside) in told
    costs.record(decision("a"))
    assert CostDatabase(path).find(decision("a").key) == decision("a")


def test_a_decision_under_anothers_name_is_damage(costs, path):
    """Its checksum is right."""
    costs.record(decision("a"))
    file = file_of(path, "a")
    file.rename(file.with_name(file.name.replace(file.name[:4], "0000")))
    assert costs.decisions() == []


@pytest.mark.parametrize("kind", ["bits", "block", "cut"])
def test_no_damage_raises_or_gives_a_wrong_answer(costs, path, kind):
    """Whatever becomes of a file's bytes: what is found is what was recorded, or nothing."""
    costs.record(decision("a"))
    file = file_of(path, "a")
    whole = file.read_bytes()
    for seed in range(50):
        draw = random.Random(seed)
        content = bytearray(whole)
        at = draw.randrange(len(content))
        if kind == "bits":
            for _ in range(draw.randrange(1, 20)):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif kind == "block":
            content[at : at + 50] = draw.randbytes(len(content[at : at + 50]))
        else:
            del content[at:]
        file.write_bytes(content)
        assert costs.find(decision("a").key) in (None, decision("a"))
        assert costs.problem == ""


def test_files_of_another_version_are_left_alone(costs, path):
    """Both versions have their own of the same decision."""
    costs.record(decision("a"))
    file = file_of(path, "a")
    other = file.rename(file.with_name(file.name.replace(".1.json", ".2.json")))
    assert costs.find(decision("a").key) is None
    costs.record(decision("a"))
    assert files(path) == {file.name, other.name}


# --- trouble --------------------------------------------------------------------------------------


def check_it_goes_on_in_memory(costs: CostDatabase, warnings, why: str) -> None:
    """Decisions are found in this process, and one warning says why."""
    for graph in "abc":
        costs.record(decision(graph))
    assert [costs.find(decision(graph).key) for graph in "abc"] == list(map(decision, "abc"))
    assert costs.nearest("step", {"graph": "a", "threads": "4"})["threads"] != "4"
    assert {d.parts["graph"] for d in costs.decisions()} >= set("abc")
    assert costs.problem.startswith("measured choices stay in memory: ")
    told = [text for text in warnings() if why in text]
    assert len(told) == 1
    assert str(costs.path) in told[0]


def full(path, content):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(costs, path, warnings, monkeypatch):
    """Choices stay in memory, and are written with the first one that can be."""
    costs.record(decision("before"))
    with monkeypatch.context() as patch:
        patch.setattr(costs_module, "write_whole", full)
        check_it_goes_on_in_memory(costs, warnings, "it can't be written: No space left on device")
        assert CostDatabase(path).decisions() == [decision("before")]
    costs.record(decision("after"))
    assert costs.problem == ""
    written = CostDatabase(path).decisions()
    assert {d.parts["graph"] for d in written} == {"before", "after", *"abc"}


READ_ONLY = """
import os, sys
from pathlib import Path
from fuseboard.profile.costs.database import CostDatabase
from tests.support.costs import decision
if os.geteuid() == 0:  # who may do anything becomes nobody
    os.setgid(65534)
    os.setuid(65534)
costs = CostDatabase(Path(sys.argv[1]))
print(costs.find(decision("before").key) == decision("before"), costs.problem)
costs.record(decision("after"))
print(costs.find(decision("after").key) == decision("after"), costs.problem)
print(costs.find(decision("before").key) == decision("before"))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of directories")
@pytest.mark.thorough
def test_a_read_only_directory():
    """What is there is found; what is chosen stays in memory."""
    directory = Path(tempfile.mkdtemp())  # one that other users can get to
    path = directory / "costs"
    try:
        CostDatabase(path).record(decision("before"))
        for place in (directory, *directory.rglob("*")):
            place.chmod(0o555 if place.is_dir() else 0o444)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(path)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    finally:
        for place in (directory, *directory.rglob("*")):
            place.chmod(0o755)
        shutil.rmtree(directory)
    first, second, third = done.stdout.splitlines()
    assert first == "True "
    assert second.startswith("True measured choices stay in memory: it can't be written: ")
    assert third == "True"


def test_a_path_that_can_be_no_directory(tmp_path, warnings):
    """A file stands where the cache directory should be."""
    (tmp_path / "cache").touch()
    costs = CostDatabase(tmp_path / "cache" / "costs")
    check_it_goes_on_in_memory(costs, warnings, "it can't be written: Not a directory")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_write_leaves_nothing(costs, path, error, monkeypatch):
    """No file is there, nor a part of one; the decision is in this process, and written later."""
    costs.record(decision("before"))
    before = files(path)

    def interrupted(source, target):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(error):
            costs.record(decision("a"))
    assert files(path) == before
    assert costs.find(decision("a").key) == decision("a")
    costs.record(decision("b"))
    assert len(CostDatabase(path).decisions()) == 3


def test_a_report_tells_of_trouble_where_a_decision_is_looked_for(tmp_path):
    path = tmp_path / "costs"
    path.touch()  # it is no directory
    report = GraphReport("inference0", "inference", "f")
    stored = StoredDecision(CostDatabase(path), {"graph": "g"}, report)
    assert stored.find() is None
    (note,) = report.notes
    assert note.startswith("measured choices stay in memory: ")
