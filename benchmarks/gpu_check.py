"""Checks and times fuseboard on one CUDA GPU, within a few minutes.

``python -m benchmarks.gpu_check``, or ``make gpu-check``.

Needs torch, Triton and fuseboard; no package index, no transformers. First the tests in
``tests/gpu``, then times by CUDA events of whole models and of single kernels. Each part runs in a
process of its own, so that a crash of one leaves the others. Everything is written to a JSON file.

``--dry-run`` goes through all of it on the CPU with tiny sizes: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Parts in order, and the share of the time that is left which each may take.
PARTS = {
    "tests": 0.4,
    "kernels": 0.3,
    "llama-block": 0.35,
    "bert-base": 0.5,
    "gpt2-decode": 0.6,
    "llama-block-training": 1.0,
}
NO_GPU = "needs a CUDA GPU: torch finds none. To go through the script without one: --dry-run"


def main() -> int:
    """Run the parts, print tables, write the file. 2 means that there is no GPU."""
    options = _options()
    if options.part:
        from benchmarks.gpu_parts import run_part

        run_part(options.part, options.dry_run, Path(options.out), options.deadline)
        return 0
    why = _why_impossible(options.dry_run)
    if why:
        print(why, file=sys.stderr)
        return 2
    started = time.monotonic()
    results: dict[str, Any] = {"dry_run": options.dry_run, "parts": {}}
    chosen = options.only or list(PARTS)
    failed = []
    for part in chosen:
        left_s = options.budget_s - (time.monotonic() - started)
        found = _run(part, left_s * PARTS[part], options.dry_run)
        results["parts"][part] = found
        results.update(found.pop("machine", {}))
        if found.get("failed"):
            failed.append(part)
        print(f"\n== {part}: {found['seconds']:.0f} s\n{found.pop('text', '')}", flush=True)
    results["seconds"] = round(time.monotonic() - started, 1)
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{results['seconds']} s; written to {options.out}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="gpu_check.json", help="the file to write")
    parser.add_argument("--budget-s", type=float, default=225, help="what all of it may take")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="these parts")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=60, help=argparse.SUPPRESS)
    return parser.parse_args()


def _why_impossible(dry_run: bool) -> str:
    for package in ("torch", "fuseboard"):
        if importlib.util.find_spec(package) is None:
            return f"{package} isn't installed for {sys.executable}; pip install --no-deps WHEEL"
    if dry_run:
        return ""
    import torch

    return "" if torch.cuda.is_available() else NO_GPU


def _run(part: str, limit_s: float, dry_run: bool) -> dict[str, Any]:
    """One part in a process of its own."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": _path(), "TOKENIZERS_PARALLELISM": "false"}
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "part.json"
        if part == "tests":
            command = _tests(out)
        else:
            command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", part]
            command += ["--out", str(out), "--deadline", str(limit_s * 0.9)]
            command += ["--dry-run"] if dry_run else []
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
            )
            text, code = done.stdout[-6000:], done.returncode
            errors = done.stderr[-3000:]
        except subprocess.TimeoutExpired as late:
            text, code, errors = _decoded(late.stdout), -1, f"stopped after {limit_s:.0f} s"
        found = json.loads(out.read_text()) if part != "tests" and out.exists() else {}
    found["seconds"] = round(time.monotonic() - started, 1)
    found["text"] = found.get("text", "") + text
    if code:
        found["failed"] = f"exit status {code}"
        found["text"] += f"\n{errors}"
        found["output"] = found["text"]
    elif part == "tests":
        found["summary"] = text.strip().splitlines()[-1:]
    return found


def _tests(out: Path) -> list[str]:
    if importlib.util.find_spec("pytest") is None:
        code = "print('pytest is not installed: the tests in tests/gpu were not run')"
        return [sys.executable, "-c", code]
    # What is read is the end of the output, of which little comes back from such a machine.
    quiet = ["-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "--maxfail=25"]
    # Without pytest-timeout its setting is unknown, and a strict configuration an error.
    if importlib.util.find_spec("pytest_timeout") is None:
        quiet += ["-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib"]
    return [sys.executable, "-m", "pytest", *quiet, str(ROOT / "tests" / "gpu")]


def _path() -> str:
    """The checkout, for ``tests`` and ``benchmarks``."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _decoded(output: Any) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else (output or "")
    return text[-6000:]


if __name__ == "__main__":
    sys.exit(main())
