"""Which models are measured. The registry imports nothing; ``benchmarks.builders`` makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.builders import Workload

Kind = Literal["inference", "training", "kernel"]


@dataclass(frozen=True)
class Model:
    """One model at one size.

    :ivar builder: the function of ``benchmarks.builders`` that makes it.
    :ivar arguments: its keyword arguments.
    :ivar kind: ``kernel`` for a few ops by themselves, which ``all`` leaves out.
    """

    name: str
    description: str
    builder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "inference"

    def build(self) -> Workload:
        """The module and its pool of inputs. Imports torch; the same bits on every call."""
        make = getattr(import_module("benchmarks.builders"), self.builder)
        workload: Workload = make(**self.arguments)
        return workload


_MODELS = (
    Model("mlp-b1", "6 layers of 256 with ReLU, batch 1", "mlp", {"batch": 1}),
    Model("mlp-b64", "6 layers of 256 with ReLU, batch 64", "mlp", {"batch": 64}),
    Model(
        "minilm-8x64",
        "all-MiniLM-L6-v2, real weights, 8 docstrings of 64 tokens, mean pooling",
        "minilm",
        {"batch": 8, "length": 64},
    ),
    Model(
        "minilm-1x16",
        "all-MiniLM-L6-v2, real weights, 1 docstring of 16 tokens, mean pooling",
        "minilm",
        {"batch": 1, "length": 16},
    ),
    Model("bert-base-1x128", "BERT-base, 1x128 tokens", "bert", {"batch": 1, "length": 128}),
    Model("bert-base-4x128", "BERT-base, 4x128 tokens", "bert", {"batch": 4, "length": 128}),
    Model("distilbert-1x128", "DistilBERT, 1x128", "distilbert", {"batch": 1, "length": 128}),
    Model("gpt2-1x128", "GPT-2 small, 1x128, no cache", "gpt2", {"batch": 1, "length": 128}),
    Model(
        "llama-1x128",
        "Llama-style, 8 layers of 512, rotary, SwiGLU, 1x128, no cache",
        "llama",
        {"batch": 1, "length": 128},
    ),
    Model(
        "llama4-1x128",
        "the same of 4 layers",
        "llama",
        {"batch": 1, "length": 128, "layers": 4},
    ),
    Model(
        "llama24-1x128",
        "the same of 24 layers",
        "llama",
        {"batch": 1, "length": 128, "layers": 24},
    ),
    Model("resnet50-b1", "ResNet-50, 1x3x224x224", "resnet50", {"batch": 1}),
    Model("resnet50-b4", "ResNet-50, 4x3x224x224", "resnet50", {"batch": 4}),
    Model("mobilenet-v2-b1", "MobileNetV2, 1x3x224x224", "mobilenet_v2", {"batch": 1}),
    Model(
        "convnext-tiny-b1",
        "ConvNeXt-tiny, 1x3x224x224: depthwise 7x7, norms over channels, GELU",
        "convnext_tiny",
        {"batch": 1},
    ),
    Model("vit-b16-b1", "ViT-B/16, 1x3x224x224", "vit_b16", {"batch": 1}),
    Model(
        "train-nanogpt",
        "GPT of 4 layers, 4 heads, 128 wide; block 64, batch 12; a step with AdamW",
        "train_nanogpt",
        kind="training",
    ),
    Model(
        "train-bert4",
        "BERT-base of 4 layers, 4x128, 2 classes; a step with AdamW",
        "train_bert",
        kind="training",
    ),
    Model(
        "train-masked-bert",
        "masked-language BERT, 4 layers of 256, 4x128; a step with AdamW",
        "train_masked_bert",
        kind="training",
    ),
    Model(
        "train-resnet18",
        "ResNet-18, 32x3x32x32, 10 classes; a step with AdamW",
        "train_resnet18",
        kind="training",
    ),
    Model(
        "train-gpt2-4x256",
        "GPT-2 small, 4x256; forward and backward",
        "train_gpt2",
        {"batch": 4, "length": 256},
        kind="training",
    ),
    Model(
        "train-llama4",
        "Llama-style, 4 layers of 512, 1x128; forward and backward",
        "train_llama",
        {"batch": 1, "length": 128, "layers": 4},
        kind="training",
    ),
    Model(
        "train-llama24",
        "the same of 24 layers",
        "train_llama",
        {"batch": 1, "length": 128, "layers": 24},
        kind="training",
    ),
)

_KERNELS = (
    Model("kernel-arithmetic", "sums, products, ReLU of three 512x1024", "arithmetic"),
    Model("kernel-functions", "sigmoid, tanh, exp, clamp of two 512x1024", "functions"),
    Model("kernel-gelu", "512x1024 plus a bias, GELU, plus 512x1024", "bias_gelu"),
    Model("kernel-block", "a transformer block, 256 wide, 4 heads, 4x64", "transformer_block"),
)

_ALL = (*_MODELS, *(replace(model, kind="kernel") for model in _KERNELS))
MODELS: dict[str, Model] = {model.name: model for model in _ALL}


def select_models(patterns: Iterable[str]) -> list[Model]:
    """Models in registry order: names, globs such as ``resnet50*``, a kind, or ``all``, which is
    all but kernels.

    :raises KeyError: a pattern that matches nothing; the message lists what there is.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            model.name
            for model in _ALL
            if pattern == model.kind
            or (pattern == "all" and model.kind != "kernel")
            or fnmatchcase(model.name, pattern)
        }
        if not found:
            raise KeyError(f"no model matches {pattern!r}; there are {', '.join(MODELS)}")
        chosen |= found
    return [model for model in _ALL if model.name in chosen]
