"""Draw one SAM update on a loss of two parameters: the counterpart of the paper's Figure 2, for choosing-rho.md.

    python docs/make_update_figure.py [--images docs/images]

A linear model with two layers of one weight each, y = w_2 w_1 x, and the mean squared error. `flatmin.SAM`
computes the gradients and weights. Takes seconds.
"""

import argparse
from pathlib import Path

import matplotlib.patheffects as effects
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import flatmin

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9730d", "#3c8d40", "#555555"
RHO, LR = 0.5, 0.25
START = (1.6, 0.25)
INPUTS = torch.linspace(-1, 1, 21, dtype=torch.float64) / 0.6055  # mean square 1
LABELS = INPUTS  # every pair with w_1 w_2 = 1 has no loss; the minimum is flattest where both are 1


def loss_at(weights: Tensor) -> Tensor:
    """Return half the mean squared error at weights (..., 2)."""
    outputs = weights.prod(-1, keepdim=True) * INPUTS
    return (outputs - LABELS).square().mean(-1) / 2


def update() -> dict[str, np.ndarray]:
    """Return the weights before and after one step of SGD and of SAM, and the perturbed weights."""
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    places = {"w": weights.detach().clone()}
    optimizer = flatmin.SAM(torch.optim.SGD([weights], lr=LR), rho=RHO)
    loss_at(weights).backward()
    places["sgd"] = places["w"] - LR * weights.grad.clone()
    with optimizer.perturbed():
        places["perturbed"] = weights.detach().clone()
        optimizer.zero_grad()
        loss_at(weights).backward()
    places["perturbed gradient end"] = places["perturbed"] - LR * weights.grad.clone()
    optimizer.step()
    places["sam"] = weights.detach().clone()
    return {name: place.numpy() for name, place in places.items()}


def draw(at: dict[str, np.ndarray]) -> Figure:
    """Return the contours of the loss with the weights and the steps between them."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    x, y = np.meshgrid(np.linspace(0.5, 2.9, 241), np.linspace(-0.45, 1.45, 191))
    heights = loss_at(torch.from_numpy(np.stack([x, y], -1))).numpy()
    axes.contour(x, y, heights, levels=np.linspace(0.02, 1.1, 9) ** 2, colors="0.8", linewidths=0.8)
    valley = np.linspace(1 / 1.45, 2.9, 200)
    axes.plot(valley, 1 / valley, color=GREEN, lw=2, label="minima: w_1 w_2 = 1, flattest at (1, 1)")
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(at["w"][0] + RHO * np.cos(angle), at["w"][1] + RHO * np.sin(angle), color=GREY, ls=":", lw=1.2)
    arrows = [
        ("w", "perturbed", GREY, "-", "ascent: eps, of length rho, along the gradient at w"),
        ("w", "sgd", BLUE, "-", "SGD's step: against the gradient at w"),
        ("perturbed", "perturbed gradient end", ORANGE, "--", "against the gradient at w + eps ..."),
        ("w", "sam", ORANGE, "-", "... SAM's step, taken from w"),
    ]
    for start, end, color, style, label in arrows:
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2, "ls": style, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", at[end], at[start], arrowprops=arrow)
        axes.plot([], [], color=color, ls=style, lw=2, label=label)
    for name, label, offset in (
        ("w", "w", (8, -4)),
        ("perturbed", "w + eps", (8, -8)),
        ("sgd", "after SGD", (8, 0)),
        ("sam", "after SAM", (8, 4)),
    ):
        axes.plot(*at[name], "o", color="black", ms=4)
        text = axes.annotate(label, at[name], xytext=offset, textcoords="offset points")
        text.set_path_effects([effects.withStroke(linewidth=3, foreground="white")])
    axes.plot(1, 1, "*", color=GREEN, ms=12)
    axes.set(xlabel="w_1", ylabel="w_2", aspect="equal", xlim=(0.5, 2.9), ylim=(-0.45, 1.45))
    axes.legend(loc="upper right", fontsize=8, framealpha=0.95)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=Path(__file__).parent / "images")
    draw(update()).savefig(parser.parse_args().images / "sam-update.png", dpi=130)
