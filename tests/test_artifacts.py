"""The store of artifacts: keys, files, room, and the command that shows and clears it."""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from fuseboard.ahead import file as package_file
from fuseboard.cli.main import app
from fuseboard.contracts import BackendInfo, Region
from fuseboard.errors import PackageError
from fuseboard.files import replacing
from fuseboard.lower.artifact_files import Key
from fuseboard.lower.artifacts import ARTIFACT, Store
from fuseboard.lower.cache_keys import NotCacheable, content_hash, region_key
from fuseboard.lower.machine import code_hash
from fuseboard.profile.costs.database import CostDatabase
from fuseboard.totals import differing, totals
from fuseboard.workshop.admission import _is_writable
from tests.support.costs import decision

PARTS = {
    "backend": "fake",
    "graph": "g",
    "static inputs": "()",
    "whole graph": "True",
    "random": "eager",
    "weights": "",
    "sizes": "",
    "fingerprint": "1",
    "code": "c",
    "composites": "c",
    "options": "",
    "torch": "2",
    "fuseboard": "0",
    "python": "3",
    "system": "Linux",
    "processor": "fast",
    "threads": "1",
    "numerics": "x",
    "gpu": "none",
}


def key(**changes: str) -> Key:
    return Key({**PARTS, **{name.replace("_", " "): value for name, value in changes.items()}})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "artifacts", 1_000_000)


def found(store, wanted: Key) -> bytes | None:
    artifact = store.find(wanted, lambda artifact: True)
    return None if artifact is None else artifact.data


def test_what_was_put_is_found(store):
    """The bytes, under an equal key; hits and misses are counted."""
    before = totals.read().lookups
    assert store.put(key(), b"\x00code\xff", {"guards": []}) == ""
    assert found(store, key()) == b"\x00code\xff"
    assert found(store, key(graph="h")) is None
    assert store.find(key(graph="h"), lambda artifact: True, again=True) is None
    after = totals.read().lookups
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (1, 1)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_each_part_counts(store, part):
    """A key that differs in one part is a miss, and that part is named where the graph is equal."""
    store.put(key(), b"code", {})
    other = Key({**PARTS, part: "another"})
    assert found(store, other) is None
    near = store.nearest(other)
    if part in ("backend", "graph"):
        assert near is None
    else:
        assert near is not None
        assert differing(other.parts, near) == (part,)


def test_the_nearest_entry_is_the_one_with_the_fewest_differences(store):
    """Of several entries of a graph."""
    store.put(key(threads="2", torch="1"), b"a", {})
    store.put(key(threads="2"), b"b", {})
    assert store.nearest(key()) == key(threads="2").parts


def test_entries_of_one_key_that_fit_differently(store):
    """Variants live side by side; the caller chooses by what the head says."""
    store.put(key(), b"small", {"bound": 4}, variant="small")
    store.put(key(), b"large", {"bound": 9}, variant="large")
    for bound, data in ((4, b"small"), (9, b"large")):
        artifact = store.find(key(), lambda a, bound=bound: a.head["bound"] == bound)
        assert artifact is not None
        assert artifact.data == data
    assert store.find(key(), lambda a: False) is None


def test_the_least_recently_used_go_first(tmp_path):
    """Reading counts as use."""
    store = Store(tmp_path, 3_500)
    for number in range(3):
        store.put(key(graph=str(number)), bytes(500), {})
        (path,) = tmp_path.rglob(f"{key(graph=str(number)).stem}*")
        os.utime(path, (number, number))
    assert found(store, key(graph="0")) is not None
    store.put(key(graph="3"), bytes(500), {})
    assert [found(store, key(graph=str(n))) is not None for n in range(4)] == [
        True,
        False,
        True,
        True,
    ]


def test_an_artifact_larger_than_all_room_isnt_stored(tmp_path):
    """The reason names the setting."""
    store = Store(tmp_path, 2_000_000)
    problem = store.put(key(), bytes(3_000_000), {})
    assert problem == "its artifact of 3 MB is more than cache_size_mb = 2"
    assert list(store.rows()) == []


def test_the_directory_is_its_owners_alone(store):
    """What lies there is run."""
    store.put(key(), b"code", {})
    assert store.directory.stat().st_mode & 0o077 == 0


def test_a_crash_is_remembered_under_its_key(store):
    """For this key only, until it is cleared."""
    store.put_tried(key(), "SIGSEGV")
    assert store.tried(key()) == "SIGSEGV"
    assert store.tried(key(fingerprint="2")) is None
    store.clear(lambda row: row.kind == "crash")
    assert store.tried(key()) is None
    store.put_tried(key(), "")
    assert store.tried(key()) == ""


# --- keys of regions ------------------------------------------------------------------------------


def region_of(function, *inputs, **changes) -> Region:
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return Region("r", "fake", "inference", graph, "signature", **changes)


def parts_of(region: Region) -> dict[str, str]:
    return dict(region_key(region, BackendInfo("fake"), (), []).parts)


def test_a_regions_key_holds_every_part():
    """Those that this file knows of, the GPU's aside, which only graphs on one have."""
    assert parts_of(region_of(torch.relu, torch.randn(3))).keys() == PARTS.keys() - {"gpu"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.randn(4, 3),), (torch.randn(3, 4).t(),)),
        ((torch.randn(4),), (torch.randn(4, dtype=torch.float64),)),
        (
            (torch.randn(4, dtype=torch.complex64),),
            (torch.randn(4, dtype=torch.complex64).conj(),),
        ),
    ],
    ids=["strides", "dtype", "conj"],
)
def test_inputs_of_another_kind_are_another_graph(one, other):
    """Strides, dtypes and lazy conjugation are metadata that code may rely on."""
    first, second = (parts_of(region_of(torch.exp, *inputs)) for inputs in (one, other))
    assert {n for n in first if first[n] != second[n]} == {"graph"}


def test_constants_count_by_content():
    """A tensor that the graph holds is part of the code."""

    def plus(value):
        held = torch.full((3,), value)
        return lambda x: x + held

    first, second = (parts_of(region_of(plus(v), torch.randn(3))) for v in (1.0, 2.0))
    assert first["graph"] != second["graph"]


def test_what_is_in_control_flow_counts():
    """torch doesn't say that its control flow may be cached; all of it is in its graphs."""

    def either(other):
        return lambda x: torch.cond(x.sum() > 0, torch.sin, other, (x,))

    first, second, same = (
        parts_of(region_of(either(other), torch.randn(3)))
        for other in (torch.cos, torch.tanh, torch.cos)
    )
    assert first["graph"] != second["graph"]
    assert first["graph"] == same["graph"]


def test_static_inputs_and_wholeness_are_parts():
    """Each by itself."""
    plain = parts_of(region_of(torch.relu, torch.randn(3)))
    for change, part in (
        ({"static_inputs": (0,)}, "static inputs"),
        ({"whole": True}, "whole graph"),
    ):
        changed = parts_of(region_of(torch.relu, torch.randn(3), **change))
        assert {n for n in plain if plain[n] != changed[n]} == {part}


def test_unknown_values_that_are_built_in_have_no_key():
    """No caching is better than another model's weights."""
    with pytest.raises(NotCacheable, match="builds in the values of weights"):
        region_key(region_of(torch.relu, torch.randn(3)), BackendInfo("fake"), (), None)


def test_functions_with_values_of_their_own_need_a_key():
    """A closure looks like any other of its kind; its ``cache_key`` tells them apart."""

    def scaling(factor):
        def scale(x):
            return x * factor

        return scale

    def key_with(function):
        region = region_of(torch.relu, torch.randn(3))
        (node,) = region.graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.relu.default
        )
        node.target = function
        return parts_of(region)

    with pytest.raises(NotCacheable, match="the function that relu calls"):
        key_with(scaling(2))
    keys = []
    for factor in (2, 3):
        scale = scaling(factor)
        scale.cache_key = str(factor)
        keys.append(key_with(scale))
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"functions"}
    assert key_with(content_hash).keys() == PARTS.keys() - {"gpu"}  # a module's function


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: t + 0 if t.dtype.is_complex else t.double(),
        lambda t: t.index_fill(0, torch.tensor(2), 5.0),
    ],
    ids=["strides", "dtype", "one element"],
)
def test_the_hash_of_a_tensor_is_of_all_of_it(change):
    """Contents, strides and dtype."""
    tensor = torch.randn(5, 3)
    assert content_hash(tensor) == content_hash(tensor.clone())
    assert content_hash(tensor) != content_hash(change(tensor))


def test_an_empty_tensor_has_a_hash():
    """There is no memory to read."""
    assert content_hash(torch.empty(0, 3)) != content_hash(torch.empty(0, 4))


def test_the_hash_of_code_follows_the_files(tmp_path):
    """Changed, added and renamed files are another plugin."""
    (tmp_path / "__init__.py").write_text("a = 1\n")
    hashes = [code_hash(tmp_path)]
    (tmp_path / "__init__.py").write_text("a = 2 \n")
    hashes.append(code_hash(tmp_path))
    (tmp_path / "more.py").write_text("")
    hashes.append(code_hash(tmp_path))
    (tmp_path / "more.py").rename(tmp_path / "less.py")
    hashes.append(code_hash(tmp_path))
    assert len(set(hashes)) == 4


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    store = Store(tmp_path / "artifacts", 1_000_000)
    store.put(key(), bytes(2_000), {})
    store.put(key(backend="other"), bytes(300_000), {})
    store.put_tried(key(graph="bad"), "SIGABRT")
    return store


def cache(*words: str) -> str:
    result = CliRunner().invoke(app, ["cache", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_lists_what_is_there(filled):
    """Backend, size, what a crash was, the sum, and where."""
    shown = cache("show")
    for text in ("other", "0.3 MB", "SIGABRT", "3 files", f"in {filled.directory}"):
        assert text in shown


def test_show_as_json(filled):
    """All parts of each key."""
    told = json.loads(cache("show", "--json"))
    assert told["directory"] == str(filled.directory)
    assert sorted(file["kind"] for file in told["files"]) == ["artifact", "artifact", "crash"]
    assert {file["key"]["threads"] for file in told["files"]} == {"1"}


def test_show_an_empty_cache(tmp_path, monkeypatch):
    """No directory yet: none is made."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "none"))
    assert cache("show").startswith("0 files")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], []),
        (["--crashes"], ["artifact", "artifact"]),
        (["--backend", "other"], ["artifact", "crash"]),
    ],
)
def test_clear_removes_what_is_asked_for(filled, words, left):
    """Everything, one backend's, or the records of crashes."""
    assert cache("clear", *words).startswith(f"removed {3 - len(left)} files")
    assert sorted(row.kind for row in filled.rows()) == left


def test_clear_of_a_backend_that_made_nothing(filled, tmp_path, monkeypatch):
    """It says whose files there are; a misspelt name would remove nothing in silence."""
    made_by = ", ".join(sorted({row.parts["backend"] for row in filled.rows()}))
    said = f"nothing of 'nosuch' in {filled.directory}: what is there was made by {made_by}"
    assert cache("clear", "--backend", "nosuch").split() == said.split()
    assert len(list(filled.rows())) == 3
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "none"))
    assert cache("clear", "--backend", "nosuch").rstrip().endswith(": no files")


def test_files_of_others_are_left_alone(filled):
    """Only what the store made is counted or removed."""
    foreign = next(filled.directory.rglob(f"*{ARTIFACT}")).parent / "notes.txt"
    foreign.write_text("mine")
    cache("clear")
    assert foreign.read_text() == "mine"


# --- who may write there --------------------------------------------------------------------------


def test_no_directory_can_be_written_by_others(tmp_path):
    """Nor one on the way that is made with it, whoever makes it first: what is there is run."""
    before = os.umask(0o002)
    try:
        made = [tmp_path / name / "home" / "artifacts" for name in "abc"]
        with Store(made[0], 10**6).alone(key(), 0):
            Store(made[0], 10**6).put(key(), b"code", {})
        assert _is_writable(Store(made[1], 10**6))
        Store(made[1], 10**6).put(key(), b"code", {})
        CostDatabase(made[2]).record(decision())
        found = [path for path in tmp_path.rglob("*") if path.is_dir()]
        assert len(found) == 12
        assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700}
    finally:
        os.umask(before)


def test_an_error_is_told_though_nothing_can_be_removed(tmp_path, monkeypatch):
    """On a read-only disk the removal of what was never made fails, too."""

    def refused(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for what in ("open", "unlink", "mkdir"):
        monkeypatch.setattr(Path, what, refused)
    monkeypatch.setattr(zipfile, "ZipFile", refused)
    with pytest.raises(PackageError, match=r"'/nowhere/m\.fbp' can't be written: Read-only"):
        package_file.write(Path("/nowhere/m.fbp"), {}, {})
    with pytest.raises(OSError, match="Read-only"), replacing(tmp_path / "pack.zip"):
        refused()
