"""Generated kernels against float64, in Triton's interpreter. Run by test_triton_interpreted."""

from __future__ import annotations

import hypothesis
import torch
from hypothesis import HealthCheck

from tests.plugins.triton_interpreted.expressions import Recipe, recipes
from tests.plugins.triton_interpreted.lowering import lower
from tests.support.values import assert_closer, strides


@hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@hypothesis.given(recipe=recipes())
def test_random_expressions_equal_float64(recipe: Recipe):
    """Whatever is fused, each result is as near to float64 as eager's, with eager's strides."""
    inputs = recipe.inputs()
    before = {name: value.clone() for name, value in inputs.items()}
    names = list(inputs)
    rival = recipe.run(inputs)
    exact = recipe.run({n: v if n == "k" else v.double() for n, v in inputs.items()}, exact=True)
    run, _ = lower(
        lambda *given: recipe.run(dict(zip(names, given, strict=True))), [*inputs.values()]
    )
    results = run(*inputs.values())
    for got, want, reference in zip(results, rival, exact, strict=True):
        assert strides(got) == strides(want)
        assert_close(got, want, reference)
    assert all(torch.equal(inputs[name], before[name]) for name in names)


def assert_close(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> None:
    """As near to float64 as eager, or within torch.testing's tolerance of it."""
    special = ~want.isfinite() | ~exact.isfinite()
    torch.testing.assert_close(got[special], want[special], equal_nan=True, rtol=0, atol=0)
    plain = ~special
    try:
        torch.testing.assert_close(got[plain], exact[plain].to(got.dtype))
    except AssertionError:
        assert_closer(got[plain], reference=exact[plain], rival=want[plain])
