"""A server that answers requests on a pool of threads, as FastAPI does for functions that block.

Beside FastAPI the handler is ``@app.post("/")`` above ``answer``; the pool here is the standard
library's.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
compiled = torch.compile(model, backend="fuseboard")


def answer(row: list[float]) -> list[float]:
    """What one request gets. Grad mode belongs to a thread, so it is left in each."""
    with torch.no_grad():
        return compiled(torch.tensor([row]))[0].tolist()


def main() -> None:
    """Requests at the same time get their own answers, of one compile.

    The first is made before others may come: Dynamo traces anew for each thread that is there
    before the first trace is done.
    """
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(rows)
    answer(rows[0].tolist())
    with ThreadPoolExecutor(8) as pool:
        found = torch.tensor(list(pool.map(answer, rows.tolist())))
    torch.testing.assert_close(found, expected)


if __name__ == "__main__":
    main()
