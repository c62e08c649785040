"""ONNX Runtime where sizes follow from others: models compute them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate, pad

from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import rnd, strides

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

#: Functions of (N, M) whose decompositions compute sizes.
PROGRAMS = {
    "remainder": lambda x: pad(x.relu(), (0, -x.shape[1] % 3)).sum(-1),
    "rounded up": lambda x: pad(x, (0, -(-x.shape[1] // 4) * 4 - x.shape[1])).exp(),
    "largest": lambda x: pad(x, (0, max(x.shape[1], 9) - x.shape[1])).exp(),
    "smallest": lambda x: pad(x, (0, min(x.shape[1], 7))).exp(),
    "square": lambda x: pad(x, (0, x.shape[1] ** 2)).sigmoid(),
    "sum": lambda x: pad(x, (x.shape[0], x.shape[1] + 2 * x.shape[0])).exp(),
    "repeated": lambda x: x.repeat(1, x.shape[0] % 3 + 2).cos(),
    "interpolated": lambda x: interpolate(x[:, None], scale_factor=1.5, mode="linear").sigmoid(),
    "interpolated twice": lambda x: interpolate(
        interpolate(x[None, None], scale_factor=(1.5, 2), mode="bilinear"), scale_factor=0.7
    ).sigmoid(),
    "a third": lambda x: interpolate(x[:, None], scale_factor=1 / 3, mode="linear").sigmoid(),
    "rolled": lambda x: x.roll(x.shape[1] // 2, 1).exp(),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_sizes_that_follow_from_others(program):
    """They are as in eager, whatever the sizes, and no region trips over them."""
    function = PROGRAMS[program]
    call = compiled(function, "onnxruntime", dynamic=True)
    for shape in ((3, 5), (2, 11), (4, 8), (5, 6)):
        result, expected = call(rnd(*shape)), function(rnd(*shape))
        torch.testing.assert_close(result, expected)
        assert strides(result) == strides(expected)
    assert not all_trips()
    # Where a size decides at which places the model is cut, the op is declined.
    assert (program == "rolled") or "onnxruntime" in {n.backend for n in last_graph().nodes}
