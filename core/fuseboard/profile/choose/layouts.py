"""The strides of a graph's results, held against eager's.

Each region may be right, and the graph still be wrong: regions lay out what they pass to each other
as torch's fake values say, which isn't always eager's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuseboard.errors import ContractError
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.judge.verify import misplaced
from fuseboard.run.runner import Runner


class Layouts:
    """The layout of eager's results for one call; computed when it is first needed."""

    def __init__(self, runner: Runner, inputs: list[Any]) -> None:
        self._runner = runner
        self._inputs = inputs
        self._eagers: list[Any] | None = None

    def check(self, candidate: Candidate, results: Sequence[Any]) -> None:
        """Hold a candidate's results against them.

        :raises ContractError: a result has other strides.
        """
        if self._eagers is None:
            self._eagers = list(map(_without_memory, self._runner.eager_results(self._inputs)))
        for number, (want, got) in enumerate(zip(self._eagers, results, strict=False)):
            if want is not None and (problem := misplaced(want, got)):
                backend = next(reversed(candidate.authors), "eager")
                raise ContractError(
                    backend, "fuseboard_lower", f"output {number} of the whole graph {problem}"
                )


def _without_memory(value: Any) -> Any:
    """A tensor that is laid out as a strided one; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
