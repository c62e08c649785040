"""The cost database: what is kept, what happens to a damaged or unusable file, and its exchange."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

import fuseboard
from fuseboard.config import resolve
from fuseboard.errors import CostsError
from fuseboard.profile import costs_file
from fuseboard.profile.costs import CandidateCost, CostDatabase, database, decision_key
from tests.support.costs import decision

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


def changed(path: Path, statement: str, *values: object) -> None:
    """Run a statement on the file behind the database's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def files(path: Path) -> set[str]:
    return {file.name for file in path.parent.iterdir()}


# --- decisions ------------------------------------------------------------------------------------


def test_another_database_finds_what_was_recorded(costs, path):
    """Every field, through the file; an unknown key is None."""
    costs.record(decision("g"), decision("h", level="graph", winner="whole:inductor"))
    other = CostDatabase(path)
    assert other.find(decision("g").key) == decision("g")
    assert other.find(decision("h", level="graph").key).winner == "whole:inductor"
    assert other.find(decision("i").key) is None
    assert other.problem == ""


def test_the_key_is_of_level_and_parts():
    """It is the same in every process and version: this one was written down."""
    assert decision_key("region", {"threads": "2", "graph": "g"}) == (
        "41d6f4bdb08536cb7965ec0f44c368faae40337aa3baec44"
    )
    keys = {
        decision_key("region", {"graph": "g"}),
        decision_key("graph", {"graph": "g"}),
        decision_key("region", {"graph": "h"}),
        decision_key("region", {"graph": "g", "threads": ""}),
    }
    assert len(keys) == 4


def test_reading_makes_no_file(costs, path):
    """A process that only asks leaves nothing behind."""
    assert costs.find("0") is None
    assert costs.decisions() == []
    assert not path.parent.exists()


def test_an_equal_key_is_replaced(costs):
    """The last one recorded counts, whatever its age."""
    costs.record(decision(winner="inductor", created=2.0))
    costs.record(decision(winner="mkldnn", created=1.0))
    assert [d.winner for d in costs.decisions()] == ["mkldnn"]


def test_what_is_settled_stays(path):
    """A process that tried less doesn't undo what another one settled, unless it says so."""
    CostDatabase(path).record(decision(winner="inductor", settled=True))
    costs = CostDatabase(path)
    costs.record(decision(winner="mkldnn", settled=False))
    assert costs.find(decision().key).winner == "inductor"
    costs.record(decision(winner="eager", settled=False), replace=True)
    assert CostDatabase(path).find(decision().key).winner == "eager"
    costs.record(decision(winner="tvm", settled=True))
    assert CostDatabase(path).find(decision().key).winner == "tvm"


def test_a_miss_names_the_part_that_differs(costs):
    """Of the decision on the same graph and level that differs in the fewest parts."""
    costs.record(decision(threads="8", torch="2.12"), decision(threads="2", torch="2.12"))
    costs.record(decision("other", torch="2.13"), decision(level="graph", torch="2.13"))
    asked = {"graph": "g", "threads": "2", "torch": "2.13"}
    assert costs.nearest("region", asked) == ("torch",)
    assert costs.nearest("region", {"graph": "g", "threads": "4"}) == ("threads", "torch")
    assert costs.nearest("region", {"graph": "unknown"}) == ()


def test_they_are_listed_newest_first_and_forgotten_by_key(costs):
    """What is forgotten is counted, and gone from the file."""
    costs.record(*(decision(graph, created=float(at)) for at, graph in enumerate("abc")))
    assert [d.parts["graph"] for d in costs.decisions()] == ["c", "b", "a"]
    assert costs.forget([decision("a").key, decision("c").key, "unknown"]) == 2
    assert [d.parts["graph"] for d in costs.decisions()] == ["b"]
    assert costs.forget([]) == 0


def test_numbers_that_arent_finite_are_none(costs, path):
    """A measurement that failed may be told as infinite or NaN."""
    odd = CandidateCost("inductor", float("inf"), float("nan"), None, compile_s=1.0)
    costs.record(dataclasses.replace(decision(), candidates=(odd,)))
    (found,) = CostDatabase(path).find(decision().key).candidates
    assert found == CandidateCost("inductor", None, None, None, compile_s=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "another"},
        {"winner": None},
        {"created": float("nan")},
        {"settled": 1},
        {"title": "\ud800"},
        {"parts": {"graph": "g", "threads": 2}},
        {"candidates": (CandidateCost("inductor", latency_us="10"),)},
        {"candidates": (CandidateCost("inductor", peak_bytes=object()),)},
    ],
)
def test_what_could_not_be_read_back_is_not_recorded(costs, changes):
    """It is the caller's mistake, and does no harm to later decisions."""
    with pytest.raises(ValueError, match="can't be kept"):
        costs.record(decision("a"), dataclasses.replace(decision("b"), **changes))
    costs.record(decision("c"))
    assert costs.decisions() == [decision("c")]


# --- records --------------------------------------------------------------------------------------


def test_records_are_bytes_in_namespaces(costs, path):
    """Two plugins may use one key; what isn't there is None."""
    costs.put_record("tvm", "k", b"\x00\xff")
    costs.put_record("tvm", "k", b"\x00\xff again")
    costs.put_record("mine", "k", b"")
    other = CostDatabase(path)
    assert other.get_record("tvm", "k") == b"\x00\xff again"
    assert other.get_record("mine", "k") == b""
    assert other.get_record("mine", "l") is None
    assert [(r.namespace, r.key) for r in other.records()] == [("mine", "k"), ("tvm", "k")]
    assert [r.value for r in other.records("tvm")] == [b"\x00\xff again"]
    assert other.forget_records("tvm") == 1
    assert CostDatabase(path).records("tvm") == []


@pytest.mark.parametrize(
    ("key", "value"), [("\ud800", b""), (7, b""), ("k", "text"), ("k", bytes(64 * 2**20 + 1))]
)
def test_what_is_no_record_is_refused(costs, key, value):
    """Text where bytes belong, too many of them, a key that is no text."""
    with pytest.raises(ValueError, match="record"):
        costs.put_record("tvm", key, value)
    costs.put_record("tvm", "fine", b"value")
    assert costs.records() == CostDatabase(costs.path).records()
    assert [record.key for record in costs.records()] == ["fine"]


# --- which database -------------------------------------------------------------------------------


def test_the_settings_say_where(tmp_path):
    """One database a directory; with cache = false one in memory, without a file."""
    with fuseboard.settings(cache_dir=str(tmp_path)):
        costs = database(resolve())
        assert costs.path == tmp_path / "costs.sqlite3"
        assert database(resolve()) is costs
        with fuseboard.settings(cache=False):
            memory = database(resolve())
    assert memory.path is None
    memory.record(decision("in memory"))
    assert memory.find(decision("in memory").key) == decision("in memory")
    assert memory.nearest("region", {"graph": "in memory"}) == ("threads",)
    assert memory.forget([decision("in memory").key]) == 1
    assert memory.problem == ""
    assert list(tmp_path.iterdir()) == []


def test_it_needs_no_torch():
    """``fuseboard costs`` answers at once."""
    code = "import sys, fuseboard.profile.costs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


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
        "UPDATE records SET key = 'other'",
        "UPDATE records SET created = 1",
        "UPDATE records SET value = 'text'",
        "DROP TABLE records",
        "ALTER TABLE decisions DROP COLUMN settled",
        "PRAGMA user_version = 0",
        "PRAGMA application_id = 1",
    ],
)
def test_what_sqlite_cant_see_is_damage_too(costs, path, warnings, statement):
    """A changed row, by its checksum; a changed table. The file is set aside, once."""
    costs.record(decision("a"))
    costs.put_record("tvm", "k", b"bytes")
    changed(path, statement)
    assert costs.decisions() == [] or costs.records() == []
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
    """Decisions are found in this process, records too, and one warning says why."""
    for graph in "abc":
        costs.record(decision(graph))
        costs.put_record("tvm", graph, b"value")
    assert [costs.find(decision(graph).key) for graph in "abc"] == list(map(decision, "abc"))
    assert costs.get_record("tvm", "a") == b"value"
    assert costs.nearest("region", {"graph": "a", "threads": "4"}) == ("threads",)
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
        costs.put_record("tvm", "during", b"value")
        assert costs.problem
    costs.record(decision("after"))
    assert costs.problem == ""
    written = CostDatabase(path)
    assert {d.parts["graph"] for d in written.decisions()} == {"before", "during", "after"}
    assert written.get_record("tvm", "during") == b"value"


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
    further = ("ALTER TABLE records ADD COLUMN further TEXT",)
    monkeypatch.setattr(costs_file, "STEPS", (*costs_file.STEPS, further))
    assert costs.find(decision("before").key) == decision("before")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT further FROM records").fetchall() == []
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
from fuseboard.profile.costs import CostDatabase
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
from fuseboard.profile import costs_file
from fuseboard.profile.costs import CostDatabase
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
def test_a_read_only_directory():
    """What is there is found; what is chosen stays in memory."""
    done = read_only(log_left=False)
    first, second, third, fourth = done.splitlines()
    assert first == "True "
    assert second.startswith("True measured choices stay in memory: it can't be ")
    assert third == "True"
    assert fourth.startswith("None measured choices stay in memory: it is of an older version")


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of directories")
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

    from fuseboard.profile import costs as module

    row_of = module.row_of
    monkeypatch.setattr(module, "row_of", interrupted)
    with pytest.raises(error):
        costs.record(decision("a"), decision("b"))
    monkeypatch.undo()
    assert CostDatabase(path).decisions() == [decision("before")]
    assert costs.find(decision("a").key) == decision("a")
    costs.record(decision("c"))  # no lock is left, and what waited goes with it
    assert len(CostDatabase(path).decisions()) == 4


# --- threads and forks ----------------------------------------------------------------------------


def test_threads_share_a_database(costs, path):
    """Each finds what it recorded, at once."""
    lost = []

    def work(number: int) -> None:
        for step in range(10):
            own = decision(f"{number}/{step}")
            costs.record(own)
            if costs.find(own.key) != own:
                lost.append(own)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert costs.problem == ""
    assert len(CostDatabase(path).decisions()) == 80


FORKING = """
import os, sys, threading
from pathlib import Path
from fuseboard.profile.costs import CostDatabase
from tests.support.costs import decision
costs = CostDatabase(Path(sys.argv[1]), wait_s=60)
costs.record(decision("before"))
ended = False
def busy():
    step = 0
    while not ended:
        costs.record(decision(f"thread/{step}"))
        step += 1
thread = threading.Thread(target=busy)
thread.start()
children = []
for number in range(10):
    child = os.fork()
    if not child:
        for step in range(5):
            costs.record(decision(f"{number}/{step}"))
        os._exit(0 if costs.find(decision("before").key) and not costs.problem else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
ended = True
thread.join()
assert codes == [0] * 10, codes
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_it(path):
    """While another thread of its parent is writing: no lock is inherited, nothing is lost."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = {d.parts["graph"] for d in CostDatabase(path).decisions()}
    assert {f"{number}/{step}" for number in range(10) for step in range(5)} <= found


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_twenty_processes_of_which_five_are_killed(path):
    """Whatever one of them has recorded is there, whole, also of those that were killed."""
    draw = random.Random(0)
    killed = set(draw.sample(range(20), 5))
    running = []
    for number in range(20):
        # Those that will be killed go on until then.
        count = 100_000 if number in killed else 12
        command = [sys.executable, "-m", "tests.support.costs", str(path), f"{number}", f"{count}"]
        out = path.with_name(f"out-{number}")
        out.parent.mkdir(exist_ok=True)
        with out.open("w") as file:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file))
    for number in killed:
        # One that hasn't begun would prove nothing.
        while not path.with_name(f"out-{number}").read_text():
            time.sleep(0.01)
    for number in sorted(killed):
        time.sleep(draw.uniform(0, 0.3))
        running[number].send_signal(signal.SIGKILL)
    codes = {number: process.wait(120) for number, process in enumerate(running)}
    told = {number: path.with_name(f"out-{number}").read_text() for number in range(20)}
    for number, code in codes.items():
        assert code == (-signal.SIGKILL if number in killed else 0), told[number]

    costs = CostDatabase(path)
    found = {d.parts["graph"]: d for d in costs.decisions()}
    records = {record.key: record.value for record in costs.records("tuner")}
    for number, lines in told.items():
        graphs = [json.loads(line) for line in lines.splitlines()]
        assert len(graphs) == 12 or number in killed
        for graph in graphs:
            assert found[graph] == decision(graph, created=float(graph.partition("/")[2]))
            assert records[graph] == graph.replace("/", " ").encode() * 50
    assert costs.problem == ""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not any("corrupt" in name for name in files(path))


# --- exchange -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shared.json", "shared.sqlite3"])
def test_an_exported_file_is_imported(costs, tmp_path, name):
    """All of it, into an empty database; a second time there is nothing to do."""
    costs.record(decision("a"), decision("b", settled=False))
    costs.put_record("tvm", "k", b"\x00\xff")
    assert costs.export(tmp_path / name) == (2, 1)
    other = CostDatabase(tmp_path / "other.sqlite3")
    told = other.import_(tmp_path / name)
    assert dataclasses.astuple(told) == (3, 0, 0, 0)
    assert other.decisions() == costs.decisions()
    assert other.records() == costs.records()
    assert dataclasses.astuple(other.import_(tmp_path / name)) == (0, 0, 3, 0)
    assert {file.name for file in tmp_path.iterdir()} == {"cache", name, "other.sqlite3"}


def test_another_processs_database_is_imported(costs, path, tmp_path):
    """As it is, with what stands in its log only."""
    costs.record(decision("a"))
    with closing(sqlite3.connect(path)) as open_elsewhere:
        open_elsewhere.execute("SELECT * FROM decisions").fetchall()
        costs.record(decision("b"))
        other = CostDatabase(tmp_path / "other.sqlite3")
        assert other.import_(path).added == 2


def test_the_newest_of_each_wins(costs, tmp_path):
    """What is settled goes before what isn't, whatever its age."""
    costs.record(
        decision("older here", winner="mine", created=1.0),
        decision("newer here", winner="mine", created=3.0),
        decision("unsettled here", winner="mine", created=3.0, settled=False),
        decision("settled here", winner="mine", created=1.0),
    )
    theirs = CostDatabase(tmp_path / "theirs.sqlite3")
    theirs.record(
        decision("older here", winner="theirs", created=2.0),
        decision("newer here", winner="theirs", created=2.0),
        decision("unsettled here", winner="theirs", created=2.0),
        decision("settled here", winner="theirs", created=2.0, settled=False),
        decision("only there", winner="theirs", created=2.0),
    )
    theirs.export(tmp_path / "theirs.json")
    told = costs.import_(tmp_path / "theirs.json")
    assert dataclasses.astuple(told) == (1, 2, 2, 0)
    assert {d.parts["graph"]: d.winner for d in costs.decisions()} == {
        "older here": "theirs",
        "newer here": "mine",
        "unsettled here": "theirs",
        "settled here": "mine",
        "only there": "theirs",
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"PK\x03\x04", "neither a JSON nor an SQLite file"),
        (b"[]", "doesn't say \"format\": 'fuseboard costs'"),
        (b'{"format": "fuseboard costs", "version": 2}', "has version 2; this fuseboard knows 1"),
        (b'{"format": "fuseboard costs", "version": 1}', "decisions is no list"),
        (b"SQLite format 3\0" + bytes(200), "can't be read: file is not a database"),
        (None, "can't be read: .*No such file"),
    ],
)
def test_a_wrong_file_is_refused(costs, tmp_path, content, why):
    """The error says what is wrong with it, and nothing is imported; the file stays as it was."""
    costs.record(decision())
    wrong = tmp_path / "wrong"
    if content is not None:
        wrong.write_bytes(content)
    with pytest.raises(CostsError, match=why):
        costs.import_(wrong)
    assert costs.decisions() == [decision()]
    assert content is None or wrong.read_bytes() == content


def test_somebody_elses_database_is_refused(costs, tmp_path):
    """It isn't set aside: it isn't ours."""
    changed(tmp_path / "theirs.db", "CREATE TABLE theirs (a)")
    with pytest.raises(CostsError, match="is an SQLite database, but not one of fuseboard's"):
        costs.import_(tmp_path / "theirs.db")
    assert {file.name for file in tmp_path.iterdir()} == {"theirs.db"}


def test_its_own_file_is_refused(costs, path):
    """To write it over itself, or to merge it into itself."""
    costs.record(decision())
    for exchange in (costs.export, costs.import_):
        with pytest.raises(CostsError, match="is the database itself"):
            exchange(path)


def test_changed_entries_are_left_out(costs, tmp_path):
    """An entry whose key isn't that of its parts, or with a value of another type, is counted."""
    costs.record(*map(decision, "abcde"))
    costs.put_record("tvm", "k", b"value")
    costs.put_record("tvm", "l", b"value")
    costs.export(tmp_path / "shared.json")
    content = json.loads((tmp_path / "shared.json").read_text())
    entries = content["decisions"]
    entries[0]["parts"]["threads"] = "4"
    entries[1]["candidates"][0]["latency_us"] = "fast"
    entries[2]["further"] = 1
    entries[3]["created"] = float("inf")
    content["records"][0]["value"] = "no base64!"
    for field, wrong in (("created", "nan"), ("key", "\ud800"), ("namespace", 7)):
        content["records"].append({**content["records"][1], field: wrong})
    (tmp_path / "shared.json").write_text(json.dumps(content))
    told = CostDatabase(tmp_path / "other.sqlite3").import_(tmp_path / "shared.json")
    assert dataclasses.astuple(told) == (2, 0, 0, 8)


def test_an_export_that_cant_be_written(costs, tmp_path):
    """An error, and no half of a file."""
    costs.record(decision())
    for name in ("shared.json", "shared.sqlite3"):
        with pytest.raises(CostsError, match="can't be written"):
            costs.export(tmp_path / "missing" / name)
    assert {file.name for file in tmp_path.iterdir()} == {"cache"}
