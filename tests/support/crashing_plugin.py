"""A backend that ends the process it compiles in, in several ways; children can import it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

import fuseboard

#: Set by the tests, in their own process: what would end it fails there instead.
here: list[str] = []


class Options(BaseModel):
    """How it compiles, and a file in which each compile leaves a line."""

    how: str = "works"
    log: str = ""


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    return fuseboard.BackendInfo(
        name="crashing",
        training=True,
        dynamic_shapes=True,
        may_crash=True,
        fingerprint=os.environ.get("CRASHING_FINGERPRINT", "1"),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(graph: Any) -> list[Any]:
    return fuseboard.claim_nodes(graph, lambda node: None)


@fuseboard.hookimpl
def fuseboard_lower(region: Any, inputs: Any) -> fuseboard.LoweredRegion | None:
    how = region.options.how
    where = "parent" if here else "child"
    with Path(region.options.log).open("a") as log:
        log.write(f"{where} {os.getpid()}\n")
    if how in _WAYS:
        assert not here, "this would have ended the tests"
        _WAYS[how]()
    if how.startswith("SIG") and not here:
        _die_once(Path(f"{region.options.log}.{how}"), signal.Signals[how])
    if how == "declines":
        return None
    if how == "raises":
        raise fuseboard.LoweringError("not today")
    if how == "breaks":
        raise RuntimeError("no engine")
    if how == "guards":
        (rows,) = (value.shape[0] for value in inputs if isinstance(value, torch.Tensor))
        assert rows > 6
    constants = [
        getattr(region.graph, str(node.target)).tolist()
        for node in region.graph.graph.find_nodes(op="get_attr")
    ]
    artifact = f"{where} {constants} {torch.get_num_threads()}".encode()
    call = fuseboard.lower_eagerly(region).call
    return fuseboard.LoweredRegion(
        call=call, notes=(f"from the {where}",), artifact=None if how == "bare" else artifact
    )


@fuseboard.hookimpl
def fuseboard_load(artifact: bytes, region: Any) -> fuseboard.LoweredRegion:
    call = fuseboard.lower_eagerly(region).call
    return fuseboard.LoweredRegion(call=call, notes=(f"loaded: {artifact.decode()}",))


def _segfault() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def _complain() -> None:
    sys.stderr.write("terminate called after an assertion\n")
    sys.stderr.flush()
    os.abort()


def _hang() -> None:
    """As C code does that never comes back: signals and other threads change nothing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT, signal.SIGTERM})
    time.sleep(600)


def _with_a_grandchild() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["CRASHING_GRANDCHILD"]).write_text(str(child.pid))
    time.sleep(600)


def _die_once(died: Path, number: int) -> None:
    """The first time only; a file tells the next process."""
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), number)


_WAYS = {
    "aborts": os.abort,
    "complains": _complain,
    "segfaults": _segfault,
    "exits": lambda: os._exit(3),
    "sleeps": lambda: time.sleep(600),
    "hangs": _hang,
    "has a child": _with_a_grandchild,
}
