"""Processes that come to the same artifact at the same time: one makes it."""

from __future__ import annotations

import threading

import pytest

from fuseboard.lower.artifact_files import Key
from fuseboard.lower.artifacts import Store

pytest.importorskip("fcntl", reason="needs locks of files")

KEY = Key({"backend": "inductor", "graph": "abc"})


def test_one_makes_it_and_the_other_finds_it(tmp_path):
    """The second one is told that it waited, and what the first one stored is there."""
    first, second = Store(tmp_path, 10**6), Store(tmp_path, 10**6)
    is_held, seen = threading.Event(), []

    def make() -> None:
        with first.alone(KEY, 60.0) as waited:
            seen.append(waited)
            is_held.set()
            contended.wait(60.0)
            first.put(KEY, b"code", {"guards": []})

    contended = threading.Event()
    thread = threading.Thread(target=make)
    thread.start()
    assert is_held.wait(60.0)
    threading.Timer(0.2, contended.set).start()
    with second.alone(KEY, 60.0) as waited:
        seen.append(waited)
        found = second.find(KEY, lambda artifact: True)
    thread.join()
    assert seen == [False, True]
    assert found is not None
    assert found.data == b"code"
    assert [row.kind for row in second.rows()] == ["artifact"]


def test_one_that_takes_too_long_is_not_waited_for(tmp_path):
    with Store(tmp_path, 10**6).alone(KEY, 60.0), Store(tmp_path, 10**6).alone(KEY, 0.1) as waited:
        assert waited


def test_a_directory_that_cannot_be_written_needs_no_lock(tmp_path):
    (tmp_path / "file").touch()
    with Store(tmp_path / "file" / "below", 10**6).alone(KEY, 0.1) as waited:
        assert not waited
