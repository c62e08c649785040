"""Attention written out in models of the transformers library: found, exact, and saving little."""

from __future__ import annotations

import copy
from functools import cache
from itertools import cycle

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import fuseboard
from tests.support.attention import found, no_further, rewrite_however_small
from tests.support.backends import all_trips, compiled
from tests.support.transformers_models import DROPOUT, MODELS, base_model, eager_model


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    rewrite_however_small(monkeypatch)


def results_of(model, inputs, train):
    """The first result, and the gradients of the weights by which it is reached."""
    result = model(**inputs)[0]
    if not train:
        return {"result": result}
    (result * result.detach().sin()).sum().backward()
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return {"result": result, **{name: grad for name, grad in named.items() if grad is not None}}


def doubled(inputs):
    return {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def assert_found_and_exact(model, inputs, count, train):
    """Each attention is found; values and gradients are as exact as eager's."""
    model.train(train)
    others = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.set_grad_enabled(train):
        got = results_of(compiled(model), inputs, train)
        eager = results_of(others[0], inputs, train)
        precise = results_of(others[1], doubled(inputs), train)
    level = max(float(value.detach().abs().max()) for value in precise.values())
    for name, value in eager.items():
        # The bias of keys moves all scores of a row alike: its gradient is 0 but for roundings.
        if float(precise[name].detach().abs().max()) < 1e-12 * level:
            assert float(got[name].abs().max()) < 1e-6 * level
        else:
            no_further(got[name], value, precise[name])
    assert found() == count
    assert not all_trips()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.thorough
def test_models_of_the_transformers_library(which, train):
    """Two narrow layers of each."""
    pytest.importorskip("transformers")
    model, inputs, count = eager_model(which)
    assert_found_and_exact(model, inputs, count, train)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.slow
def test_a_layer_of_base_size(which, train):
    """Of the width, heads and tokens of images and sound that models have."""
    pytest.importorskip("transformers")
    model, inputs, count = base_model(which)
    assert_found_and_exact(model, inputs, count, train)


# --- what is saved for the backward ---------------------------------------------------------------


def lowered_eagerly(region, inputs):
    """What is saved depends on the split of the joint graph, not on who compiles its parts."""
    return fuseboard.lower_eagerly(region)


def split_by_inductor(graph, inputs):
    """As the backend ``inductor`` splits, without compiling the parts."""

    def inner(part, example_inputs, **options):
        return make_boxed_func(part.forward)

    return compile_fx(graph, inputs, inner_compile=inner)


def saved_bytes(model, inputs):
    """What lies in memory between forward and backward, beside what lies there anyway."""
    values = [*model.parameters(), *model.buffers(), *inputs.values()]
    others = {one.untyped_storage().data_ptr() for one in values if torch.is_tensor(one)}
    found_bytes = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in others:
            found_bytes[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = model(**inputs)[0]
    result.square().sum().backward()
    return sum(found_bytes.values())


@cache
def bytes_that_inductor_saves(which, drops):
    """Between a model's forward and backward, by Inductor's own split."""
    torch._dynamo.reset()
    model, inputs, _ = eager_model(which, DROPOUT[which] if drops else {})
    return saved_bytes(torch.compile(model.train(), backend=split_by_inductor), inputs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("which", "form"),
    [
        (which, form)
        for which, left in zip(MODELS, cycle(["with_dropout", "as_written"]))
        for form in ("rewritten", left)
    ],
)
def test_a_model_saves_no_more_than_inductor(which, form, monkeypatch):
    """By default, with every backend that is installed: written as one op, and left as written.

    With a dropout it is left as written, since the kernel draws no mask: eager's is drawn. Models
    that are much alike, such as BERT and RoBERTa, take turns with the two reasons to leave it.
    """
    pytest.importorskip("transformers")
    if form == "as_written":
        monkeypatch.undo()
    drops = form == "with_dropout"
    allowed = bytes_that_inductor_saves(which, drops)
    torch._dynamo.reset()
    model, inputs, count = eager_model(which, DROPOUT[which] if drops else {})
    options = {
        **{"policy": "priority", "settle": "in_calls", "verify": "off"},
        "stages.lower": f"{__name__}:lowered_eagerly",
    }
    run = torch.compile(model.train(), backend="fuseboard", options=options)
    assert saved_bytes(run, inputs) <= allowed
    assert found() == (count if form == "rewritten" else 0)
    assert not all_trips()
