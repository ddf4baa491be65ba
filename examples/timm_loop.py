"""timm: the loop of its train.py in short, with its task, loader, optimizer, scheduler and EMA, trained by SAM.

Run it with ``python examples/timm_loop.py DIRECTORY``, a directory with one subdirectory of images per class.
"""

import argparse
import sys

import torch
from timm import create_model, utils
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
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
    args, second_order, need_update = argparse.Namespace(clip_grad=1.0), False, True
    model_ema = utils.ModelEmaV3(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    # Here train.py wraps the task's model in DistributedDataParallel and compiles it.
    optimizer = SAM(optimizer, rho=rho, model=task.trainable_module)
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer,
        num_epochs=num_epochs,
        warmup_epochs=0,
    )

    for epoch in range(num_epochs):
        model.train()
        num_correct = 0
        for input, target in loader:

            def _forward():
                result = task(input, target)
                return result["loss"], result

            def _backward(_loss):
                _loss.backward(create_graph=second_order)
                if need_update:
                    with optimizer.perturbed():
                        _forward()[0].backward()
                    if args.clip_grad is not None:
                        utils.dispatch_clip_grad(model.parameters(), value=args.clip_grad)
                    optimizer.step()

            optimizer.zero_grad()
            loss, result = _forward()
            _backward(loss)
            model_ema.update(model)
            num_correct += (result["output"].argmax(dim=1) == target).sum()  # at w
        lr_scheduler.step(epoch + 1)
    return model, optimizer


if __name__ == "__main__":
    train(sys.argv[1])
