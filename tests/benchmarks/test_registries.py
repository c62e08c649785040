"""Models, arms and checks: what is there, and how it is chosen."""

import pytest
import torch

from benchmarks.arms import ARMS, BASELINE, CONTROL, select_arms
from benchmarks.claims import (
    CHECKS,
    FULL,
    MEMORY_MODELS,
    POINTWISE,
    QUICK,
    select_checks,
)
from benchmarks.models import MODELS, select_models
from benchmarks.protocol import POOL_SIZE

SMALL = (
    *("mlp-b1", "mlp-b64", "train-nanogpt", "train-resnet18"),
    *("kernel-arithmetic", "kernel-functions", "kernel-gelu", "kernel-block"),
)


def test_models_are_chosen_by_name_glob_kind_or_all():
    """Every way to name models, always in the registry's order."""
    assert [m.name for m in select_models(["resnet50-b4", "mlp-b1"])] == ["mlp-b1", "resnet50-b4"]
    assert [m.name for m in select_models(["resnet50*"])] == ["resnet50-b1", "resnet50-b4"]
    assert all(m.kind == "training" for m in select_models(["training"]))
    assert all(m.kind == "kernel" for m in select_models(["kernel"]))
    both = [*select_models(["all"]), *select_models(["kernel"])]
    assert [m.name for m in both] == list(MODELS)


def test_arms_are_chosen_by_name_or_all():
    """In the registry's order, whatever the order asked for."""
    assert [a.name for a in select_arms(["inductor", "eager"])] == ["eager", "inductor"]
    assert [a.name for a in select_arms(["all"])] == list(ARMS)


@pytest.mark.parametrize(
    ("select", "known"),
    [(select_models, "bert-base-4x128"), (select_arms, "eager-again"), (select_checks, "memory")],
)
def test_an_unknown_name_lists_what_there_is(select, known):
    """The message says what was asked for and what could have been."""
    with pytest.raises(KeyError, match=f"'nope'.*{known}"):
        select(["nope"])


def test_the_arms_that_every_comparison_needs_are_there():
    """Eager, its control, both Inductors, fuseboard's default and each backend of its own."""
    assert {BASELINE, CONTROL, "inductor", "inductor-freezing", "fuseboard"} <= set(ARMS)
    alone = {a.backends for a in ARMS.values() if a.backends is not None}
    names = ("inductor-freezing", "mkldnn", "onnxruntime", "openvino", "tvm", "zentorch")
    engines = {(name, "eager") for name in names}
    assert alone == {("eager",), ("inductor",), *engines}
    assert {"onnxruntime", "openvino"} <= set(ARMS)  # by their own Python API
    assert {a.name for a in ARMS.values() if a.is_eager} == {BASELINE, CONTROL}


def test_the_control_is_eager():
    """The A/A control compiles nothing: it returns the module it was given."""
    module = torch.nn.Linear(2, 2)
    assert ARMS[CONTROL].compile(module) is module
    assert ARMS[BASELINE].compile(module) is module


def test_checks_name_models_that_exist():
    """A check of a model that was renamed would fail only after minutes of measuring."""
    assert {*MEMORY_MODELS, *POINTWISE} <= set(MODELS)
    for check in CHECKS:
        assert 0 < check.workers(QUICK) <= check.workers(FULL)
        assert select_checks([check.name]) == [check]


@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_the_same_every_time(name):
    """Two builds give the same bits: weights, buffers and inputs."""
    one, other = MODELS[name].build(), MODELS[name].build()
    for a, b in zip(
        one.module.state_dict().values(), other.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    for first, second in zip(one.inputs, other.inputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_a_pool_has_sets_of_one_shape_and_other_values(name):
    """No call can live off the values of the one before, and none recompiles."""
    inputs = MODELS[name].build().inputs
    assert len(inputs) == POOL_SIZE
    for other in inputs[1:]:
        assert [t.shape for t in other] == [t.shape for t in inputs[0]]
        assert not torch.equal(other[0], inputs[0][0])


@pytest.mark.parametrize("name", SMALL)
def test_a_model_answers_with_one_finite_tensor(name):
    """In training a loss; its mode fits its kind."""
    workload = MODELS[name].build()
    assert workload.training == workload.module.training == (MODELS[name].kind == "training")
    answer = workload.module(*workload.inputs[0])
    assert answer.isfinite().all()
    assert MODELS[name].kind == "kernel" or answer.ndim == (0 if workload.training else 2)
