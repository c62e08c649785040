"""Wrong answers are found, however few; right ones in another order of summation pass."""

import pytest
import torch

from benchmarks.verification import as_double, double, problem_with


@pytest.fixture
def answers():
    """Eager's answer and the float64 reference of a matrix product with a long inner sum."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator) for s in ((37, 2048), (2048, 199)))
    return a @ b, a.double() @ b.double()


def test_another_summation_order_passes(answers):
    """The product in pieces differs in bits, not in quality."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator) for s in ((37, 2048), (2048, 199)))
    pieces = sum(a[:, i::7] @ b[i::7] for i in range(7))
    eager, reference = answers
    assert not torch.equal(pieces, eager)
    assert problem_with([pieces], [eager], [reference]) == ""


def test_one_wrong_value_is_found(answers):
    """One element in thousands, off by a thousandth of the scale."""
    eager, reference = answers
    wrong = eager.clone()
    wrong[5, 7] += 1e-3 * reference.abs().max()
    assert "output 0: off by" in problem_with([wrong], [eager], [reference])


def test_without_a_reference_eager_takes_its_place(answers):
    """Then eager itself passes, and a wrong value doesn't."""
    eager, _ = answers
    assert problem_with([eager], [eager], None) == ""
    assert problem_with([eager + 1], [eager], None)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (torch.ones(2, 3), "eager has torch.float32 (3, 2)"),
        (torch.ones(3, 2, dtype=torch.float64), "torch.float64"),
        (torch.full((3, 2), torch.nan), "not finite in the same places"),
    ],
)
def test_shape_dtype_and_finiteness_are_part_of_an_answer(wrong, problem):
    """Each is named before values are looked at."""
    right = torch.ones(3, 2)
    assert problem in problem_with([wrong], [right], [right.double()])


def test_outputs_are_counted():
    """A missing gradient is a wrong result."""
    right = torch.ones(3)
    assert "1 outputs, eager has 2" in problem_with([right], [right, right], None)


def test_integers_must_be_equal():
    """No tolerance where there is no rounding."""
    assert "must be equal" in problem_with([torch.tensor([1, 2])], [torch.tensor([1, 3])], None)


def test_the_reference_is_a_copy():
    """The float64 model leaves the measured one as it was; token ids stay integers."""
    module = torch.nn.Linear(2, 2)
    assert double(module).weight.dtype == torch.float64
    assert module.weight.dtype == torch.float32
    kinds = [t.dtype for t in as_double([torch.ones(1), torch.ones(1, dtype=torch.int64)])]
    assert kinds == [torch.float64, torch.int64]
