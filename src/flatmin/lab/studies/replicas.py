"""Numbers of replicas, runs that differ in their seeds, and figures of what was measured of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from flatmin.lab.runs.directory import Metrics
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.studies.contrasts import BySeed, Contrast, mean
from flatmin.lab.studies.findings import Cell, LineFigure, Series, Surface, SurfaceFigure
from flatmin.lab.studies.statistics import mean_and_interval
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Measurement
from flatmin.measures.spectrum import SpectralDensity

Key = TypeVar("Key")
Read = Callable[[RunRecord], float | None]
"""Returns a number of a run; None where it has none."""


def metric(name: str, factor: float = 100.0) -> Read:
    """Return how to read a metric of the last epoch, in % by default."""

    def read(record: RunRecord) -> float | None:
        value = record.metrics.get(name)
        return None if value is None else factor * value

    return read


def measured(measurement: Measurement, read: str | Callable[[dict[str, Any]], float | None]) -> Read:
    """Return how to read a number of what was measured, by its name or with a function."""
    number = (lambda facts: facts[read]) if isinstance(read, str) else read
    name = measurement.name
    return lambda record: number(record.measured[name]) if name in record.measured else None


@dataclass(frozen=True)
class Replicas:
    """Runs of one method, which differ in their seeds. Numbers are read by a function, or are a metric in %."""

    name: str
    records: Sequence[RunRecord]

    @property
    def runs(self) -> tuple[str, ...]:
        """Those that are finished, by name."""
        return tuple(record.name for record in self.records if record.state == "finished")

    def by_seed(self, read: Read | str) -> dict[int, float]:
        """Return a number of each run by its seed, where there is one and it is finite."""
        read = metric(read) if isinstance(read, str) else read
        values = {record.seed or 0: read(record) for record in self.records}
        return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}

    def cell(self, read: Read | str, *, unit: str = "%", claimed: str | None = None, note: str | None = None) -> Cell:
        """Return a table's cell; without a measured part where no run has the number yet."""
        return self.cell_of(self.by_seed(read), unit=unit, claimed=claimed, note=note)

    def cell_of(self, values: BySeed, **look: Any) -> Cell:
        """Return a table's cell for numbers that were made of the runs' own."""
        return Cell(
            measured=mean_and_interval(list(values.values())) if values else None,
            values=tuple(values.values()),
            runs=tuple(record.name for record in self.records if record.seed in values),
            **look,
        )

    def lower_than(self, other: "Replicas", quantity: str, read: Read | str, unit: str = "%") -> Contrast:
        """Return the claim that a number, the ``quantity``, is lower here than for the replicas of another method."""
        return Contrast(
            quantity=quantity,
            lower_name=self.name,
            higher_name=other.name,
            lower=self.by_seed(read),
            higher=other.by_seed(read),
            num_asked=max(len(self.records), len(other.records)),
            runs=other.runs + self.runs,
            unit=unit,
        )

    def by_epoch(self, read: Callable[[Metrics], float | None]) -> dict[float, dict[int, float]]:
        """Return a number of each epoch of each finished run, in %, by epoch and seed."""
        columns: dict[float, dict[int, float]] = {}
        for record in self.records:
            for line in record.history if record.state == "finished" else ():
                value = read(line)
                if value is not None:
                    columns.setdefault(float(line["epoch"] or 0), {})[record.seed or 0] = 100 * value
        return columns

    def unfit_note(self, most: float) -> str | None:
        """Return that the training error ends above a limit, in %, or diverges; None if not, or if it is not known."""
        errors = self.by_seed("train_error")
        if diverged := sum(record.state == "finished" and record.seed not in errors for record in self.records):
            return f"{diverged} of {len(self.records)} replicas of {self.name} end without a finite training error"
        error = mean(errors.values())
        return f"{self.name} ends with a training error of {error:.1f} %, above {most:g} %" if error > most else None

    def along_training(self, name: str, read: Callable[[Metrics], float | None]) -> list[Series]:
        """Return the mean of a number of each epoch, in %, with its interval; nothing where there is none."""
        columns = self.by_epoch(read)
        return [series_over(name, columns, mode="lines")] if columns else []


def replicas_of(groups: Mapping[Key, Sequence[Job]], known: Mapping[str, RunRecord]) -> dict[Key, Replicas]:
    """Return what is known of groups of jobs, named by their keys."""
    return {key: Replicas(str(key), [job.record(known) for job in jobs]) for key, jobs in groups.items()}


def series_over(name: str, values: Mapping[int, BySeed] | Mapping[float, BySeed], **look: Any) -> Series:
    """Return the mean over replicas at each x with values, and half the width of its interval (NaN for one replica)."""
    intervals = {x: mean_and_interval(list(column.values())) for x, column in values.items() if column}
    y, half_width = [i.mean for i in intervals.values()], [i.half_width for i in intervals.values()]
    return Series(name=name, x=list(intervals), y=y, half_width=half_width, **look)


def runs_of(groups: Iterable[Replicas]) -> tuple[str, ...]:
    """Return the finished runs of several groups, by name."""
    return tuple(run for group in groups for run in group.runs)


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
