"""``fuseboard package``: a model as one file, which another process loads without compiling."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fuseboard.cli.explain import Target, call_at, check_writable


def package(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="What to write.")],
) -> None:
    """Choose what runs a model fastest on this machine, and write it to a file with its weights.

    FUNCTION returns a model and its arguments, (model, args) or (model, args, kwargs), as for
    fuseboard explain. fuseboard.load(FILE) gives the model in another process, without compiling.
    The file is for the sizes of these arguments; fuseboard.package(dynamic_shapes=) is for others.
    """
    output = output.absolute()  # the code may change the directory
    check_writable("--output", output)
    with redirect_stdout(sys.stderr):
        import fuseboard

        model, args, kwargs = call_at(target)
        fuseboard.package(model, args, output, example_kwargs=kwargs)
        packaged = fuseboard.load(output, trust=True)
    report = packaged.manifest["report"]
    backends = dict.fromkeys(region["backend"] for region in report["regions"])
    size_mb = output.stat().st_size / 1e6
    print(f"{output}: {size_mb:.1f} MB, {packaged!r} on {', '.join(backends) or 'eager'}")
    for row in report["candidates"]:
        latency = row["latency_us"]
        timed = "" if latency is None else f"{latency:.4g} us"
        print(f"  {row['name']}: {timed or row['problem'] or row['state']}")
