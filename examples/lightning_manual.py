"""Lightning, manual optimization: two visible passes, here with gradient accumulation over micro-batches."""

import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatmin import SAM

MICRO_BATCH_SIZE, NUM_ACCUMULATED = 32, 2


def make_data() -> DataLoader:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=MICRO_BATCH_SIZE * NUM_ACCUMULATED)


class Classifier(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))

    def configure_optimizers(self) -> SAM:
        return SAM(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=self)

    def accumulate(self, batch: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for x, y in zip(*(part.split(MICRO_BATCH_SIZE) for part in batch), strict=True):
            loss = nn.functional.cross_entropy(self.net(x), y, reduction="sum") / len(batch[0])
            self.manual_backward(loss)
            total += loss.detach()
        return total

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.loss = self.accumulate(batch)
        with opt.perturbed():
            self.accumulate(batch)
        self.clip_gradients(opt, gradient_clip_val=1.0)
        opt.step()


def main(num_epochs: int = 2) -> Classifier:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=num_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(model, make_data())
    print(f"{trainer.global_step} steps: loss {model.loss:.4f}")
    return model


if __name__ == "__main__":
    main()
