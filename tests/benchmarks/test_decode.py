"""Tokens a second, worked out from the processes of the arms."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import decode
from benchmarks.cli import app
from benchmarks.decode import ARMS, TOKENS, Decoded, Decoding, decoding_finding, decoding_table


def measured(inductor=0.1, half=0.06, exact=0.1, within=0.04, text=None):
    seconds = dict(zip(ARMS, (0.1, inductor, half, exact, within), strict=True))
    eagers = list(range(TOKENS))
    texts = {"fuseboard": text or eagers}
    arms = {
        arm: Decoded(1.0, 9.0, True, 2.0, [9.0, s, s], texts.get(arm, eagers), ["mkldnn"])
        for arm, s in seconds.items()
    }
    return Decoding("llama", "static", arms)


def test_tokens_a_second_are_the_medians():
    one = measured()
    assert one.arms["fuseboard, 2e-2"].tokens_per_s == pytest.approx(25)
    assert one.speedup("fuseboard, 2e-2") == pytest.approx(2.5)
    assert decoding_table([one]).row_count == len(ARMS)


def test_what_must_hold():
    """Exact no slower than Inductor; within the tolerance faster than eager and bfloat16."""
    assert measured(within=0.039).holds()
    assert decoding_finding(measured(within=0.039)).holds == "yes"
    assert not measured(within=0.041).holds()
    assert not measured(half=0.059, within=0.04).holds()
    assert not measured(exact=0.101, within=0.039).holds()
    another = [*range(TOKENS - 1), -1]
    assert measured(text=another).common("fuseboard") == TOKENS - 1
    assert not measured(within=0.039, text=another).holds()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.whole
def test_an_arm_that_fails_is_told_beside_the_others(arm):
    one = measured()
    del one.arms[arm]
    one.failures[arm] = "ended with code -6"
    assert not one.holds()
    assert f"{arm} ended with code -6" in decoding_finding(one).measured
    assert decoding_table([one]).row_count == len(ARMS)


def test_the_program_is_one():
    """It compiles."""
    compile(decode._PROGRAM, "program", "exec")


def test_models_and_caches_are_names():
    """The command can be read, as all that stand beside it, and tells what there is."""
    answer = CliRunner().invoke(app, ["decode", "--caches", "sliding"])
    assert answer.exit_code == 2
    assert "one of static, dynamic" in " ".join(answer.output.split())
