"""sentence-transformers: ``encode`` calls one module after the other, so these are compiled."""

import tempfile

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def encoder(directory: str) -> SentenceTransformer:
    """An encoder with random weights and a few words."""
    words = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat"]
    vocabulary = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(directory)
    transformer = Transformer(directory)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def main() -> None:
    """Sentences of several lengths have the same embeddings."""
    sentences = ["the cat sat", "on a mat", "the cat sat on the mat", "cat"]
    with tempfile.TemporaryDirectory() as directory:
        model = encoder(directory)
        expected = model.encode(sentences, convert_to_tensor=True)
        model.compile(backend="fuseboard")
        for batch_size in (2, 4):
            found = model.encode(sentences, batch_size=batch_size, convert_to_tensor=True)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
