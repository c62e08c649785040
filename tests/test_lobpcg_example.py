"""The example ``lobpcg.py``: eigenpairs as others find them, a tracker, a profile."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fuseboard
from tests.support.samplers import FakeSampler, sampling_with

EXAMPLE = Path(__file__).parents[1] / "examples" / "lobpcg.py"
SIDE = 9  # 9 x 12 points


@pytest.fixture(scope="module")
def lobpcg():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("lobpcg_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _csr_is_in_beta():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        yield


def problem(lobpcg, generalized: bool, dense: bool):
    a = lobpcg.laplacian(SIDE)
    b = lobpcg.mass(a.shape[0]) if generalized else None
    if dense:
        return a.to_dense(), None if b is None else b.to_dense()
    return a, b


def spectrum(a, b, largest: bool) -> torch.Tensor:
    """All eigenvalues of the dense matrices, in float64, the wanted end first."""
    a = a.to_dense()
    if b is not None:
        lower = torch.linalg.cholesky(b.to_dense())
        half = torch.linalg.solve_triangular(lower, a, upper=False)
        a = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    values = torch.linalg.eigvalsh(a)
    return values.flip(0) if largest else values


def assert_eigenpairs(result, a, b, largest: bool, tolerance: float) -> None:
    """Values as of the whole spectrum; vectors orthonormal, and what A makes of them."""
    assert result.converged
    k = len(result.values)
    torch.testing.assert_close(result.values, spectrum(a, b, largest)[:k], rtol=1e-9, atol=0)
    x = result.vectors
    bx = x if b is None else b @ x
    torch.testing.assert_close(x.mT @ bx, torch.eye(k, dtype=x.dtype), rtol=0, atol=1e-10)
    residual = torch.linalg.norm(a @ x - bx * result.values, dim=0)
    assert float((residual / torch.linalg.norm(x, dim=0)).max()) < 50 * tolerance


KINDS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize("method", ["basic", "ortho"])
@pytest.mark.parametrize(("dense", "generalized", "largest"), KINDS)
def test_eigenpairs_are_those_of_the_whole_spectrum(lobpcg, method, dense, generalized, largest):
    """Sparse and dense, with and without B, from either end; more guesses than pairs."""
    a, b = problem(lobpcg, generalized, dense)
    result = lobpcg.solve(a, 3, b=b, guesses=6, largest=largest, method=method, tolerance=1e-9)
    assert_eigenpairs(result, a, b, largest, 1e-9)


@pytest.mark.parametrize("method", ["basic", "ortho"])
@pytest.mark.parametrize("generalized", [False, True])
def test_the_compiled_update_finds_the_same(lobpcg, method, generalized):
    """Through fuseboard on eager, one graph without P and one with it; as torch.lobpcg has them."""
    a, b = problem(lobpcg, generalized, dense=False)

    def compiled(update):
        return torch.compile(
            update, backend="fuseboard", fullgraph=True, options={"backends": ["eager"]}
        )

    with fuseboard.settings(cache=False):
        result = lobpcg.solve(
            a, 3, b=b, guesses=6, largest=False, method=method, tolerance=1e-9, compile=compiled
        )
    assert_eigenpairs(result, a, b, False, 1e-9)
    theirs, _ = torch.lobpcg(a, 3, b, n=6, niter=1000, tol=1e-9, largest=False)
    torch.testing.assert_close(result.values, theirs, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_the_default_backends_find_the_same(lobpcg):
    """Whatever fuseboard chooses for the update."""
    a, b = problem(lobpcg, generalized=True, dense=False)

    def compiled(update):
        return torch.compile(update, backend="fuseboard")

    result = lobpcg.solve(
        a, 2, b=b, guesses=4, largest=True, method="ortho", tolerance=1e-9, compile=compiled
    )
    assert_eigenpairs(result, a, b, True, 1e-9)


@pytest.mark.parametrize("largest", [False, True])
def test_scipy_finds_the_same(lobpcg, largest):
    """Its dense solver, to rounding."""
    pytest.importorskip("scipy", reason="needs scipy: pip install scipy")
    a, b = problem(lobpcg, generalized=True, dense=False)
    result = lobpcg.solve(a, 3, b=b, guesses=6, largest=largest, tolerance=1e-9)
    others = lobpcg.references(a, 3, b, largest)
    assert set(others) == {"torch.lobpcg", "scipy.linalg.eigh"}
    for values in others.values():
        torch.testing.assert_close(result.values, values, rtol=1e-8, atol=0)


def test_float32_converges_to_its_own_precision(lobpcg):
    """The default tolerance is the root of the dtype's rounding."""
    a = lobpcg.laplacian(SIDE, torch.float32)
    result = lobpcg.solve(a, 2, guesses=5, largest=True)
    assert result.converged
    exact = spectrum(a.to(torch.float64), None, True)[:2]
    torch.testing.assert_close(result.values.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["basic", "ortho"])
def test_exact_guesses_are_no_trouble(lobpcg, method):
    """Residuals are rounding alone, and the basis as dependent as can be; still n steps further."""
    a = lobpcg.laplacian(SIDE).to_dense()
    _, vectors = torch.linalg.eigh(a)
    result = lobpcg.solve(
        a,
        2,
        guesses=vectors[:, :4],
        largest=False,
        method=method,
        tolerance=1e-16,
        max_iterations=5,
    )
    assert result.iterations == 5
    torch.testing.assert_close(result.values, torch.linalg.eigvalsh(a)[:2], rtol=1e-12, atol=0)
    identity = torch.eye(2, dtype=a.dtype)
    torch.testing.assert_close(result.vectors.mT @ result.vectors, identity, rtol=0, atol=1e-10)


def test_a_preconditioner_saves_iterations(lobpcg):
    """The exact inverse: each step is one of the inverse iteration at least."""
    a = lobpcg.laplacian(SIDE)
    factor = torch.linalg.cholesky(a.to_dense())
    plain = lobpcg.solve(a, 2, guesses=4, largest=False, tolerance=1e-9)
    helped = lobpcg.solve(
        a,
        *(2,),
        guesses=4,
        largest=False,
        tolerance=1e-9,
        precondition=lambda r: torch.cholesky_solve(r, factor),
    )
    assert_eigenpairs(helped, a, None, False, 1e-9)
    assert helped.iterations < plain.iterations / 2


def test_the_tracker_sees_each_iteration(lobpcg):
    """Numbers from 1, times, residuals of every vector, and how many pairs have converged."""
    seen = []
    a = lobpcg.laplacian(SIDE)
    result = lobpcg.solve(a, 3, guesses=6, largest=True, tolerance=1e-9, tracker=seen.append)
    assert seen == result.history
    assert [told.number for told in seen] == list(range(1, result.iterations + 1))
    assert all(told.seconds > 0 and told.residuals.shape == (6,) for told in seen)
    assert seen[0].converged == 0
    assert seen[-1].converged == 3
    for told in seen:
        below = told.residuals[:3] < 1e-9
        assert told.converged == next((i for i, ok in enumerate(below) if not ok), 3)


def test_it_stops_after_the_last_allowed_iteration(lobpcg):
    """And says that it hasn't converged."""
    result = lobpcg.solve(lobpcg.laplacian(SIDE), 2, guesses=4, max_iterations=3)
    assert (result.iterations, result.converged, len(result.history)) == (3, False, 3)


@pytest.mark.parametrize(
    ("k", "guesses", "problem"),
    [
        (0, 3, "1 <= k <= n <= m/3"),
        (4, 3, "k = 4 and n = 3"),
        (2, 40, "n = 40"),
        (2, torch.ones(108, 4, dtype=torch.float64), "the guesses depend on each other"),
    ],
)
def test_impossible_requests_are_refused(lobpcg, k, guesses, problem):
    """Sizes that don't fit, and guesses that are all the same."""
    with pytest.raises(ValueError, match=problem):
        lobpcg.solve(lobpcg.laplacian(SIDE), k, guesses=guesses)


def test_the_program_prints_tables_and_writes_a_profile(lobpcg, tmp_path, capsys):
    """Compilation comes before the session, so that the profile is of the iteration."""
    sampler = FakeSampler()
    arguments = ["--side", str(SIDE), "-k", "2", "-n", "4", "--method", "ortho"]
    arguments += ["--backends", "eager", "--profile", str(tmp_path / "out")]
    with fuseboard.settings(block=["pyspy", "perf"], cache=False), sampling_with(sampler):
        assert lobpcg.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"2 of 2", printed)
    assert re.search(r"largest relative difference from torch\.lobpcg: \d\.\de-1[0-6]", printed)
    assert "outside of compiled code" in printed
    assert len(list((tmp_path / "out").glob("*.html"))) == 1
    assert sampler.asked[2].tags == ("lobpcg ortho",)
