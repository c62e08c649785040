"""The documents say what is there: hooks, commands, settings, links, and code that runs."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import fuseboard
from fuseboard import hookspecs
from fuseboard.config import RawSource, check

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "plugins").glob("*/README.md")),
        ROOT / "examples" / "plugin_template" / "README.md",
    ]
}
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("fuseboard_"))
IMPLEMENTED = re.compile(r"^\s*@(?:fuseboard\.)?hookimpl\b.*\n\s*def (fuseboard_\w+)", re.M)


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENTS[document], re.M | re.S)


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


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_lead_somewhere(document):
    """A relative link names a file of the project."""
    links = re.findall(r"\]\(([^)#]+)", DOCUMENTS[document])
    here = (ROOT / document).parent
    assert [n for n in links if "://" not in n and not (here / n).resolve().exists()] == []


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


def test_the_guide_for_authors_runs(tmp_path, capsys):
    """The guide's Python blocks, one after the other, are a program that works."""
    program = tmp_path / "guide.py"
    program.write_text("\n".join(blocks("docs/plugins.md", "python")))
    runpy.run_path(str(program))
    printed = capsys.readouterr().out
    assert re.search(r"aten\.mul\.Tensor +chains ", printed)
    assert re.search(r"aten\.sigmoid\.default +eager .*is neither mul nor add", printed)
    assert "name='mul+add'" in printed
