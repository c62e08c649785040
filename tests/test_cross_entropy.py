"""Cross entropy of a linear layer becomes one op: its forms and options, and where it doesn't."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuseboard
from fuseboard.fuse import cross_entropy
from fuseboard.ops import linear_cross_entropy as op
from fuseboard.report.data import ledger
from fuseboard.torch_api.allocator import peak_bytes
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.eager_loses import MEASURE
from tests.support.values import rnd

B, S, H, V = 3, 7, 16, 53
OP = "fuseboard.linear_cross_entropy.default"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Losses are rewritten however small; a chunk is of four rows, so that the last one isn't."""
    monkeypatch.setattr(cross_entropy, "LEAST_BYTES", 0)
    monkeypatch.setattr(op, "CHUNK_BYTES", 4 * V * 4)
    ledger.clear()


def found():
    """How many losses were written as one op."""
    fusions = [one for graph in ledger.graphs() for one in graph.fusions]
    return sum(one.plugin == "linear_cross_entropy" and one.applied for one in fusions)


def drawn(dtype=torch.float32):
    """Rows, a weight, a bias, and targets of which some are ignored."""
    target = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3))
    target[0, ::3] = -100
    operands = [2 * rnd(B, S, H, seed=0), rnd(V, H, seed=1), rnd(V, seed=2)]
    return [*(one.to(dtype) for one in operands), target]


def trained(function, dtype=torch.float32, inputs=None):
    """The loss, and the gradients of the operands that it is reached by."""
    *operands, target = drawn() if inputs is None else inputs
    own = [one.detach().to(dtype or one.dtype).requires_grad_() for one in operands]
    loss = function(*own, target)
    # Factors that don't depend on the loss: its roundings aren't those of gradients.
    loss.backward(torch.linspace(0.3, 1.7, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return [loss.detach(), *(one.grad for one in own)]


def no_further(got, eager, precise, units=2):
    """From float64 than twice as far as eager is, and some units in the last place; NaN as it is.

    Each is as far as its worst element.
    """
    for ours, theirs, exact in zip(got, eager, precise, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None:
            continue
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.isnan(), theirs.isnan())
        level = exact.abs().nan_to_num().max()
        apart = [(one.double() - exact).nan_to_num().abs().max() for one in (ours, theirs)]
        assert apart[0] <= 2 * apart[1] + units * torch.finfo(ours.dtype).eps * level


def as_exact_as_eager(function, run=None, inputs=None):
    run = run or compiled(function)
    rivals = trained(function, inputs=inputs), trained(function, torch.float64, inputs)
    for _ in range(2):
        no_further(trained(run, inputs=inputs), *rivals)
    assert not all_trips()


# --- forms ----------------------------------------------------------------------------------------


def plain(x, w, b, t):
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten())


def biased(x, w, b, t):
    return F.cross_entropy(F.linear(x, w, b).view(-1, V), t.view(-1))


def as_product(x, w, b, t):
    return F.cross_entropy((x @ w.T).reshape(B * S, V), t.reshape(-1))


def as_product_of_rows(x, w, b, t):
    return F.cross_entropy(torch.mm(x.view(-1, H), w.t()), t.view(-1))


def bias_added(x, w, b, t):
    return F.cross_entropy((torch.matmul(x, w.transpose(0, 1)) + b).flatten(0, 1), t.flatten())


def weight_by_columns(x, w, b, t):
    return F.cross_entropy((x @ w.view(H, V)).flatten(0, 1), t.flatten())


def classes_second(x, w, b, t):
    return F.cross_entropy(F.linear(x, w, b).transpose(1, 2), t)


def each_loss_in_place(x, w, b, t):
    return F.cross_entropy(F.linear(x, w, b).permute(0, 2, 1), t, reduction="none")


def shifted(x, w, b, t):
    logits = F.linear(x, w)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), t[..., 1:].contiguous().view(-1))


def shifted_by_padding(x, w, b, t):
    """As transformers have it, with a count of tokens over several steps."""
    logits = F.linear(x, w).float() if w.dtype != torch.float64 else F.linear(x, w)
    labels = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="sum") / 11


def sliced_views(x, w, b, t):
    """Rows are taken from a view of rows."""
    logits = F.linear(x, w, b).view(S, B, V)[1::2, :, :].reshape(-1, V)[:-1]
    return F.cross_entropy(logits, t.view(S, B)[1::2].flatten()[:-1])


def log_likelihood(x, w, b, t):
    log_p = F.log_softmax(F.linear(x, w, b).flatten(0, 1), dim=-1)
    return F.nll_loss(log_p, t.flatten())


def tied(x, w, b, t):
    """The weight is that of an embedding as well."""
    rows = torch.tanh(F.embedding(t.clamp(min=0), w) + x)
    return F.cross_entropy(F.linear(rows, w).flatten(0, 1), t.flatten())


def twice(x, w, b, t):
    """Two losses, one of them of what the other one is of."""
    return plain(x, w, b, t) + 0.3 * shifted(x.sin(), w, b, t)


FORMS = [
    *(plain, biased, as_product, as_product_of_rows, bias_added, weight_by_columns),
    *(classes_second, each_loss_in_place, shifted, shifted_by_padding, sliced_views),
    *(log_likelihood, tied, twice),
]


def name(function):
    return function.__name__


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_a_form(form):
    """It is found; loss and gradients are as exact as eager's."""
    as_exact_as_eager(form)
    assert found() == (2 if form is twice else 1)
    assert OP in {op for region in last_graph("forward").regions for op in region.ops}


@pytest.mark.parametrize("form", [plain, each_loss_in_place, shifted_by_padding], ids=name)
def test_a_form_without_gradients(form):
    """As for a loss of validation."""
    with torch.no_grad():
        losses = [run(*drawn(dtype)) for run, dtype in _ways(form)]
    no_further(*([one] for one in losses))
    assert found() == 1


def _ways(form):
    return (compiled(form), torch.float32), (form, torch.float32), (form, torch.float64)


# --- options --------------------------------------------------------------------------------------


def chances():
    """Weights of classes, one of which counts for nothing."""
    weights = rnd(V, seed=4).abs()
    weights[5] = 0
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 7, "label_smoothing": 0.1},
        {"reduction": "sum", "weight": chances()},
        {"reduction": "none", "weight": chances(), "label_smoothing": 0.3},
        {"weight": chances(), "label_smoothing": 1.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    """Those of ``cross_entropy`` are the op's."""

    def loss(x, w, b, t):
        own = {k: v.to(x.dtype) if torch.is_tensor(v) else v for k, v in options.items()}
        targets = t.clamp(min=0) if "ignore_index" in own else t
        return F.cross_entropy(F.linear(x, w, b).flatten(0, 1), targets.flatten(), **own)

    as_exact_as_eager(loss)
    assert found() == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "class", "all"])
def test_options_together(reduction, ignored):
    """With the gradients at once and in the backward. A mean of nothing is NaN, its gradients 0."""
    *operands, target = drawn()
    target = (target.clamp(min=0) if ignored in ("none", "class") else target).flatten()
    target = torch.full_like(target, -100) if ignored == "all" else target
    ignore_index = 7 if ignored == "class" else -100
    for smoothing, weights, at_once in itertools.product(
        (0.0, 0.1, 1.0), (None, chances()), (False, reduction != "none")
    ):

        def by_op(x, w, b, t):
            options = (t, weights, reduction, ignore_index, smoothing, x.dtype)  # noqa: B023
            rows = x.flatten(0, 1)
            return op.linear_cross_entropy(rows, w, b, *options, [at_once] * 3)[0]  # noqa: B023

        def eager(x, w, b, t):
            own = None if weights is None else weights.to(x.dtype)  # noqa: B023
            return F.cross_entropy(
                F.linear(x, w, b).flatten(0, 1),
                t,
                weight=own,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=smoothing,  # noqa: B023
            )

        inputs = [*operands, target]
        got, rival, precise = (
            trained(run, dtype, inputs)
            for run, dtype in ((by_op, None), (eager, None), (eager, torch.float64))
        )
        no_further(got, rival, precise)


@pytest.mark.parametrize("wanted", range(3), ids=["rows", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_one_operand_has_a_gradient(wanted, reduction):
    """No other one is computed."""

    def loss(x, w, b, t):
        logits = F.linear(x, w, b).flatten(0, 1)
        return F.cross_entropy(logits, t.flatten(), reduction=reduction)

    def gradient(function, dtype):
        *operands, target = drawn(dtype)
        operands[wanted].requires_grad_()
        function(*operands, target).sum().backward()
        return [operands[wanted].grad]

    got = gradient(compiled(loss), torch.float32)
    no_further(got, gradient(loss, torch.float32), gradient(loss, torch.float64))
    assert found() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("upcast", [False, True], ids=["", "float"])
def test_other_dtypes(dtype, upcast):
    """Chunks' sums aren't rounded to a half; what a factor keeps from vanishing isn't lost."""

    def exact(x, w, b, t):
        return 100 * F.cross_entropy(F.linear(x, w, b).flatten(0, 1), t.flatten())

    def loss(x, w, b, t):
        logits = F.linear(x, w, b).flatten(0, 1)
        logits = logits.float() if upcast and dtype != torch.float64 else logits
        return 100 * F.cross_entropy(logits, t.flatten())

    run = compiled(loss)
    inputs = drawn(torch.bfloat16)
    rivals = trained(loss, dtype, inputs), trained(exact, torch.float64, inputs)
    no_further(trained(run, dtype, inputs), *rivals)
    assert found() == 1


@pytest.mark.parametrize("form", [biased, shifted_by_padding], ids=name)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(form, inside):
    """The layer runs in bfloat16, the loss in float32."""

    def automatic(function):
        def called(x, w, b, t):
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                return function(x, w, b, t)

        return called

    run = compiled(automatic(form)) if inside else automatic(compiled(form))
    as_exact_as_eager(automatic(form), run)
    assert found() == 1


def test_sizes_that_change():
    """One graph is for any number of rows."""
    layer = nn.Linear(H, V)

    exact = copy.deepcopy(layer).double()

    def loss(layer, x, t):
        return F.cross_entropy(layer(x).flatten(0, 1), t.flatten())

    def gradients(function, layer, x, t):
        layer.zero_grad()
        result = function(layer, x, t)
        result.backward()
        return [result.detach(), *(p.grad for p in layer.parameters())]

    run = compiled(loss)
    for rows in (5, 6, 2):
        x, *_, t = drawn()
        x, t = x[:, :rows], t[:, :rows]
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(t, 1)
        got, eager = (gradients(one, layer, x, t) for one in (run, loss))
        no_further(got, eager, gradients(loss, exact, x.double(), t))
    assert found() == 1


# --- near misses ----------------------------------------------------------------------------------


def logits_returned(x, w, b, t):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.flatten(0, 1), t.flatten()), logits


def accuracy(x, w, b, t):
    logits = F.linear(x, w).flatten(0, 1)
    return F.cross_entropy(logits, t.flatten()), (logits.argmax(1) == t.flatten()).sum()


def capped(x, w, b, t):
    return F.cross_entropy(30 * torch.tanh(F.linear(x, w) / 30).flatten(0, 1), t.flatten())


def probabilities(x, w, b, t):
    target = F.one_hot(t.clamp(min=0).flatten(), V).to(x.dtype)
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), target)


def written_to(x, w, b, t):
    logits = F.linear(x, w).flatten(0, 1)
    logits[:, 0] = 0.0
    return F.cross_entropy(logits, t.flatten())


def rows_written_to(x, w, b, t):
    rows = x * 1
    logits = F.linear(rows, w.detach()).flatten(0, 1)
    rows.mul_(2)
    return F.cross_entropy(logits, t.flatten()) + rows.sum()


def some_classes(x, w, b, t):
    return F.cross_entropy(F.linear(x, w)[..., : V - 3].flatten(0, 1), t.flatten() % 50)


def one_class_of_a_square(x, w, b, t):
    """An ellipsis at the end stands for no dimension."""
    logits = F.linear(x.repeat(1, 2 * V, 1)[0, : 2 * V], w).view(2, V, V)
    return F.cross_entropy(logits[:, :, 2, ...], t[1, :2])


def bias_after_a_cast(x, w, b, t):
    """It isn't rounded to the layer's dtype."""
    logits = F.linear(x.bfloat16(), w.bfloat16()).float() + 100 * b
    return F.cross_entropy(logits.flatten(0, 1), t.flatten())


def chosen_rows(x, w, b, t):
    kept = torch.arange(0, B * S, 2)
    return F.cross_entropy(F.linear(x, w).flatten(0, 1)[kept], t.flatten()[kept])


def rounded(x, w, b, t):
    return F.cross_entropy(F.linear(x, w).to(torch.bfloat16).flatten(0, 1), t.flatten())


def classes_first(x, w, b, t):
    return F.cross_entropy(F.linear(x, w).view(B, V, S), t)


def no_layer(x, w, b, t):
    return F.cross_entropy((x @ w.T).sin().flatten(0, 1), t.flatten())


def other_dimension(x, w, b, t):
    return F.nll_loss(F.log_softmax(F.linear(x, w).flatten(0, 1), dim=0), t.flatten())


def many_weights(x, w, b, t):
    weights = w.T.expand(B, H, V)
    return F.cross_entropy((x @ weights).flatten(0, 1), t.flatten())


def under_another_mode(x, w, b, t):
    with torch.no_grad():
        logits = F.linear(x, w).flatten(0, 1)
    return F.cross_entropy(logits + 0 * x.sum(), t.flatten())


MISSES = [
    *(logits_returned, accuracy, capped, probabilities, written_to, rows_written_to),
    *(some_classes, one_class_of_a_square, bias_after_a_cast, chosen_rows, rounded),
    *(classes_first, no_layer),
    *(other_dimension, many_weights, under_another_mode),
]


@pytest.mark.parametrize("miss", MISSES, ids=name)
def test_a_near_miss(miss):
    """It stays as it is written."""

    def first(function):
        return lambda *args: _first(function(*args))

    got, want = (trained(first(function)) for function in (compiled(miss), miss))
    torch.testing.assert_close(got, want)
    assert found() == 0
    assert not all_trips()


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def test_small_losses_stay(monkeypatch):
    """Two chunks of logits are what the op itself holds."""
    monkeypatch.setattr(cross_entropy, "LEAST_BYTES", B * S * V * 4 + 1)
    as_exact_as_eager(plain)
    assert found() == 0


# --- as autograd and eager have it ----------------------------------------------------------------


@pytest.mark.parametrize("backends", [["eager"], ["mkldnn", "eager"], ["inductor"]], ids=str)
def test_a_target_that_is_no_class(backends):
    """The error is eager's, whoever runs the rest."""
    x, w, b, target = drawn()
    target[1, 1] = V
    run = compiled(plain, *backends)
    with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
        run(x, w, b, target)
    as_exact_as_eager(plain, run)


def test_second_gradients():
    """Eager's: Dynamo's own graph computes them."""

    def penalty(function):
        *operands, target = drawn()
        own = [one.requires_grad_() for one in operands]
        grads = torch.autograd.grad(function(*own, target), own, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), own)

    torch.testing.assert_close(penalty(compiled(biased)), penalty(biased))
    assert found() == 1


def test_the_op_itself_has_no_second_gradient():
    """Whoever asks for one is told."""
    x, w, _, target = drawn()
    x = x.flatten(0, 1).requires_grad_()
    options = (target.flatten(), None, "mean", -100, 0.0, torch.float32)
    loss = op.linear_cross_entropy(x, w, None, *options, [True, False, False])[0]
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.autograd.grad(grad.sum(), x)


def test_gradients_that_the_op_was_not_asked_for():
    """They are computed in the backward."""
    *operands, target = drawn()
    rows = operands[0].flatten(0, 1)
    grads = []
    for wanted in ([True, False, False], [True, True, True]):
        own = [one.clone().requires_grad_() for one in (rows, *operands[1:])]
        options = (target.flatten(), None, "sum", -100, 0.0, torch.float32)
        op.linear_cross_entropy(*own, *options, wanted)[0].backward()
        grads.append([one.grad for one in own])
    torch.testing.assert_close(*grads)


def test_backward_twice():
    """What a backward multiplies stays as it is."""
    *operands, target = drawn()
    own = [one.requires_grad_() for one in operands]
    loss = compiled(biased)(*own, target)
    first, second = (torch.autograd.grad(3 * loss, own, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_it_can_be_switched_off():
    """As any rewrite."""
    for option in ({"block": ["linear_cross_entropy"]}, {"fuse_limit": 0}, {"fuse_skip": [0]}):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(plain, **option)(*drawn())
        assert found() == 0


# --- behind it, and what it saves -----------------------------------------------------------------


@pytest.mark.parametrize("backends", [["inductor"], ["mkldnn", "eager"], ["onnxruntime"]], ids=str)
@pytest.mark.parametrize("form", [tied, each_loss_in_place], ids=name)
def test_behind_it(backends, form):
    """Each backend leaves the op to eager, or calls it."""
    if "onnxruntime" in backends:
        pytest.importorskip("onnxruntime")
    as_exact_as_eager(form, compiled(form, *backends))
    assert found() == 1


class Model(nn.Module):
    """An embedding, a layer, and logits by the embedding's weight."""

    def __init__(self, classes, width):
        super().__init__()
        self.words = nn.Embedding(classes, width)
        self.inner = nn.Linear(width, width)

    def forward(self, ids):
        return F.linear(torch.tanh(self.inner(self.words(ids))), self.words.weight)


def step(model, ids):
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.thorough
@pytest.mark.parametrize("backends", [["eager"], ["inductor"]], ids=str)
def test_a_step_holds_no_logits(backends, monkeypatch):
    """Of twice the logits, three fifths are saved at least."""
    classes, rows = 20_000, 256
    monkeypatch.setattr(op, "CHUNK_BYTES", 8 * classes * 4)
    model = Model(classes, 8)
    ids = torch.randint(classes, (1, rows + 1))

    def peak(**options):
        torch._dynamo.reset()
        run = compiled(step, *backends, **options)
        for _ in range(2):
            run(model, ids).backward()
        model.zero_grad()
        return peak_bytes(lambda: run(model, ids).backward(), torch.device("cpu"))

    saved = peak(block=["linear_cross_entropy"]) - peak()
    assert found() == 1
    assert saved >= 0.6 * 2 * rows * classes * 4


@pytest.mark.parametrize(
    "options", [{"joint_policy": "recompute_all"}, {"memory_budget": 0.4}], ids=str
)
def test_a_memory_budget(options):
    """What is computed again is the same again."""
    as_exact_as_eager(tied, compiled(tied, **options))
    assert found() == 1


def test_forward_mode():
    """Tangents are eager's: what was compiled has none."""
    x, w, b, target = drawn()
    tangent = rnd(B, S, H, seed=5)
    run = compiled(plain)
    with torch.no_grad():
        run(x, w, b, target)
    got, want = (
        torch.func.jvp(lambda x: function(x, w, b, target), (x,), (tangent,))  # noqa: B023
        for function in (run, plain)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.thorough
def test_beside_the_calls(monkeypatch, tmp_path):
    """The workshop rewrites it, and what it made is loaded by the process of the calls."""
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(op, "CHUNK_BYTES", 32 * 2**20)  # as in the workshop
    # What was compiled wins, there and here.
    options = {"stages": {"measure": MEASURE}, "margin": 0.0}
    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", lambda trial: 1)
    model = Model(40_000, 8)
    ids = torch.randint(40_000, (1, 421))  # 64 MiB of logits: from there on the workshop rewrites
    run = compiled(step, "inductor", "eager", **options)

    def gradients(called):
        model.zero_grad()
        loss = called(model, ids)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = gradients(step)
    torch.testing.assert_close(gradients(run), expected)
    assert fuseboard.wait(120)
    for _ in range(3):
        torch.testing.assert_close(gradients(run), expected)
    model.zero_grad()
    peaks = [
        peak_bytes(lambda: called(model, ids).backward(), torch.device("cpu"))  # noqa: B023
        for called in (run, step)
    ]
    assert peaks[1] - peaks[0] > 64 * 2**20


@pytest.mark.thorough
def test_a_model_of_transformers():
    """A step that returns the loss of a language model is rewritten; one with logits isn't."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = drawn()[3].clamp(min=0)

    def loss(model, ids):
        return model(input_ids=ids, labels=ids).loss

    def gradients(run, model):
        model = copy.deepcopy(model)
        result = run(model, ids)
        result.backward()
        return [result.detach(), *(p.grad for p in model.parameters())]

    run = compiled(loss)
    no_further(gradients(run, model), gradients(loss, model), gradients(loss, model.double()))
    assert found() == 1
    ledger.clear()
    compiled(model.float())(input_ids=ids, labels=ids).loss.backward()
    assert found() == 0
