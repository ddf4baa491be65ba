"""Pictures of what was measured. matplotlib and plotly are imported where they are used: they are an extra."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flatmin.measures.hessian import Eigenvalues, SpectralDensity
    from flatmin.measures.landscape import Landscape
    from flatmin.measures.pac_bayes import Bound
    from flatmin.measures.predictive import Score
    from flatmin.measures.sharpness import Sharpness

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#8a8f98"


def new_figure(width: float = 6.0, height: float = 3.6) -> "Figure":
    """Return an empty figure that belongs to no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Pictures need matplotlib: pip install "flatmin[lab]".') from error
    return Figure(figsize=(width, height), layout="constrained")


def _axes(width: float = 6.0, height: float = 3.6) -> tuple["Figure", Any]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def sharpness(found: "Sharpness") -> "Figure":
    """Draw the sharpness of each subset, and their mean with its standard error."""
    figure, axes = _axes()
    index = np.arange(1, len(found.per_subset) + 1)
    axes.plot(index, found.per_subset, "o", color=BLUE, alpha=0.6, markersize=4, label="subsets")
    axes.axhline(found.mean, color=ORANGE, label=f"mean {found.mean:.3g}")
    if len(index) > 1:
        low, high = found.mean - found.standard_error, found.mean + found.standard_error
        axes.axhspan(low, high, color=ORANGE, alpha=0.2, lw=0, label="standard error")
    axes.set(
        xlabel=f"subset of {found.m} examples",
        ylabel=f"rise of the {found.metric}",
        title=f"m-sharpness, m = {found.m}, $\\rho$ = {found.rho:g}",
    )
    axes.legend(frameon=False)
    return figure


def eigenvalues(found: "Eigenvalues") -> "Figure":
    """Draw the leading eigenvalues, with their residuals as error bars."""
    figure, axes = _axes(4.8)
    index = np.arange(1, len(found.values) + 1)
    axes.bar(index, found.values, color=BLUE, width=0.6)
    axes.errorbar(index, found.values, yerr=found.residuals, fmt="none", color=ORANGE, capsize=4)
    axes.set_xticks(index)
    axes.set(xlabel="i", ylabel=r"$\lambda_i$", title="leading eigenvalues of the Hessian")
    return figure


def spectral_density(found: "SpectralDensity", sigma: float | None) -> "Figure":
    """Draw the smoothed spectrum on a logarithmic scale."""
    figure, axes = _axes()
    low, high = found.nodes[0], found.nodes[-1]
    width = max(high - low, 1e-12)
    sigma = width / 100 if sigma is None else sigma
    grid = np.linspace(low - 0.05 * width, high + 0.05 * width, 1001)
    density = found.density(grid, sigma)
    floor = density.max() * 1e-8
    axes.fill_between(grid, floor, np.maximum(density, floor), color=BLUE, alpha=0.35, lw=0)
    axes.plot(grid, np.maximum(density, floor), color=BLUE, lw=1)
    axes.set_yscale("log")
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(floor, None), title="spectrum of the Hessian")
    return figure
