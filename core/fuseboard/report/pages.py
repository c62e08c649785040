"""What pages of HTML that need no network have in common."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

#: So many backends have colours and patterns of their own; further ones share them.
STYLES = 8


def templates(package: str) -> Environment:
    """Those in the folder ``assets`` of a package."""
    return Environment(
        loader=PackageLoader(package, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def asset(package: str, name: str) -> str:
    """The text of a file in that folder."""
    return (files(package) / "assets" / name).read_text("utf-8")


def source_hash(text: str) -> str:
    """The source expression that allows exactly this text, for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def backend_styles(names: Iterable[str]) -> dict[str, str]:
    """Backend → its CSS class, by its place in the order; eager and the board have their own."""
    own = {"eager": "eager", "board": "board"}
    others = [name for name in dict.fromkeys(names) if name not in own]
    return {name: f"backend{i % STYLES}" for i, name in enumerate(others)} | own
