"""The example ``lobpcg``: eigenpairs as others find them, a tracker, gradients, a profile."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch

import fuseboard
from examples.lobpcg import __main__ as program
from examples.lobpcg.problems import Chebyshev, laplacian, mass, rough_ground
from examples.lobpcg.solver import solve
from tests.support.samplers import FakeSampler, sampling_with

SIDE = 9  # 9 x 12 points


@pytest.fixture(autouse=True)
def _csr_is_in_beta():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        yield


def problem(generalized: bool, dense: bool):
    a = laplacian(SIDE)
    b = mass(a.shape[0]) if generalized else None
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
def test_eigenpairs_are_those_of_the_whole_spectrum(method, dense, generalized, largest):
    """Sparse and dense, with and without B, from either end; more guesses than pairs."""
    a, b = problem(generalized, dense)
    result = solve(a, 3, b=b, guesses=6, largest=largest, method=method, tolerance=1e-9)
    assert_eigenpairs(result, a, b, largest, 1e-9)


@pytest.mark.parametrize("method", ["basic", "ortho"])
@pytest.mark.parametrize("generalized", [False, True])
@pytest.mark.thorough
def test_the_compiled_update_finds_the_same(method, generalized):
    """Through fuseboard on eager, one graph without P and one with it; as torch.lobpcg has them."""
    a, b = problem(generalized, dense=False)

    def compiled(update):
        return torch.compile(
            update, backend="fuseboard", fullgraph=True, options={"backends": ["eager"]}
        )

    with fuseboard.settings(cache=False):
        result = solve(
            a, 3, b=b, guesses=6, largest=False, method=method, tolerance=1e-9, compile=compiled
        )
    assert_eigenpairs(result, a, b, False, 1e-9)
    theirs, _ = torch.lobpcg(a, 3, b, n=6, niter=1000, tol=1e-9, largest=False)
    torch.testing.assert_close(result.values, theirs, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_the_default_backends_find_the_same():
    """Whatever fuseboard chooses for the update."""
    a, b = problem(generalized=True, dense=False)

    def compiled(update):
        return torch.compile(update, backend="fuseboard")

    result = solve(
        a, 2, b=b, guesses=4, largest=True, method="ortho", tolerance=1e-9, compile=compiled
    )
    assert_eigenpairs(result, a, b, True, 1e-9)


@pytest.mark.parametrize("largest", [False, True])
def test_scipy_finds_the_same(largest):
    """Its dense solver, to rounding."""
    pytest.importorskip("scipy", reason="needs scipy: pip install scipy")
    a, b = problem(generalized=True, dense=False)
    result = solve(a, 3, b=b, guesses=6, largest=largest, tolerance=1e-9)
    others = program.references(a, 3, b, largest)
    assert set(others) == {"torch.lobpcg", "scipy.linalg.eigh"}
    for values in others.values():
        torch.testing.assert_close(result.values, values, rtol=1e-8, atol=0)


def test_float32_converges_to_its_own_precision():
    """The default tolerance is the root of the dtype's rounding."""
    a = laplacian(SIDE, torch.float32)
    result = solve(a, 2, guesses=5, largest=True)
    assert result.converged
    exact = spectrum(a.to(torch.float64), None, True)[:2]
    torch.testing.assert_close(result.values.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["basic", "ortho"])
def test_exact_guesses_are_no_trouble(method):
    """Residuals are rounding alone, and the basis as dependent as can be; still n steps further."""
    a = laplacian(SIDE).to_dense()
    _, vectors = torch.linalg.eigh(a)
    result = solve(
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


def test_a_preconditioner_saves_iterations():
    """The exact inverse: each step is one of the inverse iteration at least."""
    a = laplacian(SIDE)
    factor = torch.linalg.cholesky(a.to_dense())
    plain = solve(a, 2, guesses=4, largest=False, tolerance=1e-9)
    helped = solve(
        a,
        *(2,),
        guesses=4,
        largest=False,
        tolerance=1e-9,
        precondition=lambda r: torch.cholesky_solve(r, factor),
    )
    assert_eigenpairs(helped, a, None, False, 1e-9)
    assert helped.iterations < plain.iterations / 2


def test_the_tracker_sees_the_guesses_and_each_iteration():
    """Numbers from 0, times, residuals of every vector, and how many pairs have converged."""
    seen = []
    a = laplacian(SIDE)
    result = solve(a, 3, guesses=6, largest=True, tolerance=1e-9, tracker=seen.append)
    assert seen == result.history
    assert [told.number for told in seen] == list(range(result.iterations + 1))
    assert all(told.seconds > 0 and told.residuals.shape == (6,) for told in seen)
    assert seen[0].converged == 0
    assert seen[-1].converged == 3
    for told in seen:
        below = told.residuals[:3] < 1e-9
        assert told.converged == next((i for i, ok in enumerate(below) if not ok), 3)


@pytest.mark.parametrize("last", [0, 4])
def test_a_tracker_ends_the_iteration(last):
    """By what it returns; what was found so far is the result."""
    a = laplacian(SIDE)
    result = solve(a, 2, guesses=4, tracker=lambda told: told.number == last)
    assert (result.iterations, result.converged) == (last, False)
    again = solve(a, 2, guesses=4, max_iterations=last)
    torch.testing.assert_close(result.values, again.values, rtol=0, atol=0)


def test_it_stops_after_the_last_allowed_iteration():
    """And says that it hasn't converged."""
    result = solve(laplacian(SIDE), 2, guesses=4, max_iterations=3)
    assert (result.iterations, result.converged, len(result.history)) == (3, False, 4)


# --- batches, functions, gradients ----------------------------------------------------------------


def some_matrices(*shape: int) -> torch.Tensor:
    """Symmetric, with wide gaps between the eigenvalues at either end."""
    m = shape[-1]
    generator = torch.Generator().manual_seed(5)
    q, _ = torch.linalg.qr(torch.randn(*shape, m, dtype=torch.float64, generator=generator))
    half = torch.arange(m) - m / 2
    return q @ torch.diag_embed((half * half.abs()).expand(shape).to(q.dtype)) @ q.mT


@pytest.mark.parametrize("method", ["basic", "ortho"])
@pytest.mark.parametrize("generalized", [False, True])
def test_matrices_of_a_batch_are_solved_together(method, generalized):
    """Each to the end, whichever is done first; as each alone."""
    a = some_matrices(2, 3, 21) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    b = mass(21).to_dense().expand(2, 3, 21, 21) if generalized else None
    seen = []
    result = solve(a, 2, b=b, guesses=5, method=method, tolerance=1e-8, tracker=seen.append)
    assert result.converged
    assert result.values.shape == (2, 3, 2)
    assert result.vectors.shape == (2, 3, 21, 2)
    assert seen[0].residuals.shape == (2, 3, 5)
    for i, j in itertools.product(range(2), range(3)):
        exact = spectrum(a[i, j], None if b is None else b[i, j], True)[:2]
        torch.testing.assert_close(result.values[i, j], exact, rtol=1e-9, atol=0)
    bx = result.vectors if b is None else b @ result.vectors
    identity = torch.eye(2, dtype=a.dtype).expand(2, 3, 2, 2)
    torch.testing.assert_close(result.vectors.mT @ bx, identity, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["basic", "ortho"])
def test_a_function_multiplies_as_its_matrix_does(method, compiled):
    """Products and a preconditioner go into what is compiled."""
    a = rough_ground(SIDE)
    size = a.c.numel()
    matrix = a(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.mT, rtol=0, atol=0)
    guesses = torch.randn(size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    result = solve(
        a,
        2,
        guesses=guesses,
        largest=False,
        method=method,
        tolerance=1e-9,
        precondition=Chebyshev(a, a.bound / 30, a.bound),
        compile=(lambda f: torch.compile(f, backend=counted, fullgraph=True))
        if compiled
        else lambda f: f,
    )
    assert bool(graphs) == compiled
    assert_eigenpairs(result, matrix, None, False, 1e-8)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("shape", [(9,), (2, 9)])
def test_the_gradient_is_that_of_eigenpairs(largest, shape):
    """Held against differences of the whole solver, and against torch.linalg.eigh's."""
    half = some_matrices(*shape)

    def pairs(half):
        found = solve((half + half.mT) / 2, 2, guesses=3, largest=largest, tolerance=1e-13)
        signs = found.vectors.detach().select(-2, 0).sign().unsqueeze(-2)
        return found.values, found.vectors * signs

    def exact(half):
        values, vectors = torch.linalg.eigh((half + half.mT) / 2)
        order = [-1, -2] if largest else [0, 1]
        vectors = vectors[..., order]
        return values[..., order], vectors * vectors.detach().select(-2, 0).sign().unsqueeze(-2)

    half.requires_grad_()
    assert torch.autograd.gradcheck(pairs, half, atol=1e-5)
    weights = torch.linspace(-1, 1, half.shape[-1] * 2, dtype=torch.float64).view(-1, 2)
    gradients = []
    for function in (pairs, exact):
        values, vectors = function(half)
        loss = (values * weights[:1]).sum() + (vectors * weights).sum()
        gradients.append(torch.autograd.grad(loss, half)[0])
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def test_a_gradient_that_is_not_known_is_refused():
    """With B, or for a sparse matrix; where no gradient is wanted there is no complaint."""
    a = some_matrices(9).requires_grad_()
    b = torch.eye(9, dtype=a.dtype)
    with pytest.raises(ValueError, match="where B is given"):
        solve(a, 1, b=b)
    with pytest.raises(ValueError, match=r"for A of layout torch\.sparse_coo"):
        solve(a.detach().to_sparse().requires_grad_(), 1)
    with torch.no_grad():
        assert not solve(a, 1, b=b).values.requires_grad


# --- what is refused, and the program -------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "guesses", "problem"),
    [
        (0, 3, "1 <= k <= n <= m/3"),
        (4, 3, "k = 4 and n = 3"),
        (2, 40, "n = 40"),
        (2, torch.ones(108, 4, dtype=torch.float64), "the guesses depend on each other"),
    ],
)
def test_impossible_requests_are_refused(k, guesses, problem):
    """Sizes that don't fit, and guesses that are all the same."""
    with pytest.raises(ValueError, match=problem):
        solve(laplacian(SIDE), k, guesses=guesses)


def test_the_program_prints_tables_and_writes_a_profile(tmp_path, capsys):
    """Compilation comes before the session, so that the profile is of the iteration."""
    sampler = FakeSampler()
    arguments = ["--side", str(SIDE), "-k", "2", "-n", "4", "--method", "ortho"]
    arguments += ["--backends", "eager", "--profile", str(tmp_path / "out")]
    with fuseboard.settings(block=["pyspy", "perf"], cache=False), sampling_with(sampler):
        assert program.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"2 of 2", printed)
    assert re.search(r"largest relative difference from torch\.lobpcg: \d\.\de-1[0-6]", printed)
    assert "outside of compiled code" in printed
    assert len(list((tmp_path / "out").glob("*.html"))) == 1
    assert sampler.asked[2].tags == ("lobpcg ortho",)


@pytest.mark.thorough
def test_the_program_compares_a_function_with_eager(capsys):
    """Once it is settled what answers; the same eigenvalues come of both."""
    arguments = ["--matrix-free", "--side", str(SIDE), "-k", "2", "-n", "4", "--backends", "eager"]
    with fuseboard.settings(cache=False):
        assert program.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"ortho update of 4 vectors of 108, .* times as fast\)", printed)
