"""What the tests of ``dynamic = "specialise"`` share: a backend that wants plain sizes."""

from __future__ import annotations

import torch

import fuseboard
from tests.support.backends import plugged
from tests.support.values import assert_same, rnd


def specialised(fn, *backends, dynamic_sizes="specialise", **options):
    """Compiled with every size symbolic; ``static`` is specialised."""
    options = {"backends": list(backends or ("static",)), "dynamic": dynamic_sizes, **options}
    return torch.compile(fn, backend="fuseboard", dynamic=True, options=options)


def static(**hooks):
    """The backend ``static`` on the board for a block; see ``plugged``."""
    return plugged("static", info={"dynamic_shapes": False}, **hooks)


def lowering(per_region):
    """A lower hook that first calls ``per_region(region)``."""

    def lower(region, inputs):
        per_region(region)
        return fuseboard.lower_eagerly(region)

    return lower


def f(x):
    """What most of the tests compile."""
    return (x.exp() + 1) * x.shape[0]


def batch_of(region):
    """The first size of a static region's first input."""
    return region.graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]


def check(fn, reference, *batches):
    """Eager's answers for batches of these sizes, in this order."""
    for n in batches:
        with torch.no_grad():
            assert_same(fn(rnd(n, 3)), reference(rnd(n, 3)))
