"""DistributedDataParallel: each worker ascends along its own gradient, and gradients are reduced once per step.

Run it with ``torchrun --nproc_per_node 2 examples/ddp.py``, or alone with ``python examples/ddp.py``.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatmin import SAM

NUM_STEPS, BATCH_SIZE = 5, 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker's own part of the data."""
    x = torch.randn(BATCH_SIZE, 16, generator=torch.Generator().manual_seed(1 + rank))
    return x, x[:, :4].argmax(dim=1)


def train(way: str, sync_perturbation: bool = False) -> nn.Module:
    model, (x, y) = DistributedDataParallel(make_model()), make_data(dist.get_rank())
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = SAM(base, rho=0.1, model=model, sync_perturbation=sync_perturbation)  # the DDP module, not the one inside it

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(NUM_STEPS):
        if way == "closure":
            loss = opt.step(closure)  # SAM runs the first pass inside no_sync(), unless sync_perturbation=True
        else:
            with model.no_sync():  # leave this line out to share one perturbation
                loss = closure()
            with opt.perturbed():
                closure()
            opt.step()
    print(f"rank {dist.get_rank()}  {way:9s} sync_perturbation={sync_perturbation!s:5s} loss {loss:.6f}", flush=True)
    return model.module


if __name__ == "__main__":
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        os.environ.setdefault(name, str(value))  # torchrun sets them
    dist.init_process_group("gloo")
    train("closure")
    train("perturbed")
    train("closure", sync_perturbation=True)
    dist.destroy_process_group()
