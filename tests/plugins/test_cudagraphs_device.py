"""How the plugin drives CUDA: the order of its calls, on stand-ins for ``torch.cuda``."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuseboard_cudagraphs import _torch_internals
from fuseboard_cudagraphs._device import CudaDevice, cuda_device


class Log(list[str]):
    """What was called, in order. Contexts are logged with ``(`` and ``)``."""

    @contextlib.contextmanager
    def context(self, name: str) -> Any:
        self.append(f"{name} (")
        yield
        self.append(f"{name} )")


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch) -> Log:
    """``torch.cuda`` with everything logged that the plugin calls."""
    log = Log()
    signature = inspect.signature(torch.cuda.graph)

    def graph(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        assert given["pool"] == "pool"
        assert given["capture_error_mode"] == "thread_local"
        return log.context(f"record on {given['stream'].name}")

    generator = SimpleNamespace(
        clone_state=lambda: "clean state",
        graphsafe_set_state=lambda state: log.append(f"generator: {state}"),
    )
    assert hasattr(torch.Generator, "clone_state")
    assert hasattr(torch.Generator, "graphsafe_set_state")
    current = {"stream": Stream(log, "main")}
    replaced = {
        "device": lambda index: log.context(f"device {index}"),
        "Stream": lambda index: Stream(log, "side"),
        "stream": lambda stream: log.context(f"stream {stream.name}"),
        "current_stream": lambda index=None: current["stream"],
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: "graph",
        "graph": graph,
        "default_generators": [None, generator],
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        _torch_internals, "forget_cublas_workspaces", lambda: log.append("forget workspaces")
    )
    log.current = current  # type: ignore[attr-defined]
    return log


@pytest.fixture
def device(log) -> CudaDevice:
    device = CudaDevice(1)
    device.prepare()
    return device


def failing() -> Any:
    raise RuntimeError("operation not permitted")


def test_the_pool_is_set_up_once_and_kept_in_use(device, log):
    """By an empty recording in it."""
    expected = ["device 1 (", "record on side (", "record on side )", "device 1 )"]
    assert log == expected
    device.prepare()
    assert log == expected


def test_a_warm_up_runs_on_the_recording_stream_between_waits(device, log):
    """Both ways, and after a failure too, so that nothing is freed under a running kernel."""
    log.clear()
    assert device.warm_up(lambda: [log.append("run"), torch.ones(3)])[1].sum() == 3
    expected = [
        "device 1 (",
        "side waits for main",
        "stream side (",
        "run",
        "stream side )",
        "main waits for side",
        "device 1 )",
    ]
    assert log == expected
    log.clear()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.warm_up(failing)
    assert log[-1] == "main waits for side"


def test_a_recording_is_made_in_the_pool_with_workspaces_of_its_own(device, log):
    """cuBLAS's are forgotten before, so that none from outside is used, and after."""
    log.clear()
    assert device.record(lambda: [1, 2]) == ("graph", [1, 2])
    assert log == [
        "device 1 (",
        "forget workspaces",
        "record on side (",
        "record on side )",
        "forget workspaces",
        "device 1 )",
    ]


def test_a_failed_recording_releases_the_generator(device, log):
    """Else every later draw of random numbers would raise."""
    log.clear()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.record(failing)
    assert log[-2:] == ["generator: clean state", "forget workspaces"]


def test_replays_on_another_stream_wait_for_the_last_one(device, log):
    """And only these."""
    log.clear()
    other = Stream(log, "other")
    for stream in (log.current["stream"], log.current["stream"], other, other):
        log.current["stream"] = stream
        device.take_turn()
    assert log == ["other waits for main"]


def test_a_device_has_one_object():
    """All its recordings share one pool and one lock."""
    assert cuda_device(torch.device("cuda", 3)) is cuda_device(torch.device("cuda", 3))
    assert cuda_device(torch.device("cuda", 3)) is not cuda_device(torch.device("cuda", 2))
