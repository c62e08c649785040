"""The plugin ``inductor``: its options, what it leaves to ATen, and its artifacts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config, lowering
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
import fuseboard_inductor
import fuseboard_inductor.freezing
from fuseboard.report.data import ledger
from fuseboard_inductor._export import _of_tensors
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import rnd


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def notes(function: Any, *inputs: Any, **options: Any) -> list[str]:
    """What the report says of the region, once the function was compiled and compared."""
    torch._dynamo.reset()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = function(*inputs)
        torch.manual_seed(0)
        result = compiled(function, "inductor", min_region_us=0, **options)(*inputs)
    torch.testing.assert_close(result, expected)
    assert all_trips() == []
    (region,) = last_graph().regions
    assert region.backend == "inductor"
    return region.notes


# --- what runs as an ATen kernel ------------------------------------------------------------------


def determinants(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.det(x) * torch.linalg.det(x + 1)


DET = (
    "aten._linalg_det.default runs as an ATen kernel (2x): Inductor has no kernel of its own for it"
)


@pytest.mark.thorough
def test_fallbacks_are_counted_with_their_reasons(directory):
    """By op. Later compiles tell the same, whether Inductor's cache or the board's serves them."""
    x = rnd(4, 4)
    assert notes(determinants, x, cache_dir=directory) == [DET]
    assert notes(determinants, x, cache_dir=directory) == [DET]
    assert last_graph().regions[0].loaded
    assert notes(determinants, x, cache=False) == [DET]


@pytest.mark.thorough
def test_complex_numbers_are_a_reason():
    """Inductor leaves every op on them to ATen."""
    found = notes(lambda x, y: torch.complex(x, y).abs() * 2, rnd(5), rnd(5))
    assert found
    assert all(note.endswith("Inductor compiles no complex numbers") for note in found)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.thorough
def test_complex_numbers_are_told_in_the_report_alone(recwarn, training):
    """Inductor would warn once in a process, also of code that loses."""
    lowering._warn_complex_not_supported.cache_clear()
    x, y = rnd(5), rnd(5)
    if training:
        with torch.enable_grad():
            fn = compiled(lambda x, y: torch.complex(x, y).abs() * 3, "inductor", cache=False)
            fn(x.requires_grad_(), y).sum().backward()
    else:
        assert notes(lambda x, y: torch.complex(x, y).abs() * 3, x, y, cache=False)
    assert [str(w.message) for w in recwarn if "complex" in str(w.message)] == []


@pytest.mark.thorough
def test_eagers_random_numbers_are_a_reason():
    """The note names the setting that would do without."""
    found = notes(lambda x: x + torch.rand_like(x), rnd(5))
    assert len(found) == 1
    assert "runs as an ATen kernel (1x): so that it draws eager's numbers" in found[0]


@pytest.mark.parametrize("random", ["eager", "fast"])
@pytest.mark.thorough
def test_attention_without_dropout_is_no_matter_of_random_numbers(random):
    """Inductor has no kernel for it, whatever the setting."""
    q, k, v = (rnd(1, 2, 64, 16) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    found = notes(lambda q, k, v: attend(q, k, v) + 1, q, k, v, random=random)
    attention = [note for note in found if "flash_attention" in note]
    assert len(attention) == 1
    assert attention[0].endswith("Inductor has no kernel of its own for it")


@pytest.mark.parametrize("function", [torch.rand_like, torch.randn_like, torch.bernoulli])
@pytest.mark.thorough
def test_kernels_that_inductor_has_for_random_numbers(function):
    """With other numbers than eager's it would use them."""
    found = notes(lambda x: x + function(x), rnd(5).abs().clamp(max=1))
    assert [note for note in found if "so that it draws eager's numbers" in note]


def test_what_inductor_compiles_has_no_note():
    """Nor has a matrix product, which is left to a library by choice."""
    assert notes(lambda x, y: torch.relu(x @ y).sum(-1), rnd(5, 7), rnd(7, 3)) == []


# --- options --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_cpp_wrapper(directory):
    """Kernels called from C++: forward and backward are right, and stored for later."""

    def f(x, y):
        return (torch.relu(x @ y) + torch.linalg.det(y)).sum(-1)

    for loaded in (False, True):
        torch._dynamo.reset()
        grads = []
        for function in (
            f,
            compiled(
                f,
                "inductor",
                "eager",
                cache_dir=directory,
                **{"plugins.inductor.cpp_wrapper": True},
            ),
        ):
            x, y = rnd(5, 4).requires_grad_(), rnd(4, 4).requires_grad_()
            result = function(x, y)
            result.sum().backward()
            grads.append([result.detach(), x.grad, y.grad])
        torch.testing.assert_close(grads[1], grads[0])
        assert all_trips() == []
        forward = [r for r in last_graph("forward").regions if r.backend == "inductor"]
        assert [r.loaded for r in forward] == [loaded]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("freezing", "use the backend inductor-freezing"),
        ("fallback_random", "use fuseboard's setting random"),
        ("max_autotune", "use the option max_autotune"),
    ],
)
def test_settings_that_would_break_a_promise_are_refused(name, reason):
    """Before anything is compiled; the message says what to use instead, or why not at all."""
    options = {"plugins.inductor.config": {name: True}}
    with pytest.raises(Exception, match=reason):
        compiled(torch.relu, "inductor", **options)(rnd(3))
    assert ledger.graphs() == []


@pytest.mark.parametrize("backend", ["inductor", "inductor-freezing"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_fusion_sise": 8}, "no setting 'max_fusion_sise'. Did you mean 'max_fusion_size'?"),
        ({"cpp": {"simdlen": 0}}, "no setting 'cpp'. It is a group: write 'cpp."),
        ({"max_fusion_size": "many"}, "max_fusion_size = 'many': Input should be a valid integer"),
        ({"epilogue_fusion": 3}, "epilogue_fusion = 3: Input should be a valid boolean"),
        ({"cpp.threads": [1]}, "cpp.threads = [1]: Input should be a valid integer"),
        ({"a": 1, "zz": 2}, "no setting 'zz'."),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_that_inductor_has_not_are_refused(backend, given, told):
    """Before anything is compiled; the message says where it was set, and what is near."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.relu, backend, **{f"plugins.{backend}.config": given})(rnd(3))
    error = caught.value.inner_exception
    assert isinstance(error, fuseboard.SettingsError)
    text = str(error)
    assert text.startswith(f"plugins.{backend}.config = ")
    assert told in text
    assert text.endswith("Set in torch.compile(options=).")
    assert ledger.graphs() == []


def test_a_setting_as_text_becomes_what_inductor_wants():
    """As from the environment, which has nothing but text; defaults are taken as they are."""
    given = {"max_fusion_size": "8", "epilogue_fusion": "no", "cpp.simdlen": None}
    options = fuseboard_inductor.Options(config=given)
    assert options.config == {"max_fusion_size": 8, "epilogue_fusion": False, "cpp.simdlen": None}
    everything = config.get_config_copy()
    taken = {
        name: value for name, value in everything.items() if name not in fuseboard_inductor.TAKEN
    }
    assert fuseboard_inductor.Options(config=taken).config == taken


@pytest.mark.thorough
def test_settings_of_inductors_own_are_parts_of_the_key(directory):
    """Those in the options, and those that were changed behind the board's back."""

    def f(x):
        return torch.sin(x) + 1

    def loaded(**options: Any) -> bool:
        notes(f, rnd(5), cache_dir=directory, **options)
        return last_graph().regions[0].loaded

    assert [loaded(), loaded()] == [False, True]
    with config.patch({"cpp.simdlen": 0}):
        assert [loaded(), loaded()] == [False, True]
    options = {"plugins.inductor.config": {"cpp.simdlen": 0}}
    assert [loaded(**options), loaded(**options)] == [False, True]


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backends", [("inductor",), ("mkldnn", "inductor", "eager")])
def test_a_tensor_joined_with_an_empty_one_is_laid_out_as_eagers(backends):
    """As keys and values are that an empty cache is updated with; plain Inductor keeps strides."""

    def join(empty, x):
        return torch.cat([empty, (x * 2).view(2, 5, 4, 3).transpose(1, 2)], -2)

    empty, x = torch.empty(0), rnd(2, 5, 12)
    with torch.no_grad():
        result = compiled(join, *backends, min_region_us=0)(empty, x)
    torch.testing.assert_close(result, join(empty, x))
    assert result.stride() == join(empty, x).stride() == (60, 15, 3, 1)
    assert all_trips() == []


@pytest.mark.thorough
def test_values_that_no_first_call_had_are_eagers():
    """NaN times 0 is NaN, as in ``softshrink``; rests are those of exact quotients."""

    def run(x, y):
        return x * 0, torch.nn.functional.softshrink(x), torch.remainder(x, y), x % 0.1

    fn = compiled(run, "inductor", settle="first_call")
    fn(rnd(5), rnd(5).abs() + 1)
    x = torch.tensor([float("nan"), float("inf"), 1e7, 2.0, -2.0])
    y = torch.tensor([1.0, 2.0, 0.3, float("inf"), float("inf")])
    torch.testing.assert_close(fn(x, y), run(x, y), equal_nan=True)
    tenths = torch.tensor(0.1).double()
    precise = torch.remainder(x.double(), tenths).float()
    torch.testing.assert_close(fn(x, y)[3], precise, equal_nan=True)
    assert not all_trips()


def test_the_key_of_its_cache_tells_the_strides_of_the_results(directory, monkeypatch):
    """An equal graph that somebody else compiled may have others."""
    from torch._inductor import compile_fx

    inner, tags = compile_fx.compile_fx_inner, []

    def spy(*args: Any, **keywords: Any) -> Any:
        tags.append(torch.compiler.config.cache_key_tag)
        return inner(*args, **keywords)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    notes(torch.sin, rnd(5, 3).t(), cache_dir=directory)
    assert tags == [" strides [(1, 3)]"]
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.parametrize("name", ["/nonexistent/c++", "no-such-compiler"])
def test_a_compiler_that_isn_t_there_is_told_before_anything_is_compiled(name, monkeypatch):
    """Inductor would try no other one, and take half a minute to say so."""
    monkeypatch.setenv("CXX", name)
    for plugin in (fuseboard_inductor, fuseboard_inductor.freezing):
        info = plugin.fuseboard_backend()
        assert "cpu" not in info.device_types or not info.available
        assert info.available or repr(name) in info.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_between_fused_ops(dtype):
    """What eager loses, or lets overflow, is lost: nothing in between has a float32's digits."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.to(dtype)
        return ((y + 1e-3) - y).float(), (y * y * y).float() * w, torch.sigmoid(y * 3.1) - y

    x, w = rnd(20), rnd(20)
    x[0] = 500.0
    torch._dynamo.reset()
    with torch.no_grad():
        results = compiled(chain, "inductor", min_region_us=0)(x, w)
        torch.testing.assert_close(results, chain(x, w), rtol=0, atol=0)
    assert all_trips() == []
    assert [region.backend for region in last_graph().regions] == ["inductor"]


def test_an_exported_graph_reads_sizes_behind_the_tensors_that_have_them():
    """Also where weights, which are stored in it, come before these."""
    weight, x = rnd(3, 4), rnd(5, 3)
    graph = make_fx(lambda rows, weight, x: (x @ weight * rows,), tracing_mode="symbolic")(
        5, weight, x
    )
    made = _of_tensors(graph, [5, weight, x], (1,))
    made.graph.lint()
    torch.testing.assert_close(made(x)[0], x @ weight * 5)
