"""When the triton backend is there, and what it says when it isn't."""

from __future__ import annotations

import pytest
import torch

import fuseboard
from fuseboard_triton import _availability, fuseboard_backend


@pytest.fixture
def with_gpu(monkeypatch) -> None:
    """A machine on which nothing is missing."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_availability, "installed", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", "3.7.1+git0a1b"])
def test_with_everything_there(version, with_gpu, monkeypatch):
    """On CUDA only, training and symbolic sizes included; by request."""
    monkeypatch.setattr(_availability, "installed", lambda: version)
    info = fuseboard_backend()
    assert info.available
    assert info.device_types == {"cuda"}
    assert info.training
    assert info.dynamic_shapes
    assert info.by_request
    assert version in info.fingerprint
    assert "sm_90" in info.fingerprint


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "Triton is missing: pip install 'triton>=3.6,<4'"),
        (
            "3.5.1",
            "Triton 3.5.1 isn't supported, 3.6 and later 3.x are: pip install 'triton>=3.6,<4'",
        ),
        (
            "4.0.0",
            "Triton 4.0.0 isn't supported, 3.6 and later 3.x are: pip install 'triton>=3.6,<4'",
        ),
    ],
)
def test_without_a_triton_that_works(version, reason, with_gpu, monkeypatch):
    """The reason ends with what to type."""
    monkeypatch.setattr(_availability, "installed", lambda: version)
    info = fuseboard_backend()
    assert (info.available, info.reason) == (False, reason)


def test_without_a_gpu(with_gpu, monkeypatch):
    """No CUDA GPU, or one that is too old."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert fuseboard_backend().reason == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fuseboard_backend().reason == "no CUDA GPU was found"


def test_in_the_interpreter(with_gpu, monkeypatch):
    """Interpreted kernels take CPU tensors; only then is the CPU claimed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    info = fuseboard_backend()
    assert info.available
    assert info.device_types == {"cpu", "cuda"}
    assert "interpreter" in info.fingerprint


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_whoever_names_it_without_a_gpu_is_told(monkeypatch):
    """An error before anything is compiled, with the reason."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options = {"backends": ["triton", "eager"]}
    compiled = torch.compile(torch.sin, backend="fuseboard", options=options)
    with pytest.raises(
        Exception, match=r"triton.*no CUDA GPU was found|Triton is missing"
    ) as raised:
        compiled(torch.ones(3))
    assert isinstance(
        getattr(raised.value, "inner_exception", raised.value), fuseboard.SettingsError
    )
