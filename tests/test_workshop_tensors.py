"""Inputs in shared memory: what another process maps is what was written, and stays its own."""

from __future__ import annotations

import pytest
import torch

from fuseboard.workshop.tensors import read_inputs, write_inputs

BASE = torch.arange(24.0)
TENSORS = {
    "plain": torch.randn(3, 5),
    "transposed": torch.randn(3, 5).t(),
    "expanded": torch.randn(1, 5).expand(4, 5),
    "with an offset": BASE[5:].view(19)[::2],
    "empty": torch.empty(0, 3),
    "a scalar": torch.tensor(2.5),
    "integers": torch.arange(7),
    "booleans": torch.tensor([True, False]),
    "halves": torch.randn(4).bfloat16(),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_as_it_is(tmp_path, name):
    """Values, dtype, shape, strides, offset and lazy bits."""
    value = TENSORS[name]
    (read,) = read_inputs(write_inputs([value], tmp_path), tmp_path)
    torch.testing.assert_close(read, value, rtol=0, atol=0)
    assert (read.dtype, read.stride(), read.storage_offset()) == (
        value.dtype,
        value.stride(),
        value.storage_offset(),
    )
    assert (read.is_conj(), read.is_neg()) == (value.is_conj(), value.is_neg())


def test_what_autograd_knows_comes_along(tmp_path):
    """Parameters stay parameters, leaves that require grad do so, inference tensors are some."""
    with torch.inference_mode():
        inference = torch.randn(2)
    values = [
        torch.nn.Parameter(torch.randn(2)),
        torch.nn.Parameter(torch.randn(2), requires_grad=False),
        torch.randn(2, requires_grad=True),
        inference,
    ]
    read = read_inputs(write_inputs(values, tmp_path), tmp_path)
    assert [value.requires_grad for value in read] == [True, False, True, False]
    assert [isinstance(value, torch.nn.Parameter) for value in read] == [True, True, False, False]
    assert [value.is_inference() for value in read] == [False, False, False, True]
    assert all(value.is_leaf for value in read)


def test_inputs_that_share_memory_share_it_there(tmp_path):
    """And only these do."""
    first, second = BASE[:10], BASE[5:15]
    read = read_inputs(write_inputs([first, second, torch.zeros(3)], tmp_path), tmp_path)
    read[0][7] = 100.0
    assert read[1][2] == 100.0
    assert read[2].untyped_storage().data_ptr() != read[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("views_first", [False, True])
def test_views_are_views_of_the_same_there(tmp_path, views_first):
    """AOTAutograd's code takes the memory that some share from what they are views of."""
    base = torch.randn(4, 6)
    values = [base, base[1], base.t()[2:4]]
    values = values[::-1] if views_first else values
    read = read_inputs(write_inputs(values, tmp_path), tmp_path)
    torch.testing.assert_close(read, values, rtol=0, atol=0)
    assert [value.stride() for value in read] == [value.stride() for value in values]
    (again,) = [value for value in read if value._base is None]
    assert again.shape == base.shape
    assert all(value is again or value._base is again for value in read)
    (alone,) = read_inputs(write_inputs([base[1]], tmp_path), tmp_path)
    assert alone._base is None  # with symbolic sizes it would bring symbols of its own


def test_writes_stay_on_one_side(tmp_path):
    """Neither the file nor the original sees what is written to what was read."""
    value = torch.zeros(5)
    sent = write_inputs([value], tmp_path)
    (read,) = read_inputs(sent, tmp_path)
    read += 1
    assert value.sum() == 0
    assert read_inputs(sent, tmp_path)[0].sum() == 0


def test_no_room_is_an_error_of_the_system(tmp_path, monkeypatch):
    """A file that found no room when it is written to would end the process."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_inputs([torch.zeros(5)], tmp_path)
