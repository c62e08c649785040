"""Whole models, changing weights, symbolic sizes, several threads, and other backends beside it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from fuseboard_zentorch._availability import why_unavailable
from torch import nn

import fuseboard

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)


def compiled(model, *backends: str, **options):
    settings = {
        "backends": [*(backends or ("zentorch", "eager"))],
        "plugins": {"zentorch": {"min_macs": 0}},
        "min_region_us": 0,
        **options,
    }
    return torch.compile(model, backend="fuseboard", options=settings)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)]
    return nn.Sequential(*layers).eval()


def placements() -> dict[str, int]:
    """Backend → how many ops it ran. No region was replaced."""
    (graph,) = fuseboard.last_report().graphs
    assert not graph.trips
    counts: dict[str, int] = {}
    for node in graph.nodes:
        counts[node.backend] = counts.get(node.backend, 0) + 1
    return counts


def rewritten() -> list[str]:
    graphs = fuseboard.last_report().graphs
    return [f.name for graph in graphs for region in graph.regions for f in region.fusions]


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=99,
    )
    ids = torch.randint(0, 99, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return BertModel(config).eval(), {"input_ids": ids, "attention_mask": mask}


def test_bert_runs_whole():
    """Every product and attention of it on ZenDNN, all else carried along, the same answers."""
    model, inputs = bert()
    fn = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            result, expected = fn(**inputs), model(**inputs)
            torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)
            torch.testing.assert_close(result.pooler_output, expected.pooler_output)
    assert set(placements()) == {"zentorch"}
    names = rewritten()
    assert names.count("attention") == 2
    assert sum(name.startswith("linear+bias") for name in names) == 2 * 6 + 1


def test_a_gated_model_runs_whole():
    """Llama's layers: products without bias, silu and the gate in one kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=99,
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(0, 99, (2, 16))
    fn = compiled(model)
    with torch.no_grad():
        result, expected = fn(ids, use_cache=False), model(ids, use_cache=False)
    torch.testing.assert_close(result.logits, expected.logits)
    assert rewritten().count("linear+silu+mul") == 2


@pytest.mark.parametrize("hoist", [True, False])
def test_changed_weights_are_seen_in_the_next_call(hoist):
    """In place, through ``.data``, replaced, loaded. zentorch's own backend misses all of these."""
    model, x = mlp(), torch.randn(5, 32)
    fn = compiled(model, hoist=hoist)
    changes = [
        lambda: model[0].weight.mul_(2),
        lambda: model[0].weight.data.add_(0.1),
        lambda: model[3].bias.data.zero_(),
        lambda: setattr(model[3], "weight", nn.Parameter(torch.full((10, 64), 0.5))),
        lambda: model.load_state_dict(mlp(7).state_dict()),
    ]
    with torch.no_grad():
        torch.testing.assert_close(fn(x), model(x))
        for change in changes:
            change()
            torch.testing.assert_close(fn(x), model(x))
    assert set(placements()) == {"zentorch"}


def test_many_instances_keep_their_own_weights():
    """One compiled function serves all, though memory of those that are gone is used again."""
    fn = compiled(lambda model, x: model(x))
    kept, x = mlp(1), torch.randn(5, 32)
    with torch.no_grad():
        for seed in range(2, 30):
            passing = mlp(seed)
            torch.testing.assert_close(fn(passing, x), passing(x))
            torch.testing.assert_close(fn(kept, x), kept(x))


def test_symbolic_sizes():
    """One compile for all batch sizes: what is packed doesn't depend on them."""
    model = mlp()
    fn = torch.compile(
        model,
        backend="fuseboard",
        dynamic=True,
        options={"backends": ["zentorch", "eager"], "plugins": {"zentorch": {"min_macs": 0}}},
    )
    with torch.no_grad():
        for rows in (5, 37, 2, 64):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(fn(x), model(x))
    assert set(placements()) == {"zentorch"}
    assert rewritten() == ["linear+bias", "linear+bias"]


def test_symbolic_lengths_of_attention():
    """Batches and lengths that change, of products that are attention's, too."""

    def f(q, k, v):
        whole = nn.functional.scaled_dot_product_attention(q, k, v)
        return whole.flatten(0, 1) @ v.flatten(0, 1).mT

    fn = torch.compile(
        f,
        backend="fuseboard",
        dynamic=True,
        options={"backends": ["zentorch", "eager"], "plugins": {"zentorch": {"min_macs": 0}}},
    )
    with torch.no_grad():
        for batch, length in [(2, 5), (3, 33), (4, 2)]:
            q, k, v = torch.randn(3, batch, 4, length, 8)
            reference = f(q.double(), k.double(), v.double())
            torch.testing.assert_close(fn(q, k, v).double(), reference, rtol=1.3e-6, atol=1e-5)
    assert "attention" in rewritten()


def test_bfloat16_is_as_near_as_eager():
    """A model in bfloat16 is no further from float64 than eager's run of it, times 1.5."""
    model, inputs = bert()
    with torch.no_grad():
        reference = model.double()(**inputs).last_hidden_state
        model.bfloat16()
        reference_of_rounded = model.double()(**inputs).last_hidden_state
        model.bfloat16()
        assert not torch.equal(reference, reference_of_rounded)
        ours = compiled(model)(**inputs).last_hidden_state
        eagers = model(**inputs).last_hidden_state
    assert ours.dtype == torch.bfloat16
    assert _distance(ours, reference_of_rounded) <= 1.5 * _distance(eagers, reference_of_rounded)
    assert "attention" in rewritten()


def test_autocast():
    """Weights that are cast in the graph are packed once, too, and again when they change."""
    model, x = mlp(), torch.randn(5, 32)
    fn = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            result, expected = fn(x), model(x)
            assert result.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(result, expected)
            model[0].weight.mul_(2)
            torch.clear_autocast_cache()
    assert rewritten() == ["linear+bias", "linear+bias"]


def _distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    return (value.double() - reference).square().mean().sqrt().item()


def test_calls_from_several_threads():
    """Each has its own results."""
    model = mlp()
    fn = compiled(model)
    problems: list[BaseException] = []
    with torch.no_grad():
        fn(torch.randn(5, 32))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(30):
                x = torch.randn(5, 32, generator=generator)
                with torch.no_grad():
                    torch.testing.assert_close(fn(x), model(x))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_training_stays_elsewhere():
    """It is for inference; gradients are eager's."""
    model, x = mlp(), torch.randn(5, 32)
    compiled(model)(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    reports = fuseboard.last_report().graphs
    assert {region.backend for graph in reports for region in graph.regions} == {"eager"}


def test_beside_another_backend():
    """Convolutions are left to a backend that has them; the products are ZenDNN's."""

    class Convnet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1)
            self.head = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512))

        def forward(self, x):
            return self.head(self.stem(x).relu().flatten(2).mT)

    torch.manual_seed(0)
    model, x = Convnet().eval(), torch.randn(2, 3, 33, 31)
    with torch.no_grad():
        result = compiled(model, "zentorch", "mkldnn", "eager")(x)
        torch.testing.assert_close(
            result.double(), model.double()(x.double()), rtol=1.3e-6, atol=1e-5
        )
    assert "linear+bias" in rewritten()


def test_an_unknown_option_is_an_error():
    """It names the option and where it was set."""
    with pytest.raises(Exception, match="min_mac"):
        compiled(mlp(), plugins={"zentorch": {"min_mac": 1}})(torch.randn(5, 32))


CONTAINED = """
import sys, torch
import torch._dynamo, torch._inductor.config as config
from torch._inductor import lowering

def state():
    settings = {name: repr(value) for name, value in config.get_config_copy().items()}
    backends = set(torch._dynamo.list_backends(exclude_tags=()))
    return settings, backends, set(lowering.lowerings), set(lowering.fallbacks)

model = torch.nn.Linear(64, 64).eval()
before = state()
options = {"backends": ["zentorch", "eager"], "plugins": {"zentorch": {"min_macs": 0}}}
with torch.no_grad():
    torch.compile(model, backend="fuseboard", options=options)(torch.randn(8, 64))
import fuseboard
(graph,) = fuseboard.last_report().graphs
assert [region.backend for region in graph.regions] == ["zentorch"], graph
assert "zentorch" not in sys.modules
assert state() == before
import zentorch  # what a user may do later
with torch.no_grad():
    x = torch.randn(9, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fuseboard", options=options)
    torch.testing.assert_close(compiled(x), model(x))
"""


def test_nothing_else_in_the_process_changes():
    """Inductor's settings, lowerings and fallbacks and the list of backends are as they were."""
    subprocess.run([sys.executable, "-c", CONTAINED], check=True)
