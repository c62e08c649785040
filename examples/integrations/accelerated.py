"""A loop of accelerate. ``dynamo_backend`` takes a closed list of names, and fuseboard isn't there.

A model that is compiled already is left as it is by ``prepare``.
"""

import torch
from accelerate import Accelerator


class Regression(torch.nn.Module):
    """It has a forward of its own: ``compile()`` of a bare ``Sequential`` compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def main() -> None:
    """Two steps change the weights as they do without it."""
    accelerator = Accelerator(cpu=True)
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Regression()
        if compiled:
            model.compile(backend="fuseboard")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            loss = model(torch.randn(16, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        results.append([weight.detach() for weight in model.parameters()])
    torch.testing.assert_close(*results)


if __name__ == "__main__":
    main()
