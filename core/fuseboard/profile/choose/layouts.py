"""The strides of a graph's results, held against eager's.

Each region may be right by itself: what it is given by other regions may be laid out as torch's
fake values say, which isn't always as eager does.
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
    """How eager lays out what the caller of one call gets; found out when first asked for."""

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
