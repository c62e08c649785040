"""What a finished session sampled, and the forms in which it can be kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fuseboard.contracts import StackFrame, StackSample
from fuseboard.profile.observe.sampling_regions import RegionFrame, place_of, short_file

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
#: The rows of :meth:`SampledProfile.region_shares` for samples that are in no region.
OUTSIDE = RegionFrame("outside of compiled code", "")


@dataclass(frozen=True)
class RegionShare:
    """How much of the samples one region had.

    :ivar region: its name, such as ``inference0.region1``; a graph's name for what is none of its
        regions; ``outside of compiled code`` for the rest.
    :ivar backend: that runs it; for a graph ``board`` (the board's own work between regions),
        ``trials`` (candidates that are compared) or ``any`` (the sampler gave no lines).
    :ivar share: of all samples, from 0 to 1.
    """

    region: str
    backend: str
    samples: int
    share: float


@dataclass(frozen=True)
class SampledProfile:
    """The stacks that a sampler saw while some work ran.

    :ivar run_id: of the session; it is in the log, too.
    :ivar sampler: the plugin whose profiler it was.
    :ivar duration_s: how long the work ran under the sampler.
    :ivar sample_each: seconds between two samples of a thread.
    :ivar samples: in the order of time.
    :ivar notes: what people should know of it.
    :ivar regions: (file, line) of generated code that was seen → the region that it belongs to.
    """

    run_id: str
    sampler: str
    duration_s: float
    sample_each: float
    tags: tuple[str, ...]
    samples: tuple[StackSample, ...]
    notes: tuple[str, ...] = ()
    regions: Mapping[tuple[str, int], RegionFrame] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many samples there are."""
        return sum(sample.count for sample in self.samples)

    @property
    def title(self) -> str:
        tags = f" [{', '.join(self.tags)}]" if self.tags else ""
        return f"{self.sampler} {self.run_id}{tags}"

    def region_shares(self) -> list[RegionShare]:
        """How the samples divide among the regions of compiled code; the shares add up to 1.

        A sample belongs to the innermost region on its stack. Threads without Python calls on their
        stacks, such as a kernel's helpers, are outside of compiled code here: what a region does in
        the calling thread is what is seen. Largest first, what is outside last; nothing where there
        are no samples.
        """
        counts: Counter[RegionFrame] = Counter()
        for sample in self.samples:
            counts[place_of(sample.stack, self.regions) or OUTSIDE] += sample.count
        total = self.total
        places = sorted(counts, key=lambda place: (place == OUTSIDE, -counts[place], place.region))
        return [
            RegionShare(place.region, place.backend, counts[place], counts[place] / total)
            for place in places
        ]

    def label(self, frame: StackFrame) -> str:
        """A frame as people read it: the region, or ``name (file:line)``."""
        place = self.regions.get((frame.file, frame.line))
        if place is not None:
            return place.label
        if not frame.file:
            return frame.name
        line = f":{frame.line}" if frame.line else ""
        return f"{frame.name} ({short_file(frame.file)}{line})"

    # --- as files -------------------------------------------------------------------------------

    def save_speedscope(self, path: str | Path) -> None:
        """Write JSON for https://www.speedscope.app, a profile for each thread."""
        _write(path, json.dumps(self.as_speedscope()))

    def as_speedscope(self) -> dict[str, Any]:
        """The content of :meth:`save_speedscope`."""
        numbers: dict[StackFrame, int] = {}
        threads: dict[str, tuple[list[list[int]], list[float]]] = {}
        for sample in self.samples:
            stacks, weights = threads.setdefault(sample.thread, ([], []))
            stacks.append([numbers.setdefault(frame, len(numbers)) for frame in sample.stack])
            weights.append(sample.count * self.sample_each)
        profiles = [
            {
                "type": "sampled",
                "name": thread or self.sampler,
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": stacks,
                "weights": weights,
            }
            for thread, (stacks, weights) in threads.items()
        ]
        return {
            "$schema": _SCHEMA,
            "name": self.title,
            "exporter": f"fuseboard@{metadata.version('fuseboard')}",
            "activeProfileIndex": 0,
            "shared": {"frames": [self._speedscope_frame(frame) for frame in numbers]},
            "profiles": profiles,
        }

    def _speedscope_frame(self, frame: StackFrame) -> dict[str, Any]:
        place = self.regions.get((frame.file, frame.line))
        entry: dict[str, Any] = {"name": place.label if place else frame.name}
        if frame.file:
            entry["file"] = frame.file
        if frame.line:
            entry["line"] = frame.line
        return entry

    def save_folded(self, path: str | Path) -> None:
        """Write one line a stack, ``thread;outermost;...;innermost count``, most frequent first."""
        counts: Counter[str] = Counter()
        for sample in self.samples:
            labels = [sample.thread or self.sampler, *map(self.label, sample.stack)]
            counts[";".join(map(_unfolded, labels))] += sample.count
        _write(path, "".join(f"{stack} {count}\n" for stack, count in counts.most_common()))

    def save_flame_graph(self, path: str | Path) -> None:
        """Write a page of HTML with the flame graph; it needs no network."""
        from fuseboard.profile.observe.sampling_page import render_flame_graph

        _write(path, render_flame_graph(self))


def _unfolded(label: str) -> str:
    """A label without what separates stacks and lines in the folded format."""
    return " ".join(label.replace(";", ",").split())


def _write(path: str | Path, text: str) -> None:
    # A file's name may hold bytes that are no text; Python has them as lone surrogates.
    Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
