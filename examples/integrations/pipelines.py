"""A pipeline of transformers: its model is compiled in place, and the pipeline stays as it is."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)


def classifier():
    """A pipeline with random weights and a few words."""
    words = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat"]
    vocabulary = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config).eval()
    return pipeline("text-classification", model=model, tokenizer=tokenizer)


def main() -> None:
    """Texts of several lengths, one at a time and as a batch, are classified as without it."""
    classify = classifier()
    texts = ["the cat sat", "on a mat", "the cat sat on the mat", "cat"]
    expected = [row["score"] for row in classify(texts)]
    classify.model.compile(backend="fuseboard")
    for batch_size in (1, 4):
        scores = [row["score"] for row in classify(texts, batch_size=batch_size)]
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
