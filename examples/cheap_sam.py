"""SAM at 1 + part passes: the correction is measured on a part of the batch and added at full strength.

Its radius starts at rho_SAM * sqrt(part), because gradients of few examples differ more.
"""

import torch
from torch import nn

from flatmin import SAM

RHO = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


def train(part: float, num_steps: int = 20) -> tuple[nn.Module, int]:
    """Train on shuffled batches; return the model and how many examples passed forward and backward."""
    model, num_passed = make_model(), 0
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=RHO * part**0.5, model=model)
    generator = torch.Generator().manual_seed(1)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal num_passed
        num_passed += len(x)
        return nn.functional.cross_entropy(model(x), y)  # the mean over the examples it is given

    for _ in range(num_steps):
        x = torch.randn(64, 16, generator=generator)
        loss = opt.step_batch(loss_fn, (x, x[:, :4].argmax(dim=1)), part=part)
    passes = num_passed / (64 * num_steps)
    print(f"part {part:g}: {passes:g} passes, loss {loss:.4f}, sharpness {opt.metrics.sharpness:.4f}")
    return model, num_passed


if __name__ == "__main__":
    for part in (1.0, 1 / 4, 1 / 8):
        train(part)
