"""diffusers: ``compile_repeated_blocks`` compiles each transformer block by itself."""

import torch
from diffusers import DiTTransformer2DModel


def main() -> None:
    """A step of a small diffusion transformer is as it was, and its blocks share one compile."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
    ).eval()
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.tensor([1, 2]))
    model._repeated_blocks = ["BasicTransformerBlock"]  # where the class doesn't say it
    with torch.no_grad():
        expected = model(*inputs).sample
        model.compile_repeated_blocks(backend="fuseboard", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(model(*inputs).sample, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
