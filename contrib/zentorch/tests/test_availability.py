"""What the backend says where it can't run. None of this needs zentorch."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import fuseboard_zentorch
import pytest
import torch
from fuseboard_zentorch import _availability

import fuseboard

REAL = metadata.version


@pytest.fixture
def versions(monkeypatch):
    """Pretend that distributions are installed in other versions; None: not at all."""
    found: dict[str, str | None] = {"zentorch": "2.13.0.2", "zentorch-weekly": None}

    def version(name: str) -> str:
        answer = found[name] if name in found else REAL(name)
        if answer is None:
            raise metadata.PackageNotFoundError(name)
        return answer

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(_availability, "version", version)
    monkeypatch.setattr(_availability, "has_avx512", lambda: True)
    return found


def info() -> fuseboard.BackendInfo:
    return fuseboard_zentorch.fuseboard_backend()


def test_it_is_available_where_all_is_there(versions):
    """A supported zentorch, its torch, AVX-512."""
    versions["torch"] = "2.13.0+cpu"
    assert info().available
    assert "2.13.0.2" in info().fingerprint


def test_without_zentorch_it_says_what_to_install(versions):
    """The command for both packages."""
    versions["zentorch"] = None
    assert not info().available
    assert "zentorch isn't installed" in info().reason
    assert info().reason.endswith(_availability.INSTALL)


@pytest.mark.parametrize("torch_version", ["2.12.1", "2.14.0+cpu"])
def test_with_another_torch_it_says_which_are_supported(versions, torch_version):
    """zentorch's library loads under its own minor release of torch only."""
    versions["torch"] = torch_version
    assert not info().available
    assert f"torch {torch_version} isn't supported, only 2.13 or later, below 2.14" in info().reason


def test_with_another_zentorch_it_says_which_are_supported(versions):
    """The operators of others weren't compared with float64."""
    versions["zentorch"] = "2.9.1"
    assert "zentorch 2.9.1 isn't supported, only 2.13 or later" in info().reason


def test_a_weekly_build_beside_it_is_refused(versions):
    """Both write to one folder, and ``import zentorch`` refuses, too."""
    versions |= {"torch": "2.13.0", "zentorch-weekly": "2.13.0.dev1"}
    assert "pip uninstall zentorch-weekly" in info().reason


def test_without_avx512_it_says_so(versions, monkeypatch):
    """And what to use instead."""
    versions["torch"] = "2.13.0"
    monkeypatch.setattr(_availability, "has_avx512", lambda: False)
    assert not info().available
    assert "AVX-512" in info().reason


def test_the_cpu_is_asked(monkeypatch):
    """Not what ``ATEN_CPU_CAPABILITY`` allows, unless torch can't ask otherwise."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False, raising=False)
    assert not _availability.has_avx512()
    monkeypatch.delattr(torch.cpu, "_is_avx512_supported")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert _availability.has_avx512()


def test_named_where_it_is_unavailable():
    """It is an error that gives the reason, before anything is compiled."""
    code = (
        "import torch, fuseboard\n"
        "from fuseboard_zentorch import _availability\n"
        "_availability.why_unavailable = lambda: 'no AVX-512 here'\n"
        "options = {'backends': ['zentorch', 'eager']}\n"
        "try:\n"
        "    torch.compile(torch.relu, backend='fuseboard', options=options)(torch.ones(2))\n"
        "except Exception as error:\n"
        "    assert \"'zentorch' is unavailable: no AVX-512 here\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('nothing was raised')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_looking_for_plugins_loads_nothing_of_zentorch():
    """Neither its package nor its library, of a hundred megabytes."""
    code = (
        "import sys, torch, fuseboard_zentorch\n"
        "fuseboard_zentorch.fuseboard_backend()\n"
        "assert 'zentorch' not in sys.modules\n"
        "assert not hasattr(torch.ops.zentorch, 'zentorch_bmm')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
