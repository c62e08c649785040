"""What is compared: eager, and ways to compile. An arm is a function from module to callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import engines

Compile = Callable[[Any], Callable[..., Any]]


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    :ivar compile: called once in a worker; what it costs belongs to the first call.
    :ivar training: False for an arm that means nothing where gradients are needed.
    :ivar backends: fuseboard's ``backends`` setting; None for an arm that isn't fuseboard's and
        for its default.
    """

    name: str
    description: str
    compile: Compile
    training: bool = True
    backends: tuple[str, ...] | None = None

    @property
    def is_fuseboard(self) -> bool:
        return self.name.split("-")[0] == "fuseboard"

    @property
    def is_eager(self) -> bool:
        """Nothing is compiled: the baseline and its control."""
        return self.name in (BASELINE, CONTROL)


BASELINE = "eager"
CONTROL = "eager-again"


def _eager(module: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = module
    return run


def _inductor(module: Any) -> Callable[..., Any]:
    import torch

    return torch.compile(module)


def _inductor_freezing(module: Any) -> Callable[..., Any]:
    import torch
    import torch._inductor.config as inductor_config

    # For the whole process and not through options=: Dynamo itself asks for it while it traces.
    inductor_config.freezing = True
    return torch.compile(module)


def _zentorch(module: Any) -> Callable[..., Any]:
    import torch
    import zentorch  # noqa: F401  # registers its backend

    return torch.compile(module, backend="zentorch")


def _fuseboard(module: Any) -> Callable[..., Any]:
    import torch

    return torch.compile(module, backend="fuseboard")


def _by_priority(module: Any) -> Callable[..., Any]:
    import torch

    return torch.compile(module, backend="fuseboard", options={"policy": "priority"})


def _fuseboard_with(name: str, description: str, *backends: str, **further: Any) -> Arm:
    def compile_with(module: Any) -> Callable[..., Any]:
        import torch

        # By priority: what the backend makes of the model is asked for, not what is fastest.
        options: dict[str, Any] = {"backends": list(backends), "policy": "priority", **further}
        return torch.compile(module, backend="fuseboard", options=options)

    return Arm(name, description, compile_with, backends=backends)


def _alone(name: str) -> Arm:
    """A backend for inference, and eager for what it doesn't take."""
    arm = _fuseboard_with(f"fuseboard-{name}", f'backends=["{name}", "eager"]', name, "eager")
    return replace(arm, training=False)


_ALL = (
    Arm(BASELINE, "the baseline of every process", _eager),
    Arm(CONTROL, "A/A control: eager measured as if it were an arm", _eager),
    Arm("inductor", 'torch.compile(model), "inductor" by default', _inductor),
    Arm(
        "inductor-freezing",
        "the same with torch._inductor.config.freezing, under no_grad",
        _inductor_freezing,
        training=False,
    ),
    Arm("fuseboard", 'torch.compile(model, backend="fuseboard"), its defaults', _fuseboard),
    Arm(
        "fuseboard-priority", 'policy="priority": the default order, nothing measured', _by_priority
    ),
    _fuseboard_with("fuseboard-eager", 'backends=["eager"]: the cost of the board itself', "eager"),
    _fuseboard_with("fuseboard-mkldnn", 'backends=["mkldnn", "eager"]', "mkldnn", "eager"),
    _fuseboard_with("fuseboard-inductor", 'backends=["inductor"]', "inductor"),
    replace(
        _fuseboard_with(
            "fuseboard-inductor-freezing",
            'backends=["inductor-freezing", "eager"], repeats="never": layouts run through',
            "inductor-freezing",
            "eager",
            repeats="never",
        ),
        training=False,
    ),
    *(_alone(name) for name in ("onnxruntime", "openvino", "tvm", "zentorch")),
    Arm(
        "onnxruntime",
        "ONNX Runtime by its own Python API, on torch.onnx's export",
        engines.onnxruntime,
        training=False,
    ),
    Arm("openvino", "OpenVINO by its own Python API", engines.openvino, training=False),
    Arm("zentorch", 'torch.compile(model, backend="zentorch")', _zentorch, training=False),
)

ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}


def select_arms(names: Iterable[str]) -> list[Arm]:
    """Arms in registry order; ``all`` means every one.

    :raises KeyError: an unknown name; the message lists what there is.
    """
    wanted = set(names)
    if unknown := sorted(wanted - {"all", *ARMS}):
        raise KeyError(f"no arm is named {unknown[0]!r}; there are {', '.join(ARMS)}")
    return [arm for arm in _ALL if "all" in wanted or arm.name in wanted]
