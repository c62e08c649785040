"""The machine and the process that code is made for and by: their parts in keys and in packages."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

from fuseboard.torch_api.switches import read_switches


def machine_parts() -> dict[str, str]:
    """The versions, the machine and the process that code is to run on and in."""
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "fuseboard": fuseboard_version(),
        "python": f"{platform.python_implementation()} {'.'.join(map(str, sys.version_info[:3]))}",
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "processor": processor(),
        "threads": f"{torch.get_num_threads()}",
        "numerics": numerics(),
    }


def code_hash(home: Path) -> str:
    """A hash of a plugin's Python files: a checkout changes without a new version."""
    is_folder = home.is_dir()
    files = sorted(map(str, home.rglob("*.py"))) if is_folder else [str(home)]
    found = [(file, os.stat(file)) for file in files]
    states = tuple((file, state.st_mtime_ns, state.st_size) for file, state in found)
    return _code_hash(states, str(home) if is_folder else str(home.parent))


@lru_cache(maxsize=64)
def _code_hash(states: tuple[tuple[str, int, int], ...], folder: str) -> str:
    digest = hashlib.sha256()
    for name, _, _ in states:
        digest.update(f"{name.removeprefix(folder)}\n".encode())
        with open(name, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:32]


@lru_cache(maxsize=1)
def fuseboard_version() -> str:
    """The version of the installed distribution."""
    return metadata.version("fuseboard")


@lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name and what it can do, as far as torch or the system tells."""
    capability = torch.backends.cpu.get_cpu_capability()
    if hasattr(torch.cpu, "get_capabilities"):
        known = dict(torch.cpu.get_capabilities())
        name = known.pop("cpu_name", platform.processor())
        able = sorted(key for key, value in known.items() if value is True)
        return f"{name} {capability} {' '.join(able)}"
    flags = Path("/proc/cpuinfo")
    lines = flags.read_text().splitlines() if flags.exists() else []
    described = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{platform.processor()} {capability} {' '.join(sorted(described))}"


def gpu() -> str:
    """The current CUDA device, and the CUDA that torch was built for."""
    index = torch.cuda.current_device()
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return f"{torch.cuda.get_device_name(index)} sm_{capability} CUDA {torch.version.cuda}"


def numerics() -> str:
    """The switches of torch that choose among kernels."""
    return ", ".join(f"{name}={value}" for name, value in read_switches().items())
