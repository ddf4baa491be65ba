"""The runs of a study: which it asked for, and numbers of replicas by seed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flatmin.lab.runs.directory import Metrics
from flatmin.lab.studies.contrasts import BySeed, Contrast
from flatmin.lab.studies.findings import Cell, Series
from flatmin.lab.studies.statistics import mean_and_interval
from flatmin.lab.sweeps.jobs import Job, Measurement, Outcome
from flatmin.lab.sweeps.runners import Runner

Key = TypeVar("Key")
Read = Callable[[Outcome], float | None]
"""Returns a number of a run; None where it has none."""


def metric(name: str, factor: float = 100.0) -> Read:
    """Return how to read a metric of the last epoch, in % by default."""

    def read(outcome: Outcome) -> float | None:
        value = outcome.result.metrics.get(name) if outcome.result is not None else None
        return None if value is None else factor * value

    return read


def measured(measurement: Measurement, read: str | Callable[[dict[str, Any]], float | None]) -> Read:
    """Return how to read a number of what was measured, by its name or with a function."""
    number = (lambda facts: facts[read]) if isinstance(read, str) else read
    return lambda outcome: number(outcome.measured[measurement]) if measurement in outcome.measured else None


@dataclass(frozen=True)
class Replicas:
    """Runs of one method, which differ in their seeds. Numbers are read by a function, or are a metric in %."""

    name: str
    """What the method is called."""
    outcomes: Sequence[Outcome]

    @property
    def runs(self) -> tuple[str, ...]:
        """Those that exist, by the names of their directories."""
        return tuple(outcome.job.name for outcome in self.outcomes if outcome.result is not None)

    def by_seed(self, read: Read | str) -> dict[int, float]:
        """Return a number of each run by its seed, where there is one and it is finite."""
        read = metric(read) if isinstance(read, str) else read
        values = {outcome.job.seed: read(outcome) for outcome in self.outcomes}
        return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}

    def cell(self, read: Read | str, *, unit: str = "%", claimed: str | None = None, note: str | None = None) -> Cell:
        """Return a table's cell; without a measured part where no run has the number yet."""
        return self.cell_of(self.by_seed(read), unit=unit, claimed=claimed, note=note)

    def cell_of(self, values: BySeed, **look: Any) -> Cell:
        """Return a table's cell for numbers that were made of those of the runs."""
        return Cell(
            measured=mean_and_interval(list(values.values())) if values else None,
            values=tuple(values.values()),
            runs=tuple(outcome.job.name for outcome in self.outcomes if outcome.job.seed in values),
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
            num_asked=max(len(self.outcomes), len(other.outcomes)),
            runs=other.runs + self.runs,
            unit=unit,
        )

    def along_training(self, name: str, read: Callable[[Metrics], float | None]) -> list[Series]:
        """Return the mean of a number of each epoch, in %, with its interval; nothing where there is none."""
        columns: dict[float, dict[int, float]] = {}
        for outcome in self.outcomes:
            for line in outcome.result.history if outcome.result is not None else ():
                value = read(line)
                if value is not None:
                    columns.setdefault(float(line["epoch"] or 0), {})[outcome.job.seed] = 100 * value
        return [series_over(name, columns, mode="lines")] if columns else []


def series_over(name: str, values: Mapping[int, BySeed] | Mapping[float, BySeed], **look: Any) -> Series:
    """Return the mean over replicas at each x with values, and half the width of its interval (NaN for one replica)."""
    intervals = {x: mean_and_interval(list(column.values())) for x, column in values.items() if column}
    y, half_width = [i.mean for i in intervals.values()], [i.half_width for i in intervals.values()]
    return Series(name=name, x=list(intervals), y=y, half_width=half_width, **look)


def runs_of(groups: Iterable[Replicas]) -> tuple[str, ...]:
    """Return the runs of several groups that exist, by the names of their directories."""
    return tuple(run for group in groups for run in group.runs)


class RecordingRunner:
    """A runner that remembers what a study asked it for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._incomplete: dict[str, bool] = {}
        self._problems: dict[str, str] = {}

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Return the outcome of each job, in the same order."""
        outcomes = self._runner.outcomes(jobs, what)
        for outcome in outcomes:
            name = outcome.job.name
            self._incomplete[name] = self._incomplete.get(name, False) or not outcome.complete
            if outcome.failure is not None:
                self._problems[name] = outcome.failure
        return outcomes

    def replicas(self, groups: Mapping[Key, Sequence[Job]], what: str) -> dict[Key, Replicas]:
        """Return groups of runs, named by their keys; asked for at once, so that all can run side by side."""
        outcomes = iter(self.outcomes([job for jobs in groups.values() for job in jobs], what))
        return {key: Replicas(str(key), [next(outcomes) for _ in jobs]) for key, jobs in groups.items()}

    @property
    def runs(self) -> tuple[str, ...]:
        """All runs that were asked for, by the names of their directories."""
        return tuple(self._incomplete)

    @property
    def complete_runs(self) -> tuple[str, ...]:
        """Those of them that are complete."""
        return tuple(name for name, incomplete in self._incomplete.items() if not incomplete)

    @property
    def num_missing(self) -> int:
        """How many of them are not there, or not measured in full."""
        return sum(self._incomplete.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of runs that failed."""
        return tuple(f"{name} failed: {problem}" for name, problem in self._problems.items())
