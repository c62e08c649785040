"""Compiling, settling and running leave the process as it was: switches, modes, generators, all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuseboard.beside import beside
from fuseboard.torch_api.state import (
    ANSWER_PARTS,
    PARTS,
    StateGuard,
    put_back,
    read_state,
    under_state,
)
from tests.support.misbehaving import CHANGES, change_surroundings

ROOT = Path(__file__).parents[1]


# --- the guard ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_and_put_back(name):
    """By name, and so that nothing differs any more."""
    does, told = CHANGES[name]
    before = read_state()
    with StateGuard() as guard:
        does()
    assert told in guard.changed("answers")
    assert not put_back(before)


def test_several_changes_are_put_back_in_an_order_that_works():
    """A precision that sets others, a device that is a mode, levels inside of one another."""
    before = read_state()
    with StateGuard() as guard:
        for does, _ in CHANGES.values():
            does()
        change_surroundings()
    # Leaving the inference mode sets the grad mode, too, so that this has no change of its own.
    wanted = [told for name, (_, told) in CHANGES.items() if name != "grad mode"]
    assert [told for told in wanted if told not in guard.changed("answers")] == []
    assert "os.environ['FAKE_ENGINE']" in guard.changed("surroundings")
    assert "generator" in guard.changed("draws")
    assert not put_back(before)


def test_beside_calls_the_process_is_left_alone():
    """Its other threads change it meanwhile: only what is the thread's own is put back."""
    opened = torch.autograd.forward_ad.dual_level()
    with beside(), StateGuard() as guard:
        torch.set_float32_matmul_precision("medium")
        os.environ["FAKE_ENGINE"] = "1"
        opened.__enter__()  # its level is one of the whole process's
        torch._C._set_grad_enabled(False)
    assert torch.get_float32_matmul_precision() == "medium"
    assert os.environ.pop("FAKE_ENGINE") == "1"
    assert torch.is_grad_enabled()
    assert [change.part.name for change in guard.changes] == ["the grad mode"]
    torch.set_float32_matmul_precision("highest")
    opened.__exit__(None, None, None)


def test_a_block_that_raises_is_put_back_too():
    """The exception passes, and the state is what it was."""
    before = read_state()

    def fails():
        CHANGES["level"][0]()
        CHANGES["autocast"][0]()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), StateGuard():
        fails()
    assert not put_back(before)


def test_a_switch_that_torch_refuses_to_read_is_no_obstacle():
    """Once precisions were set for libraries apart, the one of all products can't be read."""
    with StateGuard():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with StateGuard() as guard:
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        assert "mkldnn.matmul.fp32_precision from 'bf16' to 'ieee'" in guard.changed("answers")
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_an_honest_block_changes_nothing():
    """Contexts that are left again, and computing, aren't told of."""
    with StateGuard() as guard:
        with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
            torch.ones(2) @ torch.ones(2)
        torch.func.hessian(lambda x: x.sin().sum())(torch.zeros(2))
    assert not guard.changes


def test_the_state_of_another_call_is_entered_and_left():
    """What was read under other switches holds in the block, and no longer."""
    before = read_state(ANSWER_PARTS)
    with StateGuard():
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        other = read_state(ANSWER_PARTS)
    with under_state(other):
        assert torch.zeros(()).dtype == torch.float64
        assert read_state(ANSWER_PARTS) == other
    assert read_state(ANSWER_PARTS) == before


def test_everything_that_torch_has_is_looked_at():
    """Parts that can't be read here are left out, which mustn't be those that every torch has."""
    names = {part.name for part in PARTS}
    assert len(names) == len(PARTS)
    wanted = ("grad mode", "set_num_threads", "working directory", "SIGINT", "os.environ")
    assert all(any(part in name for name in names) for part in wanted)


# --- whole processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "mkldnn", "onnxruntime", "tvm", "inductor"])
@pytest.mark.thorough
def test_a_process_that_compiles_is_as_it_was(backend):
    """After the import, the first call, settling, further calls and training."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.state_program", backend]
    environment = {**os.environ, "FUSEBOARD_POLICY": "measured"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["import", "first call", "settling", "calls", "training"]
    assert not any(found.values()), found
