"""The example of a budget of accuracy: it tells what it measured, whatever the processor has."""

from __future__ import annotations

import re

import pytest

from examples import accuracy_budget
from fuseboard.torch_api import formats


@pytest.mark.usefixtures("policy_measured")
def test_what_was_gained_is_measured_and_told(capsys, tmp_path, monkeypatch):
    """With integers alone, which one layer is too much for. What is fastest isn't known."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, device_type: False)
    monkeypatch.setenv("FUSEBOARD_BACKENDS", '["mkldnn", "eager"]')  # they compile quickly
    page = tmp_path / "budget.html"
    arguments = ["--width", "64", "--layers", "3", "--tolerance", "0.02", "--page", str(page)]
    accuracy_budget.main(arguments)
    told = capsys.readouterr().out
    (error,) = re.findall(r"times as fast, with an error of (\S+) on other inputs", told)
    assert float(error) <= 1.5 * 0.02
    assert "exact " in told
    assert "within 0.02 " in told
    assert "what runs: " in told
    html = page.read_text("utf-8")
    assert "partly in int8" in html
    assert "Error against time of the candidates" in html
