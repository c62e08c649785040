"""Versions of engines: what a plugin says where its engine is missing, too old or too new."""

from __future__ import annotations

from importlib import metadata

import pytest

import fuseboard

INSTALL = "pip install 'fuseboard[engine]'"


@pytest.fixture
def installed(monkeypatch):
    """Distributions that are there, for one test."""
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    return there


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("1.22", True),
        ("1.22.0", True),
        ("1.22.1+cu126", True),
        ("1.23.0rc1", True),
        ("1.100", True),
        ("1.9", False),
        ("1.21.9", False),
        ("2", False),
        ("2.0.0", False),
        ("10.1", False),
    ],
)
def test_versions_are_compared_as_numbers(installed, version, supported):
    """Local parts and release candidates aside."""
    installed["engine"] = version
    engine = fuseboard.Engine("engine", at_least="1.22", below="2")
    assert engine.version == version
    assert (engine.problem == "") is supported
    if not supported:
        assert engine.problem == f"engine {version} isn't supported, only 1.22 or later, below 2"


def test_bounds_can_be_left_out(installed):
    """Any version, or one bound alone."""
    installed["engine"] = "0.1"
    assert fuseboard.Engine("engine").problem == ""
    assert fuseboard.Engine("engine", below="1").problem == ""
    problem = fuseboard.Engine("engine", at_least="1").problem
    assert problem == "engine 0.1 isn't supported, only 1 or later"


def test_any_of_several_distributions_will_do(installed):
    """The first that is installed counts."""
    engine = fuseboard.Engine("engine", distributions=("engine", "engine-gpu"))
    assert engine.problem == "engine isn't installed"
    installed["engine-gpu"] = "3.1"
    assert (engine.version, engine.problem) == ("3.1", "")


def test_a_reason_names_every_problem_and_ends_with_what_to_do(installed):
    """As ``BackendInfo.reason`` wants it."""
    engines = [fuseboard.Engine("one"), fuseboard.Engine("two", below="3")]
    installed["two"] = "3.0"
    reason = fuseboard.why_unavailable(*engines, install=INSTALL)
    assert reason == f"one isn't installed; two 3.0 isn't supported, only below 3: {INSTALL}"
    installed.update(one="1", two="2.9")
    assert fuseboard.why_unavailable(*engines, install=INSTALL) == ""
