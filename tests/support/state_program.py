"""What compiling changes in a process: ``python -m tests.support.state_program BACKEND``.

Prints a JSON object: stage → what was changed in it, as people read it. Stages are the import of
the board, the first call, settling, further calls and a training step.
"""

from __future__ import annotations

import json
import locale
import logging
import os
import sys
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

# Read before the board is imported; its parts are what is compared, and these besides.
CONFIGS = {
    "torch._dynamo.config": torch._dynamo.config,
    "torch._inductor.config": torch._inductor.config,
    "torch._functorch.config": torch._functorch.config,
}


def further_state() -> dict[str, Any]:
    """What the board doesn't look at itself."""
    umask = os.umask(0)
    os.umask(umask)
    state: dict[str, Any] = {
        "umask": umask,
        # Importing setuptools, as Inductor does, adds what it brings along.
        "sys.path": [path for path in sys.path if not path.endswith("_vendor")],
        "locale": locale.setlocale(locale.LC_ALL),
        "the root logger": (logging.root.level, len(logging.root.handlers), logging.root.disabled),
        "logging of torch": logging.getLogger("torch").level,
        "the strides of a fake view": _strides_of_a_fake_view(),
    }
    for name, config in CONFIGS.items():
        state |= {f"{name}.{key}": str(value) for key, value in _values(config).items()}
    return state


def _values(config: Any) -> dict[str, Any]:
    """Settings of one of torch's modules of settings, which 2.14 gives by another name."""
    copy = getattr(config, "get_config_copy", None) or config.shallow_copy_dict
    return dict(copy())


def _strides_of_a_fake_view() -> list[int]:
    """As torch gives them to every compiler."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return list(torch.empty(1, 6, 4).transpose(1, 2).view(1, 4, 2, 3).stride())


class Stages:
    """Compares the state after each stage with that before it."""

    def __init__(self) -> None:
        from fuseboard.torch_api.state import PARTS, StateChange, read_state

        self._parts, self._change, self._read = PARTS, StateChange, read_state
        self.found: dict[str, list[str]] = {}

    def now(self) -> tuple[list[Any], dict[str, Any]]:
        return self._read(), further_state()

    def over(self, name: str, before: tuple[list[Any], dict[str, Any]]) -> None:
        state, further = self.now()
        pairs = zip(self._parts, before[0], state, strict=True)
        changes = [str(self._change(*three)) for three in pairs if three[1] != three[2]]
        changes += [
            f"{name} from {was} to {further.get(name)}"
            for name, was in before[1].items()
            if further.get(name) != was
        ]
        self.found[name] = changes


class Net(torch.nn.Module):
    """Ops for every backend to take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.conv(x)).mean((2, 3))).softmax(-1)


def main(backend: str) -> None:
    further = further_state()
    import fuseboard
    import fuseboard.backend

    stages = Stages()
    # PARTS can't be read before they are there: importing changes what remains of the others.
    stages.found["import"] = [
        f"{name} from {was} to {further_state()[name]}"
        for name, was in further.items()
        if further_state()[name] != was
    ]
    options = {
        "backends": list(dict.fromkeys([backend, "eager"])),
        "policy": "measured",
        "measure_s": 0.05,
    }
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(net, backend="fuseboard", options=options)
    with torch.no_grad():
        before = stages.now()
        compiled(x)
        stages.over("first call", before)
        before = stages.now()
        fuseboard.wait(progress=False)
        stages.over("settling", before)
        before = stages.now()
        for _ in range(3):
            compiled(x)
        stages.over("calls", before)
    trained = torch.compile(Net(), backend="fuseboard", options=options)
    before = stages.now()
    for _ in range(2):
        trained(x).sum().backward()
    stages.over("training", before)
    print(json.dumps(stages.found))


if __name__ == "__main__":
    main(sys.argv[1])
