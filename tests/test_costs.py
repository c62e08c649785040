"""The cost database: what it keeps, for whom, and how files of it are passed on."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fuseboard
from fuseboard.config import resolve
from fuseboard.errors import CostsError
from fuseboard.profile.costs.database import CandidateCost, CostDatabase, database, decision_key
from fuseboard.totals import differing
from tests.support.costs import decision, files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "costs"


@pytest.fixture
def costs(path):
    return CostDatabase(path)


# --- decisions ------------------------------------------------------------------------------------


def test_another_database_finds_what_was_recorded(costs, path):
    """Every field, through its file; an unknown key is None."""
    costs.record(decision("g"))
    costs.record(decision("h", level="graph", winner="whole:inductor"))
    other = CostDatabase(path)
    assert other.find(decision("g").key) == decision("g")
    assert other.find(decision("h", level="graph").key).winner == "whole:inductor"
    assert other.find(decision("i").key) is None
    assert other.problem == ""


def test_the_key_is_of_level_and_parts():
    """It is the same in every process and version: this one was written down."""
    assert decision_key("step", {"threads": "2", "graph": "g"}) == (
        "e8c80f2b045d74881dd2e68b5d2ea80f9ba823ca2cea2e14"
    )
    keys = {
        decision_key("step", {"graph": "g"}),
        decision_key("graph", {"graph": "g"}),
        decision_key("step", {"graph": "h"}),
        decision_key("step", {"graph": "g", "threads": ""}),
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
    for one in (
        decision(threads="8", torch="2.12"),
        decision(threads="2", torch="2.12"),
        decision("other", torch="2.13"),
        decision(level="graph", torch="2.13"),
    ):
        costs.record(one)
    asked = {"graph": "g", "threads": "2", "torch": "2.13"}
    assert differing(asked, costs.nearest("step", asked)) == ("torch",)
    asked = {"graph": "g", "threads": "4"}
    assert differing(asked, costs.nearest("step", asked)) == ("threads", "torch")
    assert costs.nearest("step", {"graph": "unknown"}) is None


def test_they_are_listed_newest_first_and_forgotten_by_key(costs):
    """What is forgotten is counted, and its file is gone."""
    for at, graph in enumerate("abc"):
        costs.record(decision(graph, created=float(at)))
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
        {"candidates": (CandidateCost("inductor", exact=(3,)),)},
        {"candidates": (CandidateCost("inductor", exact="addmm_3"),)},
    ],
)
def test_what_could_not_be_read_back_is_not_recorded(costs, changes):
    """It is the caller's mistake, and does no harm to later decisions."""
    with pytest.raises(ValueError, match="can't be kept"):
        costs.record(dataclasses.replace(decision("b"), **changes))
    costs.record(decision("c"))
    assert costs.decisions() == [decision("c")]


# --- which database -------------------------------------------------------------------------------


def test_the_settings_say_where(tmp_path):
    """One database a directory; with cache = false one in memory, without a file."""
    with fuseboard.settings(cache_dir=str(tmp_path)):
        costs = database(resolve())
        assert costs.path == tmp_path / "costs"
        assert database(resolve()) is costs
        with fuseboard.settings(cache=False):
            memory = database(resolve())
    assert memory.path is None
    memory.record(decision("in memory"))
    assert memory.find(decision("in memory").key) == decision("in memory")
    assert memory.nearest("step", {"graph": "in memory"})["threads"]
    assert memory.forget([decision("in memory").key]) == 1
    assert memory.problem == ""
    assert list(tmp_path.iterdir()) == []


def test_it_needs_no_torch():
    """``fuseboard costs`` answers at once."""
    code = "import sys, fuseboard.profile.costs.database; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- exchange -------------------------------------------------------------------------------------


def test_an_exported_file_is_imported(costs, tmp_path):
    """All of it, into an empty database; a second time there is nothing to do."""
    name = "shared.json"
    costs.record(decision("a"))
    costs.record(decision("b", settled=False))
    assert costs.export(tmp_path / name) == 2
    other = CostDatabase(tmp_path / "other")
    told = other.import_(tmp_path / name)
    assert dataclasses.astuple(told) == (2, 0, 0, 0)
    assert other.decisions() == costs.decisions()
    assert dataclasses.astuple(other.import_(tmp_path / name)) == (0, 0, 2, 0)
    assert {file.name for file in tmp_path.iterdir()} == {"cache", name, "other"}


def test_another_machines_database_is_imported(costs, path, tmp_path):
    """As it is; what is damaged in it is left out, and stays there."""
    for graph in "ab":
        costs.record(decision(graph))
    (file,) = path.rglob(f"{decision('a').key}*")
    file.write_bytes(b"")
    other = CostDatabase(tmp_path / "other")
    assert dataclasses.astuple(other.import_(path)) == (1, 0, 0, 1)
    assert other.decisions() == [decision("b")]
    assert file.exists()


def test_the_newest_of_each_wins(costs, tmp_path):
    """What is settled goes before what isn't, whatever its age."""
    for mine in (
        decision("older here", winner="mine", created=1.0),
        decision("newer here", winner="mine", created=3.0),
        decision("unsettled here", winner="mine", created=3.0, settled=False),
        decision("settled here", winner="mine", created=1.0),
    ):
        costs.record(mine)
    theirs = CostDatabase(tmp_path / "theirs")
    for its in (
        decision("older here", winner="theirs", created=2.0),
        decision("newer here", winner="theirs", created=2.0),
        decision("unsettled here", winner="theirs", created=2.0),
        decision("settled here", winner="theirs", created=2.0, settled=False),
        decision("only there", winner="theirs", created=2.0),
    ):
        theirs.record(its)
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
        (b"PK\x03\x04", "neither a database nor"),
        (b"[]", "doesn't say \"format\": 'fuseboard costs'"),
        (b'{"format": "fuseboard costs", "version": 2}', "has version 2; this fuseboard knows 1"),
        (b'{"format": "fuseboard costs", "version": 1}', "decisions is no list"),
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


def test_a_directory_without_decisions_is_refused(costs, tmp_path):
    """Nothing in it is changed."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a.json").write_text("{}")
    with pytest.raises(CostsError, match="is a directory, but not one of decisions"):
        costs.import_(tmp_path / "theirs")
    assert files(tmp_path / "theirs") == {"a.json"}


def test_its_own_directory_is_refused(costs, path):
    """To merge it into itself."""
    costs.record(decision())
    with pytest.raises(CostsError, match="is the database itself"):
        costs.import_(path)


def test_changed_entries_are_left_out(costs, tmp_path):
    """An entry whose key isn't that of its parts, or with a value of another type, is counted."""
    for graph in "abcde":
        costs.record(decision(graph))
    costs.export(tmp_path / "shared.json")
    content = json.loads((tmp_path / "shared.json").read_text())
    entries = content["decisions"]
    entries[0]["parts"]["threads"] = "4"
    entries[1]["candidates"][0]["latency_us"] = "fast"
    entries[2]["further"] = 1
    entries[3]["created"] = float("inf")
    (tmp_path / "shared.json").write_text(json.dumps(content))
    told = CostDatabase(tmp_path / "other").import_(tmp_path / "shared.json")
    assert dataclasses.astuple(told) == (1, 0, 0, 4)


def test_an_export_that_cant_be_written(costs, tmp_path):
    """An error, and no half of a file."""
    costs.record(decision())
    with pytest.raises(CostsError, match="can't be written"):
        costs.export(tmp_path / "missing" / "shared.json")
    assert {file.name for file in tmp_path.iterdir()} == {"cache"}
