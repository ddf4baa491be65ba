"""The module and data of tests/integrations/test_lightning.py, also for its two processes."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatmin.integrations.lightning import SAMCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SETTINGS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
SETTINGS |= {"enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


def make_data(num_examples=24, batch_size=8, **settings):
    x = torch.randn(num_examples, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(dim=1)), batch_size=batch_size, **settings)


class Classifier(pl.LightningModule):
    def __init__(self, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))

    def configure_optimizers(self):
        opt = self.make_optimizer(self.parameters())
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def fit(callback, model=None, data=None, ckpt_path=None, max_epochs=2, **settings):
    model = Classifier() if model is None else model
    callbacks = callback if isinstance(callback, list) else [callback]
    trainer = pl.Trainer(callbacks=callbacks, max_epochs=max_epochs, **SETTINGS | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers, loggers and intervals: not ours
        trainer.fit(model, make_data() if data is None else data, ckpt_path=ckpt_path)
    return model, trainer


def fit_with_ddp(rank, folder):
    """What each of two workers does."""
    for name, settings in {"whole": {}, "part": {"part": 0.5}, "shared": {"sync_perturbation": True}}.items():
        ddp = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        data = make_data(sampler=range(rank, 24, 2))
        model, trainer = fit(SAMCallback(rho=0.1, **settings), data=data, max_epochs=1, **ddp)
        if trainer.is_global_zero:
            torch.save(model.net.state_dict(), f"{folder}/{name}.pt")
