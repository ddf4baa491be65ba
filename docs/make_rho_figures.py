"""Draw the figures of choosing-rho.md, and print the suggested radii that it has.

    python docs/make_rho_figures.py [--data DIRECTORY] [--images docs/images]

sam-update.png: one SAM update on a loss of two weights, the counterpart of the paper's Figure 2. A linear model with
two layers of one weight each, y = w_2 w_1 x, and the mean squared error; `flatmin.SAM` computes gradients and weights.

choosing-rho.png: the rise of the loss over rho for two models. Both are untrained, with the settings of the cheap-SAM
study: 128 examples of Fashion-MNIST, 14 x 14 pixels, share a perturbation. DIRECTORY has the dataset, if it is not
where the lab looks for it. Takes less than a minute.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib.patheffects as effects
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import flatmin
from flatmin.lab.data.datasets import Dataset, load_dataset
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.auto_rho import suggestion
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.steps import Stepper
from flatmin.lab.training.trained_model import model_pipeline

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


def draw_update(at: dict[str, np.ndarray]) -> Figure:
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


# The rise of the loss over rho.

DATA = Data(name="fashion-mnist", image_size=14, train_size=1000, batch_size=128)
SETTINGS = {
    ("WRN-10-2", 0.0): Experiment(data=DATA, model=Model(name="wrn-10-2")),
    ("WRN-10-2", 0.4): Experiment(data=replace(DATA, label_noise=0.4), model=Model(name="wrn-10-2")),
    ("ViT", 0.4): Experiment(data=replace(DATA, label_noise=0.4), model=Model(name="vit-4-64-2")),
}


def curve_of(experiment: Experiment, dataset: Dataset) -> flatmin.RiseCurve:
    """Return the rise of the loss at the weights and on the batches that a run of seed 0 starts with."""
    torch.manual_seed(torch_seed(0, Purpose.NETWORK_INIT))
    network = build_model(experiment.model, num_classes=dataset.info.num_classes, in_channels=dataset.info.channels)
    workers = Workers(device=torch.device("cpu"))
    pipeline = model_pipeline(network, experiment, dataset.info, 0, workers)
    found = suggestion(Stepper(experiment, network, 0, workers), pipeline.training(dataset.train, epoch=0))
    print(f"  {experiment.optim.m or experiment.data.batch_size} examples: {found}")
    return found.measure()


def draw_rises(curves: dict[str, flatmin.RiseCurve]) -> Figure:
    """Draw measured and first-order rises, relative to the loss."""
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0.1, color=GREY, linewidth=0.8, linestyle=":")
    for color, (name, curve) in zip((BLUE, GREEN), curves.items(), strict=True):
        line = [value / curve.loss for value in curve.first_order]
        rises = [rise / curve.loss if rise > 0 else float("nan") for rise in curve.rises]
        axes.loglog(curve.rhos, line, "--", color=color, linewidth=0.9)
        axes.loglog(curve.rhos, rises, "o-", color=color, markersize=4, label=f"{name}, suggested: {curve.rho:.2g}")
        axes.plot(curve.rho, 0.1, "*", color=ORANGE, markersize=13, zorder=3)
    axes.set(xlabel=r"$\rho$", ylabel="rise of the loss / loss", ylim=(3e-3, 10))
    axes.legend(frameon=False, loc="upper left")
    return figure


def main() -> None:
    """Print the suggestions and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.images.mkdir(parents=True, exist_ok=True)
    draw_update(update()).savefig(arguments.images / "sam-update.png", dpi=130)
    curves: dict[str, flatmin.RiseCurve] = {}
    for (name, noise), experiment in SETTINGS.items():
        print(f"{name}, {noise:.0%} noisy labels")
        dataset = load_dataset(experiment.data, data_root=arguments.data)
        for m in (None, 16):
            curve = curve_of(replace(experiment, optim=Optim(m=m)), dataset)
            if m is None:
                curves[name] = curve
    draw_rises(curves).savefig(arguments.images / "choosing-rho.png", dpi=110)


if __name__ == "__main__":
    main()
