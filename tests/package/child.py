"""A fresh process: loads packages and compares them with eager. Prints what differs, as JSON."""

from __future__ import annotations

import copy
import json
import sys

import torch
from torch.utils._pytree import tree_flatten

from tests.package import models

#: What a process that loads packages of onnxruntime and mkldnn has no use for.
NEEDLESS = [
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "pydantic",
    "onnx",
    "fuseboard.board",
    "fuseboard.config",
    "fuseboard.pipeline",
    "fuseboard_inductor",
    "fuseboard_triton",
    "fuseboard_tvm",
]


def sharing(outputs, leaves):
    """Which results are, or share memory with, which argument."""
    return [
        [
            (i, a is b)
            for i, b in enumerate(leaves)
            if isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        ]
        for a in outputs
    ]


def called(model, args, kwargs):
    args, kwargs = copy.deepcopy((args, kwargs))
    leaves, _ = tree_flatten((args, kwargs))
    with torch.no_grad():
        outputs, structure = tree_flatten(model(*args, **kwargs))
    return outputs, structure, leaves


def differences(name, packaged):
    make, calls = models.seeded(lambda: (models.CASES[name][0](), models.CASES[name][1]))
    for number, (args, kwargs) in enumerate(calls):
        got, own, own_leaves = called(packaged, args, kwargs)
        want, structure, leaves = called(make, args, kwargs)
        assert own == structure, (number, own, structure)
        assert sharing(got, own_leaves) == sharing(want, leaves), number
        for a, b in zip([*got, *own_leaves], [*want, *leaves], strict=True):
            if not isinstance(b, torch.Tensor):
                assert (type(a), a) == (type(b), b), number
                continue
            torch.testing.assert_close(a, b)
    if isinstance(make, torch.nn.Module):
        for key, value in make.state_dict().items():
            torch.testing.assert_close(packaged.weights[key], value)


def main():
    import fuseboard

    paths = json.loads(sys.argv[1])
    for name, path in paths.items():
        args, kwargs = models.seeded(lambda name=name: models.CASES[name][1])[0]
        fuseboard.load(path)(*args, **kwargs)
    imported = [name for name in NEEDLESS if name in sys.modules]
    found = {}
    for name, path in paths.items():
        try:
            differences(name, fuseboard.load(path))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"differences": found, "imported": imported}))


if __name__ == "__main__":
    main()
