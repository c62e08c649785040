"""``generate`` of transformers: the forward is what is called for each token.

On CPU ``generate`` compiles nothing by itself, whatever ``compile_config`` says.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """The same tokens with a growing cache and with a static one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 100, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    model.compile(backend="fuseboard")
    for cache in ("dynamic", "static"):
        tokens = model.generate(prompt, cache_implementation=cache, **options)
        assert torch.equal(tokens, expected), cache


if __name__ == "__main__":
    main()
