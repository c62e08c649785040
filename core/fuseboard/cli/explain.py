"""``fuseboard explain``: run a function of the user's, show what fuseboard made of it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fuseboard.errors import FuseboardError

if TYPE_CHECKING:
    from fuseboard.explanations.explanation import Explanation

_ANSWERS = (
    "It may return (model, args) or (model, args, kwargs): then model(*args, **kwargs) is "
    "explained. Or it may do the work itself, with torch.compile(..., backend='fuseboard') inside."
)

#: The argument by which commands are told what to run, and an option of several.
Target = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT_OR_MODULE:FUNCTION",
        help="A script's path or a dotted module, and a function of it without parameters.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class TargetError(FuseboardError):
    """What a command is to run can't be found, or returns the wrong thing."""


class OutputError(FuseboardError):
    """What a command is to write can't be written."""


def explain(
    target: Target,
    as_json: AsJson = False,
    wait: Annotated[
        bool,
        typer.Option(help="Try every candidate before reporting, those that compile slowly too."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write a page that draws the graphs; needs no network."),
    ] = None,
) -> None:
    """Show what runs where, and why: graphs, graph breaks, regions, reasons, trips.

    FUNCTION returns a callable and its arguments, (model, args) or (model, args, kwargs): that
    call is explained. Or it does the work itself, with torch.compile(..., backend="fuseboard")
    inside: whatever is compiled while it runs is explained.

    What the code prints goes to stderr, so the report can be piped.
    """
    if html is not None:
        html = html.absolute()  # the code may change the directory
        check_writable("--html", html)
    with redirect_stdout(sys.stderr):
        explanation = run(target, wait)
    if as_json:
        print(json.dumps(explanation.as_dict(), indent=2))
    else:
        from fuseboard.explanations.text import show

        show(explanation, Console())
    if html is not None:
        html.write_text(explanation.to_html(), "utf-8")
        print(f"\nThe page is in {html}", file=sys.stderr if as_json else sys.stdout)


def check_writable(option: str, path: Path, make_folder: bool = False) -> None:
    """Before minutes of compiling: whether a file can be written there.

    :param make_folder: make the folder that it is in.
    :raises OutputError: it can't.
    """
    there = path.exists()
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise OutputError(
            f"{option} {str(path)!r} can't be written: {error.strerror}. Give the path of a file "
            "in a directory that exists."
        ) from error
    if not there:
        path.unlink()


def run(target: str, wait: bool = False) -> Explanation:
    """Import the target, run it, and explain.

    :param wait: until everything is decided, as far as the target's result keeps it alive.
    :raises TargetError: the target isn't there, or returns what can't be explained.
    """
    function = _named(target)

    import fuseboard
    from fuseboard.explanations import explanation as report

    with report.explained() as explanation:
        result = function()
        if wait:
            fuseboard.wait()
    if isinstance(result, tuple) and result and callable(result[0]):
        model, args, kwargs = _call(result, target)
        return report.explain_call(model, args, kwargs, settled=wait)
    if not explanation.graphs and not explanation.breaks:
        raise TargetError(
            f"{target} returned {_described(result)} and compiled nothing with fuseboard. "
            f"{_ANSWERS}"
        )
    return explanation


def call_at(target: str) -> tuple[Any, Any, Any]:
    """The model, arguments and keyword arguments that a target's function returns.

    :raises TargetError: the target isn't there, or returns something else.
    """
    result = _named(target)()
    if isinstance(result, tuple) and result and callable(result[0]):
        return _call(result, target)
    raise TargetError(
        f"{target} returned {_described(result)}. It has to return (model, args) or "
        "(model, args, kwargs), such as (model, (x,))."
    )


def _named(target: str) -> Callable[[], Any]:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(
            f"{target!r} names no function: allowed: SCRIPT_OR_MODULE:FUNCTION, such as "
            f"{_example(target)}"
        )
    return _function(_imported(place), name, place)


def _call(result: tuple[Any, ...], target: str) -> tuple[Any, Any, Any]:
    """The call that a returned tuple stands for."""
    model, *rest = result
    right = (
        len(rest) in (1, 2)
        and isinstance(rest[0], tuple | list)
        and all(isinstance(kwargs, dict) for kwargs in rest[1:])
    )
    if not right:
        got = ", ".join(_described(item) for item in result)
        raise TargetError(
            f"{target} returned ({got}). After the callable come its arguments, a tuple or list, "
            "and if wanted a dict of keyword ones: (model, (x,)) or (model, (x,), {'mask': m})."
        )
    return model, rest[0], rest[1] if len(rest) == 2 else {}


def _described(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiouAEIO" else f"a {kind}"


# --- finding the function -------------------------------------------------------------------------


def _imported(place: str) -> ModuleType:
    """A module, from a script's path or a dotted name."""
    path = Path(place)
    if path.suffix == ".py" or path.is_file() or len(path.parts) > 1:
        return _script(path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as for `python -m`
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports isn't
        raise TargetError(
            f"there is no module {place!r}, in {here} or on Python's path. A script is named by "
            f"its path, such as ./{place.replace('.', '/')}.py"
        ) from None


def _script(path: Path) -> ModuleType:
    """A script as a module, so that its ``if __name__ == "__main__":`` doesn't run."""
    if not path.is_file():
        siblings = [found.name for found in path.parent.glob("*.py")]
        raise TargetError(f"there is no file {str(path)!r}.{_near(path.name, siblings)}")
    name = path.stem if path.stem not in sys.modules else f"_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{str(path)!r} isn't a Python file: its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as for `python SCRIPT`
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    own = sorted(n for n, v in vars(module).items() if inspect.isroutine(v) and n[0] != "_")
    function = getattr(module, name, None)
    if function is None:
        raise TargetError(
            f"{place} has no function {name!r}.{_near(name, own)} "
            f"Its functions: {', '.join(own) or 'none'}"
        )
    if not callable(function):
        raise TargetError(
            f"{name!r} of {place} is {_described(function)}, not a function.{_near(name, own)}"
        )
    called = getattr(function, "forward", function)  # a module says nothing of its own
    needed = [
        parameter.name
        for parameter in inspect.signature(called).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(
            f"{place}:{name} has the parameters {', '.join(needed)}, and is called without any. "
            f"Write a function around it. {_ANSWERS}"
        )
    return function  # type: ignore[no-any-return]


def _example(target: str) -> str:
    """What could be written in place of a target that names no function."""
    path = Path(target.rstrip(":"))
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "train.py:step or package.models:example"
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    own = [name for name in own if not name.startswith("_")]
    return " or ".join(f"{path}:{name}" for name in own[:3]) or f"{path}:FUNCTION; it has none"


def _near(name: str, others: list[str]) -> str:
    found = get_close_matches(name, others, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
