"""Whole models, their weights, several threads, settings."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fuseboard


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Each test compiles anew."""
    torch._dynamo.reset()


def compiled(model, **options):
    return torch.compile(
        model, backend="fuseboard", options={"backends": ["openvino", "eager"], **options}
    )


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)]
    return nn.Sequential(*layers).eval()


class Convnet(nn.Module):
    """A residual block between a stem and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1)
        return self.head((x + self.block(x).relu()).mean((2, 3)))


def placements() -> dict[str, int]:
    (graph,) = fuseboard.last_report().graphs
    assert not graph.trips
    counts: dict[str, int] = {}
    for node in graph.nodes:
        counts[node.backend] = counts.get(node.backend, 0) + 1
    return counts


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
    return BertModel(config).eval(), {"input_ids": ids}


def test_bert_runs_nearly_whole():
    """The same answers, and OpenVINO takes at least nine ops of ten."""
    model, inputs = bert()
    fn = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            result, expected = fn(**inputs), model(**inputs)
            torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)
            torch.testing.assert_close(result.pooler_output, expected.pooler_output)
    counts = placements()
    assert counts["openvino"] >= 0.9 * sum(counts.values())


def test_a_convnet_runs_whole():
    """Convolutions, batch norm, pooling."""
    torch.manual_seed(0)
    model, x = Convnet().eval(), torch.randn(2, 3, 17, 19)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert set(placements()) == {"openvino"}


@pytest.mark.parametrize("hoist", [True, False])
def test_changed_weights_are_seen_in_the_next_call(hoist):
    """In place, through ``.data``, replaced, loaded."""
    model, x = mlp(), torch.randn(5, 32)
    fn = compiled(model, hoist=hoist)
    changes = [
        lambda: model[0].weight.mul_(2),
        lambda: model[0].weight.data.add_(0.1),
        lambda: model[3].bias.data.zero_(),
        lambda: setattr(model[2], "weight", nn.Parameter(torch.full((64,), 0.5))),
        lambda: model.load_state_dict(mlp(7).state_dict()),
    ]
    with torch.no_grad():
        torch.testing.assert_close(fn(x), model(x))
        for change in changes:
            change()
            torch.testing.assert_close(fn(x), model(x))
    assert set(placements()) == {"openvino"}


def test_two_instances_keep_their_own_weights():
    """One compiled function serves both."""
    first, second, x = mlp(1), mlp(2), torch.randn(5, 32)
    fn = compiled(lambda model, x: model(x))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fn(first, x), first(x))
            torch.testing.assert_close(fn(second, x), second(x))


def test_sessions_go_with_the_weights():
    """What was compiled for a module is freed with it."""
    import gc

    from fuseboard_openvino._model import Session

    def sessions():
        gc.collect()
        return sum(isinstance(one, Session) for one in gc.get_objects())

    before = sessions()
    model, x = mlp(3), torch.randn(5, 32)
    fn = compiled(lambda model, x: model(x))
    with torch.no_grad():
        fn(model, x)
    assert sessions() == before + 1
    del model
    assert sessions() == before


def test_results_of_earlier_calls_stay():
    """A call doesn't overwrite what an earlier one returned."""
    model = mlp()
    fn = compiled(model)
    inputs = [torch.randn(5, 32) for _ in range(4)]
    with torch.no_grad():
        results = [fn(x) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            torch.testing.assert_close(result, model(x))


def test_calls_from_several_threads():
    """Each has a request of its own."""
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


def test_an_unknown_option_is_an_error():
    """It names the option and where it was set."""
    with pytest.raises(Exception, match="precison"):
        compiled(mlp(), plugins={"openvino": {"precison": "bf16"}})(torch.randn(5, 32))
