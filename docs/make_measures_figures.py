"""Train models on Fashion-MNIST with SGD and SAM, measure them, and draw the plots of measures.md.

    python docs/make_measures_figures.py FOLDER [--images docs/images] [--work runs/measures]

About ten minutes on one CPU core. What was trained or measured before is read from the work directory.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D103
import argparse
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import flatmin
from flatmin.measures import (
    HessianOperator,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    predictive_power,
    sam_update_cosine,
    spectral_density,
    top_eigenvalues,
)

BLUE, ORANGE = "#1f5fa8", "#d9730d"
COLOURS = {"SGD": BLUE, "SAM": ORANGE}
LOSS = nn.CrossEntropyLoss()


def read(directory: Path, name: str, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read images and labels from gzipped IDX files, as tensors with zero mean and unit variance."""
    images = gzip.decompress((directory / f"{name}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((directory / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    x = torch.from_numpy(np.frombuffer(images, np.uint8, offset=16).copy()).view(-1, 1, 28, 28)[:num]
    y = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).copy()).long()[:num]
    return (x.float() / 255 - 0.286) / 0.353, y


def convolutional() -> nn.Module:
    """A model without batch norm, which obscures the Hessian (Section 4.2); 19,466 weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def perceptron(width: int) -> nn.Module:
    """A small model for the grid of hyperparameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, x, y, *, epochs, rho, lr=0.05, batch_size=128, weight_decay=0.0, watch=None):
    """Train with SGD, or with SAM where rho > 0, and call watch(step, batch) on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    if rho > 0:
        optimizer = flatmin.SAM(optimizer, rho=rho, model=model)
    generator = torch.Generator().manual_seed(0)
    step = 0
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(batch_size):
            batch = x[index], y[index]

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = LOSS(model(batch[0]), batch[1])
                loss.backward()
                return loss

            if watch is not None:
                watch(step, batch)
            optimizer.step(closure)
            step += 1
        scheduler.step()
    return model.eval()


def error(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) != y).float().mean())


def trained_pair(data, work):
    """Return one model trained with SGD and one with SAM, and the cosine along SAM's training."""
    (x, y), _ = data
    models, cosines = {}, []
    for name, rho in (("SGD", 0.0), ("SAM", 0.1)):
        model, path = convolutional(), work / f"{name}.pt"
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
        else:

            def watch(step, batch, model=model, rho=rho):
                if rho and step % 25 == 0:
                    cosines.append((step, sam_update_cosine(model, LOSS, batch, rho=rho)))

            train(model, x, y, epochs=40, rho=rho, watch=watch)
            torch.save(model.state_dict(), path)
            (work / "cosines.json").write_text(json.dumps(cosines))
        models[name] = model.eval()
    return models, json.loads((work / "cosines.json").read_text())


def axes_of(width=6.0, height=3.4, num=1):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, num, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_sharpness(models, batches):
    figure, (axes,) = axes_of()
    sizes = [16, 64, 256, 1024, 2048]
    for name, model in models.items():
        found = [m_sharpness(model, LOSS, batches, rho=0.1, m=m) for m in sizes]
        means, errors = [f.mean for f in found], [np.nan_to_num(f.standard_error) for f in found]
        axes.errorbar(sizes, means, errors, fmt="o-", color=COLOURS[name], capsize=3, label=name)
        print(name, "m-sharpness", dict(zip(sizes, np.round(means, 4), strict=True)))
    axes.set(xscale="log", yscale="log", xlabel="m, examples in a subset (of 2,048)", ylabel="m-sharpness")
    axes.set_xticks(sizes, [f"{m:,}" for m in sizes])
    axes.minorticks_off()
    axes.set_title(r"the loss rises more on smaller subsets ($\rho$ = 0.1)")
    axes.legend(frameon=False)
    return figure


def draw_spectra(models, batches):
    figure, (left, right) = axes_of(8.4, 3.2, 2)
    for offset, (name, model) in zip((-0.2, 0.2), models.items(), strict=True):
        op = HessianOperator(model, LOSS, batches)
        top = top_eigenvalues(op, k=5)
        ratio = top.ratio(1, 5)
        print(
            name,
            "eigenvalues",
            top.values.round(3),
            "ratio",
            round(ratio, 2),
            "trace",
            round(op.trace(20), 2),
        )
        index = np.arange(1, 6) + offset
        label = rf"{name}: $\lambda_1/\lambda_5$ = {ratio:.1f}"
        left.bar(index, top.values, width=0.4, color=COLOURS[name], label=label)
        density = spectral_density(op, steps=60, probes=3)
        grid = np.linspace(density.nodes[0] - 1, density.nodes[-1] + 1, 1500)
        right.plot(grid, density.density(grid, 0.15), color=COLOURS[name], lw=1.2, label=name)
    left.set(xlabel="i", ylabel=r"eigenvalue $\lambda_i$", title="the five largest eigenvalues")
    right.set(xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(1e-6, 10), title="the whole spectrum")
    for axes in (left, right):
        axes.legend(frameon=False)
    return figure


def draw_cosines(cosines):
    figure, (axes,) = axes_of()
    steps, values = np.array(cosines).T
    window = 9
    axes.plot(steps, values, ".", color=BLUE, alpha=0.35, markersize=4, label="a batch")
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    axes.plot(steps[window // 2 : -(window // 2)], smooth, color=ORANGE, label=f"mean of {window}")
    axes.set(xlabel="step of SAM", ylabel="cosine", title="first- against second-order update")
    axes.legend(frameon=False)
    return figure


def draw_score(data, work):
    """Train a grid of models, and ask how well m-sharpness predicts their gaps."""
    (x, y), (test_x, test_y) = data
    x, y = x[:2000], y[:2000]
    grid = list(itertools.product((16, 64), (0.05, 0.2), (0.0, 1e-3), (0.0, 0.1), (32, 256)))
    path = work / "grid.json"
    if not path.exists():
        rows = []
        for width, lr, decay, rho, batch_size in grid:
            model = perceptron(width)
            train(model, x, y, epochs=40, rho=rho, lr=lr, batch_size=batch_size, weight_decay=decay)
            sharp = m_sharpness(model, LOSS, [(x, y)], rho=0.1, m=50).mean
            rows.append((sharp, error(model, test_x, test_y) - error(model, x, y)))
        path.write_text(json.dumps(rows))
    sharp, gap = zip(*json.loads(path.read_text()), strict=True)
    found = predictive_power(sharp, gap, grid)
    print(f"score {found.score:.3f}, null {found.null_low:.3f} to {found.null_high:.3f}, tau {found.kendall_tau:.2f}")
    return found.plot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the directory with the four gzipped IDX files of Fashion-MNIST")
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--work", type=Path, default=Path("runs/measures"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.images.mkdir(parents=True, exist_ok=True)
    data = read(arguments.data, "train", 10_000), read(arguments.data, "t10k", 10_000)
    models, cosines = trained_pair(data, arguments.work)
    for name, model in models.items():
        print(name, "train error", error(model, *data[0]), "test error", error(model, *data[1]))
    x, y = data[0]
    batches = list(zip(x[:2048].split(256), y[:2048].split(256), strict=True))
    figures = {"sharpness": draw_sharpness(models, batches), "spectrum": draw_spectra(models, batches)}
    landscape = loss_landscape(
        models, LOSS, batches[:4], points=31, cache=arguments.work / "plane.jsonl", progress=True
    )
    figures["landscape"] = landscape.plot("contour")
    figures["surface"] = landscape.plot("surface")
    landscape.save_html(arguments.work / "surface.html")
    valley = loss_landscape(
        models, LOSS, batches[:4], dims=1, directions="hessian", span=2.0, cache=arguments.work / "line.jsonl"
    )
    figures["valley"] = valley.plot()
    whole = list(zip(x.split(1000), y.split(1000), strict=True))
    bound = pac_bayes_bound(models["SAM"], LOSS, whole, rho=0.1, metric="error")
    print(bound)
    figures["bound"] = bound.plot()
    figures["cosine"] = draw_cosines(cosines)
    figures["predictive"] = draw_score(data, arguments.work)
    for name, figure in figures.items():
        figure.savefig(arguments.images / f"measures-{name}.png", dpi=110)


if __name__ == "__main__":
    main()
