"""Dynamo compiles frames of the user's, and none of the board's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import fuseboard
from tests.support.backends import compiled
from tests.support.values import rnd

HOME = str(Path(fuseboard.__file__).parent)


@pytest.mark.parametrize("settle", ["background", "first_call"])
@pytest.mark.usefixtures("as_users_run_it")
def test_a_gradient_within_a_compiled_frame(settle):
    """Dynamo's hook of Python's frames is on while autograd calls what the board put there."""

    def f(x, w):
        y = torch.sin(x @ w).sum()
        torch._dynamo.graph_break()
        return torch.autograd.grad(y, (x, w))

    clear_compilation_metrics()
    inputs = [rnd(4, 4).requires_grad_(), rnd(4, 4, seed=1).requires_grad_()]
    run = compiled(f, "mkldnn", "eager", settle=settle)
    for _ in range(4):
        torch.testing.assert_close(run(*inputs), f(*inputs))
    fuseboard.wait(60)
    torch.testing.assert_close(run(*inputs), f(*inputs))
    files = {str(one.co_filename) for one in get_compilation_metrics()}
    assert __file__ in files
    assert not [file for file in files if file.startswith(HOME)]
