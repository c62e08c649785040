"""The command ``fuseboard costs``: what it shows, forgets and passes on, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fuseboard.cli.costs import _time
from fuseboard.cli.main import app
from fuseboard.profile.costs.database import CandidateCost, CostDatabase
from tests.support.costs import decision

NEW = decision("new", created=time.time() - 3600)
OLD = decision("old", level="graph", winner="mkldnn", settled=False, created=time.time() - 864_000)


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A database with two decisions, which the settings lead to."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    costs = CostDatabase(tmp_path / "cache" / "costs")
    costs.record(NEW)
    costs.record(OLD)
    return costs


def costs(*words: str) -> str:
    result = CliRunner().invoke(app, ["costs", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["costs", *words])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


# --- looking --------------------------------------------------------------------------------------


def test_list_shows_winner_and_rival(filled):
    """Newest first: key, level and what; winner with its time, the next best, whether settled."""
    lines = costs("list").splitlines()
    first, second, third, fourth = (" ".join(line.split()) for line in lines[:4])
    assert first.startswith(f"{NEW.key[:12]} step ")
    assert first.endswith(" model.forward")
    assert second == "inductor 10.5 µs, next best mkldnn 12.0 µs, 3 tried"
    assert third.startswith(f"{OLD.key[:12]} graph ")
    assert fourth == "mkldnn 12.0 µs, next best inductor 10.5 µs, 3 tried, more to try"
    assert lines[-1] == f"2 decisions of {filled.path}"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], [NEW.key, OLD.key]),
        (["--level", "step"], [NEW.key]),
        (["--unsettled"], [OLD.key]),
        (["--level", "step", "--unsettled"], []),
    ],
)
def test_list_as_json(filled, words, keys):
    """Every field of what was asked for."""
    told = json.loads(costs("list", "--json", *words))
    assert told["path"] == str(filled.path)
    assert [one["key"] for one in told["decisions"]] == keys
    if NEW.key in keys:
        assert told["decisions"][0] == json.loads(json.dumps(dataclasses.asdict(NEW)))


def test_list_where_the_output_has_no_micro_sign(filled):
    """A character that the encoding lacks is a question mark, not an error."""
    result = CliRunner(charset="ascii").invoke(app, ["costs", "list"])
    assert result.exit_code == 0, result.exception
    assert "10.5 ?s" in result.stdout


def test_list_of_a_level_that_is_none(filled):
    """The levels are told."""
    assert "'grph': allowed: graph, step, capture, call" in refused("list", "--level", "grph")


def test_list_without_a_database(tmp_path, monkeypatch):
    """None is made for it."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "none"))
    assert costs("list") == "0 decisions: no file yet\n"
    assert not (tmp_path / "none").exists()


def test_show_tells_all_of_one(filled):
    """Every candidate with time, interval, compile time, peak or problem, and the key's parts."""
    shown = costs("show", NEW.key[:10])
    for text in (
        "model.forward: inductor",
        "10.0 µs to 11.0 µs",
        "2.0 s",
        "0.0 MB",
        "failed verification: output 0",
        "threads",
        f"key {NEW.key}",
        "settled",
    ):
        assert text in shown
    assert json.loads(costs("show", NEW.key, "--json"))["parts"] == {"graph": "new", "threads": "2"}


def test_a_title_is_shown_as_it_is(filled):
    """Brackets in it are no markup."""
    odd = dataclasses.replace(decision("odd"), title="layers[0] [red]")
    filled.record(odd)
    assert "layers[0] [red]" in costs("list")
    assert "layers[0] [red]: inductor" in costs("show", odd.key)


def test_a_decision_without_times_is_shown(filled):
    """A winner that nobody timed: it was the only one."""
    only = dataclasses.replace(
        decision("only", winner="eager"), candidates=(CandidateCost("eager"),), title=""
    )
    filled.record(only)
    lines = costs("list").splitlines()
    place = next(i for i, line in enumerate(lines) if only.key[:12] in line)
    assert lines[place + 1].strip() == "eager, 1 tried"
    assert f"{only.key}: eager" in costs("show", only.key)


def test_list_shows_files_without_their_folders(filled):
    """Which would take the table's width; the whole title is in ``show``."""
    title = "inference 0/0 Net.forward (/home/ann/models/net.py:10)"
    one = dataclasses.replace(decision("long"), title=title)
    filled.record(one)
    row = next(line for line in costs("list").splitlines() if one.key[:12] in line)
    assert "inference 0/0 Net.forward (net.py:10)" in row
    assert title in costs("show", one.key)


def test_list_has_the_users_words_for_what_follows_a_graph_break(filled):
    """Dynamo names such a function by itself."""
    title = "inference 1/0 step.<locals>.torch_dynamo_resume_in_step_at_52 (net.py:52)"
    filled.record(dataclasses.replace(decision("resumed"), title=title))
    assert "inference 1/0 step.step, resumed at line 52 (net.py:52)" in costs("list")


def test_a_key_must_be_one(filled):
    """None that begins so, or several: neither is guessed."""
    assert "no key begins with 'xyz'" in refused("show", "xyz")
    assert "no key begins with ''" in refused("show", "")
    for number in range(40):  # two of them begin with the same digit
        filled.record(decision(f"{number}"))
    assert "several keys begin with" in refused("forget", NEW.key[:1])


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.0, "0.00 µs"),
        (3.14159, "3.14 µs"),
        (100.0, "100 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (12_345.0, "12.3 ms"),
        (2_000_000.0, "2.00 s"),
    ],
)
def test_times_have_three_digits(us, text):
    """In the unit that suits them."""
    assert _time(us) == text


# --- removing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--all"], []),
        ([NEW.key[:12]], [OLD]),
        ([NEW.key, NEW.key], [OLD]),
        (["--winner", "mkldnn"], [NEW]),
        (["--older-than", "5"], [NEW]),
        (["--older-than", "0"], []),
        ([NEW.key[:12], "--winner", "mkldnn"], [NEW, OLD]),
    ],
)
def test_forget_removes_what_is_asked_for(filled, words, left):
    """All, by key, by winner, by age; several conditions at once."""
    assert costs("forget", *words) == f"forgot {2 - len(left)} decisions\n"
    assert filled.decisions() == left


def test_forget_needs_to_be_told_what(filled):
    """Nothing by mistake."""
    assert "say what" in refused("forget")
    assert "--all leaves no room" in refused("forget", "--all", "--winner", "mkldnn")
    assert filled.decisions() == [NEW, OLD]


# --- passing on -----------------------------------------------------------------------------------


def test_a_cluster_shares_a_file(filled, tmp_path, monkeypatch):
    """One machine exports, another one imports, and then has the same."""
    shared = tmp_path / "shared.json"
    assert costs("export", str(shared)) == f"wrote 2 decisions to {shared}\n"
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "elsewhere"))
    told = [
        f"{shared}: 2 added, 0 replaced, 0 skipped",
        f"{shared}: 0 added, 0 replaced, 2 skipped",
    ]
    assert costs("import", str(shared), str(shared)).splitlines() == told
    there = CostDatabase(tmp_path / "elsewhere" / "costs")
    assert there.decisions() == [NEW, OLD]


def test_export_replaces_no_file_by_mistake(filled, tmp_path):
    """Only when told to."""
    shared = tmp_path / "shared.json"
    shared.write_text("mine")
    assert "is there already; --force replaces it" in refused("export", str(shared))
    assert shared.read_text() == "mine"
    costs("export", "--force", str(shared))
    assert json.loads(shared.read_text())["format"] == "fuseboard costs"


def test_export_where_there_is_no_directory(filled, tmp_path):
    """The error names the file that was asked for, not the one that was to become it."""
    path = tmp_path / "none" / "shared.json"
    told = f"{path} can't be written: No such file or directory"
    assert refused("export", str(path)).endswith(told)


def test_a_wrong_file_is_refused(filled, tmp_path):
    """The error says what it is not; damaged entries of a right one are counted."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert "neither a database nor what `fuseboard costs export` wrote" in refused(
        "import", str(wrong)
    )
    wrong.write_text('{"format": "fuseboard costs", "version": 1, "decisions": [{}]}')
    assert costs("import", str(wrong)).endswith(
        "0 added, 0 replaced, 0 skipped, 1 damaged and left out\n"
    )
    assert filled.decisions() == [NEW, OLD]


# --- refused --------------------------------------------------------------------------------------


def test_without_a_cache_there_is_no_database(filled, monkeypatch):
    """The error says where the setting was set."""
    monkeypatch.setenv("FUSEBOARD_CACHE", "0")
    assert "cache = false, set in environment FUSEBOARD_CACHE: " in refused("list")


def test_a_database_that_cant_be_read(filled, caplog):
    """The command fails, and says why; nothing is shown as if there was nothing."""
    from fuseboard.profile.costs import database as module

    shutil.rmtree(filled.path)
    filled.path.touch()
    module._opened.clear()  # each command is a process of its own
    for words in (["list"], ["show", NEW.key], ["forget", "--all"], ["export", "x.json"]):
        assert "it can't be read: Not a directory" in refused(*words) + caplog.text


def test_it_needs_no_torch(filled):
    """``fuseboard costs list`` answers at once."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fuseboard.cli.main import app\n"
        "result = CliRunner().invoke(app, ['costs', 'list'])\n"
        "sys.exit(result.exit_code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
