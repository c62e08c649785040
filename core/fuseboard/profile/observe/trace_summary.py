"""What a trace says of compiled code, in numbers and in words.

Calls that compiled something, or in which fuseboard verified or compared, are counted apart: they
say nothing of the calls that follow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fuseboard.profile.observe.trace import DeviceWork, Span, Trace

#: Outside of regions is worth a word from this share of the calls on.
OUTSIDE_SHARE = 0.15
#: Calls are short below this: what each costs by itself weighs.
SHORT_CALL_US = 2000.0
#: An accelerator's idle share of the time between its first and its last kernel of a call.
IDLE_SHARE = 0.15
#: Kernels that follow each other within this are back to back.
BACK_TO_BACK_US = 2.0
#: A gap below this is the launch of the next kernel; above it something else is waited for.
LAUNCH_GAP_US = 50.0
#: Regions on eager are worth a word from this share on.
EAGER_SHARE = 0.3


@dataclass(frozen=True)
class RegionTime:
    """One region, over all calls that didn't compile.

    :ivar share: of the time of these calls.
    :ivar device_us: of the kernels that it launched; 0 without an accelerator.
    """

    region: str
    backend: str
    modules: str
    source: str
    calls: int
    total_us: float
    share: float
    device_us: float = 0.0

    @property
    def mean_us(self) -> float:
        return self.total_us / self.calls


@dataclass(frozen=True)
class DeviceTime:
    """An accelerator in the calls that didn't compile, from the first to the last kernel of each.

    :ivar gaps: longer pauses between kernels than back to back; ``gap_us`` is their mean.
    """

    device: str
    kernels: int
    busy_us: float
    idle_us: float
    gaps: int
    gap_us: float

    @property
    def idle_share(self) -> float:
        return self.idle_us / ((self.busy_us + self.idle_us) or 1.0)


@dataclass
class Summary:
    """What :func:`summarise` found.

    :ivar calls: calls of compiled code that didn't compile; ``backwards`` of them are backwards.
    :ivar first_calls: those that compiled, verified or compared; ``first_s`` is their time.
    :ivar outside_us: of ``calls_us``, what isn't in a region: Dynamo's and AOTAutograd's wrappers,
        ops of the board's own, and what runs uncompiled after a graph break.
    :ivar guards_us: of the checks of guards that precede calls, in all; not in ``calls_us``.
    :ivar resumed: how many further compiled pieces those calls ran inside of them, one after each
        graph break.
    :ivar compile_s: of Dynamo's compilations, the backend's work included.
    :ivar stages: (graph, stage) → seconds of fuseboard's.
    :ivar peak_bytes: device → most that was allocated at once, over what was at the beginning.
    """

    regions: list[RegionTime] = field(default_factory=list)
    calls: int = 0
    backwards: int = 0
    calls_us: float = 0.0
    first_calls: int = 0
    first_s: float = 0.0
    outside_us: float = 0.0
    guards: int = 0
    guards_us: float = 0.0
    resumed: int = 0
    compile_s: float = 0.0
    compilations: int = 0
    stages: dict[tuple[str, str], float] = field(default_factory=dict)
    devices: list[DeviceTime] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    breaks: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        stages = [
            {"graph": graph, "stage": stage, "seconds": seconds}
            for (graph, stage), seconds in self.stages.items()
        ]
        return {**asdict(self), "stages": stages}


def summarise(trace: Trace) -> Summary:
    """The numbers of a trace; with sources and breaks if it was annotated."""
    summary = Summary()
    steady: list[Span] = []
    for call in _outermost(trace.of_kind("call"), "call"):
        if _is_part_of_compiling(call):
            continue
        if _compiles(call):
            summary.first_calls += 1
            summary.first_s += call.us / 1e6
        else:
            steady.append(call)
    summary.calls = len(steady)
    summary.backwards = sum(not call.parts["id"] for call in steady)
    summary.calls_us = sum(call.us for call in steady)
    summary.resumed = sum(span.kind == "call" for call in steady for span in call.within())
    regions = [span for call in steady for span in call.within() if span.kind == "region"]
    summary.outside_us = summary.calls_us - sum(region.us for region in regions)
    summary.regions = _region_times(regions, summary.calls_us, _device_us(trace))
    lookups = trace.of_kind("guards")
    summary.guards, summary.guards_us = len(lookups), sum(span.us for span in lookups)
    _add_compilations(summary, trace)
    summary.devices = _device_times(trace.work, steady)
    summary.peak_bytes = {
        device: max(0, *(total for _, total in changes))
        for device, changes in trace.memory().items()
    }
    summary.breaks = list(trace.annotations.get("breaks", ()))
    summary.advice = advise(summary)
    return summary


def _outermost(spans: Sequence[Span], kind: str) -> list[Span]:
    return [span for span in spans if not any(around.kind == kind for around in span.around())]


def _is_part_of_compiling(call: Span) -> bool:
    """Whether nobody made the call but the board, to compare what it compiles."""
    return any(span.kind in ("stage", "compile") for span in call.around())


def _compiles(call: Span) -> bool:
    return any(span.kind in ("stage", "compile") for span in call.within())


def _region_times(
    regions: Sequence[Span], whole_us: float, device_us: dict[int, float]
) -> list[RegionTime]:
    """One row a region and backend, largest first."""
    rows: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in regions:
        rows[span.parts["region"], span.parts["backend"]].append(span)
    found = []
    for (region, backend), spans in rows.items():
        total_us = sum(span.us for span in spans)
        sources = spans[0].event.get("args", {}).get("source", ())
        found.append(
            RegionTime(
                region=region,
                backend=backend,
                modules=spans[0].parts["modules"],
                source=sources[0] if sources else "",
                calls=len(spans),
                total_us=total_us,
                share=total_us / whole_us if whole_us else 0.0,
                device_us=sum(device_us.get(id(span), 0.0) for span in spans),
            )
        )
    return sorted(found, key=lambda row: -max(row.total_us, row.device_us))


def _add_compilations(summary: Summary, trace: Trace) -> None:
    compilations = _outermost(trace.of_kind("compile"), "compile")
    summary.compilations = len(compilations)
    summary.compile_s = sum(span.us for span in compilations) / 1e6
    for span in trace.of_kind("stage"):
        stage, what = span.parts["stage"], span.parts["what"]
        graph = what.partition(".")[0]
        if not any(s.kind == "stage" and s.parts["stage"] == stage for s in span.around()):
            key = graph, stage
            summary.stages[key] = summary.stages.get(key, 0.0) + span.us / 1e6


# --- accelerators ---------------------------------------------------------------------------------


def _device_us(trace: Trace) -> dict[int, float]:
    """By ``id``: the time of the kernels that each region launched."""
    found: dict[int, float] = defaultdict(float)
    for work in trace.work:
        region = _region_of(work)
        if region is not None:
            found[id(region)] += work.end_us - work.start_us
    return found


def _region_of(work: DeviceWork) -> Span | None:
    around = work.launch.around() if work.launch is not None else ()
    return next((span for span in around if span.kind == "region"), None)


def _call_of(work: DeviceWork) -> Span | None:
    """The outermost call that launched it."""
    around = work.launch.around() if work.launch is not None else ()
    return next((span for span in reversed(list(around)) if span.kind == "call"), None)


def _device_times(work: Sequence[DeviceWork], steady: Sequence[Span]) -> list[DeviceTime]:
    """What each accelerator did between the first and the last kernel of each call."""
    calls = {id(call) for call in steady}
    by_call: dict[tuple[str, int], list[DeviceWork]] = defaultdict(list)
    for item in work:
        call = _call_of(item)
        if call is not None and id(call) in calls:
            by_call[str(item.device), id(call)].append(item)
    found: dict[str, list[tuple[int, float, list[float]]]] = defaultdict(list)
    for (device, _), items in by_call.items():
        busy_us, gaps = _busy_and_gaps(items)
        found[device].append((len(items), busy_us, gaps))
    times = []
    for device, parts in sorted(found.items()):
        gaps = [gap for _, _, some in parts for gap in some]
        long = [gap for gap in gaps if gap > BACK_TO_BACK_US]
        times.append(
            DeviceTime(
                device=device,
                kernels=sum(count for count, _, _ in parts),
                busy_us=sum(busy for _, busy, _ in parts),
                idle_us=sum(gaps),
                gaps=len(long),
                gap_us=sum(long) / len(long) if long else 0.0,
            )
        )
    return times


def _busy_and_gaps(work: Sequence[DeviceWork]) -> tuple[float, list[float]]:
    """Of kernels in the order of time, on whichever streams; they may overlap."""
    busy_us, gaps = 0.0, []
    until = work[0].start_us
    for item in work:
        if item.start_us > until:
            gaps.append(item.start_us - until)
        busy_us += max(0.0, item.end_us - max(item.start_us, until))
        until = max(until, item.end_us)
    return busy_us, gaps


# --- advice ---------------------------------------------------------------------------------------


def advise(summary: Summary) -> list[str]:
    """What stands out, and what to do about it, as sentences; most telling first."""
    if not summary.calls and not summary.first_calls:
        return ["Nothing compiled by torch.compile ran while this was traced."]
    found = []
    if not summary.calls:
        found.append(
            f"All {summary.first_calls} calls compiled something or were checked: there is no call "
            "to judge. Let the script call the compiled code several times."
        )
    elif not summary.regions:
        found.append(
            "No region of fuseboard's ran in a call that didn't compile. Was another backend "
            "used than torch.compile(..., backend='fuseboard')?"
        )
    found.extend(_of_breaks(summary))
    found.extend(_of_devices(summary))
    found.extend(_of_outside(summary))
    found.extend(_of_eager(summary))
    return found


def _of_breaks(summary: Summary) -> list[str]:
    if not summary.resumed and not summary.breaks:
        return []
    text = "Dynamo broke graphs"
    if summary.resumed:
        per_call = summary.resumed / max(summary.calls - summary.backwards, 1)
        pieces = "piece" if per_call == 1 else "pieces"
        text += f": {per_call:.3g} further compiled {pieces} ran in each call"
    text += ". After each, Python runs what couldn't be compiled"
    reasons = Counter({b["reason"]: b.get("count", 1) for b in summary.breaks}).most_common(1)
    if reasons:
        text += f"; most often: {reasons[0][0]}"
    return [f"{text}. fuseboard explain shows each place."]


def _of_devices(summary: Summary) -> list[str]:
    found = []
    for device in summary.devices:
        if device.idle_share < IDLE_SHARE:
            continue
        text = (
            f"Device {device.device} is idle for {device.idle_share:.0%} of the time between a "
            f"call's first and last kernel: {device.gaps} gaps of {device.gap_us:.0f} us each. "
        )
        if device.gap_us < LAUNCH_GAP_US:
            text += (
                "That is what launching kernels takes: CUDA graphs (mode='reduce-overhead') launch "
                "them all at once, and larger batches make kernels longer."
            )
        else:
            text += (
                "That is longer than a launch takes: look in the trace for what the CPU does "
                "there, such as graph breaks, copies from the device (.item(), .cpu()), or input."
            )
        found.append(text)
    return found


def _of_outside(summary: Summary) -> list[str]:
    share = summary.outside_us / summary.calls_us if summary.calls_us else 0.0
    if not summary.regions or share < OUTSIDE_SHARE or summary.devices:
        return []
    each_us = summary.outside_us / summary.calls
    text = f"{share:.0%} of the calls' time, {each_us:.0f} us a call, is outside of regions. "
    if summary.resumed:
        text += "With graph breaks, what runs between graphs counts here: remove these first."
    elif summary.calls_us / summary.calls < SHORT_CALL_US:
        text += (
            "These are Dynamo's and AOTAutograd's wrappers, which every call pays, and with a "
            "profiler more than without: larger batches, or one compiled function around several "
            "calls, make them weigh less."
        )
    else:
        text += (
            "Look in the trace for what runs there: ops that the board keeps for itself, copies "
            "into inputs that the call writes to, or Dynamo's and AOTAutograd's wrappers."
        )
    return [text]


def _of_eager(summary: Summary) -> list[str]:
    eager = [row for row in summary.regions if row.backend == "eager"]
    share = sum(row.share for row in eager)
    if len(eager) == len(summary.regions) or share < EAGER_SHARE:
        return []
    return [
        f"{share:.0%} of the calls' time is in regions on eager. fuseboard explain says why no "
        "backend took them."
    ]
