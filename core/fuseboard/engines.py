"""Engines that plugins need: which version is installed, and whether it is supported.

Nothing is imported but package metadata, so this is for ``fuseboard_backend``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Engine:
    """A package that a plugin needs, with the versions that it supports.

    :ivar name: as people write it; also the distribution's, unless others are named.
    :ivar at_least: the lowest supported version, such as ``"1.22"``; "" for any.
    :ivar below: the first that isn't supported any more; "" for none.
    :ivar distributions: those that bring it, such as ``("onnxruntime", "onnxruntime-gpu")``.
    """

    name: str
    at_least: str = ""
    below: str = ""
    distributions: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The installed version; "" where it isn't installed."""
        return next(iter(self._versions.values()), "")

    @property
    def installed(self) -> tuple[str, ...]:
        """The distributions that bring it here."""
        return tuple(self._versions)

    @property
    def _versions(self) -> dict[str, str]:
        found = {}
        for distribution in self.distributions or (self.name,):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[distribution] = metadata.version(distribution)
        return found

    @property
    def problem(self) -> str:
        """What is wrong with what is installed; "" if nothing is."""
        version = self.version
        if not version:
            return f"{self.name} isn't installed"
        low = bool(self.at_least) and _order(version) < _order(self.at_least)
        high = bool(self.below) and _order(version) >= _order(self.below)
        if not (low or high):
            return ""
        allowed = [f"{self.at_least} or later"] if self.at_least else []
        allowed += [f"below {self.below}"] if self.below else []
        return f"{self.name} {version} isn't supported, only {', '.join(allowed)}"


def why_unavailable(*engines: Engine, install: str) -> str:
    """The ``reason`` of a :class:`~fuseboard.BackendInfo`; "" where every engine can be used.

    :param install: what to run, such as ``"pip install 'fuseboard[tvm]'"``; ends the reason.
    """
    problems = [engine.problem for engine in engines if engine.problem]
    return f"{'; '.join(problems)}: {install}" if problems else ""


def _order(version: str) -> tuple[int, ...]:
    """The numbers of a release, without trailing zeros: 2.0 and 2.0.0 are one.

    A release candidate counts as the release.
    """
    found = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version.strip())
    numbers = [int(part) for part in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
