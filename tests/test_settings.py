"""Settings: which source wins, where a value came from, and what a mistake reads like."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

import fuseboard
from fuseboard import config, hookspecs
from fuseboard.config import PRESETS, STAGES, Settings, describe, resolve
from fuseboard.errors import SettingsError


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    """No pyproject.toml and no fuseboard.toml but those that a test writes."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)


def message(**arguments) -> str:
    """The text of the SettingsError that ``resolve`` raises."""
    with pytest.raises(SettingsError) as caught:
        resolve(**arguments)
    return str(caught.value)


# --- sources ------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones(monkeypatch):
    """Without any source every value is the model's default, and says so."""
    for name in ("FUSEBOARD_POLICY", "FUSEBOARD_SETTLE"):  # what the other tests run under
        monkeypatch.delenv(name)
    settings = resolve()
    assert settings.model_dump() == Settings().model_dump()
    assert {settings.origin(name) for name in Settings.model_fields} == {"default"}


def test_each_source_wins_over_the_one_before(tmp_path, monkeypatch):
    """defaults < pyproject.toml < fuseboard.toml < environment < with < options."""
    assert resolve().max_weight_sets == 64
    (tmp_path / "pyproject.toml").write_text("[tool.fuseboard]\nmax_weight_sets = 1\n")
    assert resolve().max_weight_sets == 1
    assert resolve().origin("max_weight_sets") == f"{tmp_path}/pyproject.toml [tool.fuseboard]"
    (tmp_path / "fuseboard.toml").write_text("max_weight_sets = 2\n")
    assert resolve().max_weight_sets == 2
    assert resolve().origin("max_weight_sets") == f"{tmp_path}/fuseboard.toml"
    monkeypatch.setenv("FUSEBOARD_MAX_WEIGHT_SETS", "3")
    assert resolve().max_weight_sets == 3
    assert resolve().origin("max_weight_sets") == "environment FUSEBOARD_MAX_WEIGHT_SETS"
    with fuseboard.settings(max_weight_sets=4):
        assert resolve().max_weight_sets == 4
        assert resolve().origin("max_weight_sets") == "fuseboard.settings(...)"
        last = resolve({"max_weight_sets": 5})
        assert last.max_weight_sets == 5
        assert last.origin("max_weight_sets") == "torch.compile(options=)"
    assert resolve().max_weight_sets == 3


def test_tables_are_merged_key_by_key(tmp_path, monkeypatch):
    """A later source adds to ``stages`` and ``plugins``; it replaces the keys it names only."""
    (tmp_path / "fuseboard.toml").write_text(
        'stages.plan = "one"\nstages.verify = "one"\n'
        "[plugins.inductor]\nmax_autotune = false\nthreads = 1\n[plugins.tvm]\ntrials = 3\n"
    )
    monkeypatch.setenv("FUSEBOARD_STAGES__PLAN", "two")
    monkeypatch.setenv("FUSEBOARD_PLUGINS__INDUCTOR__THREADS", "2")
    settings = resolve({"plugins.inductor.max_autotune": True})
    assert settings.stages == {"plan": "two", "verify": "one"}
    assert settings.plugins == {
        "inductor": {"max_autotune": True, "threads": "2"},
        "tvm": {"trials": 3},
    }
    toml, env = f"{tmp_path}/fuseboard.toml", "environment FUSEBOARD_PLUGINS__INDUCTOR__THREADS"
    assert settings.origin("plugins.inductor.max_autotune") == "torch.compile(options=)"
    assert settings.origin("plugins.inductor.threads") == env
    assert settings.origin("plugins.tvm.trials") == toml
    assert settings.origin("stages.verify") == toml
    assert settings.origin("plugins.inductor") == f"{env}, torch.compile(options=)"


def test_the_nearest_file_above_counts(tmp_path, monkeypatch):
    """Files are looked for from the working directory upwards, and only the nearest is read."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "fuseboard.toml").write_text("hoist = false\nfuse_limit = 1\n")
    monkeypatch.chdir(below)
    assert resolve().hoist is False
    (tmp_path / "a" / "fuseboard.toml").write_text("fuse_limit = 2\n")
    assert (resolve().fuse_limit, resolve().hoist) == (2, True)


def test_an_edited_file_is_read_again_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    """The cache goes by modification time and size."""
    path = tmp_path / "fuseboard.toml"
    path.write_text("fuse_limit = 1\n")
    os.utime(path, ns=(1, 1))
    assert resolve().fuse_limit == 1
    monkeypatch.setattr(config.layers, "read_toml_file", lambda *a: pytest.fail("read again"))
    assert resolve().fuse_limit == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    path.write_text("fuse_limit = 2\n")
    os.utime(path, ns=(2, 2))
    assert resolve().fuse_limit == 2


def test_a_deleted_working_directory_has_no_files(tmp_path, monkeypatch):
    """``resolve`` works where the working directory is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resolve().hoist is True


@pytest.mark.parametrize("text", ['["mkldnn", "eager"]', "mkldnn,eager", " mkldnn , eager "])
def test_backends_in_the_environment_as_json_or_with_commas(text, monkeypatch):
    """Both forms of a list are read."""
    monkeypatch.setenv("FUSEBOARD_BACKENDS", text)
    assert resolve().backends == ("mkldnn", "eager")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("FUSE_SKIP", "3", "fuse_skip", (3,)),
        ("FUSE_SKIP", "3,7", "fuse_skip", (3, 7)),
        ("FUSE_LIMIT", "0", "fuse_limit", 0),
        ("HOIST", "off", "hoist", False),
        ("MEMORY_BUDGET", "0.5", "memory_budget", 0.5),
        ("BLOCK", "", "block", ()),
        ("PLUGINS", '{"x": {"y": [1]}}', "plugins", {"x": {"y": [1]}}),
        ("PLUGINS__X__Y", "[1, 2]", "plugins", {"x": {"y": [1, 2]}}),
        ("STAGES__PLAN", "a.b:c", "stages", {"plan": "a.b:c"}),
    ],
)
def test_text_in_the_environment_becomes_the_field_s_type(name, text, field, value, monkeypatch):
    """Numbers, booleans, lists and tables can all be set in the environment."""
    monkeypatch.setenv(f"FUSEBOARD_{name}", text)
    assert getattr(resolve(), field) == value


def test_one_variable_with_a_whole_table_is_the_origin_of_what_is_in_it(monkeypatch):
    """A JSON table and a variable for one key of it mix; each key knows its own."""
    monkeypatch.setenv("FUSEBOARD_PLUGINS", '{"x": {"y": 1, "z": 1}}')
    monkeypatch.setenv("FUSEBOARD_PLUGINS__X__Z", "2")
    settings = resolve()
    assert settings.plugins == {"x": {"y": 1, "z": "2"}}
    assert settings.origin("plugins.x.y") == "environment FUSEBOARD_PLUGINS"
    assert settings.origin("plugins.x.z") == "environment FUSEBOARD_PLUGINS__X__Z"


# --- mode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"mode": "max-autotune"}, {"options": {"mode": "max-autotune"}}])
def test_mode_applies_its_preset(given):
    """As torch's keyword or among the options, which torch allows alone."""
    settings = resolve(**given)
    assert settings.plugins["inductor"] == {"max_autotune": True}
    assert settings.origin("plugins.inductor.max_autotune") == "mode='max-autotune'"
    assert settings.mode == "max-autotune"
    assert settings.plugins["cudagraphs"]["enabled"] is True


def test_max_autotune_without_cudagraphs_leaves_them_off():
    """As torch's mode of that name."""
    settings = resolve(mode="max-autotune-no-cudagraphs")
    assert settings.plugins == {"inductor": {"max_autotune": True}}


def test_a_preset_is_below_the_options_and_above_what_came_before():
    """``mode=`` wins over a context, and a single option over ``mode=``."""
    with fuseboard.settings(plugins={"inductor": {"max_autotune": False}}):
        assert resolve(mode="max-autotune").plugins["inductor"]["max_autotune"] is True
        options = {"mode": "max-autotune", "plugins.inductor.max_autotune": False}
        assert resolve(options).plugins["inductor"]["max_autotune"] is False


def test_only_the_last_mode_counts():
    """A later mode takes the preset of an earlier one away."""
    with fuseboard.settings(mode="max-autotune"):
        assert resolve().plugins
        assert resolve(mode="default").plugins == {}


def test_reduce_overhead_turns_cuda_graphs_on():
    """As an option that a single one given beside it can turn off."""
    assert resolve(mode="reduce-overhead").plugins == {"cudagraphs": {"enabled": True}}
    options = {"mode": "reduce-overhead", "plugins.cudagraphs.enabled": False}
    assert resolve(options).plugins == {"cudagraphs": {"enabled": False}}


def test_an_unknown_mode_is_refused():
    """The message names the modes and where it was set."""
    text = message(mode="reduce-overheads")
    assert all(repr(mode) in text for mode in PRESETS)
    assert "Did you mean 'reduce-overhead'?" in text
    assert "torch.compile(mode=)" in text


@pytest.mark.parametrize("mode", PRESETS)
def test_every_preset_is_a_mode_and_holds_settings(mode):
    """The presets and the model agree."""
    assert resolve(mode=mode).mode == mode


# --- contexts and snapshots ---------------------------------------------------------------------


def test_contexts_nest_and_end():
    """The inner one wins; leaving restores, after an exception too."""
    with fuseboard.settings(fuse_limit=1, hoist=False):
        with fuseboard.settings(fuse_limit=2):
            assert (resolve().fuse_limit, resolve().hoist) == (2, False)
        with pytest.raises(KeyError), fuseboard.settings(fuse_limit=3):
            raise KeyError
        assert resolve().fuse_limit == 1
    assert resolve().fuse_limit is None


def test_the_context_is_a_decorator_that_checks_at_once():
    """A decorated function sees the settings at every call; a bad key fails at decoration."""

    @fuseboard.settings(fuse_limit=7)
    def limit():
        return resolve().fuse_limit

    assert (limit(), limit(), resolve().fuse_limit) == (7, 7, None)
    with pytest.raises(SettingsError, match="fuse_limitt"):
        fuseboard.settings(fuse_limitt=7)


def test_a_new_thread_starts_without_the_context():
    """Contexts follow contextvars, as the docstring says."""
    seen = []
    with fuseboard.settings(fuse_limit=7):
        thread = threading.Thread(target=lambda: seen.append(resolve().fuse_limit))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_snapshot_is_not_reached_by_later_changes():
    """Neither frozen fields nor the caller's own tables change it."""
    options = {"plugins": {"x": {"list": [1], "table": {"a": 1}}}, "stages": {"plan": "p"}}
    settings = resolve(options)
    options["plugins"]["x"]["list"].append(2)
    options["plugins"]["x"]["table"]["a"] = 2
    options["stages"]["plan"] = "q"
    assert settings.plugins == {"x": {"list": [1], "table": {"a": 1}}}
    assert settings.stages == {"plan": "p"}
    with pytest.raises(ValueError, match="frozen"):
        settings.hoist = False
    with fuseboard.settings(plugins={"x": {"a": [1]}}):
        resolve().plugins["x"]["a"].append(2)
        resolve().plugins["y"] = {}
        assert resolve().plugins == {"x": {"a": [1]}}


# --- mistakes -----------------------------------------------------------------------------------


def test_a_wrong_value_reads_well():
    """One line: key, value, what is allowed, the near one, where it was set, what to do."""
    assert message(options={"on_failure": "nxet"}) == (
        "on_failure = 'nxet': allowed: 'raise', 'next', 'eager'. Did you mean 'next'? "
        "Set in torch.compile(options=); correct it there."
    )


def test_an_unknown_key_reads_well():
    """It suggests the near one, lists all, and says how a plugin's option is written."""
    text = message(options={"on_fail": "next"})
    assert text.startswith(
        "on_fail = 'next': there is no setting 'on_fail'. Did you mean 'on_failure'? Settings are "
        "backends, block, "
    )
    assert text.endswith(
        "a plugin's option is written plugins.NAME.OPTION. Set in torch.compile(options=); "
        "correct it there."
    )


def test_all_mistakes_of_one_source_are_told_at_once():
    """One a line, so that they can be corrected in one go."""
    lines = message(options={"memory_budget": 2, "random": "fats", "hoist": "no"}).splitlines()
    assert [line.partition(" = ")[0] for line in lines] == ["random", "memory_budget", "hoist"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backends": []}, "backends = (): allowed: a list of at least one plugin name"),
        ({"backends": "mkldnn"}, "backends = 'mkldnn': allowed: a list"),
        ({"backends": ["a", "a"]}, "each named once"),
        ({"backends": [1]}, "backends = (1,): allowed: a list"),
        ({"policy": "best"}, "policy = 'best': allowed: 'measured', 'priority'."),
        ({"memory_budget": 1.5}, "memory_budget = 1.5: allowed: a number from 0 to 1"),
        ({"hook_limit_s": float("inf")}, "hook_limit_s = inf: allowed: a finite number"),
        ({"hook_limit_s": 0}, "hook_limit_s = 0: allowed: a finite number of seconds above 0"),
        ({"max_weight_sets": 0}, "max_weight_sets = 0: allowed: a whole number from 1"),
        ({"max_weight_sets": "64"}, "max_weight_sets = '64': allowed: a whole number"),
        ({"fuse_limit": True}, "fuse_limit = True: allowed: a whole number from 0"),
        ({"hoist": "yes"}, "hoist = 'yes': allowed: true or false"),
        ({"hoist.x": 1}, "there is no setting 'hoist.x'. Did you mean 'hoist'?"),
        ({"stages": {"plann": "x"}}, "no stage 'plann' to override. Did you mean 'plan'?"),
        ({"stages.plan": 3}, "stages.plan = 3: allowed: for each stage a plugin's name or a path"),
        ({"stages": "x"}, "stages = 'x': allowed: for each stage"),
        ({"plugins.inductor": 3}, "plugins.inductor = 3: allowed: a table of options"),
        ({"max_autotune": True}, "a plugin's option is written plugins.NAME.OPTION"),
        ({3: True}, "3 = True: there is no setting '3'."),
    ],
)
def test_wrong_keys_and_values_are_refused(options, expected):
    """Types are strict outside the environment: text isn't a number, true isn't 1."""
    assert expected in message(options=options)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("FUSEBOARD_BACKEND", "x", "Did you mean 'FUSEBOARD_BACKENDS'?"),
        ("FUSEBOARD_HOIST__X", "1", "Did you mean 'FUSEBOARD_HOIST'?"),
        ("FUSEBOARD_FUSE_LIMIT", "a", "fuse_limit = 'a': allowed: a whole number from 0. Set in"),
        ("FUSEBOARD_FUSE_SKIP", "[1,", "fuse_skip = '[1,': allowed: a list of whole numbers"),
        ("FUSEBOARD_PLUGINS", "{", "plugins = '{': allowed: a table of options"),
        ("FUSEBOARD_PLUGINS__X", "1", "plugins.x = '1': allowed: a table of options"),
        ("FUSEBOARD_STAGES__PLANN", "x", "there is no stage 'plann' to override."),
    ],
)
def test_mistakes_in_the_environment_name_the_variable(name, text, expected, monkeypatch):
    """Unknown variables are errors too."""
    monkeypatch.setenv(name, text)
    assert expected in message()
    assert f"environment {name}" in message()


def test_a_mistake_in_a_file_names_the_file_even_if_a_later_source_overrides_it(tmp_path):
    """Each source is checked on its own."""
    (tmp_path / "pyproject.toml").write_text("[tool.fuseboard]\nfuse_limit = -1\n")
    expected = f"Set in {tmp_path}/pyproject.toml [tool.fuseboard]; correct it there."
    assert message(options={"fuse_limit": 1}).endswith(expected)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hoist = true\nfuse_limit 3\nrandom = 'fast'\n", 2),
        ("hoist = [\n\n1,", 3),
        ("a = 1\na = 2", 2),
    ],
)
def test_broken_toml_names_file_and_line(text, line, tmp_path):
    """One error, before anything else is looked at."""
    (tmp_path / "fuseboard.toml").write_text(text)
    assert message().startswith(f"{tmp_path}/fuseboard.toml, line {line}: not valid TOML: ")


def test_a_broken_pyproject_of_others_is_not_ours_to_report(tmp_path):
    """Unless it speaks of fuseboard."""
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert resolve().hoist is True
    (tmp_path / "pyproject.toml").write_text("[tool.fuseboard]\nhoist = maybe\n")
    assert "pyproject.toml, line 2: not valid TOML" in message()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Such as one in another encoding."""
    (tmp_path / "fuseboard.toml").write_bytes(b"a = '\xff'")
    assert message().startswith(f"{tmp_path}/fuseboard.toml: can't read the settings in this file")


def test_tool_fuseboard_must_be_a_table(tmp_path):
    """A value there is refused by name."""
    (tmp_path / "pyproject.toml").write_text("[tool]\nfuseboard = 3\n")
    assert "tool.fuseboard = 3 must be a table: [tool.fuseboard]" in message()


def test_origin_of_an_unknown_key_is_an_error():
    """It suggests the near one."""
    with pytest.raises(SettingsError, match="Did you mean 'on_failure'"):
        resolve().origin("on_failur")


# --- the model ----------------------------------------------------------------------------------


def test_the_stages_are_hooks_of_which_one_answer_counts():
    """What one plugin decides for all, what makes a region's code, and samplers."""
    first = {
        name.removeprefix("fuseboard_")
        for name, function in vars(hookspecs).items()
        if name.startswith("fuseboard_") and function.fuseboard_spec["firstresult"]
    }
    assert set(STAGES) == first | {"fuse", "lower", "sampler"}


def test_describe_has_a_row_for_every_setting_and_every_key_of_a_table():
    """Each with a description and an origin."""
    rows = {row.key: row for row in describe(resolve({"plugins.x.y": 1, "plugins.x.z": None}))}
    assert {key.partition(".")[0] for key in rows} == set(Settings.model_fields)
    assert all(row.description.endswith(".") for row in rows.values())
    assert (rows["plugins.x.y"].value, rows["plugins.x.y"].origin) == (1, "torch.compile(options=)")
    assert rows["hoist"].origin == "default"


def test_the_document_lists_every_setting_with_its_default():
    """In the model's order, so that a new setting has its row."""
    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+?) \|", text, re.M)
    defaults = {
        name: "not set" if info.default is None else f"`{json.dumps(info.default)}`"
        for name, info in Settings.model_fields.items()
    }
    assert dict(rows) == defaults
    assert [name for name, _ in rows] == list(defaults)
    assert all(f"`{mode}`" in text for mode in PRESETS)
    assert all(f"`{stage}`" in text for stage in STAGES)
