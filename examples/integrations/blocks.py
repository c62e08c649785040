"""Blocks compiled one by one, as torchtitan does: blocks of one form share a compile."""

import torch


class Block(torch.nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def gradients(compiled: bool) -> list[torch.Tensor]:
    """Of all weights, after one backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(16) for _ in range(4)))
    if compiled:
        for name, block in model.named_children():
            model.register_module(name, torch.compile(block, backend="fuseboard", fullgraph=True))
    model(torch.randn(8, 16)).square().sum().backward()
    return [weight.grad for weight in model.parameters()]


def main() -> None:
    """Gradients are the same."""
    torch.testing.assert_close(gradients(compiled=True), gradients(compiled=False))


if __name__ == "__main__":
    main()
