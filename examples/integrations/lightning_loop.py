"""Lightning: its module is compiled before ``fit``, which calls ``training_step`` through it."""

import logging
import warnings

import lightning
import torch


class Regression(lightning.LightningModule):
    """A small module as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(compiled: bool) -> list[torch.Tensor]:
    """The weights after an epoch."""
    lightning.seed_everything(0, verbose=False)
    module = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    run = torch.compile(module, backend="fuseboard") if compiled else module
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(run, torch.utils.data.DataLoader(data, batch_size=16))
    return [weight.detach() for weight in module.parameters()]


def main() -> None:
    """An epoch with and without fuseboard comes to the same weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of workers that load data
        torch.testing.assert_close(trained(compiled=True), trained(compiled=False))


if __name__ == "__main__":
    main()
