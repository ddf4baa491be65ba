"""Gradient accumulation: one SAM step of a large batch that does not fit in memory, with one shared perturbation."""

import torch
from torch import nn

from flatmin import SAM


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(dim=1)


def train(micro_batch_size: int, num_steps: int = 5) -> nn.Module:
    model, (x, y) = make_model(), make_data()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model)
    micro_batches = list(zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True))

    def accumulate() -> float:
        total = 0.0
        for inputs, targets in micro_batches:
            # The sum, divided by the whole batch's size: a short last micro-batch then has its right weight.
            loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / len(x)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(num_steps):
        opt.zero_grad()
        loss = accumulate()  # the gradient at w, of all micro-batches: it gives one perturbation
        with opt.perturbed():
            accumulate()  # the gradient at w + eps, of the same micro-batches
        opt.step()
    print(f"micro-batches of {micro_batch_size:2d}: loss {loss:.6f}")
    return model


def main() -> float:
    whole, accumulated = train(micro_batch_size=96), train(micro_batch_size=20)
    pairs = zip(whole.parameters(), accumulated.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference of any weight: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
