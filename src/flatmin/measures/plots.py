"""Plots of what was measured. matplotlib and plotly, an extra, are imported when they are used."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure

    from flatmin.measures.landscape import Landscape
    from flatmin.measures.pac_bayes import Bound
    from flatmin.measures.predictive import Score
    from flatmin.measures.sharpness import Sharpness
    from flatmin.measures.spectrum import Eigenvalues, SpectralDensity

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#8a8f98"


def new_figure(width: float = 6.0, height: float = 3.6) -> "Figure":
    """Return an empty figure that belongs to no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _axes(width: float = 6.0, height: float = 3.6) -> tuple["Figure", Any]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def sharpness(result: "Sharpness") -> "Figure":
    """Draw the sharpness of each subset, and their mean with its standard error."""
    figure, axes = _axes()
    index = np.arange(1, len(result.per_subset) + 1)
    axes.plot(index, result.per_subset, "o", color=BLUE, alpha=0.6, markersize=4, label="subsets")
    axes.axhline(result.mean, color=ORANGE, label=f"mean {result.mean:.3g}")
    if len(index) > 1:
        low, high = result.mean - result.standard_error, result.mean + result.standard_error
        axes.axhspan(low, high, color=ORANGE, alpha=0.2, lw=0, label="standard error")
    axes.set(
        xlabel=f"subset of {result.m} examples",
        ylabel=f"rise of the {result.metric}",
        title=f"m-sharpness, m = {result.m}, $\\rho$ = {result.rho:g}",
    )
    axes.legend(frameon=False)
    return figure


def eigenvalues(result: "Eigenvalues") -> "Figure":
    """Draw eigenvalues, with their residuals as error bars."""
    figure, axes = _axes(4.8)
    index = np.arange(1, len(result.values) + 1)
    axes.bar(index, result.values, color=BLUE, width=0.6)
    axes.errorbar(index, result.values, yerr=result.residuals, fmt="none", color=ORANGE, capsize=4)
    axes.set_xticks(index)
    axes.set(xlabel="i", ylabel=r"$\lambda_i$", title="eigenvalues")
    return figure


def spectral_density(result: "SpectralDensity", sigma: float | None) -> "Figure":
    """Draw the smoothed spectrum on a logarithmic scale."""
    figure, axes = _axes()
    low, high = result.nodes[0], result.nodes[-1]
    width = max(high - low, 1e-12)
    sigma = width / 100 if sigma is None else sigma
    grid = np.linspace(low - 0.05 * width, high + 0.05 * width, 1001)
    density = result.density(grid, sigma)
    floor = density.max() * 1e-8
    axes.fill_between(grid, floor, np.maximum(density, floor), color=BLUE, alpha=0.35, lw=0)
    axes.plot(grid, np.maximum(density, floor), color=BLUE, lw=1)
    axes.set_yscale("log")
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(floor, None), title="spectrum")
    return figure


def bound(result: "Bound") -> "Figure":
    """Draw what adds up to the bound, and the range of the loss that it must stay below to say anything."""
    figure, axes = _axes(6.4, 2.6)
    rise = result.sharp_loss - result.loss
    left = 0.0
    parts = [("loss", result.loss, BLUE), ("sharpness", rise, ORANGE), ("complexity", result.complexity, GREY)]
    for name, width, color in parts:
        axes.barh(0, width, left=left, color=color, height=0.5, label=f"{name} {width:.3g}")
        left += width
    axes.axvline(result.loss_range, color="black", ls="--", lw=1, label=f"range of the loss {result.loss_range:g}")
    verdict = "vacuous" if result.vacuous else "not vacuous"
    axes.set(yticks=[], ylim=(-0.4, 0.4), title=f"estimate of the bound: {result.total:.3g} ({verdict})")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def score(result: "Score") -> "Figure":
    """Draw the information for each set of hyperparameters, next to the score and its permutation null."""
    figure, axes = _axes(6.4)
    sets = [chosen for chosen, value in result.per_set.items() if np.isfinite(value)]
    names = ["{" + ", ".join(map(str, chosen)) + "}" for chosen in sets]
    axes.bar(names, [result.per_set[chosen] for chosen in sets], color=BLUE, alpha=0.8)
    axes.axhspan(
        result.null_low, result.null_high, color=GREY, alpha=0.3, lw=0, label="score of a shuffled measure, 95 %"
    )
    axes.axhline(result.score, color=ORANGE, label=f"score {result.score:.3g}")
    axes.tick_params(axis="x", labelrotation=60)
    axes.set(
        xlabel="hyperparameters conditioned on",
        ylabel="share of the gap's sign explained",
        title=f"{result.num_models} models, Kendall's tau {result.kendall_tau:.2f}",
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def landscape(result: "Landscape", kind: str, metric: str) -> "Figure":
    """Draw curves in 1-D, contours or surfaces in 2-D, all models on one scale."""
    if kind not in ("contour", "surface"):
        raise ValueError(f'kind must be "contour" or "surface", got {kind!r}.')
    values = _per_model(result, metric)
    if values.ndim == 2:
        return _curves(result, values, metric)
    num = len(values)
    figure = new_figure(3.7 * num + 1.0, 3.6 if kind == "contour" else 3.9)
    levels, norm = _colors(values)
    a, b = np.meshgrid(result.coordinates, result.coordinates, indexing="ij")
    image: Any = None
    for number, (label, one) in enumerate(zip(result.labels, values, strict=True)):
        if kind == "contour":
            axes: Any = figure.add_subplot(1, num, number + 1)
            image = axes.contourf(a, b, one, levels=levels, cmap="viridis", norm=norm)
            axes.contour(a, b, one, levels=levels, colors="white", linewidths=0.4, alpha=0.7)
            axes.plot(0, 0, "+", color="white", markersize=9)
            axes.set_aspect("equal")
        else:
            axes = figure.add_subplot(1, num, number + 1, projection="3d")
            image = axes.plot_surface(a, b, one, cmap="viridis", norm=norm, rcount=101, ccount=101, lw=0)
            axes.set_zlim(values.min(), values.max())
            axes.tick_params(labelsize=7, pad=0)
        axes.set(xlabel=_direction(result, 1), ylabel=_direction(result, 2), title=label)
    bar = figure.colorbar(image, ax=figure.axes, label=metric, shrink=0.85 if kind == "contour" else 0.6, pad=0.04)
    bar.set_ticks(levels[::6].tolist(), labels=[f"{level:.3g}" for level in levels[::6]])
    bar.minorticks_off()
    return figure


def landscape_page(result: "Landscape", path: str | os.PathLike[str], metric: str) -> None:
    """Write a page with one surface for each model, to turn in a browser."""
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError("Pages with 3-D surfaces need plotly: pip install plotly.") from error
    values = _per_model(result, metric)
    if values.ndim == 2:
        raise ValueError("save_html needs a 2-D landscape, got a 1-D one: measure it with dims=2, or use plot().")
    scenes = [[{"type": "surface"}] * len(values)]
    page = make_subplots(rows=1, cols=len(values), specs=scenes, subplot_titles=result.labels)
    axis = {
        "xaxis_title": _direction(result, 1),
        "yaxis_title": _direction(result, 2),
        "zaxis": {"title": metric, "range": [float(values.min()), float(values.max())]},
    }
    for number, one in enumerate(values, 1):
        # plotly wants z[j][i] at (x[i], y[j]).
        surface = graph_objects.Surface(x=result.coordinates, y=result.coordinates, z=one.T, coloraxis="coloraxis")
        page.add_trace(surface, row=1, col=number)
        page.update_layout({f"scene{number}": axis})
    page.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"title": metric}})
    page.write_html(path, include_plotlyjs=True)


def _curves(result: "Landscape", values: np.ndarray, metric: str) -> "Figure":
    figure, axes = _axes()
    for label, one in zip(result.labels, values, strict=True):
        axes.plot(result.coordinates, one, label=label)
    axes.axvline(0, color=GREY, lw=0.8, ls=":")
    axes.set(xlabel=_direction(result, 1), ylabel=metric)
    if len(result.labels) > 1:
        axes.legend(frameon=False)
    return figure


def _direction(result: "Landscape", number: int) -> str:
    return f"{'eigenvector' if result.directions == 'hessian' else 'random direction'} {number}"


def _per_model(result: "Landscape", metric: str) -> np.ndarray:
    """Return the values with the models in front; what is not finite becomes the largest number that is."""
    if metric not in ("loss", "accuracy"):
        raise ValueError(f'metric must be "loss" or "accuracy", got {metric!r}.')
    values = result.loss if metric == "loss" else result.accuracy
    if not np.isfinite(values).any():
        raise ValueError(f"There is no {metric} in this landscape: the model is not a classifier.")
    num, points = len(result.labels), len(result.coordinates)
    values = np.where(np.isfinite(values), values, values[np.isfinite(values)].max())
    return values.reshape(num, points, *(() if values.size == num * points else (points,)))


def _colors(values: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return 25 levels and a scale that all models share: logarithmic where values span over a decade."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    if low > 0 and high > 10 * low:
        # The ends are stretched: rounding must not put a point outside.
        return np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), 25), LogNorm(low, high)
    return np.linspace(low, high, 25), Normalize(low, high)
