"""``python -m benchmarks``, from the root of a checkout."""

from benchmarks.cli import app

app(prog_name="python -m benchmarks")
