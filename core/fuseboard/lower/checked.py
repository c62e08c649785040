"""Regions in a checked call: what they return is held against what they promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.contracts import Boxed, Region, Verdict
from fuseboard.errors import ContractError, PluginError
from fuseboard.lower.failure import decide, trip
from fuseboard.profile.verify import verify
from fuseboard.report.data import GraphReport


class CheckedRegion:
    """A region's callable in a checked call.

    :param expected: fake values of its outputs.
    :param inputs_too: also hold the inputs against copies of them, and undo what was written.
    """

    def __init__(
        self,
        region: Region,
        call: Boxed,
        expected: tuple[Any, ...],
        session: Session,
        report: GraphReport,
        inputs_too: bool,
    ) -> None:
        self._region = region
        self._call = call
        self._session = session
        self._report = report
        self._inputs_too = inputs_too
        self._expected = expected

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        before = [_copy(value) for value in inputs] if self._inputs_too else None
        try:
            result = self._call(args)
        finally:
            written = _restore(inputs, before) if before is not None else []
        if written:
            raise self._broken(f"the lowered region wrote to its inputs {written}")
        verdict = self._verdict(result, inputs)
        if not verdict.ok:
            raise self._broken(verdict.problem)
        return result

    def _broken(self, problem: str) -> ContractError:
        return ContractError(self._region.backend, "fuseboard_lower", problem)

    def _verdict(self, result: Any, inputs: list[Any]) -> Verdict:
        """The verify hook's; where it fails the policy decides, and the default stands in."""
        region, session, report = self._region, self._session, self._report
        arguments: dict[str, Any] = {
            "region": region,
            "expected": self._expected,
            "result": result,
            "inputs": inputs,
        }
        try:
            _, verdict = session.first("fuseboard_verify", **arguments)
        except PluginError as error:
            if decide(session, region.name, error.plugin, "profile", error) == "raise":
                raise
            instead = "the default check"
            trip(report, error.plugin, "profile", region.name, error, instead, region.source)
            verdict = verify(**arguments)
        return verdict  # type: ignore[no-any-return]


def _restore(inputs: list[Any], before: list[Any]) -> list[int]:
    """Undo what was written to the inputs; returns the positions where something was."""
    written = [
        i
        for i, (now, was) in enumerate(zip(inputs, before, strict=True))
        if isinstance(was, torch.Tensor) and not _same_bits(now, was)
    ]
    with torch.no_grad():
        for i in written:
            # An expanded tensor has one element in several places and takes no copy.
            shape = [
                1 if s == 0 else n for n, s in zip(inputs[i].shape, inputs[i].stride(), strict=True)
            ]
            where = inputs[i].as_strided(shape, inputs[i].stride())
            where.copy_(before[i].as_strided(shape, before[i].stride()))
    return written


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return value.detach().clone()
    return None


def _same_bits(now: torch.Tensor, was: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(now), _bytes_of(was))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().flatten()
    # A clone: one element may have any stride and be called contiguous, and then has no view.
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)
