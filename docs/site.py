"""MkDocs' hooks: the site has the documents of the whole project, each at its own path.

So links in them are the same on the site, in a checkout and at a code host. A link to a file that
is no document leads to the file itself; one to a directory, to its README.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?(?:fuseboard\.)?([\w.]+)</code>")


def on_files(files: Files, config: Any) -> Files:
    """The documents that the navigation lists, and whatever these link to."""
    pages = list(_paths(config["nav"]))
    linked = {path for page in pages for path in _links(ROOT / page).values()}
    found = Files([file for file in files if not file.src_uri.endswith((".md", ".py", ".png"))])
    for path in dict.fromkeys([*pages, *sorted(linked - set(pages))]):
        found.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to directories lead to what is read there."""
    targets = _links(ROOT / page.file.src_uri)
    here = Path(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = targets.get(found[2])
        return found[1] + (found[2] if target is None else "../" * len(here.parts) + target)

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name what they speak of by Sphinx's roles, of which the name is left."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _paths(nav: Any) -> Any:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _paths(item)


def _links(page: Path) -> dict[str, str]:
    """Relative links of a document to what exists: as written → path from the project's root."""
    found = {}
    for _, written in _LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / written).resolve()
        if "://" not in written and target.exists():
            target = target / "README.md" if target.is_dir() else target
            found[written] = target.relative_to(ROOT).as_posix()
    return found
