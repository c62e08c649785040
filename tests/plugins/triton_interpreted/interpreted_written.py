"""Every written kernel, forward and backward, against its reference in float64."""

from __future__ import annotations

import pytest
import torch

from fuseboard_triton.kernels import (
    cross_entropy,
    norms,
    rotary,
)
from tests.support.values import assert_closer, rnd

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: No aligned tile, in every dtype; one element and a power of two.
CASES = [((2, 3, 37), dtype) for dtype in DTYPES]
CASES += [((1, 1), torch.float32), ((5, 64), torch.float32)]


def exactly(*values):
    """The same in float64."""
    return [
        v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values
    ]


def check(kernel, reference, *args) -> None:
    """As near to float64 as the reference in the dtype itself; no argument is written to."""
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    got, rival, exact = kernel(*args), reference(*args), reference(*exactly(*args))
    if isinstance(got, torch.Tensor):
        got, rival, exact = (got,), (rival,), (exact,)
    for one, other, true in zip(got, rival, exact, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert_closer(one, reference=true, rival=other.to(one.dtype))
    for arg, old in zip(args, before, strict=True):
        if isinstance(arg, torch.Tensor):
            torch.testing.assert_close(arg, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_rms_norm(shape, weighted, dtype):
    """RMS norm, with and without a weight, and its gradients."""
    x, grad = rnd(*shape, dtype=dtype), rnd(*shape, seed=1, dtype=dtype)
    weight = rnd(shape[-1], seed=2, dtype=dtype) if weighted else None
    check(norms.rms_norm, norms.rms_norm_reference, x, weight, 1e-5)
    rstd = norms.rms_norm_reference(x.float(), None, 1e-5)[1]
    check(norms.rms_norm_backward, norms.rms_norm_backward_reference, grad, x, weight, rstd)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_layer_norm(shape, weighted, dtype):
    """Layer norm, with and without weight and bias, and its gradients."""
    x, grad = 3 + rnd(*shape, dtype=dtype), rnd(*shape, seed=1, dtype=dtype)
    weight, bias = (rnd(shape[-1], seed=s, dtype=dtype) if weighted else None for s in (2, 3))
    check(norms.layer_norm, norms.layer_norm_reference, x, weight, bias, 1e-5)
    _, mean, rstd = norms.layer_norm_reference(x.float(), None, None, 1e-5)
    check(
        norms.layer_norm_backward, norms.layer_norm_backward_reference, grad, x, weight, mean, rstd
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_first(dtype):
    """The sum is returned as well, rounded as eager's, and it is what is normalised."""
    x, residual = rnd(4, 37, dtype=dtype), rnd(4, 37, seed=1, dtype=dtype)
    weight, bias = rnd(37, seed=2, dtype=dtype), rnd(37, seed=3, dtype=dtype)

    def rms(x, residual, weight, eps):
        return *norms.rms_norm_reference(x + residual, weight, eps), x + residual

    def layer(x, residual, weight, bias, eps):
        return *norms.layer_norm_reference(x + residual, weight, bias, eps), x + residual

    check(norms.add_rms_norm, rms, x, residual, weight, 1e-5)
    check(norms.add_layer_norm, layer, x, residual, weight, bias, 1e-5)
    *_, total = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [True, False])
def test_cross_entropy(mean, dtype):
    """Loss, count and log-softmax, with targets that are ignored; and the gradient."""
    x, target = 3 * rnd(6, 37, dtype=dtype), torch.tensor([0, 36, 5, -100, 7, -100])

    def loss(x, target, ignored, mean):
        return cross_entropy.cross_entropy(x, target, ignored, mean, True)

    check(loss, cross_entropy.reference, x, target, -100, mean)
    _, total, logs = cross_entropy.reference(x, target, -100, mean)
    args = (torch.tensor(0.7, dtype=dtype), logs, target, -100, mean, total)
    check(cross_entropy.cross_entropy_backward, cross_entropy.reference_backward, *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 10, 16])
def test_rotary(size, dtype):
    """Heads that lie transposed in memory, tables that broadcast; forwards and backwards."""
    x = rnd(2, 5, 3, size, dtype=dtype).transpose(1, 2)
    cos, sin = rnd(5, size, seed=1, dtype=dtype), rnd(1, 1, 5, size, seed=2, dtype=dtype)
    check(rotary.rotary, rotary.reference, x, cos, sin)
    check(rotary.rotary_backward, rotary.reference_backward, x, cos, sin)
    assert rotary.rotary(x, cos, sin, x.stride()).stride() == x.stride()


def test_nothing_to_do():
    """Tensors without elements."""
    x, w = torch.empty(0, 8), torch.ones(8)
    assert norms.rms_norm(x, w, 1e-5)[0].shape == (0, 8)
    assert torch.equal(norms.rms_norm_backward(x, x, w, torch.empty(0, 1))[1], torch.zeros(8))
    assert norms.layer_norm(x, w, w, 1e-5)[0].shape == (0, 8)
    assert rotary.rotary(x, w, w).shape == (0, 8)
