"""What the loss of a large vocabulary costs a training step: its peak of memory, and its time.

A Llama-style model of SmolLM's size (135M) with a vocabulary of 49,152, 4x512 tokens, forward and
backward, in processes that take turns: eager, and what is compiled without and with the pass
``linear_cross_entropy``. Times are of the processor, by one thread: a step takes tens of seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from rich.table import Table

from benchmarks.processes import last_line

WORDS, BATCH, LENGTH, LAYERS = 49_152, 4, 512, 30
ARMS = ("eager", "without", "with")
#: What must hold: by how much the peak falls, of twice the logits' size; the time, of the other's.
LEAST_SAVED, MOST_TIME = 0.6, 1.05

_PROGRAM = """
import json, sys, time
import torch
from benchmarks.builders import smollm
from fuseboard.torch_api.allocator import peak_bytes
arm, backend, steps, layers, words, batch, length = json.loads(sys.argv[1])
torch.set_num_threads(1)
model = smollm(layers, words)
ids = torch.randint(words, (batch, length), generator=torch.Generator().manual_seed(0))

def loss(ids):
    return model(input_ids=ids, labels=ids).loss

if arm != "eager":
    options = {"backends": [backend], "policy": "priority", "verify": "off"}
    if arm == "without":
        options["block"] = ["linear_cross_entropy"]
    loss = torch.compile(loss, backend="fuseboard", options=options)

def step():
    model.zero_grad()
    loss(ids).backward()

step()
seconds = []
for _ in range(steps):
    start = time.process_time()
    step()
    seconds.append(time.process_time() - start)
model.zero_grad()  # else it would give back gradients that were there before
peak = peak_bytes(step, torch.device("cpu"))
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
"""


@dataclass
class Loss:
    """The processes of one backend.

    :ivar seconds: arm → of each step.
    :ivar peak_bytes: arm → over what lies in memory between steps.
    """

    backend: str
    logits_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def saved(self) -> float:
        """Of twice the logits' size."""
        difference = self.peak_bytes["without"] - self.peak_bytes["with"]
        return difference / (2 * self.logits_bytes)

    @property
    def time(self) -> float:
        return median(self.seconds["with"]) / median(self.seconds["without"])

    def holds(self) -> bool:
        return self.saved >= LEAST_SAVED and self.time <= MOST_TIME


def measure_losses(
    backend: str,
    repeats: int,
    steps: int,
    report: Callable[[str], None],
    layers: int = LAYERS,
    words: int = WORDS,
) -> Loss:
    """Each arm in ``repeats`` fresh processes, which take turns."""
    found = Loss(backend, BATCH * LENGTH * words * 4)
    for repeat in range(repeats):
        for arm in ARMS:
            report(f"{backend} · {arm} · {repeat + 1} of {repeats}")
            request = json.dumps([arm, backend, steps, layers, words, BATCH, LENGTH])
            values = json.loads(last_line(_PROGRAM, request))
            found.seconds[arm] += values["seconds"]
            found.peak_bytes[arm] = values["peak_bytes"]
    return found


def losses_table(losses: Iterable[Loss]) -> Table:
    table = Table(title="A step with a loss of 49,152 words", title_justify="left")
    for column in ("backend", "arm", "peak", "step", "saved of 2 × logits", "time", "holds"):
        table.add_column(column)
    for one in losses:
        for arm in ARMS:
            compared = arm == "with"
            table.add_row(
                one.backend if arm != "eager" else "",
                arm,
                f"{one.peak_bytes[arm] / 2**20:.0f} MiB",
                f"{median(one.seconds[arm]):.2f} s",
                f"{one.saved:.2f}" if compared else "",
                f"{one.time:.3f}" if compared else "",
                ("yes" if one.holds() else "no") if compared else "",
            )
    return table
