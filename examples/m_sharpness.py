"""m-sharpness: each micro-batch has its own perturbation, and the SAM gradients are averaged.

The paper finds that a smaller m, the number of examples that share a perturbation, generalizes better (Section 4.1).
"""

import torch
from torch import nn

from flatmin import SAM


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(dim=1)


def train(m: int, num_steps: int = 20) -> tuple[nn.Module, float]:
    model, (x, y) = make_model(), make_data()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model)

    def closure_of(inputs: torch.Tensor, targets: torch.Tensor):
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)  # the mean over this micro-batch
            loss.backward()
            return loss

        return closure

    micro_batches = list(zip(x.split(m), y.split(m), strict=True))
    for _ in range(num_steps):
        closures = [closure_of(inputs, targets) for inputs, targets in micro_batches]
        loss = opt.step(closures, weights=[len(inputs) for inputs, _ in micro_batches])  # the last one may be short
    sharpness = opt.metrics.sharpness.item()
    print(f"m = {m:2d}: loss {loss:.4f}  sharpness {sharpness:.4f}")
    return model, sharpness


if __name__ == "__main__":
    for m in (96, 40, 8):
        train(m)
