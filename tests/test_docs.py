"""The documents say what is there: hooks, commands, settings, links, and code that runs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import runpy
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from typer.main import get_command

import fuseboard
from fuseboard import contracts, errors, hookspecs
from fuseboard.config import RawSource, check
from fuseboard.config.model import STAGES
from fuseboard.partition import repeats
from fuseboard.profile.choose import measure
from fuseboard.profile.judge import divergence, reference, rewrites, same_results, values
from fuseboard.profile.observe import sampling
from fuseboard.profile.observe import session as sampler
from fuseboard.ranks import agreement, job
from fuseboard.report import data
from fuseboard.report.data import ledger
from fuseboard.testing import compare
from tests.support.backends import all_trips, last_graph, plugged

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "plugins").glob("*/README.md")),
        *sorted((ROOT / "contrib").glob("*/README.md")),
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "plugin_template" / "README.md",
    ]
}
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("fuseboard_"))
#: Numbers that the documents write out.
WORDS = {2: "twice", 3: "three", 5: "five", 10: "ten"}
IMPLEMENTED = re.compile(
    r"^\s*@(?:fuseboard\.)?hookimpl(?:\(specname=\"|\b.*\n\s*def )(fuseboard_\w+)", re.M
)


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a document in one language, those with a title among them."""
    fence = rf"^```{language}(?: title=.*)?\n(.*?)^```"
    return re.findall(fence, DOCUMENTS[document], re.M | re.S)


def sources(*roots: str) -> dict[Path, str]:
    return {path: path.read_text() for root in roots for path in (ROOT / root).rglob("*.py")}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("document", ["docs/design.md", "docs/plugins.md"])
def test_every_hook_is_documented(hook, document):
    """Both the design and the guide for authors name the hook."""
    assert f"`{hook}`" in DOCUMENTS[document]


@pytest.mark.parametrize("document", ["docs/design.md", "docs/plugins.md", "CHANGELOG.md"])
def test_no_document_names_a_hook_that_is_gone(document):
    """What looks like a hook in a document is one."""
    named = set(re.findall(r"`(fuseboard_[a-z_]+)`", DOCUMENTS[document]))
    packages = {path.name for path in (ROOT / "plugins").glob("*/fuseboard_*")}
    assert named - packages <= set(HOOKS)


def test_each_stage_has_a_page_with_its_hooks():
    """A section of the hooks' module is a page of ``docs/stages``: its hooks, in order."""
    sections: dict[str, list[str]] = {}
    module = (ROOT / "core/fuseboard/hookspecs.py").read_text()
    for section, hook in re.findall(r"^# --- (\w+)|^def (fuseboard_\w+)", module, re.M):
        if section:
            sections[section] = []
        else:
            sections[list(sections)[-1]].append(hook)
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/stages").glob("*.md")}
    shown = {
        name: re.findall(r"^::: fuseboard\.hookspecs\.(\w+)", text, re.M)
        for name, text in pages.items()
    }
    assert shown == sections


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "fuseboard_on_failure"])
def test_every_hook_is_used_by_what_ships(hook):
    """A first-party plugin or a default implements it: no hook exists for tests alone.

    ``fuseboard_on_failure`` is the exception: its default is the setting ``on_failure``.
    """
    code = sources("core", "plugins")
    assert any(hook in IMPLEMENTED.findall(text) for text in code.values())


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_tested_by_name(hook):
    """Some test implements the hook or calls it."""
    code = sources("tests")
    del code[Path(__file__)]
    assert any(re.search(rf"\b{hook}\b", text) for text in code.values())


def test_make_targets_of_the_documents_exist():
    """Each ``make TARGET`` that a reader is told to run is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for name, text in DOCUMENTS.items():
        told = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.M))
        assert told <= targets, name
    readme = set(re.findall(r"^\$ make ([a-z-]+)", DOCUMENTS["README.md"], re.M))
    assert {"demo", "test"} <= readme


def test_commands_of_the_documents_exist():
    """Each ``fuseboard COMMAND`` that a reader is told to run is a command, and each is told of."""
    from fuseboard.cli.main import app

    commands = set(get_command(app).commands)
    told: set[str] = set()
    for text in DOCUMENTS.values():
        told |= set(re.findall(r"(?:^\$ |`)fuseboard ([a-z-]+)", text, re.M))
    assert told == commands


#: Document → sentences of it that have numbers, with the code's.
NUMBERS = {
    "docs/verification.md": [
        f"Each element is within **{values.WORST_FACTOR:g} E** of float64, plus a floor: "
        f"**{values.FLOOR_UNITS:g}** units in the last place of the element and "
        f"**{values.LEVEL_UNITS:g}** of the output's root mean square (half types: "
        f"{values.FLOOR_UNITS_HALF:g} and {values.LEVEL_UNITS_HALF:g})",
        f"eager has {values.MANY_EXACT} or more elements and all of them exactly",
        f"the floor is {values.EXACT_UNITS:g} units of the element",
        f"is within **{values.RMSE_FACTOR:g} times** eager's ({values.RMSE_FACTOR_WIDE:g} times "
        f"for half types and under {values.FEW_ELEMENTS} elements), plus "
        f"**{values.RMSE_UNITS:g}** units of the output's root mean square "
        f"({values.RMSE_UNITS_HALF:g} for half types)",
        f"Under {values.TOO_FEW_ELEMENTS} elements it is left out",
        f"eager is run {WORDS[reference.DISTURBED_RUNS]} more times",
        f"**{values.DISTURBED_FACTOR:g} D** is allowed as well, or "
        f"{values.DISTURBED_FACTOR:g} times the largest *relative* distance",
        f"one in {values.MISMATCH_SHARE:,}",
        f"{divergence.MAX_TRIES} parts or {divergence.BUDGET_S:g} seconds at most",
        f"taken to be {same_results._ROUNDINGS:g} units in the last place of the largest element, "
        f"so {WORDS[values.WORST_FACTOR]} times that is allowed",
        f"up to {WORDS[same_results._DISTURBED_RUNS]} times with roundings disturbed",
        f"less free memory than {WORDS[1 / rewrites.MEMORY_SHARE]} what both take",
    ],
    "docs/choice.md": [
        f"(longer, up to {WORDS[measure.PATIENCE]} times, where each has had less than "
        f"{WORDS[measure.FEW_ROUNDS]} turns)",
    ],
    "docs/ranks.md": [
        f"doesn't come within {agreement.GRACE_S:g} s",
        f"another one has waited for it for {job.WAIT_S / 3600:g} h",
    ],
    "docs/design.md": [
        f"where at least {repeats.MIN_SAVED_NODES} nodes are saved and the cuts are estimated to "
        f"cost less than {100 * repeats.MAX_SLOWDOWN:g}% of a call",
        f"the report remembers the last {data.REMEMBERED_GRAPHS} graphs",
    ],
    "docs/plugins.md": [
        f"each has {WORDS[sampler.METHOD_LIMIT_S]} seconds",
        f"in outputs of under {compare.FEW_ELEMENTS} elements",
    ],
    "docs/profiling.md": [
        f"from {sampling.FASTEST_S:g} to {sampling.SLOWEST_S:g}:",
        f"{sampler.START_TRIES * sampler.POLL_S:g} s at most",
    ],
}


@pytest.mark.parametrize("document", sorted(NUMBERS))
def test_numbers_of_the_documents_are_those_of_the_code(document):
    """Limits that a document tells are the constants that hold."""
    text = " ".join(DOCUMENTS[document].split())
    for sentence in NUMBERS[document]:
        assert sentence in text, sentence


def test_events_are_those_that_the_contract_lists():
    """``Event`` names each in its docstring; the type of ``name`` holds those who notify."""
    (listed,) = re.findall(r":ivar name: (.*?):ivar", contracts.Event.__doc__ or "", re.S)
    assert re.findall(r"``(\w+)``", listed) == list(get_args(contracts.EventName))
    assert get_type_hints(contracts.Event)["name"] == contracts.EventName


def test_the_tree_of_exceptions_is_the_modules():
    """Drawn at the top of ``errors.py``: every class there, below the one it is derived from."""
    path: list[str] = []
    drawn: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([│├└─ ]*)([A-Z]\w*[A-Z]\w+)( |$)", line):
            del path[len(found[1]) // 4 :]
            drawn[found[2]] = path[-1] if path else None
            path.append(found[2])
    defined = {
        name: value.__base__.__name__ if value.__base__.__module__ == errors.__name__ else None
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert drawn == defined


def layout() -> list[set[str]]:
    """The design's groups of files and folders of core, from the top."""
    (tree,) = re.findall(
        r"^```\ncore/fuseboard/\n(.*?)^plugins/", DOCUMENTS["docs/design.md"], re.M | re.S
    )
    return [set(re.findall(r"^[├└]── (\S+)", group, re.M)) for group in tree.split("│\n")]


def test_the_layout_lists_the_modules_of_core():
    """Each module and package of core has its line in the design, and each line is one of them."""
    core = ROOT / "core" / "fuseboard"
    there = {path.name for path in core.glob("*.py")}
    there |= {f"{path.parent.name}/" for path in core.glob("*/__init__.py")} - {"profile/"}
    there |= {f"profile/{path.parent.name}/" for path in core.glob("profile/*/__init__.py")}
    assert set().union(*layout()) == there


def test_the_layout_is_in_layers():
    """The design groups core's files and folders as the contract on imports does."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (one["layers"] for one in tools["contracts"] if one["type"] == "layers")
    shown = [
        {name.removesuffix(".py").rstrip("/").replace("/", ".") for name in group}
        for group in layout()
    ]
    shown[0].remove("__init__")
    assert shown == [set(re.split(r" [|:] ", layer)) for layer in layers]


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_files_that_a_document_names_exist(document):
    """A path in backquotes or a command is one from the root, core, here, or of a new plugin's."""
    text = DOCUMENTS[document]
    named = set(re.findall(r"\b(?:tests|examples|docs|core|plugins)/[\w./]*\w", text))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    named |= {n for n in re.findall(r"`([\w./-]+)`", prose) if re.search(r".+/.*(/|\.py)$|/$", n)}
    homes = [ROOT, ROOT / "core", ROOT / "core" / "fuseboard", (ROOT / document).parent]
    homes.append(ROOT / "examples" / "plugin_template")
    missing = {n for n in named if not any((home / n).exists() for home in homes)}
    assert missing <= {"benchmarks/results/"}  # a run makes it, and git ignores it


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_lead_somewhere(document):
    """A relative link names a file of the project."""
    links = re.findall(r"\]\(([^)#]+)", DOCUMENTS[document])
    here = (ROOT / document).parent
    assert [n for n in links if "://" not in n and not (here / n).resolve().exists()] == []


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_to_a_heading_find_it(document):
    """What follows ``#`` in a link to a document is a heading of it, as code hosts write it."""
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", DOCUMENTS[document]):
        target = ((ROOT / document).parent / path).resolve() if path else ROOT / document
        prose = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.M | re.S)
        headings = re.findall(r"^#+ (.*)", prose, re.M)
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in slugs, (path, anchor)


def test_the_site_has_every_document():
    """The site's navigation lists each document once."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"- (\S+\.md)$", nav, re.M)) == sorted(DOCUMENTS)


def test_the_reference_has_every_public_name():
    """The page of public names shows each once, and nothing else."""
    shown = re.findall(r"^::: fuseboard\.(\w+)$", DOCUMENTS["docs/api.md"], re.M)
    assert sorted(shown) == sorted(fuseboard.__all__)


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_settings_in_the_documents_are_valid(document):
    """Each ``[tool.fuseboard]`` table of a document passes the check that a user's would."""
    for block in blocks(document, "toml"):
        table = tomllib.loads(block).get("tool", {}).get("fuseboard", {})
        check(RawSource(table, lambda key: document))


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_names_in_the_documents_are_public(document):
    """Code that a reader copies uses names that ``fuseboard.__all__`` lists, and the test suite."""
    code = "\n".join(blocks(document, "python"))
    named = re.findall(r"\bfuseboard\.([A-Za-z_]+)", code)
    assert set(named) <= {*fuseboard.__all__, "testing"}


def test_the_guide_for_authors_runs(tmp_path, capsys, monkeypatch):
    """The guide's Python blocks, one after the other, are a program that works as it is told to.

    Under default settings, as its reader runs it.
    """
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    program = tmp_path / "guide.py"
    program.write_text("\n".join(blocks("docs/plugins.md", "python")))
    runpy.run_path(str(program))
    printed = capsys.readouterr().out
    assert re.search(r"aten\.mul\.Tensor +chains ", printed)
    assert re.search(r"aten\.sigmoid\.default +eager .*is neither mul nor add", printed)
    assert "name='mul+add'" in printed
    assert re.search(r"^[1-9]\d* .*'wrapped by counted'", printed, re.M)


def test_the_functions_of_a_graphs_way_exist():
    """The table of the design by which one graph is followed through the code."""
    table = (ROOT / "docs/design.md").read_text().partition("| function |")[2].partition("\n\n")[0]
    names = re.findall(r"^\| `([\w.]+)` \|", table, re.M)
    assert len(names) == 11
    for name in names:
        pkgutil.resolve_name(f"fuseboard.{name}")


def test_functions_that_decide_a_stage_run(tmp_path, monkeypatch):
    """The settings' examples, as a module of the user's: each is used, none trips."""
    table = "[tool.fuseboard.stages]"
    (named,) = [block for block in blocks("docs/settings.md", "toml") if "mystages:" in block]
    stages = tomllib.loads(named)["tool"]["fuseboard"]["stages"]
    assert named.startswith(table)
    assert sorted(stages) == sorted(STAGES)
    code = [block for block in blocks("docs/settings.md", "python") if "def " in block]
    (tmp_path / "mystages.py").write_text("\n".join(b for b in code if "class Block" not in b))
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = _recording(importlib.import_module("mystages"), stages, monkeypatch)
    ledger.clear()
    options = {"backends": ["mkldnn", "eager"], "policy": "measured", "stages": stages}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Gated())
    x = torch.randn(3, 8)
    run = torch.compile(model, backend="fuseboard", options=options)
    run(x).sum().backward()
    options["stages"] = {k: v for k, v in stages.items() if k != "plan"}  # which measures nothing
    with torch.no_grad(), plugged():
        options["backends"] = ["fake", "eager"]
        run = torch.compile(model, backend="fuseboard", options=options)
        torch.testing.assert_close(run(x), model(x))
        fuseboard.wait(60)
    assert not all_trips()
    with fuseboard.settings(stages=stages):
        profiler = fuseboard.SamplingProfiler(stop_at_error=True)
        profiler.profile(int)
    assert profiler.result.sampler == "mystages:where_it_hangs"
    assert asked == {*STAGES} - {"on_failure"}
    assert "aten.silu.default" in {op for r in last_graph().regions for op in r.ops}


class Gated(torch.nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def _recording(module, stages, monkeypatch):
    """The stages whose function in a module is called from now on and answers something."""
    asked = set()

    def recorded(stage, function):
        @functools.wraps(function)
        def call(**arguments):
            answer = function(**arguments)
            if answer is not None or stage == "verify":
                asked.add(stage)
            return answer

        return call

    for stage, path in stages.items():
        name = path.partition(":")[2]
        monkeypatch.setattr(module, name, recorded(stage, getattr(module, name)))
    return asked
