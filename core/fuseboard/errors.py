"""The exceptions that fuseboard raises on purpose.

Those of one command or tool are defined beside it, below :class:`FuseboardError` as well.

FuseboardError
├── SettingsError        a setting is unknown, mistyped, or names something that isn't there
├── RegistrationError    a plugin can't be registered: name taken, unknown hook, wrong signature
├── PluginError          a plugin's hook raised or answered with the wrong thing
│   ├── HookTimeout      it didn't answer within its limit
│   └── ContractError    it answered, but the answer breaks the hook's contract
│       └── WrongValues  a lowered region computes something else than the graph says
├── LoweringError        a backend claimed a region and can't compile it (plugins raise this)
├── NotEnoughMemory      what is prepared from weights, or copied, takes too much of the free memory
├── CostsError           a file of measured choices can't be read, written or taken over
├── RankError            the ranks of a distributed job don't agree, or one doesn't answer
├── RegionError          a region failed and the policy is to raise; chained to the cause
├── PackageError         a model can't be packaged, or a package not be loaded, here or at all
├── PatternError         a pattern can't be traced, or has to be found in a graph and isn't there
└── SamplingError        a profiling session can't start: no sampler, no permission, another runs

ProcessEnds              a thread of the board's is to stop; no ``except Exception`` contains it
"""

import signal
import sys
from types import CodeType, TracebackType


class ProcessEnds(BaseException):
    """Ends what a thread of the board's does, since its process ends. Nothing contains it."""


def containable() -> tuple[type[BaseException], ...]:
    """What ``except containable()`` is to catch of the exception under way.

    A plugin's code may raise anything, ``sys.exit`` and classes beside :class:`Exception` (a panic
    of an extension in Rust) included, and mustn't end the user's program by it. What is the user's
    passes: Ctrl-C, and what a signal handler raised that isn't an :class:`Exception`.
    """
    error = sys.exc_info()[1]
    if isinstance(error, Exception | SystemExit | GeneratorExit):
        return (BaseException,)
    if isinstance(error, KeyboardInterrupt | ProcessEnds) or _is_by_signal(error):
        return ()
    return (BaseException,)


def _is_by_signal(error: BaseException | None) -> bool:
    """Whether a frame of an exception belongs to a handler of a signal."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace: TracebackType | None = error.__traceback__ if error is not None else None
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """The code of a Python function or method."""
    found = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return found if isinstance(found, CodeType) else None


class FuseboardError(Exception):
    """The base of every exception that fuseboard raises on purpose."""


class SettingsError(FuseboardError):
    """A setting is unknown, mistyped, or names something that isn't there."""


class RegistrationError(FuseboardError):
    """A plugin can't be registered: its name is taken, or a hook of it is unknown."""


class PluginError(FuseboardError):
    """A plugin's hook raised, or answered with the wrong thing.

    :ivar plugin: the plugin's registered name.
    :ivar hook: the hook that was called, such as ``fuseboard_lower``.
    """

    def __init__(self, plugin: str, hook: str, problem: str) -> None:
        self.plugin = plugin
        self.hook = hook
        self.problem = problem
        super().__init__(f"plugin {plugin!r}, hook {hook}: {problem}")

    def add(self, sentence: str) -> None:
        """Say more than was known where it was raised."""
        self.problem += f" {sentence}"
        self.args = (f"plugin {self.plugin!r}, hook {self.hook}: {self.problem}",)


class HookTimeout(PluginError):
    """A hook didn't answer within ``hook_limit_s``."""


class ContractError(PluginError):
    """A hook answered, but the answer breaks the contract that its docstring states."""


class WrongValues(ContractError):
    """A lowered region computes something else than the graph says, rounding aside."""


class LoweringError(FuseboardError):
    """A backend claimed a region but can't compile it. Plugins raise this from ``lower``.

    :param for_good: False where this says nothing of the backend, such as where a process that
        compiled was killed. The cost database keeps no such failure: later processes try again.
    """

    def __init__(self, *arguments: object, for_good: bool = True) -> None:
        super().__init__(*arguments)
        self.for_good = for_good


class PatternError(FuseboardError):
    """A pattern can't be traced, or has to be found in a graph and isn't there."""


class PackageError(FuseboardError):
    """A model can't be packaged, or a package can't be loaded.

    :ivar kind: ``model`` (it can't be packaged), ``file`` (it can't be read or written), ``trust``
        (others may have written it), ``damaged``, ``format``, ``machine`` (torch, the processor or
        threads are others than where it was made), ``plugins`` (one is missing, or another
        version), ``program`` (what is in it can't be made again here).
    """

    def __init__(self, kind: str, problem: str) -> None:
        self.kind = kind
        super().__init__(problem)


class NotEnoughMemory(FuseboardError):
    """What is prepared from weights would take more of the free memory than ``prepare_memory``.

    Or there is no room for the copies on which a region is judged.
    """


class CostsError(FuseboardError):
    """A file of measured choices can't be read or written, or isn't one."""


class RankError(FuseboardError):
    """The ranks of a distributed job compile different things, or one of them doesn't answer."""


class RegionError(FuseboardError):
    """A region failed and ``on_failure`` says to raise. ``__cause__`` is what went wrong."""


class SamplingError(FuseboardError):
    """A profiling session can't start, or a path for its results can't be written."""


def error_text(error: BaseException) -> str:
    """An exception as ``Type: message``. A plugin's own may fail to make its message."""
    try:
        message = str(error)
    except containable() as problem:
        message = f"(its message can't be made: {type(problem).__name__})"
    return f"{type(error).__name__}: {message}"
