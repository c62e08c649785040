"""The texts to search: what Python's standard library says of its functions and classes."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from types import ModuleType

#: Modules that people use, and that can be imported without effects.
MODULES = """
argparse bisect calendar collections concurrent.futures configparser contextlib copy csv
dataclasses datetime difflib email.utils enum filecmp fnmatch fractions functools getpass glob
graphlib gzip hashlib heapq html io itertools json logging mimetypes multiprocessing os.path
pathlib pickle pprint queue random re sched secrets shelve shlex shutil signal socket sqlite3
statistics string struct subprocess tarfile tempfile textwrap threading time timeit traceback
unicodedata unittest urllib.error urllib.parse urllib.request uuid warnings weakref webbrowser
xml.etree.ElementTree zipfile zlib zoneinfo
""".split()

#: A first paragraph of fewer words says next to nothing.
MIN_WORDS = 4

#: Characters; the model reads 64 tokens.
MAX_LENGTH = 400


@dataclass(frozen=True)
class Docstring:
    """A function or class: its dotted name, and the first paragraph of its docstring."""

    name: str
    text: str

    @property
    def line(self) -> str:
        """The first sentence, or what of it fits on a line."""
        return re.split(r"(?<=[.!?])\s", self.text, maxsplit=1)[0]


def collect(limit: int = 0) -> list[Docstring]:
    """The entries in the order of :data:`MODULES`, each text once; the same in every run.

    :param limit: take so many, evenly spread; 0 takes all.
    """
    entries: dict[str, Docstring] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # a Python that was built without it: ssl, sqlite3, lzma, bz2
            continue
        for entry in _entries(module, name):
            entries.setdefault(entry.text, entry)
    found = list(entries.values())
    if not 0 < limit < len(found):
        return found
    return [found[number * len(found) // limit] for number in range(limit)]


def _entries(module: ModuleType, module_name: str) -> list[Docstring]:
    public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    found = []
    for name in sorted(public):
        value = getattr(module, name, None)
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue  # nobody asks for an error
        doc = value.__doc__
        text = first_paragraph(doc, name) if isinstance(doc, str) else ""
        if len(text.split()) >= MIN_WORDS:
            found.append(Docstring(f"{module_name}.{name}", text))
    return found


def first_paragraph(doc: str, name: str) -> str:
    """The first paragraph that isn't a signature, on one line."""
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        lines = paragraph.splitlines()
        while lines and re.match(rf"(class )?{re.escape(name)}\(", lines[0]):
            lines.pop(0)
        text = " ".join(" ".join(lines).split())
        if text:
            return text[:MAX_LENGTH]
    return ""
