"""Jobs of several ranks train as in eager, by the default settings."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.rank_job import seen_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch's gloo backend"
    ),
]

PROGRAM = "tests.support.rank_training_program"


def test_two_ranks_train_as_in_eager(tmp_path):
    """Losses and parameters after 30 steps of AdamW; decisions are the same on both ranks.

    By DDP, FSDP2, tensor parallelism; with uneven data; in a pipeline, where each decides.
    """
    ways = ("ddp", "fsdp", "tensor_parallel", "joined", "pipelined")
    first, second = seen_by(PROGRAM, 2, tmp_path, *ways)
    for way in ("ddp", "fsdp", "tensor_parallel"):
        assert first[way] == second[way]
        assert first[way]


def test_four_ranks_train_as_in_eager(tmp_path):
    ranks = seen_by(PROGRAM, 4, tmp_path, "ddp", "tensor_parallel")
    assert ranks == [ranks[0]] * 4
