"""Mixed precision: bfloat16 autocast with a closure, and float16-style loss scaling with a GradScaler."""

import torch
from torch import nn

from flatmin import SAM, effective_perturbation


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(dim=1)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(model(x), y)


def train_with_autocast(num_steps: int = 20) -> nn.Module:
    model, (x, y) = make_model(), make_data()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()  # outside of autocast, as always
        return loss

    for _ in range(num_steps):
        loss = opt.step(closure)
    print(f"autocast    loss {loss:.4f}  sharpness {opt.metrics.sharpness:.4f}")
    closure()
    print(f"            {effective_perturbation(opt, compute_dtype=torch.bfloat16)}")
    return model


def train_with_scaler(num_steps: int = 20, max_norm: float = 1.0) -> nn.Module:
    model, (x, y) = make_model(), make_data()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=model)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(num_steps):
        opt.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()  # no unscaling here: the perturbation does not depend on the scale
        with opt.perturbed():
            scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)  # only because of the clipping
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(opt)
        scaler.update()
    print(f"GradScaler  loss {loss:.4f}  scale {scaler.get_scale():g}")
    return model


if __name__ == "__main__":
    train_with_autocast()
    train_with_scaler()
