"""A module that was exported: ``module()`` of the program is compiled like any other."""

import tempfile
from pathlib import Path

import torch


def main() -> None:
    """What is loaded from a file runs compiled, at sizes other than the example's, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: batch},))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt2")
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    run = torch.compile(loaded, backend="fuseboard")
    with torch.no_grad():
        for size in (4, 7, 9):
            x = torch.randn(size, 8)
            torch.testing.assert_close(run(x), model(x))


if __name__ == "__main__":
    main()
