"""Text that transformers' ``generate`` makes of a compiled model, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.backends import all_trips, compiled, graph_count
from tests.support.values import rnd

#: Graphs that Dynamo makes of prefill and tokens: of a cache that grows, one for the first token,
#: and one for all sizes that follow.
GRAPHS = {"static": 2, "dynamic": 3}


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99},
        **{"max_position_embeddings": 96, "pad_token_id": 0, "eos_token_id": None},
    )
    model = transformers.LlamaForCausalLM(configuration).eval()
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() > 1:
            parameter.data = rnd(*parameter.shape, seed=number) / 4
    return model


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("cache", GRAPHS)
@pytest.mark.thorough
def test_text_is_eagers_and_no_token_past_the_second_is_compiled(cache, batch):
    """64 tokens, with a padded prompt among several; symbols of the cache's length stay symbols."""
    model = tiny_llama()
    ids = torch.randint(3, 99, (batch, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[: batch - 1, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 64, "do_sample": False}
    how |= {"cache_implementation": "static"} if cache == "static" else {}
    want = model.generate(ids, **how)
    before = counters["stats"]["unique_graphs"]
    model.forward = compiled(model.forward, "mkldnn", on_failure="raise")
    assert torch.equal(model.generate(ids, **how), want)
    assert counters["stats"]["unique_graphs"] - before == GRAPHS[cache]
    assert graph_count("inference") == GRAPHS[cache]
    assert not all_trips()
