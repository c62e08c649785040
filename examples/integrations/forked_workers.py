"""Workers forked from a process that has the model already, as ``gunicorn --preload`` does.

``compiled`` may have been called before the fork, or not; each worker goes on by itself.
"""

import multiprocessing
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
compiled = torch.compile(model, backend="fuseboard")


def answer(row: list[float]) -> list[float]:
    """What one request gets."""
    with torch.no_grad():
        return compiled(torch.tensor([row]))[0].tolist()


def main() -> None:
    """Two workers answer as the model does, after a first call in the process they came from."""
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(rows)
    if "--cold" not in sys.argv:
        answer(rows[0].tolist())
    with multiprocessing.get_context("fork").Pool(2) as workers:
        found = torch.tensor(workers.map(answer, rows.tolist(), chunksize=1))
    torch.testing.assert_close(found, expected)


if __name__ == "__main__":
    main()
