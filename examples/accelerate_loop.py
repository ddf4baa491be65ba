"""Hugging Face Accelerate: the two-pass form works on any device, with any precision, on one worker or on many.

Run it with ``python examples/accelerate_loop.py`` or ``accelerate launch examples/accelerate_loop.py``.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatmin import SAM


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))


def make_data() -> DataLoader:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=64)


def main(num_epochs: int = 2) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    sam = SAM(torch.optim.AdamW(model.parameters(), lr=0.01), rho=0.1)
    model, opt, loader = accelerator.prepare(model, sam, make_data())  # opt wraps sam, and steps it
    sam.model = model  # as Accelerate wrapped it

    for epoch in range(num_epochs):
        for x, y in loader:
            opt.zero_grad()
            # Each worker has its own perturbation. With FSDP2 gradients must be reduced in both passes: leave it out.
            with accelerator.no_sync(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
            with sam.perturbed():
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}  gradient norm {sam.metrics.grad_norm:.4f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
