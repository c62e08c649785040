"""Graphs that are compiled beside their calls, as users' are by default."""

from __future__ import annotations

import time

import torch

import fuseboard
from fuseboard.lower import background
from tests.support.eager_loses import MEASURE

QUICK = ["mkldnn", "eager"]


def compiled(target, dynamic=None, **options):
    options = {"backends": QUICK, "measure_s": 0.01, **options}
    return torch.compile(target, backend="fuseboard", options=options, dynamic=dynamic)


def pinned(target, backend="mkldnn", dynamic=None, **options):
    """One backend, which wins each comparison with eager in the workshop."""
    stages = {"measure": MEASURE}
    backends = [backend, "eager"]
    options = {"backends": backends, "stages": stages, "margin": 0.0, **options}
    return compiled(target, dynamic, **options)


def lives():
    return [graph for graph in background._unsettled if hasattr(graph, "state")]


def life():
    (found,) = lives()
    return found


def wait_for(happened):
    """Wait until a function's answer is true, for what another thread does; return it."""
    end = time.monotonic() + 60
    while not (answer := happened()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


def compare_all():
    """Wait until no call waits to be compared on beside the calls."""
    chosen = [one._chosen for one in lives() if one._chosen is not None]
    by_sizes = [one.by_sizes for one in chosen if one.by_sizes is not None]
    wait_for(lambda: not any(one._pending for one in by_sizes))


def mlp(size=64):
    return torch.nn.Sequential(
        torch.nn.Linear(size, size),
        torch.nn.ReLU(),
        torch.nn.Linear(size, size),
        torch.nn.Softmax(-1),
    )


def loaded():
    """The graphs that were made again in this process."""
    return [graph for graph in fuseboard.last_report().graphs if "load" in graph.seconds]


#: A plugin that another process finds, which does something in ``lower``.
PLUGIN = """
import os, signal, time
import fuseboard

@fuseboard.hookimpl
def fuseboard_backend():
    return fuseboard.BackendInfo(
        name="{name}", compiles_quickly=True, dynamic_shapes=True
    )

@fuseboard.hookimpl
def fuseboard_claim(graph, kind):
    return fuseboard.claim_nodes(graph, lambda node: None)

@fuseboard.hookimpl
def fuseboard_lower(region, inputs):
    {act}
"""
