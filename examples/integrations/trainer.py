"""transformers' Trainer. Its ``torch_compile_backend`` knows the backends that accelerate lists.

So the model is compiled in place: names in checkpoints and what the Trainer sees stay as they are.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def losses(compiled: bool) -> list[float]:
    """The losses of each step and of the evaluation at the end."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    if compiled:
        model.compile(backend="fuseboard")
    rows = [{"input_ids": torch.randint(0, 100, (16,)), "labels": i % 2} for i in range(32)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, max_steps=4, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"]]


def main() -> None:
    """Training with and without fuseboard comes to the same losses."""
    torch.testing.assert_close(losses(compiled=True), losses(compiled=False), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
