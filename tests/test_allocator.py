"""The most that a call has allocated at once."""

from __future__ import annotations

import threading

import pytest
import torch

from fuseboard.torch_api import allocator as torch_allocator
from fuseboard.torch_api.allocator import peak_bytes

CPU = torch.device("cpu")
MIB = 2**20
X = torch.ones(MIB // 4)


def test_the_peak_is_of_what_lives_at_once():
    def call():
        first = X + 1
        second = first * 2
        del first
        return second.sum()

    assert 2 * MIB <= peak_bytes(call, CPU) < 2.1 * MIB


def test_the_call_s_exception_passes_and_later_calls_are_counted():
    def fail():
        raise ValueError("the call's own")

    with pytest.raises(ValueError, match="the call's own"):
        peak_bytes(fail, CPU)
    assert MIB <= peak_bytes(lambda: X + 1, CPU) < 1.1 * MIB


def test_under_a_profiler_nothing_is_told_and_the_profile_goes_on():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert peak_bytes(lambda: X + 1, CPU) is None
        X.neg()
    assert "aten::neg" in {event.name for event in profile.events()}


def test_a_profiler_of_another_thread_is_left_alone():
    told = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        thread = threading.Thread(target=lambda: told.append(peak_bytes(lambda: X + 1, CPU)))
        thread.start()
        thread.join()
        X.neg()
    assert MIB <= told[0] < 1.1 * MIB
    assert "aten::neg" in {event.name for event in profile.events()}


def test_a_torch_without_the_thread_s_profiler_does_not_tell(monkeypatch):
    monkeypatch.setattr(torch_allocator, "_start", None)
    assert peak_bytes(lambda: X + 1, CPU) is None


def test_other_devices_are_not_told():
    assert peak_bytes(lambda: X + 1, torch.device("meta")) is None
