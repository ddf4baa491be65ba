"""Lightning, automatic optimization: a callback, and nothing else.

Accumulation needs manual optimization (lightning_manual.py): with ``accumulate_grad_batches`` above 1 Lightning's
closure holds the last micro-batch only, so the second pass would not see the others.
"""

import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatmin.integrations.lightning import SAMCallback


def make_data() -> DataLoader:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=64)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


def main(num_epochs: int = 2, **settings) -> Classifier:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Classifier()
    settings = {"gradient_clip_val": 1.0, "accelerator": "cpu", "devices": 1, "max_epochs": num_epochs} | settings
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(callbacks=[SAMCallback(rho=0.1)], **quiet, **settings)
    trainer.fit(model, make_data())
    metrics = trainer.optimizers[0].metrics
    print(f"{trainer.global_step} steps: loss {metrics.loss:.4f}  sharpness {metrics.sharpness:.4f}")
    return model


if __name__ == "__main__":
    main()
