"""The conformance suite: first-party backends pass it, and plugins that lie are caught."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from typer.testing import CliRunner

from fuseboard.cli.main import app
from fuseboard.errors import SettingsError
from fuseboard.testing import (
    Check,
    CheckResult,
    checks_for,
    parametrize_with_checks,
    programs,
    pytest_support,
    run_checks,
)
from fuseboard.testing.compare import SLACK, allowed, first_difference
from fuseboard.testing.program import Observations, Seen, function, observe, rnd
from fuseboard.testing.programs import PROGRAMS
from tests.support.backends import claim_ops, op_name, plugged

aten = torch.ops.aten
NAMES = [program.name for program in PROGRAMS]


def program(name: str) -> Any:
    return next(program for program in PROGRAMS if program.name == name)


def result(backend: str, name: str) -> CheckResult:
    return Check(backend, program(name)).run()


# --- backends that are right ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_eager_passes_every_check(name):
    """Nothing is declined, nothing is wrong: what the suite asks for can be done."""
    found = result("eager", name)
    assert found.verdict == "pass", found.text


#: Programs with something for oneDNN in them. The others cost time and are declined.
MKLDNN = "linear|matmul|convolution|weights|instances|outputs_are|dynamic_(batch|by)|mutation_of_b"
MKLDNN += "|attention_written"


@pytest.mark.parametrize("name", [name for name in NAMES if re.match(MKLDNN, name)])
def test_mkldnn_passes_or_declines(name):
    """What oneDNN takes is right."""
    found = result("mkldnn", name)
    assert found.verdict in ("pass", "declined"), found.text


@pytest.mark.slow
def test_mkldnn_takes_nothing_else():
    """All other checks are declined, so leaving them out above leaves nothing out."""
    others = [check for check in checks_for("mkldnn") if not re.match(MKLDNN, check.name)]
    for check in others:
        assert check().verdict == "declined", check.name


#: Where Inductor has something to get wrong, and what it needs no minute of C++ for.
SLOW = "linear_mlp|convolution_(groups|batch_norm)|pooling_average|norm_layer|attention_masked"
SLOW += "|weights_edited|indexing_put|softmax_inf|reduction_nan|aliasing|mutation_(of_ov|shifts)"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if re.search(SLOW, name)])
def test_inductor_passes_or_declines(name):
    """What Inductor is known to get wrong is declined, so nothing is wrong."""
    found = result("inductor", name)
    assert found.verdict in ("pass", "declined"), found.text


# --- programs -------------------------------------------------------------------------------------


def test_names_are_unique_and_begin_with_a_family():
    """A name is an id, and ``--only`` finds a family by it."""
    assert len(set(NAMES)) == len(NAMES)
    families = {name.split("_")[0] for name in NAMES}
    assert families == {
        *("pointwise", "layout", "size", "promotion", "integer", "reduction", "softmax"),
        *("sorting", "linear", "matmul", "convolution", "pooling", "norm", "attention"),
        *("embedding", "indexing", "shape", "random", "mutation", "aliasing", "outputs"),
        *("weights", "instances", "dynamic", "training"),
    }


@pytest.mark.parametrize("name", [name for name in NAMES if program(name).reference])
def test_the_reference_is_near_eager(name):
    """Twice eager's distance from float64 is little: a wrong result doesn't fit into it."""
    eager, exact = (observe(program(name), lambda target: target, d) for d in (False, True))
    for label, seen in eager.tensors.items():
        if seen.values.is_floating_point() and seen.values.numel():
            finite = seen.values.isfinite()
            margin = allowed(seen.values, exact.tensors[label].values)[finite]
            scale = seen.values[finite].abs().double().max() if finite.any() else 0
            # Sums of up to hundreds of products: a hundred roundings of the largest element.
            # The gradient of a bias before a batch norm is zero, a sum that cancels: 2e-5.
            assert (margin <= 100 * torch.finfo(seen.values.dtype).eps * scale + 2e-5).all(), label


def test_programs_are_repeatable():
    """Two runs are equal bit for bit, random numbers included."""
    for name in ("random_dropout", "training_dropout", "weights_edited", "instances_in_turn"):
        first, second = (observe(program(name), lambda target: target) for _ in range(2))
        assert first_difference(second, first, first) == ""
        assert all(
            torch.equal(s.values, first.tensors[k].values) for k, s in second.tensors.items()
        )


def test_programs_leave_the_generator_alone():
    """Who runs checks draws the same numbers as who doesn't."""
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    result("eager", "random_numbers")
    assert torch.rand(()) == expected


# --- closeness ------------------------------------------------------------------------------------


def seen(values: Tensor) -> Observations:
    return Observations({"it": Seen(values, values.stride(), False)}, {"it": "a tensor"})


def difference(got: Tensor, eager: Tensor, exact: Tensor | None = None) -> str:
    return first_difference(seen(got), seen(eager), seen(eager if exact is None else exact))


def test_as_far_from_float64_as_eager_is_near_enough():
    """Twice eager's worst distance passes, more doesn't, whatever the distance to eager is."""
    exact = rnd(5, 7).double()
    eager = exact.float()
    eager[0, 0] += 1e-3
    distance = float((eager.double() - exact).abs().max())
    for factor, ok in ((-0.9 * SLACK, True), (-1.1 * SLACK, False), (1.1 * SLACK, False)):
        got = exact.float()
        got[3, 2] += factor * distance
        assert (difference(got, eager, exact) == "") == ok


def test_one_wrong_element_among_many_is_found():
    """A single element that is off by a thousandth is named with its place."""
    eager = rnd(100, 100)
    got = eager.clone()
    got[17, 3] *= 1.001
    assert "at [17, 3]" in difference(got, eager)
    assert "1 of 10000" in difference(got, eager)


@pytest.mark.parametrize(
    ("got", "eager"),
    [
        (torch.zeros(3), torch.full((3,), torch.nan)),
        (torch.full((3,), torch.nan), torch.zeros(3)),
        (torch.full((3,), torch.inf), torch.full((3,), -torch.inf)),
        (torch.zeros(3).double(), torch.zeros(3)),
        (torch.zeros(3, 1), torch.zeros(3)),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
    ],
)
def test_what_differs_is_different(got, eager):
    """NaN, infinities, dtypes, shapes, strides, integers and booleans are eager's."""
    assert difference(got, eager)
    assert difference(eager, eager) == ""


def test_what_eager_overflows_is_right_as_float64_has_it():
    """Another number isn't, nor an infinity that neither has."""
    eager = torch.tensor([torch.inf, torch.nan, 1.0])
    exact = torch.tensor([3e38, torch.inf, 1.0], dtype=torch.float64)
    for first, second, right in (
        (3e38, torch.inf, True),
        (torch.inf, torch.nan, True),
        (2e38, torch.inf, False),
        (-torch.inf, torch.inf, False),
        (3e38, 0.0, False),
    ):
        got = torch.tensor([first, second, 1.0])
        assert (difference(got, eager, exact) == "") == right


# --- plugins that get one op wrong ----------------------------------------------------------------

Lie = Callable[..., Any]


class _Lying(Interpreter):
    """Runs a region's ops as eager does, but for one."""

    def __init__(self, graph: Any, op: str, lie: Lie) -> None:
        super().__init__(graph)
        self.op, self.lie = op, lie

    def run_node(self, n: Any) -> Any:
        value = super().run_node(n)
        if n.op != "call_function" or op_name(n) != self.op:
            return value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.lie(value, *args, **kwargs)


def lying(op: str, lie: Lie) -> Any:
    """A backend whose op of this name gives ``lie(result, *arguments)``."""

    def call(eager_call: Any, region: Any) -> Any:
        return lambda args: _Lying(region.graph, op, lie).run(*args)

    return plugged("liar", call=call)


def first(change: Callable[[Tensor], Tensor]) -> Lie:
    """A lie about the first of several results."""
    return lambda r, *args, **kwargs: (change(r[0]), *r[1:])


def no_nan(r: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return r.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _own_numbers(r: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.rand(r.shape, generator=torch.Generator().manual_seed(7))


LIES: dict[str, tuple[str, Lie]] = {
    "pointwise_float32": ("tanh", lambda r, *a: r * (1 + 1e-5)),
    "pointwise_alpha": ("addcmul", lambda r, x, y, z, **k: x + y * z),
    "pointwise_special_values": ("relu", no_nan),
    "pointwise_zero_signs": ("neg", lambda r, *a: r + 0.0),
    "pointwise_bfloat16": ("sigmoid", lambda r, *a: r * 1.1),
    "layout_transposed": ("sub", lambda r, *a: r.contiguous()),
    "layout_channels_last": ("sub", lambda r, *a: r.contiguous()),
    "size_one": ("sigmoid", lambda r, *a: r.reshape(-1)),
    "promotion_scalars": ("div", lambda r, *a: r.double()),
    "promotion_uint8_wraps": ("mul", lambda r, x, y: (x.int() * y.int()).clamp(0, 255).byte()),
    "integer_division": ("remainder", lambda r, x, y: torch.fmod(x, y)),
    "reduction_nan_and_infinities": ("amax", no_nan),
    "reduction_sums": ("sum", lambda r, *a, **k: r * 1.0001),
    "reduction_of_nothing_and_of_one": ("prod", lambda r, *a, **k: r * 0),
    "softmax_infinite_rows": ("_softmax", no_nan),
    "sorting_stable_ties": ("sort", lambda r, x, **k: (r[0], r[1].flip(k.get("dim", -1)))),
    "linear_mlp": ("addmm", lambda r, bias, x, w: x @ w),
    "matmul_nothing_to_sum": ("mm", lambda r, *a: r + torch.nan),
    "convolution_nan": ("relu", no_nan),
    "convolution_groups": ("convolution", lambda r, *a: r * 1.001),
    "pooling_max_ceil_mode": ("max_pool2d_with_indices", lambda r, *a: (r[0], r[1] + 1)),
    "pooling_average_ceil_mode": ("avg_pool2d", lambda r, *a: r * 0.99),
    "norm_layer": ("native_layer_norm", first(lambda r: r * 0.999)),
    "norm_batch_statistics": (
        "_native_batch_norm_legit_functional",
        lambda r, *a: (*r[:4], r[4] * 1.01),
    ),
    "attention_causal": (
        "_scaled_dot_product_flash_attention_for_cpu",
        first(lambda r: r.flip(2).contiguous().as_strided(r.shape, r.stride())),
    ),
    "embedding_padding": ("embedding", lambda r, weight, i, *a: weight[(i + 1) % 7]),
    "indexing_put_accumulates": (
        "index_put",
        lambda r, x, i, v, *a: aten.index_put(x, i, v, False),
    ),
    "indexing_gather": ("gather", lambda r, *a: r.roll(1, 0)),
    "shape_join": ("cat", lambda r, *a: r.flip(0)),
    "random_numbers": ("rand_like", _own_numbers),
    "mutation_shifts_rows": ("slice_scatter", lambda r, x, *a, **k: x.clone()),
    "training_embedding_padding": (
        "embedding_dense_backward",
        lambda r, g, i, n, *a: aten.embedding_dense_backward(g, i, n, -1, False),
    ),
    "training_pooling_max_ceil_mode": (
        "max_pool2d_with_indices_backward",
        lambda r, *a: r * 0.5,
    ),
    "dynamic_batch_linear": ("gelu", lambda r, *a, **k: r * (r.shape[0] == 3)),
}


@pytest.mark.parametrize("name", LIES)
def test_a_wrong_op_is_caught(name):
    """A backend that gets one op wrong fails the check that is there for it."""
    op, lie = LIES[name]
    with lying(op, lie):
        found = result("liar", name)
    assert found.verdict == "wrong", found
    assert found.message


# --- plugins that break a promise of the whole call -----------------------------------------------


def _stale(eager_call: Any, region: Any) -> Any:
    """Keeps the weights of the first call, as who bakes them in does."""
    kept: dict[int, Tensor] = {}

    def call(args: list[Any]) -> Any:
        for i in region.static_inputs:
            args[i] = kept.setdefault(i, args[i].clone())
        return eager_call(args)

    return call


def _reuses_outputs(eager_call: Any, region: Any) -> Any:
    """Returns the same tensors from every call."""
    kept: list[Any] = []

    def call(args: list[Any]) -> Any:
        results = eager_call(args)
        kept[:] = kept or [r.clone() for r in results]
        return tuple(old.copy_(new) for old, new in zip(kept, results, strict=True))

    return call


def _writes_inputs(eager_call: Any, region: Any) -> Any:
    def call(args: list[Any]) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        results = eager_call(args)
        with torch.no_grad():
            tensors[0].detach().mul_(2)
        return results

    return call


def _halves_gradients(eager_call: Any, region: Any) -> Any:
    if region.kind != "backward":
        return eager_call
    return lambda args: tuple(r if r is None else r * 0.5 for r in eager_call(args))


def _draws_more(eager_call: Any, region: Any) -> Any:
    def call(args: list[Any]) -> Any:
        torch.rand(1)
        return eager_call(args)

    return call


def _first_size_only(eager_call: Any, region: Any) -> Any:
    """Computes as many rows as the first call had; the others are left at zero."""
    rows: list[int] = []

    def call(args: list[Any]) -> Any:
        results = [r.clone() for r in eager_call(args)]
        rows[:] = rows or [results[0].shape[0]]
        for r in results:
            r[rows[0] :] = 0
        return results

    return call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (_stale, "weights_edited"),
        (_stale, "weights_loaded"),
        (_stale, "weights_replaced"),
        (_stale, "weights_written_through_data"),
        (_stale, "instances_in_turn"),
        (_reuses_outputs, "outputs_are_fresh"),
        (_reuses_outputs, "outputs_constants_are_fresh"),
        (_writes_inputs, "aliasing_of_outputs"),
        (_writes_inputs, "mutation_of_buffers"),
        (_halves_gradients, "training_linear_tied_weights"),
        (_halves_gradients, "training_optimizer_steps"),
        (_draws_more, "training_dropout"),
        (_draws_more, "random_dropout"),
        (_first_size_only, "dynamic_batch_linear"),
    ],
)
def test_a_broken_promise_is_caught(call, name):
    """Stale weights, shared outputs, inputs written to, gradients, random numbers, sizes."""
    with plugged("liar", call=call):
        assert result("liar", name).verdict == "wrong"


def test_outputs_that_alias_are_told_from_those_that_do_not():
    """Storage shared with an input, or kept apart from it, is noticed in both directions."""
    p = function("aliasing", lambda x: (x.view(-1), x + 1), lambda: (rnd(3, 4),))
    eager = observe(p, lambda target: target)
    copies = observe(p, lambda target: lambda x: (x.reshape(-1).clone(), x + 1))
    shares = observe(p, lambda target: lambda x: (x.view(-1), x.add_(1)))
    assert "shares storage with input 0" in first_difference(copies, eager, eager)
    assert "output 1 is input 0" in first_difference(shares, eager, eager)


# --- verdicts -------------------------------------------------------------------------------------


def _raising(eager_call: Any, region: Any) -> Any:
    def call(args: list[Any]) -> Any:
        if any(isinstance(a, Tensor) and a.numel() == 0 for a in args):
            raise ZeroDivisionError("no elements")
        return eager_call(args)

    return call


def test_a_backend_that_raises_is_an_error():
    """The verdict is ``error``, with what it raised; calling the check raises it."""
    with plugged("raiser", call=_raising):
        found = result("raiser", "size_zero")
        assert found.verdict == "error"
        assert "no elements" in found.message
        with pytest.raises(Exception, match="no elements"):
            Check("raiser", program("size_zero"))()


def test_wrong_checks_raise_an_assertion_that_says_what():
    """The message names check, backend, place and both values."""
    with lying("tanh", lambda r, *a: r + 1), pytest.raises(AssertionError) as raised:
        Check("liar", program("pointwise_float32"))()
    assert re.search(
        r"pointwise_float32 on liar: call 0: output 0 is .*, eager's", str(raised.value)
    )


def test_what_is_not_taken_is_declined_with_the_reason():
    """Neither pass nor wrong; a check is a pass as soon as one op is taken."""
    with plugged("picky", claim=claim_ops("tanh")):
        declined = result("picky", "linear_mlp")
        passed = result("picky", "pointwise_float32")
    assert declined.verdict == "declined"
    assert declined.message == "another op"
    assert passed.verdict == "pass"
    assert passed.taken == {"aten.tanh.default": 1}


def test_training_is_declined_for_who_takes_none():
    """A backend without training isn't asked to."""
    with plugged("inference", info={"training": False}):
        found = result("inference", "training_norm_layer")
    assert (found.verdict, found.taken) == ("declined", {})


def test_small_programs_are_offered_all_the_same():
    """The usual plan would leave a tiny stretch between eager's to eager."""
    with plugged("tiny", claim=claim_ops("exp")):
        assert result("tiny", "pointwise_float32").taken == {"aten.exp.default": 1}


def test_an_unknown_backend_is_a_mistake_of_the_caller():
    """It isn't reported as hundreds of failing checks."""
    with pytest.raises(SettingsError, match="no plugin named 'nonsense'"):
        run_checks("nonsense")


# --- for pytest -----------------------------------------------------------------------------------


def a_test() -> Any:
    def test_conformance(check):
        check()

    return test_conformance


def test_ids_are_names():
    """One id a check; ``only`` selects."""
    (mark,) = parametrize_with_checks("eager", only="softmax")(a_test()).pytestmark
    assert mark.kwargs["ids"] == [check.name for check in checks_for("eager", "softmax")]
    assert "softmax_infinite_rows" in mark.kwargs["ids"]


@pytest.mark.thorough
def test_failures_are_not_buried_in_torchs_trace(tmp_path):
    """In a third party's tests, too, torch makes no structured trace for pytest to show."""
    (tmp_path / "test_it.py").write_text(
        "import logging\n"
        "from fuseboard.testing import parametrize_with_checks\n"
        "@parametrize_with_checks('eager', only='softmax_dims')\n"
        "def test_it(check):\n"
        "    check()\n"
        "    assert not logging.getLogger('torch.__trace').handlers\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_expected_failures_are_strict():
    """One that fails is an expected failure; one that passes or is declined fails the test."""
    expected = {"pointwise_float32": "tanh is off", "softmax_dims": "was once"}
    mark = parametrize_with_checks("liar", expected_failures=expected)(a_test()).pytestmark
    checks = {check.name: check for check in mark[0].args[1]}
    with lying("tanh", lambda r, *a: r + 1):
        with pytest.raises(pytest.xfail.Exception, match="tanh is off: call 0"):
            checks["pointwise_float32"]()
        with pytest.raises(pytest.fail.Exception, match="take it out of expected_failures"):
            checks["softmax_dims"]()
        with pytest.raises(AssertionError, match="liar: call 0"):
            checks["training_pointwise_float32"]()


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"softmax_dim": "why"}, "no check 'softmax_dim'.*softmax_dims"),
        ({"softmax_dims": " "}, "say why"),
    ],
)
def test_expected_failures_need_a_name_and_a_reason(expected, message):
    """A misspelt check, or none of a reason, is refused at once."""
    with pytest.raises(ValueError, match=message):
        parametrize_with_checks("eager", expected_failures=expected)


def test_without_pytest_the_error_says_what_to_install(monkeypatch):
    """Core needs no pytest; who decorates a test does."""
    monkeypatch.setitem(__import__("sys").modules, "pytest", None)
    with pytest.raises(ImportError, match="pip install pytest"):
        pytest_support.parametrize_with_checks("eager")


# --- at a shell -----------------------------------------------------------------------------------


def test_the_command_prints_a_table(monkeypatch):
    """Check, verdict, ops; exit status 0 where nothing is wrong."""
    monkeypatch.setenv("COLUMNS", "200")
    with plugged("picky", claim=claim_ops("_softmax")):
        done = CliRunner().invoke(app, ["conformance", "picky", "--only", "softmax_"])
    assert done.exit_code == 0, done.output
    line = r"^pass +softmax_infinite_rows +aten\._softmax\.default × 2$"
    assert re.search(line, done.output, re.M)
    done = CliRunner().invoke(app, ["conformance", "mkldnn", "--only", "softmax_dims"])
    assert "declined all" in done.output


def test_the_command_prints_one_line_a_check_however_narrow_the_terminal_was(monkeypatch):
    """Into a file nothing is folded; a wrong one says where it is written and what it was given."""
    monkeypatch.setenv("COLUMNS", "40")
    with lying("_softmax", no_nan):
        done = CliRunner().invoke(app, ["conformance", "liar", "--only", "softmax"])
    *lines, counts = done.stdout.splitlines()
    assert len(lines) == len(checks_for("liar", "softmax"))
    assert re.fullmatch(r"\d+ pass, \d+ declined, \d+ wrong, \d+ error", counts)
    (wrong,) = [line for line in lines if line.startswith("wrong ")]
    for told in (
        "softmax_infinite_rows",
        "eager's nan",
        "aten._softmax.default × 2",
        "call 0 (seed 1234): float32[6, 5] strides (5, 1)",
    ):
        assert told in wrong, told
    file, number = re.search(r"program at (\S+):(\d+);", wrong).groups()
    source = Path(programs.__file__).parent / Path(file).name
    assert "softmax_infinite_rows" in "\n".join(
        source.read_text().splitlines()[int(number) - 3 : int(number)]
    )


def test_the_command_fails_where_something_is_wrong():
    """Exit status 1, and JSON that says what."""
    with lying("_softmax", no_nan):
        done = CliRunner().invoke(app, ["conformance", "liar", "--only", "softmax_inf", "--json"])
    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)
    assert (found["check"], found["verdict"]) == ("softmax_infinite_rows", "wrong")
    assert "eager's nan" in found["message"]
    assert found["source"].endswith(tuple("0123456789"))
    assert found["inputs"]


def test_the_command_prints_a_table_of_ops_for_a_readme():
    """What runs, in how many checks, and which of them fail."""
    with lying("_softmax", no_nan):
        done = CliRunner().invoke(app, ["conformance", "liar", "--only", "softmax", "--table"])
    assert done.exit_code == 1
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert rows[0] == ["op", "runs in checks", "what is known"]
    known = {row[0]: row[1:] for row in rows[2:]}
    checks, text = known["`aten._softmax.default`"]
    assert int(checks) > 1
    assert text == "in checks that fail: softmax_infinite_rows"


def test_every_program_knows_where_it_is_written():
    """The place is in the module that defines it, and inputs can be told."""
    for one in PROGRAMS:
        file, _, line = one.source.rpartition(":")
        assert Path(file).parent == Path(programs.__file__).parent, one.name
        assert line.isdigit()
        assert len(one.inputs()) == len(one.calls)


@pytest.mark.parametrize("arguments", [("nonsense",), ("eager", "--only", "nonsense")])
def test_the_command_refuses_what_is_not_there(arguments):
    """An unknown backend or check is the user's mistake: exit status 2."""
    done = CliRunner().invoke(app, ["conformance", *arguments])
    assert done.exit_code == 2
    assert "nonsense" in done.stderr
