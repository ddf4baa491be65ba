"""Draw the rise of the loss over rho for two models, and print the suggested radii, for choosing-rho.md.

    python docs/make_rho_figure.py [--data DIRECTORY] [--images docs/images]

Both models are untrained, with the settings of the cheap-SAM study: 128 examples of Fashion-MNIST, 14 x 14 pixels,
share a perturbation. DIRECTORY has the dataset, if it is not where the lab looks for it. Takes less than a minute.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from flatmin import RiseCurve
from flatmin.lab.data.datasets import Dataset, load_dataset
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.auto_rho import suggestion
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.steps import Stepper
from flatmin.lab.training.trained_model import model_pipeline

DATA = Data(name="fashion-mnist", image_size=14, train_size=1000, batch_size=128)
COLORS = ("#1f5fa8", "#3c8d40")
SETTINGS = {
    ("WRN-10-2", 0.0): Experiment(data=DATA, model=Model(name="wrn-10-2")),
    ("WRN-10-2", 0.4): Experiment(data=replace(DATA, label_noise=0.4), model=Model(name="wrn-10-2")),
    ("ViT", 0.4): Experiment(data=replace(DATA, label_noise=0.4), model=Model(name="vit-4-64-2")),
}


def curve_of(experiment: Experiment, dataset: Dataset) -> RiseCurve:
    """Return the rise of the loss at the weights and on the batches that a run of seed 0 starts with."""
    torch.manual_seed(torch_seed(0, Purpose.NETWORK_INIT))
    network = build_model(experiment.model, num_classes=dataset.info.num_classes, in_channels=dataset.info.channels)
    workers = Workers(device=torch.device("cpu"))
    pipeline = model_pipeline(network, experiment, dataset.info, 0, workers)
    found = suggestion(Stepper(experiment, network, 0, workers), pipeline.training(dataset.train, epoch=0))
    print(f"  {experiment.optim.m or experiment.data.batch_size} examples: {found}")
    return found.measure()


def draw(curves: dict[str, RiseCurve]) -> Figure:
    """Draw measured and first-order rises, relative to the loss."""
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0.1, color="#555555", linewidth=0.8, linestyle=":")
    for color, (name, curve) in zip(COLORS, curves.items(), strict=True):
        line = [value / curve.loss for value in curve.first_order]
        rises = [rise / curve.loss if rise > 0 else float("nan") for rise in curve.rises]
        axes.loglog(curve.rhos, line, "--", color=color, linewidth=0.9)
        axes.loglog(curve.rhos, rises, "o-", color=color, markersize=4, label=f"{name}, suggested: {curve.rho:.2g}")
        axes.plot(curve.rho, 0.1, "*", color="#d9730d", markersize=13, zorder=3)
    axes.set(xlabel=r"$\rho$", ylabel="rise of the loss / loss", ylim=(3e-3, 10))
    axes.legend(frameon=False, loc="upper left")
    return figure


def main() -> None:
    """Print the suggestions and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    curves: dict[str, RiseCurve] = {}
    for (name, noise), experiment in SETTINGS.items():
        print(f"{name}, {noise:.0%} noisy labels")
        dataset = load_dataset(experiment.data, data_root=arguments.data)
        for m in (None, 16):
            curve = curve_of(replace(experiment, optim=Optim(m=m)), dataset)
            if m is None:
                curves[name] = curve
    arguments.images.mkdir(parents=True, exist_ok=True)
    draw(curves).savefig(arguments.images / "choosing-rho.png", dpi=110)


if __name__ == "__main__":
    main()
