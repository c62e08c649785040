"""Ways in which a plugin can misbehave: in one of its hooks, or in calls of what it compiled.

Each is something to do; :func:`plugin_that` puts it where it is done.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.backends import claim_all, plugged

#: Things that plugins enter and never leave; kept, since their end would leave them.
_entered: list[Any] = []


class AMode(TorchFunctionMode):
    """A mode of somebody's, which changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class ADispatchMode(TorchDispatchMode):
    """The same, of ops."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


class SilentError(Exception):
    """An error whose message can't be made."""

    def __str__(self) -> str:
        raise ValueError("no message")


class Panic(BaseException):
    """No Exception: extensions in Rust raise such a class where their code panics."""


def enter(context: Any) -> None:
    context.__enter__()
    _entered.append(context)


def leave_by_exit() -> None:
    sys.exit("the plugin's own end")


def raise_generator_exit() -> None:
    raise GeneratorExit


def raise_an_error() -> None:
    raise ValueError("the engine exploded")


def raise_a_silent_error() -> None:
    raise SilentError


def panic() -> None:
    raise Panic("index out of bounds")


def hang() -> None:
    time.sleep(3600)


#: What changes the process, in a hook or in a call; and what a trip says of it.
CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "set_num_threads"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "float32_matmul_precision"),
    "mkldnn": (lambda: torch._C._set_mkldnn_enabled(False), "torch.backends.mkldnn.enabled"),
    "directory": (lambda: os.chdir(os.sep), "the working directory"),
    "device": (lambda: torch.set_default_device("meta"), "the default device"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    "autocast": (lambda: enter(torch.autocast("cpu")), "autocast on cpu"),
    "grad mode": (lambda: torch._C._set_grad_enabled(not torch.is_grad_enabled()), "the grad mode"),
    "inference mode": (lambda: enter(torch.inference_mode()), "the inference mode"),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        "use_deterministic_algorithms",
    ),
    "level": (torch._C._functorch._grad_increment_nesting, "open levels of torch.func"),
    "dual level": (torch._C._enter_dual_level, "the level of forward-mode AD"),
    "mode": (lambda: enter(AMode()), "the torch-function modes"),
    "dispatch mode": (lambda: enter(ADispatchMode()), "the torch-dispatch modes"),
    "denormals": (lambda: torch.set_flush_denormal(True), "set_flush_denormal"),
    "sparse": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        "check_sparse_tensor_invariants",
    ),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), "set_detect_anomaly"),
    "saved tensors": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
        "hooks of saved tensors",
    ),
    "signal": (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), "the handler of SIGINT"),
}

#: What ends a hook or a call.
ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exit": (leave_by_exit, "SystemExit: the plugin's own end"),
    "generator exit": (raise_generator_exit, "GeneratorExit"),
    "panic": (panic, "Panic: index out of bounds"),
    "error": (raise_an_error, "ValueError: the engine exploded"),
    "silent error": (raise_a_silent_error, "its message can't be made"),
    "hang": (hang, "over|within"),
}


def change_surroundings() -> None:
    """What an engine may do when it is imported: put back, and no reason to do without it."""
    os.environ["FAKE_ENGINE"] = "1"
    logging.disable()
    random.random()
    torch.rand(3)


@contextmanager
def plugin_that(
    does: Callable[[], Any], where: str, name: str = "bad", info: dict[str, Any] | None = None
) -> Iterator[str]:
    """A backend that runs everything as eager does, and does something in a hook or in calls.

    :param where: ``call``, or a hook's name without ``fuseboard_``.
    """

    def hook(answer: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: Any) -> Any:
            does()
            return answer(graph)

        return run

    def call(eager_call: Any, region: Any) -> Any:
        if where == "lower":
            does()
        if where != "call":
            return eager_call

        def run(args: list[Any]) -> Any:
            does()
            return eager_call(args)

        return run

    def nothing(graph: Any) -> None:
        does()

    def observe(event: Any) -> None:
        does()

    hooks: dict[str, Any] = {
        "claim": {"claim": hook(claim_all)},
        "fuse": {"fuse": hook(lambda graph: [])},
        "event": {"event": observe},
    }.get(where, {})
    with plugged(name, call=call, info={"compiles_quickly": True, **(info or {})}, **hooks):
        yield name
