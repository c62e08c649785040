"""A cost database whose file is damaged, or can't be used: nothing is lost that needn't be."""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from fuseboard.errors import CostsError
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.costs import database as costs_module
from fuseboard.profile.costs import file as costs_file
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.report.data import GraphReport
from tests.support.costs import changed, decision, files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "costs.sqlite3"


@pytest.fixture
def costs(path):
    return CostDatabase(path, wait_s=0.3)


@pytest.fixture
def warnings(caplog):
    """The texts of fuseboard's warnings so far."""
    caplog.set_level(logging.WARNING, logger="fuseboard")
    return lambda: [record.getMessage() for record in caplog.records]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\0" + bytes(4096)])
def test_a_damaged_file_is_set_aside(costs, path, warnings, content):
    """It is renamed with one warning, and a new one serves at once; a second gets number 2."""
    path.parent.mkdir()
    for number in (1, 2):
        path.write_bytes(content)
        assert costs.find(decision().key) is None
        costs.record(decision())
        assert CostDatabase(path).find(decision().key) == decision()
        aside = path.with_name(f"costs.sqlite3.corrupt-{number}")
        assert aside.read_bytes() == content
        assert len(warnings()) == number
        assert "set aside, it is damaged (" in warnings()[-1]
        assert str(aside) in warnings()[-1]


def test_a_file_with_holes_is_set_aside(costs, path, warnings):
    """Damage in the middle is seen when it is read."""
    costs.record(*(decision(f"g{number}" * 50) for number in range(200)))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 2 * 4096))
    assert costs.decisions() == []
    assert "costs.sqlite3.corrupt-1" in files(path)
    assert len(warnings()) == 1
    costs.record(decision())
    assert costs.decisions() == [decision()]


def test_a_file_without_its_table_is_set_aside(costs, path, warnings):
    """As is one that somebody else's program made."""
    costs.record(decision())
    changed(path, "DROP TABLE decisions")
    assert costs.find(decision().key) is None
    changed(path, "CREATE TABLE theirs (a)")
    costs.record(decision())
    assert costs.find(decision().key) == decision()
    assert {"costs.sqlite3.corrupt-1", "costs.sqlite3.corrupt-2"} <= files(path)
    assert "it is no cost database" in warnings()[-1]


def test_an_empty_file_is_a_new_one(costs, path, warnings):
    """A process that was killed while it made the file may leave it so."""
    path.parent.mkdir()
    path.touch()
    assert costs.find(decision().key) is None
    costs.record(decision())
    assert costs.find(decision().key) == decision()
    assert warnings() == []


def test_the_log_of_a_damaged_file_goes_with_it(costs, path):
    """Else SQLite would apply it to the new file."""
    costs.record(*(decision(f"{number}") for number in range(100)))
    with closing(sqlite3.connect(path)) as open_elsewhere:
        open_elsewhere.execute("SELECT * FROM decisions").fetchall()
        costs.record(decision("in the log"))
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))
        wal = path.with_name("costs.sqlite3-wal").read_bytes()
        costs.record(decision("new"))
        assert [d.parts["graph"] for d in costs.decisions()] == ["new"]
        assert path.with_name("costs.sqlite3.corrupt-1-wal").read_bytes()[:4096] == wal[:4096]


def test_a_sound_file_is_never_set_aside(costs, path):
    """Whoever comes late finds that another process has replaced the damaged file."""
    costs.record(decision())
    costs_file.CostFile(path, 1.0)._set_aside(RuntimeError("was damaged before"), 0.0)
    assert CostDatabase(path).find(decision().key) == decision()
    assert not any("corrupt" in name for name in files(path))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE decisions SET body = replace(body, 'inductor', 'indictor')",
        "UPDATE decisions SET body = x'00'",
        "UPDATE decisions SET body = CAST(x'ff' AS TEXT)",
        "UPDATE decisions SET key = replace(key, substr(key, 1, 4), '0000')",
        "UPDATE decisions SET graph = 'other'",
        "UPDATE decisions SET settled = 0",
        "DROP TABLE decisions",
        "ALTER TABLE decisions DROP COLUMN settled",
        "PRAGMA user_version = 0",
        "PRAGMA application_id = 1",
    ],
)
def test_what_sqlite_cant_see_is_damage_too(costs, path, warnings, statement):
    """A changed row, by its checksum; a changed table. The file is set aside, once."""
    costs.record(decision("a"))
    changed(path, statement)
    assert costs.decisions() == []
    costs.record(decision("b"))
    assert CostDatabase(path).decisions() == [decision("b")]
    assert len(warnings()) == 1
    assert files(path) == {"costs.sqlite3", "costs.sqlite3.corrupt-1", "costs.sqlite3.lock"}


def test_undamaged_rows_of_a_file_set_aside_can_be_imported(costs, path):
    """Where SQLite can still read it."""
    costs.record(decision("a"), decision("b"))
    changed(path, "UPDATE decisions SET settled = 0 WHERE graph = 'a'")
    assert costs.find(decision("a").key) is None
    told = costs.import_(path.with_name("costs.sqlite3.corrupt-1"))
    assert dataclasses.astuple(told) == (1, 0, 0, 1)
    assert costs.decisions() == [decision("b")]


@pytest.mark.parametrize("kind", ["bits", "block", "cut"])
def test_no_damage_raises_or_gives_a_wrong_answer(tmp_path, kind):
    """Whatever becomes of the file's bytes: what is found is what was recorded, or nothing."""
    recorded = {made.key: made for made in (decision(f"{number}") for number in range(50))}
    CostDatabase(tmp_path / "whole").record(*recorded.values())
    whole = (tmp_path / "whole").read_bytes()
    for seed in range(25):
        draw = random.Random(seed)
        content = bytearray(whole)
        at = draw.randrange(len(content))
        if kind == "bits":
            for _ in range(draw.randrange(1, 20)):
                content[draw.randrange(100, len(content))] ^= 1 << draw.randrange(8)
        elif kind == "block":
            content[at : at + 5000] = draw.randbytes(len(content[at : at + 5000]))
        else:
            del content[at:]
        path = tmp_path / f"{seed}" / "costs.sqlite3"
        path.parent.mkdir()
        path.write_bytes(content)
        costs = CostDatabase(path)
        assert costs.find(decision("7").key) in (None, decision("7"))
        assert all(recorded[found.key] == found for found in costs.decisions())
        costs.record(decision("new"))
        assert costs.find(decision("new").key) == decision("new")
        assert costs.problem == ""


# --- trouble --------------------------------------------------------------------------------------


def check_it_goes_on_in_memory(costs: CostDatabase, warnings, why: str) -> None:
    """Decisions are found in this process, and one warning says why."""
    for graph in "abc":
        costs.record(decision(graph))
    assert [costs.find(decision(graph).key) for graph in "abc"] == list(map(decision, "abc"))
    assert costs.nearest("step", {"graph": "a", "threads": "4"}) == ("threads",)
    assert {d.parts["graph"] for d in costs.decisions()} >= set("abc")
    assert why in costs.problem
    assert costs.problem.startswith("measured choices stay in memory: ")
    told = [text for text in warnings() if "stay in memory" in text]
    assert len(told) == 1
    assert why in told[0]
    assert str(costs.path) in told[0]


def test_a_locked_file(costs, path, warnings):
    """Choices stay in memory while another process holds the lock; others can still be read."""
    costs.record(decision("before"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        check_it_goes_on_in_memory(costs, warnings, "another process kept it locked for 0.3 s")
        assert costs.find(decision("before").key) == decision("before")
        assert CostDatabase(path).find(decision("a").key) is None


def test_what_waited_is_written_later(path):
    """With the first choice that can be written, in one go."""
    costs = CostDatabase(path, wait_s=0.2, retry_s=0.0)
    costs.record(decision("before"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        costs.record(decision("during"))
        assert costs.problem
    costs.record(decision("after"))
    assert costs.problem == ""
    written = CostDatabase(path)
    assert {d.parts["graph"] for d in written.decisions()} == {"before", "during", "after"}


def test_a_locked_file_is_waited_for_once(path):
    """Not for each choice anew: compiling goes on."""
    costs = CostDatabase(path, wait_s=0.2)
    costs.record(decision("before"))
    attempts = []
    write = costs._file.write
    costs._file.write = lambda work: attempts.append(1) or write(work)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for graph in "abcdef":
            costs.record(decision(graph))
    assert len(attempts) == 1


def test_a_newer_version(costs, path, warnings):
    """Its file isn't touched."""
    costs.record(decision("before"))
    changed(path, f"PRAGMA user_version = {len(costs_file.STEPS) + 1}")
    before = path.read_bytes()
    check_it_goes_on_in_memory(costs, warnings, "it has format 2, of a newer fuseboard")
    assert path.read_bytes() == before
    with pytest.raises(CostsError, match="of a newer fuseboard; this one knows 1"):
        costs.forget([decision("before").key])


def test_an_older_version_is_brought_up_to_date(costs, path, monkeypatch):
    """By a read as well as by a write; what it holds stays."""
    costs.record(decision("before"))
    further = ("ALTER TABLE decisions ADD COLUMN further TEXT",)
    monkeypatch.setattr(costs_file, "STEPS", (*costs_file.STEPS, further))
    assert costs.find(decision("before").key) == decision("before")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT further FROM decisions").fetchall() == [(None,)]
    monkeypatch.setattr(costs_file, "STEPS", (*costs_file.STEPS, further[:0]))
    costs.record(decision("after"))
    assert len(CostDatabase(path).decisions()) == 2


def test_a_full_disk(costs, path, warnings, monkeypatch):
    """SQLite may make the file no larger: choices stay in memory, what is there stays whole."""
    costs.record(decision("before"))
    connect = sqlite3.connect

    def limited(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 1")  # it takes what the file has by now
        return connection

    monkeypatch.setattr(sqlite3, "connect", limited)
    many = [decision(f"many {number}") for number in range(100)]
    costs.record(*many)
    check_it_goes_on_in_memory(costs, warnings, "the disk is full")
    assert costs.find(many[0].key) == many[0]
    monkeypatch.undo()
    assert CostDatabase(path).decisions() == [decision("before")]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.report.data import GraphReport
from tests.support.costs import decision
path = Path(sys.argv[1])
CostDatabase(path).record(decision("before"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))
costs = CostDatabase(path)
costs.record(*(decision(f"{number}") for number in range(200)))
assert costs.problem, "it could be written"
assert costs.find(decision("7").key) == decision("7")
assert costs.find(decision("before").key) == decision("before")
print(costs.problem)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits for a process's files")
@pytest.mark.thorough
def test_files_that_may_not_grow(path):
    """With the system's own limit: the same, and the file is whole afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "measured choices stay in memory: there is no room for the files beside it: "
    )
    costs = CostDatabase(path)
    assert costs.decisions() == [decision("before")]
    costs.record(decision("after"))
    assert costs.problem == ""


READ_ONLY = """
import os, sys
from pathlib import Path
from fuseboard.profile.costs import file as costs_file
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.report.data import GraphReport
from tests.support.costs import decision
if os.geteuid() == 0:  # who may do anything becomes nobody
    os.setgid(65534)
    os.setuid(65534)
path = Path(sys.argv[1])
costs = CostDatabase(path)
print(costs.find(decision("before").key) == decision("before"), costs.problem)
costs.record(decision("after"))
print(costs.find(decision("after").key) == decision("after"), costs.problem)
print(costs.find(decision("before").key) == decision("before"))
costs_file.STEPS += ((),)  # as a newer fuseboard would have it
newer = CostDatabase(path)
print(newer.find(decision("before").key), newer.problem)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of directories")
@pytest.mark.thorough
def test_a_read_only_directory():
    """What is there is found; what is chosen stays in memory."""
    done = read_only(log_left=False)
    first, second, third, fourth = done.splitlines()
    assert first == "True "
    assert second.startswith("True measured choices stay in memory: it can't be ")
    assert third == "True"
    assert fourth.startswith("None measured choices stay in memory: it is of an older version")


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of directories")
@pytest.mark.thorough
def test_a_read_only_directory_with_a_log():
    """A log that can't be read in leaves the file in a state that nobody knows: it isn't read."""
    first, second, *_ = read_only(log_left=True).splitlines()
    assert first.startswith("False measured choices stay in memory: it can't be opened")
    assert second.startswith("True measured choices stay in memory: it can't be ")


def read_only(log_left: bool) -> str:
    """What ``READ_ONLY`` prints. The directory is one that other users can get to."""
    directory = Path(tempfile.mkdtemp())
    path = directory / "costs.sqlite3"
    try:
        CostDatabase(path).record(decision("before"))
        if log_left:
            path.with_name("costs.sqlite3-wal").write_bytes(b"\x37\x7f\x06\x82" + bytes(100))
        for file in directory.iterdir():
            file.chmod(0o444)
        directory.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(path)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
    finally:
        directory.chmod(0o755)
        shutil.rmtree(directory)


def test_a_path_that_can_be_no_directory(tmp_path, warnings):
    """A file stands where the cache directory should be."""
    (tmp_path / "cache").touch()
    costs = CostDatabase(tmp_path / "cache" / "costs.sqlite3")
    check_it_goes_on_in_memory(costs, warnings, "can't be made")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_write_leaves_nothing(costs, path, error, monkeypatch):
    """Ctrl-C between two rows of a transaction: neither is there; both are in this process."""
    costs.record(decision("before"))
    rows = iter([None, error()])

    def interrupted(given):
        if (raised := next(rows)) is not None:
            raise raised
        return row_of(given)

    row_of = costs_module.row_of
    monkeypatch.setattr(costs_module, "row_of", interrupted)
    with pytest.raises(error):
        costs.record(decision("a"), decision("b"))
    monkeypatch.undo()
    assert CostDatabase(path).decisions() == [decision("before")]
    assert costs.find(decision("a").key) == decision("a")
    costs.record(decision("c"))  # no lock is left, and what waited goes with it
    assert len(CostDatabase(path).decisions()) == 4


def test_a_report_tells_of_trouble_where_a_decision_is_looked_for(tmp_path, caplog):
    path = tmp_path / "costs.sqlite3"
    path.mkdir()  # can't be opened as a file
    report = GraphReport("inference0", "inference", "f")
    stored = StoredDecision(CostDatabase(path), {"graph": "g"}, report)
    assert stored.find() is None
    (note,) = report.notes
    assert note.startswith("measured choices stay in memory: ")
