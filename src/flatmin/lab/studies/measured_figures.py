"""Figures of what was measured: spectra of the Hessian, and losses around the weights, of one replica per method."""

import math
from collections.abc import Mapping

import numpy as np

from flatmin.lab.studies.contrasts import run_names
from flatmin.lab.studies.findings import LineFigure, Series, Surface, SurfaceFigure
from flatmin.lab.sweeps.jobs import Measurement, Outcome
from flatmin.measures.spectrum import SpectralDensity

NUM_DENSITY_POINTS = 201
DENSITY_FLOOR = 1e-6
"""The density is drawn on a logarithmic scale; below this it is nothing."""
LOWEST_HEIGHT = 1e-6
"""Losses are drawn on a logarithmic scale, which has no 0."""


def density_figures(outcomes: Mapping[str, Outcome], spectrum: Measurement, title: str) -> list[LineFigure]:
    """Return the spectral densities of all methods on one axis; nothing if none was measured."""
    shown = {method: outcome for method, outcome in outcomes.items() if spectrum in outcome.measured}
    if not shown:
        return []
    facts = {method: outcome.measured[spectrum] for method, outcome in shown.items()}
    nodes = np.concatenate([f["nodes"] for f in facts.values()])
    low, high = float(nodes.min()), float(nodes.max())
    sigma = max(0.01 * (high - low), 1e-9)
    grid = np.linspace(low - 3 * sigma, high + 3 * sigma, NUM_DENSITY_POINTS)
    series = []
    for method, f in facts.items():
        density = SpectralDensity(np.asarray(f["nodes"]), np.asarray(f["weights"])).density(grid, sigma)
        heights = [max(float(value), DENSITY_FLOOR) for value in density]
        series.append(Series(name=method, x=grid.tolist(), y=heights, mode="lines"))
    return [
        LineFigure(
            title=title,
            x_label="eigenvalue",
            y_label="density",
            series=series,
            log_y=True,
            note=f"Stochastic Lanczos quadrature, smoothed with a Gaussian of width {sigma:.2g}. Where a curve is at "
            f"{DENSITY_FLOOR:g} there is nothing.",
            runs=run_names(shown.values()),
        )
    ]


def landscape_figures(outcomes: Mapping[str, Outcome], landscape: Measurement, title: str) -> list[SurfaceFigure]:
    """Return the losses around the weights of all methods, side by side; nothing if none was measured."""
    shown = {method: outcome for method, outcome in outcomes.items() if landscape in outcome.measured}
    if not shown:
        return []
    surfaces = []
    for method, outcome in shown.items():
        facts = outcome.measured[landscape]
        heights = [[max(v, LOWEST_HEIGHT) if math.isfinite(v) else math.nan for v in row] for row in facts["loss"]]
        surfaces.append(Surface(name=method, coordinates=facts["coordinates"], height=heights))
    return [
        SurfaceFigure(
            title=title,
            height_label="training loss",
            surfaces=surfaces,
            log_height=True,
            note="The same random directions for all methods, scaled to the filters of each model.",
            runs=run_names(shown.values()),
        )
    ]
