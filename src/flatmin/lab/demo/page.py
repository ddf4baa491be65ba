"""The demonstration's page: one HTML file that needs nothing else."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F

from flatmin.lab.training.trained_model import load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flatmin.lab.demo.study import DemoRun, Row

COLOURS = {"SGD": "#c44e52", "SGD, twice the epochs": "#dd8452", "SAM": "#4c72b0"}
LANDSCAPE_POINTS, LANDSCAPE_SPAN = 15, 1.0
LANCZOS_STEPS, LANCZOS_PROBES = 40, 2

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .3rem .8rem; border-bottom: 1px solid #ccc; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } img { max-width: 100%; }
.verdict { background: #f4f4f0; padding: .6rem 1rem; border-left: 4px solid #4c72b0; }
"""


def write_page(path: Path, rows: "list[Row]", verdicts: list[str], settings: dict[str, Any]) -> Path:
    """Write the page with table, curves, spectra and landscapes, and return its path."""
    parts = [
        "<h1>SAM on 500 handwritten digits</h1>",
        "<p>A small network trained with SGD, with SGD for twice as many epochs (SAM computes two gradients a step), "
        "and with SAM; on clean labels and with 40 % of the training labels replaced by a wrong class. Three seeds "
        "each; test errors on 500 other digits with clean labels.</p>",
        *(f'<p class="verdict">{html.escape(sentence)}</p>' for sentence in verdicts),
        _results_table(rows),
        "<p>Mean and 95 % confidence interval (Student's t). m-sharpness: how far the training loss rises within "
        "rho = 0.05 on subsets of 64 examples. lambda_max: the largest eigenvalue of the Hessian of the training loss. "
        "Both are measured at the last weights, on the training set with the labels it was trained with. A network "
        "that has fitted all its labels, wrong ones included, has flat surroundings too: see its training error.</p>",
        "<h2>Training</h2>",
        _image(_curves(rows), "Test error over training"),
        "<h2>Hessian spectra</h2>",
        "<p>Spectral density of the Hessian of the training loss, seed 0.</p>",
        _image(_spectra(rows), "Hessian spectra of SGD and SAM"),
        "<h2>Loss landscapes</h2>",
        "<p>The training loss on a plane of random, filter-normalized directions through the weights, seed 0; the same "
        "directions and the same colors for SGD and SAM.</p>",
        _image(_landscapes(rows), "Loss landscapes of SGD and SAM"),
        "<h2>How network, learning rate and rho were chosen</h2>",
        "<p>By the error on held-out validation digits, with other seeds; the test set had no part in it. First "
        "network and learning rate for SGD, then rho for SAM, for each noise rate.</p>",
        _sweep_table(settings),
        f"<p>{html.escape(_chosen(settings))}</p>",
        "<p>Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning "
        "Repository (CC BY 4.0).</p>",
    ]
    head = f'<meta charset="utf-8"><title>flatmin demo</title><style>{STYLE}</style>'
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(parts)
    path.write_text(f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n')
    return path


def _results_table(rows: "list[Row]") -> str:
    cells = [
        (
            f"{row.noise:.0%}",
            row.method,
            str(row.test_error),
            str(row.train_error),
            str(row.m_sharpness),
            str(row.lambda_max),
        )
        for row in rows
    ]
    return _table(("wrong labels", "method", "test error, %", "train error, %", "m-sharpness", "lambda_max"), cells)


def _sweep_table(settings: dict[str, Any]) -> str:
    cells = [
        (
            f"{line['noise']:.0%}",
            line["network"],
            f"{line['lr']:g}",
            f"{line['rho']:g}",
            f"{line['valid_error']['mean']:.1f} ± {line['valid_error']['half_width']:.1f}",
        )
        for line in settings["sweep"]
    ]
    return _table(("wrong labels", "network", "learning rate", "rho", "validation error, %"), cells)


def _chosen(settings: dict[str, Any]) -> str:
    chosen = settings["chosen"]
    radii = ", ".join(f"{rho:g} with {float(noise):.0%} wrong labels" for noise, rho in chosen["rho"].items())
    return f"Chosen: {chosen['network']}, learning rate {chosen['lr']:g}; rho {radii}."


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' if i > 1 else ''}>{html.escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _first_seed(rows: "list[Row]", noise: float, method: str) -> "DemoRun":
    return next(row for row in rows if (row.noise, row.method) == (noise, method)).runs[0]


def _noise_rates(rows: "list[Row]") -> list[float]:
    return sorted({row.noise for row in rows})


def _figure(num_columns: int, num_rows: int = 1, height: float = 3.4) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure  # no window system is touched

    figure = Figure(figsize=(5 * num_columns, height * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def _curves(rows: "list[Row]") -> "Figure":
    figure, axes = _figure(len(_noise_rates(rows)))
    for noise, axis in zip(_noise_rates(rows), axes[0], strict=True):
        for row in (r for r in rows if r.noise == noise):
            curves = np.array([[100 * (line["test_error"] or 0) for line in run.result.history] for run in row.runs])
            epochs = np.arange(1, curves.shape[1] + 1)
            axis.plot(epochs, curves.mean(0), color=COLOURS[row.method], label=row.method)
            axis.fill_between(epochs, curves.min(0), curves.max(0), color=COLOURS[row.method], alpha=0.15, linewidth=0)
        axis.set(
            title=f"{noise:.0%} wrong labels", xlabel="epoch", ylabel="test error, % (range of seeds)", ylim=(0, None)
        )
        axis.legend()
    return figure


def _spectra(rows: "list[Row]") -> "Figure":
    from flatmin.measures import HessianOperator, spectral_density

    figure, axes = _figure(len(_noise_rates(rows)))
    for noise, axis in zip(_noise_rates(rows), axes[0], strict=True):
        found = {}
        for method in ("SGD", "SAM"):
            trained = load_trained(_first_seed(rows, noise, method).result.directory)
            operator = HessianOperator(trained.network, F.cross_entropy, trained.training_batches())
            found[method] = spectral_density(operator, steps=LANCZOS_STEPS, probes=LANCZOS_PROBES)
        low = min(float(density.nodes.min()) for density in found.values())
        high = max(float(density.nodes.max()) for density in found.values())
        width = (high - low) / 100
        grid = np.linspace(low - 5 * width, high + 5 * width, 1000)
        curves = {method: density.density(grid, sigma=width) for method, density in found.items()}
        for method, curve in curves.items():
            axis.semilogy(grid, curve, color=COLOURS[method], label=method)
        # Both ends: far from every eigenvalue the density is 0 but for underflow, which would stretch the scale.
        top = 10 * max(float(curve.max()) for curve in curves.values())
        axis.set(title=f"{noise:.0%} wrong labels", xlabel="eigenvalue", ylabel="density", ylim=(1e-6, top))
        axis.legend()
    return figure


def _landscapes(rows: "list[Row]") -> "Figure":
    from flatmin.measures import loss_landscape

    rates = _noise_rates(rows)
    figure, axes = _figure(2, len(rates), height=4.0)
    for noise, pair in zip(rates, axes, strict=True):
        trained = {m: load_trained(_first_seed(rows, noise, m).result.directory) for m in ("SGD", "SAM")}
        found = loss_landscape(
            {name: t.network for name, t in trained.items()},
            F.cross_entropy,
            trained["SGD"].training_batches(),
            points=LANDSCAPE_POINTS,
            span=LANDSCAPE_SPAN,
            progress=False,
        )
        levels = np.geomspace(max(float(found.loss.min()), 1e-3), float(found.loss.max()), 20)
        for axis, label, loss in zip(pair, found.labels, found.loss, strict=True):
            drawn = axis.contourf(
                found.coordinates, found.coordinates, np.clip(loss, levels[0], levels[-1]).T, levels=levels, norm="log"
            )
            axis.plot(0, 0, "w+")
            axis.set(title=f"{label}, {noise:.0%} wrong labels", xlabel="direction 1", ylabel="direction 2")
        figure.colorbar(drawn, ax=list(pair), label="training loss", format="%.2g")
    return figure


def _image(figure: "Figure", description: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}"></p>'
