"""The order of rewrites: what plugins say, what the setting says, and circles."""

from __future__ import annotations

import pytest

import fuseboard
from fuseboard.config import resolve
from fuseboard.errors import RegistrationError, SettingsError
from tests.board_fakes import FakeEntryPoint, a_board, plugin
from tests.support.backends import compiled, observing
from tests.support.values import rnd


def a_pass(**order):
    """A plugin that rewrites nothing, with a place in the order."""

    def fuse(graph):
        return None

    return plugin(fuse=fuseboard.pass_order(**order)(fuse) if order else fuse)


def order_of(*, settings=None, **passes):
    """The board's own pass and these, in the order in which they are asked."""
    board = a_board(*(FakeEntryPoint(name, one) for name, one in passes.items()))
    return board.session(resolve(settings or {})).with_hook("fuseboard_fuse")


def test_without_wishes_it_is_that_of_the_plugins():
    assert order_of(a=a_pass(), b=a_pass()) == ("shared_heads", "simplify", "a", "b")


def test_a_plugin_says_before_or_after_which_it_is_asked():
    """Others stay where they are."""
    assert order_of(a=a_pass(), b=a_pass(before=["simplify"])) == (
        "shared_heads",
        "b",
        "simplify",
        "a",
    )
    assert order_of(a=a_pass(after=["c"]), b=a_pass(), c=a_pass()) == (
        "shared_heads",
        "simplify",
        "c",
        "a",
        "b",
    )


def test_a_neighbour_without_the_hook_is_no_error():
    assert order_of(a=a_pass(before=["eager"])) == ("shared_heads", "simplify", "a")


def test_the_setting_orders_what_it_names():
    settings = {"fuse_order": ["b", "simplify"]}
    assert order_of(a=a_pass(), b=a_pass(), settings=settings) == (
        "shared_heads",
        "b",
        "simplify",
        "a",
    )


def test_a_name_that_is_not_there():
    """The error has the place, and what is near."""
    with pytest.raises(RegistrationError, match=r"plugin 'a', before='simplfy'.*'simplify'") as own:
        order_of(a=a_pass(before=["simplfy"]))
    assert f"{__file__}:" in str(own.value)
    with pytest.raises(SettingsError, match=r"fuse_order = \['b'\], set in .*no plugin named 'b'"):
        order_of(a=a_pass(), settings={"fuse_order": ["b"]})


def test_a_circle_of_plugins_is_named_with_each_place():
    with pytest.raises(RegistrationError, match=r"a → b → a|b → a → b") as raised:
        order_of(a=a_pass(before=["b"]), b=a_pass(before=["a"]), c=a_pass())
    text = str(raised.value)
    assert text.count(f"{__file__}:") == 2
    assert "before='b' of fuseboard_fuse" in text
    assert "'c'" not in text


def test_a_circle_with_the_setting_names_it():
    with pytest.raises(SettingsError, match=r"a → b → a|b → a → b") as raised:
        order_of(a=a_pass(before=["b"]), b=a_pass(), settings={"fuse_order": ["b", "a"]})
    assert "fuse_order = ['b', 'a'], set in" in str(raised.value)


@pytest.mark.parametrize("names", ["simplify", [1]])
def test_names_are_a_sequence_of_strings(names):
    with pytest.raises(TypeError, match="not a sequence of plugins' names"):
        fuseboard.pass_order(before=names)


def test_a_circle_is_an_error_before_anything_is_compiled():
    asked = []

    @fuseboard.pass_order(before=["second"])
    def first(graph):
        asked.append("first")

    @fuseboard.pass_order(before=["first"])
    def second(graph):
        asked.append("second")

    with observing("first", fuse=first), observing("second", fuse=second):
        with pytest.raises(Exception, match="the order of fuseboard_fuse is a circle"):
            compiled(lambda x: x.sin())(rnd(2))
    assert not asked


def test_passes_are_asked_in_that_order():
    asked = []

    @fuseboard.pass_order(before=["first"])
    def second(graph, region):
        if region is None:
            asked.append("second")

    def first(graph, region):
        if region is None:
            asked.append("first")

    with observing("first", fuse=first), observing("second", fuse=second):
        compiled(lambda x: x.sin())(rnd(2))
    assert asked == ["second", "first"]
