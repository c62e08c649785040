"""Traces as torch's profiler exports them: what fuseboard reads in them, and what it adds.

The format is Chrome's trace events, which Perfetto reads. Times are microseconds. Names and
arguments were read off traces of torch 2.13: ``Torch-Compiled Region: ID`` around each call of code
that Dynamo compiled (``torch/csrc/dynamo/eval_frame.c``), ``TorchDynamo Cache Lookup`` around the
checks of guards before it, ``CompiledFunctionBackward`` around a backward, ``entire_frame_compile``
and ``entire_backward_compile`` around compilations (``torch/_dynamo/utils.py``), ``[memory]`` for
each allocation.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from fuseboard.report.data import Break, GraphReport
from fuseboard.torch_api.profiler import PREFIX

Kind = Literal["region", "stage", "call", "guards", "compile", "launch"]
Event = dict[str, Any]

_REGION = re.compile(
    rf"{PREFIX}(?P<region>\w+\.region\d+) \[(?P<backend>[^\]]+)\](?: (?P<modules>.+))?"
)
_STAGE = re.compile(
    rf"{PREFIX}(?P<stage>fuse|partition|lower|capture|profile|verify|prepare) (?P<what>\S+).*"
)
_CALL = re.compile(r"Torch-Compiled Region: (?P<id>.+)|CompiledFunctionBackward")
_GUARDS = "TorchDynamo Cache Lookup"
_COMPILE = ("entire_frame_compile", "entire_backward_compile")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_ARROWS = "fuseboard_fwdbwd"


@dataclass(eq=False)
class Span:
    """A stretch of one thread's time that tells something of compiled code.

    :ivar parts: what the kind's pattern found in the name: ``region``, ``backend``, ``modules``;
        ``stage``, ``what``; ``id``.
    :ivar parent: the innermost span around it.
    """

    kind: Kind
    name: str
    start_us: float
    end_us: float
    thread: tuple[Any, Any]
    event: Event
    parts: Mapping[str, str] = field(default_factory=dict)
    parent: Span | None = None
    children: list[Span] = field(default_factory=list)

    @property
    def us(self) -> float:
        return self.end_us - self.start_us

    def around(self) -> Iterator[Span]:
        """The spans around it, innermost first."""
        span = self.parent
        while span is not None:
            yield span
            span = span.parent

    def within(self) -> Iterator[Span]:
        """The spans in it."""
        for child in self.children:
            yield child
            yield from child.within()


@dataclass(frozen=True)
class DeviceWork:
    """A kernel, or a copy, on an accelerator.

    :ivar launch: the call that started it, where the trace has it.
    """

    name: str
    device: Any
    start_us: float
    end_us: float
    launch: Span | None = None


class Trace:
    """A trace that was read.

    :param data: the parsed JSON; it is changed by :func:`annotate` only.
    :ivar spans: in the order of threads and time.
    :ivar work: of accelerators, in the order of time.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.events: list[Event] = data["traceEvents"]
        self.spans = _nested(filter(None, map(_span, self.events)))
        launches = {
            span.event["args"]["correlation"]: span for span in self.spans if span.kind == "launch"
        }
        self.work = sorted(
            (_device_work(e, launches) for e in self.events if e.get("cat") in _DEVICE),
            key=lambda work: work.start_us,
        )

    @property
    def annotations(self) -> dict[str, Any]:
        """What :func:`annotate` left in it: ``graphs`` and ``breaks``."""
        found: dict[str, Any] = self.data.get("fuseboard", {})
        return found

    def of_kind(self, kind: Kind) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]

    def memory(self) -> dict[str, list[tuple[float, int]]]:
        """Device → (time, bytes allocated since the trace began), for each change."""
        found: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for event in self.events:
            if event.get("name") == "[memory]":
                args = event["args"]
                device = "cpu" if args["Device Type"] == 0 else f"device {args['Device Id']}"
                found[device].append((float(event["ts"]), int(args["Total Allocated"])))
        return {device: sorted(changes, key=itemgetter(0)) for device, changes in found.items()}


def read_trace(path: Path) -> Trace:
    """:raises ValueError: it isn't a trace in JSON."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        data = json.load(file)
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path}: there is no list 'traceEvents'")
    return Trace(data)


def write_trace(trace: Trace, path: Path) -> None:
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with opened as file:
        json.dump(trace.data, file)


def _span(event: Event) -> Span | None:
    """What an event tells of compiled code; None for all others."""
    if event.get("ph") != "X":
        return None
    name = str(event.get("name", ""))
    kind: Kind
    parts: dict[str, str] = {}
    if name.startswith(PREFIX):
        if event.get("cat") == "gpu_user_annotation":
            return None  # the same span once more, on the accelerator's time line
        match = _REGION.fullmatch(name)
        kind = "region" if match else "stage"
        match = match or _STAGE.fullmatch(name)
        if match is None:
            return None
        parts = {key: value or "" for key, value in match.groupdict().items()}
    elif event.get("cat") in _RUNTIME and "correlation" in event.get("args", {}):
        kind = "launch"
    elif name in _COMPILE:
        kind = "compile"
    elif name == _GUARDS:
        kind = "guards"
    elif match := _CALL.fullmatch(name):
        kind, parts = "call", {"id": match["id"] or ""}
    else:
        return None
    start = float(event["ts"])
    thread = (event.get("pid"), event.get("tid"))
    return Span(kind, name, start, start + float(event.get("dur", 0.0)), thread, event, parts)


def _nested(spans: Iterable[Span]) -> list[Span]:
    """The same spans, in order, knowing what they are in."""
    order = sorted(spans, key=lambda s: (str(s.thread), s.start_us, -s.end_us))
    open_spans: list[Span] = []
    for span in order:
        while open_spans and (
            open_spans[-1].thread != span.thread or open_spans[-1].end_us <= span.start_us
        ):
            open_spans.pop()
        if open_spans:
            span.parent = open_spans[-1]
            span.parent.children.append(span)
        open_spans.append(span)
    return order


def _device_work(event: Event, launches: Mapping[Any, Span]) -> DeviceWork:
    args = event.get("args", {})
    start = float(event["ts"])
    end = start + float(event.get("dur", 0.0))
    device = args.get("device", event.get("pid"))
    return DeviceWork(event["name"], device, start, end, launches.get(args.get("correlation")))


# --- what is added ------------------------------------------------------------------------------


def annotate(trace: Trace, graphs: Sequence[GraphReport], breaks: Sequence[Break]) -> None:
    """Add what fuseboard knows.

    Regions get their modules, sources and ops as arguments; arrows lead from regions of a forward
    to those of its backward; allocated memory becomes a counter; graphs and breaks are put beside
    the events, under ``fuseboard``.
    """
    regions = {region.name: region for graph in graphs for region in graph.regions}
    frames = {region.name: graph.frame for graph in graphs for region in graph.regions}
    for span in trace.of_kind("region"):
        args = span.event.setdefault("args", {})
        args.update(backend=span.parts["backend"], module=span.parts["modules"])
        region = regions.get(span.parts["region"])
        if region is not None:
            args.update(
                source=list(region.sources),
                ops=dict(region.ops),
                frame=frames[region.name],
            )
    trace.data["fuseboard"] = {
        "graphs": [
            {
                "name": graph.name,
                "kind": graph.kind,
                "frame": graph.frame,
                "seconds": dict(graph.seconds),
                "regions": [
                    {"name": r.name, "backend": r.backend, "source": list(r.sources)}
                    for r in graph.regions
                ],
            }
            for graph in graphs
        ],
        "breaks": [
            {"reason": b.reason, "function": b.function, "source": b.source, "count": b.count}
            for b in breaks
        ],
    }
    trace.events.extend(_arrows(trace))
    trace.events.extend(_counters(trace))


def _counters(trace: Trace) -> Iterator[Event]:
    """Allocated memory as a time line."""
    pid = next((span.thread[0] for span in trace.spans), 0)
    for device, changes in trace.memory().items():
        for time_us, total in changes:
            yield {
                "ph": "C",
                "name": f"memory allocated, {device}",
                "pid": pid,
                "ts": time_us,
                "args": {"bytes": total},
            }


def _arrows(trace: Trace) -> Iterator[Event]:
    """From regions of a forward to those of its backward.

    torch draws arrows between the ops that hold them, ``CompiledFunction`` and
    ``CompiledFunctionBackward``; regions of the same module are paired, else those that have most
    source lines in common.
    """
    starts = {e["id"]: e for e in trace.events if e.get("cat") == "fwdbwd" and e["ph"] == "s"}
    ends = [e for e in trace.events if e.get("cat") == "fwdbwd" and e["ph"] == "f"]
    holders = {
        (e.get("tid"), e["ts"]): e
        for e in trace.events
        if e.get("name") in ("CompiledFunction", "CompiledFunctionBackward")
    }
    number = 0
    for end in ends:
        start = starts.get(end["id"])
        forward = holders.get((start.get("tid"), start["ts"])) if start is not None else None
        backward = holders.get((end.get("tid"), end["ts"]))
        if forward is None or backward is None:
            continue
        begun = _regions_in(trace, forward)
        for region in _regions_in(trace, backward):
            source = max(begun, key=lambda other: _likeness(other, region), default=None)
            if source is not None and _likeness(source, region) > 0:
                number += 1
                yield _arrow("s", number, source)
                yield {**_arrow("f", number, region), "bp": "e"}


def _regions_in(trace: Trace, holder: Event) -> list[Span]:
    start, end = holder["ts"], holder["ts"] + holder.get("dur", 0.0)
    return [
        span
        for span in trace.spans
        if span.kind == "region"
        and span.thread == (holder.get("pid"), holder.get("tid"))
        and start <= span.start_us < end
        and not any(around.kind == "stage" for around in span.around())
    ]


def _likeness(forward: Span, backward: Span) -> float:
    if forward.parts["modules"] and forward.parts["modules"] == backward.parts["modules"]:
        return float("inf")
    sources = (set(s.event["args"].get("source", ())) for s in (forward, backward))
    return float(len(set.intersection(*sources)))


def _arrow(phase: str, number: int, span: Span) -> Event:
    pid, tid = span.thread
    event = {"ph": phase, "id": number, "pid": pid, "tid": tid, "ts": span.start_us}
    return {**event, "cat": _ARROWS, "name": _ARROWS}
