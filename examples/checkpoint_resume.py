"""Save in the middle, resume with new objects, and end with the same bits.

The state dict is the base optimizer's, with its momentum and the current radius. A schedule of rho is a function of the
step, as the learning rate's is.
"""

import io
import math

import torch
from torch import nn

from flatmin import SAM

NUM_STEPS = 20


def rho_at(step: int) -> float:
    """Grow from 0.02 to 0.1 along half a cosine."""
    return 0.1 - 0.08 * (1 + math.cos(math.pi * step / NUM_STEPS)) / 2


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.opt = SAM(torch.optim.AdamW(self.model.parameters(), lr=0.01), model=self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, NUM_STEPS)  # or of self.opt.base
        self.parts = {"model": self.model, "opt": self.opt, "schedule": self.schedule}
        self.data = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))

    def train(self, first: int, last: int) -> None:
        def closure() -> torch.Tensor:
            self.opt.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.data), self.data[:, :4].argmax(dim=1))
            loss.backward()
            return loss

        for step in range(first, last):
            self.opt.rho = rho_at(step)
            loss = self.opt.step(closure)
            self.schedule.step()
        print(f"step {last:2d}: loss {loss:.4f}  lr {self.schedule.get_last_lr()[0]:.4f}  rho {self.opt.rho:.4f}")


def main() -> tuple[nn.Module, nn.Module]:
    whole = Run()
    whole.train(0, NUM_STEPS)

    stopped, file = Run(), io.BytesIO()
    stopped.train(0, 8)
    torch.save({name: part.state_dict() for name, part in stopped.parts.items()} | {"rng": torch.get_rng_state()}, file)

    resumed, checkpoint = Run(), torch.load(io.BytesIO(file.getvalue()))
    for name, part in resumed.parts.items():
        part.load_state_dict(checkpoint[name])
    torch.set_rng_state(checkpoint["rng"])  # for dropout
    resumed.train(8, NUM_STEPS)
    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    print("the same bits:", all(torch.equal(a, b) for a, b in pairs))
    return whole.model, resumed.model


if __name__ == "__main__":
    main()
