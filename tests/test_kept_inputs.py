"""Inputs that are kept for a comparison without a call."""

from __future__ import annotations

import pytest
import torch

from fuseboard.run import kept_inputs
from fuseboard.run.kept_inputs import KeptInputs
from tests.support.values import rnd

LAYOUTS = {
    "contiguous": rnd(2, 3),
    "transposed": rnd(2, 3).t(),
    "column of a larger one": rnd(2, 4, 3)[:, 0],
    "every other": rnd(8)[::2],
    "with an offset": rnd(9)[3:],
    "expanded": rnd(1, 3).expand(4, 3),
    "overlapping": rnd(6).as_strided((3, 3), (1, 1)),
    "number": rnd(),
    "empty": rnd(0, 3),
    "sparse": torch.eye(3).to_sparse(),
    "negated": rnd(2, 3, dtype=torch.complex64).conj().imag,
    "conjugated": rnd(2, 3, dtype=torch.complex64).t().conj(),
    "both": torch._neg_view(rnd(2, 3, dtype=torch.complex128).conj()),
    "integers": torch.arange(6).view(2, 3),
}


@pytest.mark.parametrize("given", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_copy_has_the_values_and_the_strides(given):
    kept = KeptInputs()
    kept.keep([given, 3], static=())
    copy, number = kept.inputs()
    assert number == 3
    torch.testing.assert_close(copy.to_dense(), given.to_dense(), rtol=0, atol=0)
    if given.layout == torch.strided:
        assert copy.stride() == given.stride()
        assert (copy.is_neg(), copy.is_conj()) == (given.is_neg(), given.is_conj())
        if given.numel():
            assert copy.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_weights_are_not_copied_and_may_go():
    kept, weight = KeptInputs(), rnd(100)
    kept.keep([weight, rnd(2)], static=(0,))
    assert kept.inputs()[0] is weight
    del weight
    assert kept.inputs() is None


@pytest.mark.parametrize("free", [40, 48, None])
def test_inputs_that_take_much_of_the_free_memory_are_not_kept(free, monkeypatch):
    """A quarter of it may be taken; of few bytes nobody asks."""
    monkeypatch.setattr(kept_inputs, "free_bytes", lambda device: free)
    for few, is_kept in ((11, free != 40), (12, True)):
        monkeypatch.setattr(kept_inputs, "FEW_BYTES", few)
        kept = KeptInputs()
        kept.keep([rnd(3)], static=())
        assert (kept.inputs() is not None) == is_kept
