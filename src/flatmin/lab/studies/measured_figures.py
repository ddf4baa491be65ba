"""Figures of what was measured: spectra of the Hessian, and losses around the weights, of one replica per method."""

import math
from collections.abc import Iterable

import numpy as np

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.studies.findings import LineFigure, Series, Surface, SurfaceFigure
from flatmin.lab.studies.replicas import Replicas
from flatmin.lab.sweeps.measurements import Measurement
from flatmin.measures.spectrum import SpectralDensity

NUM_DENSITY_POINTS = 201
DENSITY_FLOOR = 1e-6
"""The density is drawn on a logarithmic scale; below this it is nothing."""
LOWEST_HEIGHT = 1e-6
"""Losses are drawn on a logarithmic scale, which has no 0."""


def density_figures(methods: Iterable[Replicas], spectrum: Measurement, title: str) -> list[LineFigure]:
    """Return the spectral densities of all methods' first replicas on one axis; nothing if none was measured."""
    first = _measured_first(methods, spectrum)
    if not first:
        return []
    facts = {method: record.measured[spectrum.name] for method, record in first.items()}
    nodes = np.concatenate([f["nodes"] for f in facts.values()])
    low, high = float(nodes.min()), float(nodes.max())
    sigma = max(0.01 * (high - low), 1e-9)
    grid = np.linspace(low - 3 * sigma, high + 3 * sigma, NUM_DENSITY_POINTS)
    series = []
    for method, f in facts.items():
        density = SpectralDensity(np.asarray(f["nodes"]), np.asarray(f["weights"])).density(grid, sigma)
        heights = [max(float(value), DENSITY_FLOOR) for value in density]
        series.append(Series(name=method, x=grid.tolist(), y=heights, mode="lines"))
    figure = LineFigure(
        title=title,
        x_label="eigenvalue",
        y_label="density",
        series=series,
        log_y=True,
        note=f"Stochastic Lanczos quadrature, smoothed with a Gaussian of width {sigma:.2g}. Where a curve is at "
        f"{DENSITY_FLOOR:g} there is nothing.",
        runs=tuple(record.name for record in first.values()),
    )
    return [figure]


def landscape_figures(methods: Iterable[Replicas], landscape: Measurement, title: str) -> list[SurfaceFigure]:
    """Return the losses around the weights of all methods' first replicas; nothing if none was measured."""
    first = _measured_first(methods, landscape)
    surfaces = []
    for method, record in first.items():
        facts = record.measured[landscape.name]
        heights = [[max(v, LOWEST_HEIGHT) if math.isfinite(v) else math.nan for v in row] for row in facts["loss"]]
        surfaces.append(Surface(name=method, coordinates=facts["coordinates"], height=heights))
    figure = SurfaceFigure(
        title=title,
        height_label="training loss",
        surfaces=surfaces,
        note="The same random directions for all methods, scaled to the filters of each model.",
        runs=tuple(record.name for record in first.values()),
    )
    return [figure] if surfaces else []


def _measured_first(methods: Iterable[Replicas], measurement: Measurement) -> dict[str, RunRecord]:
    return {m.name: m.records[0] for m in methods if m.records and measurement.name in m.records[0].measured}
