"""What the workshop is asked, and what it answers. Both are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuseboard.config.model import Settings
from fuseboard.partition.pins import Pins
from fuseboard.report.data import GraphReport
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.workshop.tensors import SentInputs


@dataclass(frozen=True)
class Request:
    """A graph of Dynamo's, and a call of it.

    :ivar graph: as :func:`fuseboard.torch_api.dynamo_graphs.graph_to_bytes` made it.
    :ivar static: positions of the inputs that are parameters or buffers.
    :ivar modules: (module, name) of plugins that were registered at run time.
    :ivar op_modules: define ops that are in the graph.
    :ivar op_definitions: other ops in it, as :func:`definitions` of
        :mod:`fuseboard.torch_api.op_definitions` made them.
    :ivar main_file: the program's script, if it is among them.
    :ivar paths: where modules are looked for.
    :ivar frame: names the user's function in reports.
    :ivar state: name → value: what results depend on, as the call found it.
    :ivar modes: the grad mode and the inference mode of the call.
    :ivar sizes: what Dynamo knows of the inputs' sizes; None where these are plain.
    :ivar pins: what the user wants where.
    """

    graph: bytes
    inputs: SentInputs
    static: frozenset[int]
    settings: Settings
    modules: tuple[tuple[str, str], ...]
    op_modules: tuple[str, ...]
    op_definitions: bytes
    main_file: str | None
    paths: list[str]
    frame: str
    state: dict[str, Any]
    modes: tuple[bool, bool]
    sizes: CallSizes | None
    pins: Pins


@dataclass(frozen=True)
class TrialOutcome:
    """How the trial in the user's calls ended: what was chosen has won.

    :ivar times_us: the medians of calls by Dynamo's graph and by what was chosen. None where too
        few could be compared: then nothing was decided, and what won in the workshop stays.
    """

    times_us: tuple[float, float] | None = None


@dataclass(frozen=True)
class Answer:
    """What became of it.

    :ivar dynamo_wins: Dynamo's own graph is the fastest that is right.
    :ivar reports: of the graphs that AOTAutograd made of it.
    :ivar problem: why there is nothing to load; "" where there is.
    :ivar program: what was chosen, as :func:`fuseboard.workshop.carried.pack` made it.
    :ivar again: the call raised, as it does in eager: another one may do.
    :ivar only_here: the problem is that of another process alone, such as one that doesn't find an
        op which the program defines.
    :ivar trial: how it ended in an earlier process, in which the program won it; None where none
        has ended.
    """

    dynamo_wins: bool = False
    reports: tuple[GraphReport, ...] = field(default=())
    problem: str = ""
    program: bytes | None = None
    again: bool = False
    only_here: bool = False
    trial: TrialOutcome | None = None
