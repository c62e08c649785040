"""A cache that several machines share: packs of it, addresses of it, and what isn't taken."""

from __future__ import annotations

import importlib
import os
import random
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fuseboard
from fuseboard import remote_cache, trust
from fuseboard.cli.main import app
from fuseboard.config import resolve
from fuseboard.lower.artifact_files import Key
from fuseboard.lower.artifacts import Store, store_at
from fuseboard.profile.costs.database import CostDatabase, remote_path
from fuseboard.profile.costs.exchange import Content
from fuseboard.profile.costs.file import content_of
from fuseboard.remote_cache import RemoteCache
from fuseboard.totals import Totals, totals
from fuseboard.workshop import process
from fuseboard.workshop.chosen import Chosen
from tests.support.backends import registered
from tests.support.beside import loaded, mlp, pinned
from tests.support.costs import decision

#: A backend that leaves artifacts, and counts what it compiles in whatever process.
PLUGIN = """
import fuseboard

@fuseboard.hookimpl
def fuseboard_backend():
    return fuseboard.BackendInfo(name="counted", compiles_quickly=True)

@fuseboard.hookimpl
def fuseboard_claim(graph, kind):
    return fuseboard.claim_nodes(graph, lambda node: None)

@fuseboard.hookimpl
def fuseboard_lower(region, inputs):
    with open({path!r}, "a") as file:
        print("lowered", file=file)
    return fuseboard.LoweredRegion(fuseboard.lower_eagerly(region).call, artifact=b"the code")

@fuseboard.hookimpl
def fuseboard_load(artifact, region, inputs):
    assert artifact == b"the code"
    return fuseboard.LoweredRegion(fuseboard.lower_eagerly(region).call)
"""


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch):
    monkeypatch.setattr(totals, "_counts", Totals()._counts)


@pytest.fixture
def lowered(tmp_path, monkeypatch):
    """Has the backend ``counted``; gives the file of what it compiled."""
    path = tmp_path / "lowered"
    (tmp_path / "counted.py").write_text(PLUGIN.format(path=str(path)))
    monkeypatch.syspath_prepend(tmp_path)
    with registered(importlib.import_module("counted"), "counted"):
        yield path
    sys.modules.pop("counted")


def cli(*words):
    done = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return " ".join(done.output.split())


@pytest.mark.usefixtures("as_users_run_it", "chosen")
@pytest.mark.parametrize("way", ["pack.zip", "pack", "remote"])
def test_a_second_machine_measures_and_compiles_nothing(
    way, lowered, own_desk, tmp_path, monkeypatch
):
    """It installs what the first one has decided, from what that has compiled."""
    model, x, place = mlp(), torch.randn(8, 64), tmp_path / way
    if way == "remote":
        monkeypatch.setenv("FUSEBOARD_CACHE_REMOTE", str(place))
        monkeypatch.setenv("FUSEBOARD_CACHE_REMOTE_WRITE", "true")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "first"))
    with torch.no_grad():
        pinned(model, "counted")(x)
        assert fuseboard.wait(120)
        if way != "remote":
            assert "1 decisions" not in cli("pack", place)
        compiled = lowered.read_text()
        before = fuseboard.status()
        assert (before.cache.hits, before.workshop.graphs_asked) == (1, 1)

        torch._dynamo.reset()
        monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "second"))
        monkeypatch.setenv("FUSEBOARD_CACHE_REMOTE_WRITE", "false")
        if way != "remote":
            assert "left out" not in cli("unpack", place)
        monkeypatch.setattr(process.Workshop, "ask", lambda *a: pytest.fail("it was asked"))
        monkeypatch.setattr(Chosen, "in_turn_with", lambda *a: pytest.fail("there is a trial"))
        run = pinned(model, "counted")
        run(x)
        assert fuseboard.wait(120)
        torch.testing.assert_close(run(x), model(x))
    assert loaded()
    assert lowered.read_text() == compiled
    after = fuseboard.status()
    assert after.cache.misses == before.cache.misses
    assert after.cache.hits == before.cache.hits + 2  # the program, and its region
    assert after.swaps == before.swaps + 1
    assert after.workshop.graphs_asked == 1


# --- what isn't taken -----------------------------------------------------------------------------

PARTS = {"backend": "b", "graph": "g", "torch": "2", "processor": "p avx2"}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Of a cache with one artifact and one decision."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    found = resolve()
    store_at(found).put(Key(PARTS), b"code", {"guards": []})
    CostDatabase(tmp_path / "cache" / "costs").record(decision())
    return found


def test_nothing_of_a_damaged_pack_is_taken(tmp_path, settings):
    """A hundred times one byte, anywhere: it is told, and the other file is taken."""
    from fuseboard.lower import packing

    cli("pack", tmp_path / "pack")
    files = sorted(path for path in (tmp_path / "pack").rglob("*.*") if path.is_file())
    assert [path.suffix for path in files] == [".artifact", ".json"]
    draw = random.Random(0)
    for number in range(100):
        file = files[number % 2]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        store = Store(tmp_path / f"artifacts{number}", 1_000_000)
        costs = CostDatabase(tmp_path / f"costs{number}")
        done = packing.unpack(packing.read_from(str(tmp_path / "pack"), False), store, costs, None)
        assert (done.artifacts, done.decisions) == (number % 2, 1 - number % 2)
        assert [Path(path).name for path in done.problems] == [file.name]
        file.write_bytes(whole)


def test_what_is_for_another_machine_is_left_out_and_told(tmp_path, settings, monkeypatch):
    """Unless all is wanted, as for an image that is built elsewhere."""
    monkeypatch.setattr("fuseboard.lower.packing.machine", lambda: {**PARTS, "processor": "other"})
    cli("pack", tmp_path / "pack.zip")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "second"))
    said = cli("unpack", tmp_path / "pack.zip")
    assert "0 artifacts and" in said
    assert "are for another processor" in said
    assert not list(store_at(resolve()).rows())
    assert "1 artifacts and" in cli("unpack", tmp_path / "pack.zip", "--any-machine")


@pytest.mark.parametrize("name", ["pack", "pack.zip"])
def test_a_pack_that_others_can_write_is_refused(name, tmp_path, settings, monkeypatch):
    """Artifacts are code; who knows where it comes from says so."""
    cli("pack", tmp_path / name)
    (tmp_path / name).chmod(0o777)
    second = tmp_path / "second"
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(second))
    assert "can be written by others" in cli("unpack", tmp_path / name)
    assert not list(store_at(resolve().model_copy(update={"cache_dir": str(second)})).rows())
    assert "1 artifacts" in cli("unpack", tmp_path / name, "--trust", "--any-machine")


def test_a_pack_that_isnt_there_is_no_empty_one(tmp_path, settings):
    """A wrong path is an error, also where it can't be written."""
    assert "No such file" in cli("unpack", tmp_path / "nowhere")
    assert "No such file" in cli("unpack", tmp_path / "nowhere.zip")
    (tmp_path / "file").touch()
    assert "can't be written" in cli("pack", tmp_path / "file" / "pack")


def remote(address, writes=False, trusts=False, limit_bytes=10**9):
    return RemoteCache(str(address), writes, trusts, limit_bytes)


def test_damaged_files_at_an_address_are_told_and_never_loaded(tmp_path, caplog):
    """The region is lowered, the graph measured, and the address serves others on."""
    there, key = remote(tmp_path / "there", writes=True), Key(PARTS)
    Store(tmp_path / "a", 10**6, there).put(key, b"code", {"guards": []})
    (file,) = (tmp_path / "there" / "artifacts").rglob("*.artifact")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    there.write(remote_path(decision().key), content_of(decision("another")))
    reader = remote(tmp_path / "there")
    assert Store(tmp_path / "b", 10**6, reader).find(key, lambda artifact: True) is None
    assert CostDatabase(tmp_path / "costs", remote=reader).find(decision().key) is None
    assert totals.read().lookups == {"damaged": 1, "misses": 1}
    told = [record.getMessage() for record in caplog.records]
    assert [("it is damaged" in text, "another decision's" in text) for text in told] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("address", ["http://localhost/cache", "/nowhere/cache", "nonsense://x"])
def test_an_address_that_fails_is_told_once_and_left_alone(address, tmp_path, caplog):
    """Compiling goes on without it; plain http is nobody's that one could trust."""
    there = remote(address)
    store = Store(tmp_path, 10**6, there)
    for _ in range(3):
        assert store.find(Key(PARTS), lambda artifact: True) is None
        assert there.read("costs/a") is None
    (record,) = caplog.records
    wanted = {"h": "doesn't prove who answers", "/": "No such file", "n": "nonsense"}
    assert wanted[address[0]] in record.getMessage()


def test_who_writes_makes_room(tmp_path, monkeypatch):
    """What was written first goes first; who only reads writes nothing."""
    monkeypatch.setattr(remote_cache, "_LOOKS_EVERY", 1)
    there = remote(tmp_path / "there", writes=True, limit_bytes=250)
    for number in range(4):
        there.write(f"artifacts/aa/{number}.artifact", bytes(100))
        file = tmp_path / "there" / "artifacts" / "aa" / f"{number}.artifact"
        os.utime(file, (number, number))
    assert there.names("artifacts/") == [f"artifacts/aa/{number}.artifact" for number in (2, 3)]
    remote(tmp_path / "there").write("artifacts/aa/5.artifact", b"")
    assert len(there.names("artifacts/")) == 2


def test_who_makes_room_leaves_what_others_keep_there(tmp_path, monkeypatch):
    """An address may hold other files, also below its folders, older than all of the cache's."""
    monkeypatch.setattr(remote_cache, "_LOOKS_EVERY", 1)
    there = tmp_path / "there"
    foreign = [there / "model.bin", there / "artifacts" / "model.bin", there / "x" / "a.artifact"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    for number in range(2):
        remote(there, writes=True, limit_bytes=150).write(f"costs/aa/{number}.json", bytes(100))
    assert all(path.exists() for path in foreign)
    assert len(remote(there).names("costs/")) == 1


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """Where writing it ends in between, what was there before is there."""
    there = remote(tmp_path, writes=True)
    there.write("costs/aa/a.json", b"before")

    def ends(path, content):
        with path.open("wb") as file:
            file.write(content[:2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", ends)
    there.write("costs/aa/a.json", b"after")
    assert "the disk is full" in there.problem
    assert [path.name for path in (tmp_path / "costs" / "aa").iterdir()] == ["a.json"]
    assert remote(tmp_path).read("costs/aa/a.json") == b"before"


@pytest.mark.parametrize("place", ["costs", "costs/aa", "costs/aa/a.json"])
def test_each_file_is_looked_at_and_the_way_to_it(place, tmp_path, caplog):
    """Below an address that is to be trusted; the other files are read on."""
    for folder in ("costs", "artifacts"):
        remote(tmp_path, writes=True).write(f"{folder}/aa/a.json", b"{}")
    (tmp_path / place).chmod(0o777)
    reader = remote(tmp_path)
    assert reader.read("costs/aa/a.json") is None
    assert "can be written by others" in caplog.text
    assert reader.read("artifacts/aa/a.json") == b"{}"
    assert remote(tmp_path, trusts=True).read("costs/aa/a.json") == b"{}"


def test_what_a_pack_holds_is_taken_whatever_the_umask(tmp_path, settings, monkeypatch):
    """``unpack`` takes what ``pack`` wrote, though files are a group's by default."""
    before = os.umask(0o002)
    try:
        for name in ("pack", "pack.zip"):
            cli("pack", tmp_path / name)
            monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / f"of {name}"))
            assert "1 artifacts and 1 decisions" in cli("unpack", tmp_path / name, "--any-machine")
            monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    finally:
        os.umask(before)


def test_a_link_of_another_user_isnt_followed(tmp_path, monkeypatch):
    """Its owner may turn it elsewhere, in a directory where others may not."""
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "link to it").symlink_to(tmp_path / "link")
    path = tmp_path / "link to it" / ".." / "link to it" / "file"
    path.touch()
    assert trust.why_not_trusted(path, path.stat()) == ""
    lstat = Path.lstat

    def of_another_user(self):
        found = lstat(self)
        uid = found.st_uid + (self == tmp_path / "link")
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(Path, "lstat", of_another_user)
    assert "link' of another user" in trust.why_not_trusted(path, path.stat())


def test_nobody_waits_for_a_machine_under_a_lock(tmp_path):
    """Neither what records nor what merges asks the address, nor has it the lock when it writes."""
    costs = CostDatabase(tmp_path / "costs")

    class There:
        rests = False

        def read(self, path, content=b""):
            assert not costs._lock._is_owned()

        write = read

    costs._remote = There()
    costs.record(decision(settled=False))
    costs.merge(Content(decisions=[decision("another", settled=False)]))
    costs.record(decision())
    assert len(costs.decisions()) == 2


def test_what_cant_be_kept_is_used(tmp_path):
    """On a disk that can't be written to a region is loaded, and no file counts as damaged."""
    key = Key(PARTS)
    Store(tmp_path / "a", 10**6, remote(tmp_path / "there", writes=True)).put(
        key, b"code", {"guards": []}
    )
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "artifacts", 10**6, remote(tmp_path / "there"))
    for _ in range(2):
        found = store.find(key, lambda artifact: True)
        assert found is not None
        assert found.data == b"code"
    assert totals.read().lookups == {"hits": 2}


def test_an_address_that_was_left_alone_is_asked_again(tmp_path):
    """What it didn't answer counts as unknown; what others add since is found."""
    there = remote(tmp_path / "there")
    costs = CostDatabase(tmp_path / "costs", remote=there)
    assert costs.find(decision().key) is None
    assert "No such file" in there.problem
    remote(tmp_path / "there", writes=True).write(
        remote_path(decision().key), content_of(decision())
    )
    there._again_at = 0.0  # the minute is over
    assert costs.find(decision().key) == decision()


def test_a_late_answer_is_waited_for_by_one_thread(tmp_path, monkeypatch, caplog):
    """Where requests hang no further one is begun, and the log has one line."""
    monkeypatch.setattr(remote_cache, "_LIMIT_S", 0.01)
    monkeypatch.setattr(remote_cache, "_PAUSE_S", 0.0)
    ends, begun = threading.Event(), []

    def hangs(self):
        begun.append(1)
        ends.wait(60)
        raise OSError("at last")

    monkeypatch.setattr(RemoteCache, "_files", hangs)
    there = remote(tmp_path)
    for number in range(3):
        assert there.read(f"costs/{number}") is None
    ends.set()
    there._late.join()
    assert len(begun) == len(caplog.records) == 1
    there.read("costs/3")
    there._late.join()
    assert len(begun) == 2


# --- why something isn't found --------------------------------------------------------------------

SCRIPT = """
import torch
def main():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),)
"""


@pytest.mark.usefixtures("as_users_run_it", "chosen")
def test_why_miss_names_what_differs(tmp_path, monkeypatch, own_desk):
    """In the key of the nearest entry, with both values; and that nothing is there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("FUSEBOARD_BACKENDS", '["mkldnn", "eager"]')
    said = cli("why-miss", f"{tmp_path / 'script.py'}:main")
    assert "not found for the whole call: there is nothing for the same graph" in said
    torch._dynamo.reset()  # that model is gone, and its graph with it
    model, args = runpy.run_path(str(tmp_path / "script.py"))["main"]()
    run = torch.compile(model, backend="fuseboard")  # which keeps the graph alive
    run(*args)
    assert fuseboard.wait(120)
    torch._dynamo.reset()
    monkeypatch.setattr(totals, "_counts", Totals()._counts)
    monkeypatch.setenv("FUSEBOARD_MARGIN", "0.07")
    said = cli("why-miss", f"{tmp_path / 'script.py'}:main")
    assert "not found for the whole call: what is there has another settings:" in said
    assert "0.07" in said
