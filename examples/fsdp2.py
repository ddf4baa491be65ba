"""FSDP2: parameters are sharded over the workers; the norm of the gradient is over all shards.

Run it with ``torchrun --nproc_per_node 2 examples/fsdp2.py``, or alone with ``python examples/fsdp2.py``.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flatmin import SAM

NUM_STEPS, BATCH_SIZE = 5, 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 63), nn.Tanh(), nn.Linear(63, 4))  # 63 rows: the shards differ in size


def make_data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker's own part of the data."""
    x = torch.randn(BATCH_SIZE, 16, generator=torch.Generator().manual_seed(1 + rank))
    return x, x[:, :4].argmax(dim=1)


def train() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, (x, y) = make_model(), make_data(dist.get_rank())
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=0.01), rho=0.1, model=model)  # after fully_shard

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(NUM_STEPS):
        loss = opt.step(closure)
    norm = opt.metrics.grad_norm  # the same number on every worker
    print(f"rank {dist.get_rank()}  loss {loss:.6f}  norm of the whole gradient {norm:.6f}", flush=True)
    return model


if __name__ == "__main__":
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        os.environ.setdefault(name, str(value))  # torchrun sets them
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
