"""Models that have to keep a budget of accuracy: small ones of many kinds, with other inputs each.

Weights are random, but for MiniLM's. In a planted one, a channel is a thousand times as large as
the others where it is stored, and its weights a thousandth where it is read: the model computes
what it did, and whoever rounds all channels in the same steps loses the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.builders import WEIGHT_SEED, Call, calibrate, from_config, minilm

WORDS = 2000
#: Inputs that decide, the first and the three after it; then those of which nothing is known.
DECIDING, UNSEEN = 4, 5
PLANTED = 1000.0

Inputs = tuple[Tensor, ...]


@dataclass
class BudgetModel:
    """
    :ivar module: returns one tensor.
    :ivar inputs: ``DECIDING`` of a kind, then ``UNSEEN``, of which the last two are of another one.
    """

    module: nn.Module
    inputs: list[Inputs]


def _pool(make: Callable[[torch.Generator, bool], Inputs]) -> list[Inputs]:
    generator = torch.Generator().manual_seed(WEIGHT_SEED)
    count = DECIDING + UNSEEN
    return [make(generator, number >= count - 2) for number in range(count)]


def _numbers(*shape: int) -> list[Inputs]:
    """Normal ones. Of the other kind: a quarter of the contrast, and an offset."""

    def make(generator: torch.Generator, other: bool) -> Inputs:
        drawn = torch.randn(shape, generator=generator)
        return (0.25 * drawn + 0.5 if other else drawn,)

    return _pool(make)


def _text(words: int = WORDS, batch: int = 2, length: int = 64) -> list[Inputs]:
    """Ids and masks. Of the other kind: few different words, half of the places padded."""

    def make(generator: torch.Generator, other: bool) -> Inputs:
        ids = torch.randint(3, 10 if other else words, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        if other:
            mask[:, length // 2 :] = 0
        return ids, mask

    return _pool(make)


def _ids() -> list[Inputs]:
    return [(ids,) for ids, _ in _text()]


_ENCODER = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256},
    "intermediate_size": 1024,
}


def _bert() -> BudgetModel:
    model = from_config("BertModel", "BertConfig", vocab_size=WORDS, **_ENCODER).eval()
    names = "input_ids", "attention_mask"
    return BudgetModel(Call(model, "last_hidden_state", *names), _text())


def _gpt2() -> BudgetModel:
    fields = {"n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    model = from_config(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, use_cache=False, **fields
    ).eval()
    return BudgetModel(Call(model, "logits", "input_ids"), _ids())


def _llama() -> BudgetModel:
    fields = {**_ENCODER, "num_key_value_heads": 2, "use_cache": False}
    model = from_config("LlamaForCausalLM", "LlamaConfig", vocab_size=WORDS, **fields).eval()
    return BudgetModel(Call(model, "logits", "input_ids"), _ids())


def _t5() -> BudgetModel:
    fields = {"d_model": 256, "num_layers": 4, "num_heads": 4, "d_kv": 64, "d_ff": 1024}
    model = from_config("T5EncoderModel", "T5Config", vocab_size=WORDS, **fields).eval()
    names = "input_ids", "attention_mask"
    return BudgetModel(Call(model, "last_hidden_state", *names), _text())


def _vit() -> BudgetModel:
    fields = {**_ENCODER, "image_size": 64, "patch_size": 8}
    model = from_config("ViTModel", "ViTConfig", **fields).eval()
    return BudgetModel(Call(model, "last_hidden_state", "pixel_values"), _numbers(2, 3, 64, 64))


def _swin() -> BudgetModel:
    fields = {"embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4}
    model = from_config("SwinModel", "SwinConfig", image_size=64, patch_size=4, **fields).eval()
    return BudgetModel(Call(model, "last_hidden_state", "pixel_values"), _numbers(2, 3, 64, 64))


def _whisper() -> BudgetModel:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(WEIGHT_SEED)
    fields = {"encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 1024}
    config = WhisperConfig(d_model=256, max_source_positions=100, **fields)
    model = WhisperEncoder._from_config(config).eval()
    return BudgetModel(Call(model, "last_hidden_state", "input_features"), _numbers(1, 80, 200))


def _images(model: str, config: str, field: str = "logits", **fields: Any) -> BudgetModel:
    inputs = _numbers(2, 3, 64, 64)
    module = Call(from_config(model, config, **fields), field, "pixel_values")
    return BudgetModel(calibrate(module, inputs[0]), inputs)


def _resnet() -> BudgetModel:
    fields = {"hidden_sizes": [64, 128, 256], "depths": [2, 2, 2], "layer_type": "basic"}
    return _images("ResNetForImageClassification", "ResNetConfig", num_labels=100, **fields)


def _mobilenet() -> BudgetModel:
    kind = "MobileNetV2ForImageClassification"
    return _images(kind, "MobileNetV2Config", num_labels=100, image_size=64)


def _convnext() -> BudgetModel:
    fields = {"hidden_sizes": [48, 96, 192], "depths": [2, 2, 4], "num_stages": 3}
    return _images("ConvNextModel", "ConvNextConfig", "last_hidden_state", **fields)


def mlp(width: int = 512, layers: int = 6) -> BudgetModel:
    torch.manual_seed(WEIGHT_SEED)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.ReLU()]
    return BudgetModel(nn.Sequential(*blocks[:-1]).eval(), _numbers(64, width))


def _conv1d() -> BudgetModel:
    torch.manual_seed(WEIGHT_SEED)
    blocks: list[nn.Module] = []
    for width, further in ((40, 128), (128, 128), (128, 256), (256, 256)):
        blocks += [nn.Conv1d(width, further, 5, padding=2), nn.BatchNorm1d(further), nn.GELU()]
    head = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 50)
    inputs = _numbers(4, 40, 200)
    return BudgetModel(calibrate(nn.Sequential(*blocks, *head), inputs[0]), inputs)


def _minilm() -> BudgetModel:
    """Docstrings; of the other kind: those of 64 tokens cut off at 16."""
    workload = minilm(8, 64, DECIDING + UNSEEN)
    *alike, one, other = workload.inputs
    for _, mask in (one, other):
        mask[:, 16:] = 0
    return BudgetModel(workload.module, [*alike, one, other])


# --- planted --------------------------------------------------------------------------------------


@torch.no_grad()
def planted_mlp(width: int = 512, layers: int = 6) -> BudgetModel:
    model = mlp(width, layers)
    first, _, second, *_ = model.module.children()
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    first.weight[3] *= PLANTED
    first.bias[3] *= PLANTED
    second.weight[:, 3] /= PLANTED
    return model


@torch.no_grad()
def _planted_bert() -> BudgetModel:
    """Channels of values, which attention leaves where they are."""
    model = _bert()
    for layer in model.module.model.encoder.layer:  # type: ignore[union-attr]
        value, out = layer.attention.self.value, layer.attention.output.dense
        value.weight[3] *= PLANTED
        value.bias[3] *= PLANTED
        out.weight[:, 3] /= PLANTED
    return model


@torch.no_grad()
def _planted_gpt2() -> BudgetModel:
    """Channels that norms scale, which nothing reads but the next product."""
    model = _gpt2()
    for block in model.module.model.transformer.h:  # type: ignore[union-attr]
        for norm, reader in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            norm.weight[3] *= PLANTED
            norm.bias[3] *= PLANTED
            reader.weight[3] /= PLANTED  # (in, out)
    return model


_BUILDERS: dict[str, Callable[[], BudgetModel]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "vit": _vit,
    "t5-encoder": _t5,
    "resnet": _resnet,
    "mobilenet-v2": _mobilenet,
    "convnext": _convnext,
    "llama": _llama,
    "swin": _swin,
    "whisper-encoder": _whisper,
    "mlp": mlp,
    "conv1d": _conv1d,
    "minilm": _minilm,
    "planted-bert": _planted_bert,
    "planted-gpt2": _planted_gpt2,
    "planted-mlp": planted_mlp,
}
NAMES = tuple(_BUILDERS)


def build(name: str) -> BudgetModel:
    """The same bits on every call."""
    return _BUILDERS[name]()
