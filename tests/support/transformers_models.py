"""Tiny models of the transformers library with attention written out; weights are drawn."""

from __future__ import annotations

from typing import Any

import torch


def _text(padded: bool = True) -> dict[str, Any]:
    """Two sentences, one of them padded: the mask matters."""
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
_DENSE = {**_SMALL, "intermediate_size": 37, "vocab_size": 99, "pad_token_id": 0}
_LLAMAS = {**_DENSE, "num_key_value_heads": 2, "max_position_embeddings": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_CACHE = {"use_cache": False}
_IMAGES = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))}
_SOUND = {"input_features": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3))}
_BART = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 37 for part in ("encoder", "decoder")},
    **{"d_model": 32, "vocab_size": 99, "max_position_embeddings": 64, "dropout": 0.0},
}
_GPT2 = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
    **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    **{"bos_token_id": 1, "eos_token_id": 1},
}
_T5 = {
    **{"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 37},
    **{"vocab_size": 99, "dropout_rate": 0.0},
}
_SWIN = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]},
    **{"window_size": 4, "drop_path_rate": 0.0},
}
_WHISPER = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 37},
    **{"num_mel_bins": 8, "max_source_positions": 32},
}
_DISTIL = {
    **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37, "vocab_size": 99},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}

#: Name → (configuration, model, its fields, inputs, how many attentions it has).
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    "bert": ("BertConfig", "BertModel", {**_DENSE, **_NO_DROPOUT}, _text(), 2),
    "roberta": ("RobertaConfig", "RobertaModel", {**_DENSE, **_NO_DROPOUT}, _text(), 2),
    "albert": (
        "AlbertConfig",
        "AlbertModel",
        {**_DENSE, **_NO_DROPOUT, "embedding_size": 16},
        _text(),
        2,
    ),
    "distilbert": ("DistilBertConfig", "DistilBertModel", _DISTIL, _text(), 2),
    "gpt2": ("GPT2Config", "GPT2Model", _GPT2, {**_text(), **_NO_CACHE}, 2),
    "llama": ("LlamaConfig", "LlamaModel", _LLAMAS, {**_text(), **_NO_CACHE}, 2),
    "mistral": ("MistralConfig", "MistralModel", _LLAMAS, {**_text(), **_NO_CACHE}, 2),
    "phi": ("PhiConfig", "PhiModel", _LLAMAS, {**_text(), **_NO_CACHE}, 2),
    "t5": ("T5Config", "T5EncoderModel", _T5, _text(), 2),
    "bart": ("BartConfig", "BartModel", _BART, {**_text(), **_NO_CACHE}, 6),
    "vit": (
        "ViTConfig",
        "ViTModel",
        {**_SMALL, "intermediate_size": 37, "image_size": 32, "patch_size": 8},
        _IMAGES,
        2,
    ),
    "swin": ("SwinConfig", "SwinModel", _SWIN, _IMAGES, 3),
    "whisper": ("WhisperConfig", "WhisperEncoder", _WHISPER, _SOUND, 2),
}


#: What each drops of its probabilities in training; above they drop nothing.
DROPOUT: dict[str, dict[str, Any]] = {
    name: {field: 0.1}
    for field, names in {
        "attention_probs_dropout_prob": ("bert", "roberta", "albert", "vit", "swin"),
        "attention_dropout": ("distilbert", "llama", "mistral", "phi", "bart", "whisper"),
        "attn_pdrop": ("gpt2",),
        "dropout_rate": ("t5",),
    }.items()
    for name in names
}

_WIDE = {"num_hidden_layers": 1, "num_attention_heads": 12, "hidden_size": 768}
_WIDE_DENSE = {**_WIDE, "intermediate_size": 3072}
_WIDE_LLAMA = {**_WIDE_DENSE, "num_key_value_heads": 4}
_WIDE_IMAGES = {
    "pixel_values": torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(4))
}
_WIDE_SOUND = {
    "input_features": torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(5))
}
#: One layer of each, as wide as the base size has it: its fields, and inputs where others are
#: needed, and the number of attentions.
BASE: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{name: (_WIDE_DENSE, {}, 1) for name in ("bert", "roberta")},
    "albert": ({**_WIDE_DENSE, "embedding_size": 128}, {}, 1),
    "distilbert": ({"dim": 768, "n_layers": 1, "n_heads": 12, "hidden_dim": 3072}, {}, 1),
    "gpt2": ({"n_embd": 768, "n_layer": 1, "n_head": 12}, {}, 1),
    "llama": (_WIDE_LLAMA, {}, 1),
    "mistral": (_WIDE_LLAMA, {}, 1),
    "phi": (_WIDE_LLAMA, {}, 1),
    "t5": ({"d_model": 768, "num_layers": 1, "num_heads": 12, "d_kv": 64, "d_ff": 3072}, {}, 1),
    "bart": (
        {
            **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 12 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 3072 for part in ("encoder", "decoder")},
            "d_model": 768,
        },
        {},
        3,
    ),
    "vit": ({**_WIDE_DENSE, "image_size": 224, "patch_size": 16}, _WIDE_IMAGES, 1),
    "swin": (
        {
            **{"image_size": 224, "patch_size": 4, "embed_dim": 128, "window_size": 7},
            **{"depths": [1, 1, 1, 1], "num_heads": [4, 8, 16, 32]},
        },
        _WIDE_IMAGES,
        4,
    ),
    "whisper": (
        {
            **{"d_model": 512, "encoder_layers": 1, "encoder_attention_heads": 8},
            **{"encoder_ffn_dim": 2048, "num_mel_bins": 80, "max_source_positions": 1500},
        },
        _WIDE_SOUND,
        1,
    ),
}


def base_model(name: str) -> tuple[torch.nn.Module, dict[str, Any], int]:
    """One layer as wide as the base size; else as :func:`eager_model`."""
    fields, inputs, count = BASE[name]
    model, tiny_inputs, _ = eager_model(name, fields)
    return model, inputs or tiny_inputs, count


def eager_model(
    name: str, further: dict[str, Any] | None = None
) -> tuple[torch.nn.Module, dict[str, Any], int]:
    """A model whose attention is written out, inputs for it, and its number of attentions.

    :param further: fields, in place of those that it has here.
    """
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config, kind, fields, inputs, count = MODELS[name]
    fields = {**fields, **(further or {})}
    torch.manual_seed(0)
    own = WhisperEncoder if kind == "WhisperEncoder" else getattr(transformers, kind)
    made = own._from_config(getattr(transformers, config)(**fields), attn_implementation="eager")
    return made, inputs, count
