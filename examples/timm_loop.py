"""timm: the loop of its train.py in short, with its model, loader, optimizer, scheduler and EMA, trained by SAM.

Run it with ``python examples/timm_loop.py DIRECTORY``, a directory with one subdirectory of images per class.
"""

import sys

import torch
from timm import create_model
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import nn

from flatmin import SAM


def train(directory: str, num_epochs: int = 2, rho: float = 0.05, size: int = 32) -> tuple[nn.Module, SAM]:
    torch.manual_seed(0)
    dataset = create_dataset("", root=directory, is_training=True)
    loader = create_loader(
        dataset, (3, size, size), 8, is_training=True, use_prefetcher=False, num_workers=0, pin_memory=False
    )
    model = create_model("test_resnet", num_classes=len(dataset.reader.class_to_idx))
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=1e-4)
    optimizer = SAM(optimizer, rho=rho, model=model)  # after the model is wrapped (DDP) or compiled
    scheduler, num_epochs = create_scheduler_v2(optimizer, num_epochs=num_epochs, warmup_epochs=0)
    ema, loss_fn = ModelEmaV3(model), nn.CrossEntropyLoss()

    for epoch in range(num_epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()  # before the first forward pass: from here on, noise is drawn again
            loss = loss_fn(model(x), y)
            loss.backward()
            with optimizer.perturbed():
                loss_fn(model(x), y).backward()
            dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
            optimizer.step()
            ema.update(model)
        scheduler.step(epoch + 1)
    return model, optimizer


if __name__ == "__main__":
    train(sys.argv[1])
