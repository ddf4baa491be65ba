"""From runs to evidence: which runs a study asked for, replicas paired by seed, and what that says of a claim."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatmin.lab.runs.directory import Metrics
from flatmin.lab.studies.findings import Cell, Comparison, Series, Verdict, VerdictStatus
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.statistics import SIGNIFICANT, holm, mean_and_interval, p_text, paired_p_value
from flatmin.lab.sweeps.jobs import Measurement, MeasurementResult, Outcome

BySeed = Mapping[int, float]


def metric_by_seed(outcomes: Iterable[Outcome], metric: str, factor: float = 100.0) -> dict[int, float]:
    """Return a metric of the last epoch by seed (in %, by default) of the runs that have it."""
    return by_seed(outcomes, lambda outcome: _scaled(_last(outcome, metric), factor))


def measured_by_seed(
    outcomes: Iterable[Outcome], measurement: Measurement, read: Callable[[MeasurementResult], float | None]
) -> dict[int, float]:
    """Return a number of what was measured, by seed, of the runs for which it was."""
    return by_seed(outcomes, lambda o: read(o.measured[measurement]) if measurement in o.measured else None)


def by_seed(outcomes: Iterable[Outcome], read: Callable[[Outcome], float | None]) -> dict[int, float]:
    """Return a number of each outcome by seed, where there is one and it is finite."""
    found = {outcome.job.seed: read(outcome) for outcome in outcomes}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def run_names(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Return the runs that exist, by the names of their directories."""
    return tuple(outcome.job.name for outcome in outcomes if outcome.result is not None)


def number_cell(
    values: BySeed,
    outcomes: Sequence[Outcome],
    *,
    unit: str = "%",
    claimed: str | None = None,
    note: str | None = None,
) -> Cell:
    """Return a table's cell for a number of each replica; without a measured part where there is none yet."""
    return Cell(
        claimed=claimed,
        measured=mean_and_interval(list(values.values())) if values else None,
        unit=unit,
        values=tuple(values.values()),
        runs=tuple(outcome.job.name for outcome in outcomes if outcome.job.seed in values),
        note=note,
    )


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A claim that one number is lower than another, with both for each seed."""

    quantity: str
    """What the numbers are, for example "test error, %"."""
    lower_name: str
    higher_name: str
    lower: BySeed
    """What is claimed to be lower."""
    higher: BySeed
    num_asked: int
    """How many pairs were asked for. With fewer nothing is judged: those may be the ones that went well."""
    runs: tuple[str, ...] = ()
    unit: str = "%"

    @property
    def differences(self) -> list[float]:
        """For each seed that both have; negative where the claim holds."""
        return [self.lower[seed] - self.higher[seed] for seed in sorted(self.lower.keys() & self.higher.keys())]

    @property
    def waits(self) -> bool:
        """Whether there are fewer pairs than were asked for, or than two."""
        return len(self.differences) < max(2, self.num_asked)

    @property
    def p_value(self) -> float:
        """Student's paired test, two-sided; NaN with fewer than two pairs, or fewer than were asked for."""
        seeds = sorted(self.lower.keys() & self.higher.keys())
        if self.waits:
            return math.nan
        return paired_p_value([self.lower[s] for s in seeds], [self.higher[s] for s in seeds])

    def comparison(self, p_holm: float) -> Comparison:
        """Return it as an entry of a table; there has to be a pair."""
        return Comparison(
            name=f"{self.lower_name} - {self.higher_name}",
            difference=mean_and_interval(self.differences),
            baseline=mean(self.higher[seed] for seed in self.lower if seed in self.higher),
            quantity=self.quantity,
            p_value=self.p_value,
            p_holm=p_holm,
            num_pairs=len(self.differences),
            unit=self.unit,
            values=tuple(self.differences),
            runs=self.runs,
        )

    def describe(self, p_holm: float) -> str:
        """Return the numbers, how many pairs, and the p-value, in a sentence."""
        n = len(self.differences)
        if n == 0:
            return f"{self.quantity}: no pair of runs of {self.lower_name} and {self.higher_name} is available"
        seeds = sorted(self.lower.keys() & self.higher.keys())
        low, high = (mean(values[s] for s in seeds) for values in (self.lower, self.higher))
        said = f"{self.quantity}: {low:.4g} ({self.lower_name}) against {high:.4g} ({self.higher_name})"
        if n < self.num_asked:
            return f"{said}; {n} of {self.num_asked} pairs are available, nothing is judged before all are"
        if n == 1:
            return f"{said}; n = 1, too few for a test"
        return f"{said}; difference {mean_and_interval(self.differences)}, n = {n}, {p_text(p_holm)}"


def contrast_between(
    quantity: str,
    lower: tuple[str, Sequence[Outcome]],
    higher: tuple[str, Sequence[Outcome]],
    read: Callable[[Sequence[Outcome]], BySeed],
    unit: str = "%",
) -> Contrast:
    """Return the claim that a number is lower for one method's replicas than for another's.

    Args:
        quantity: what the number is.
        lower: the method, and its replicas, of which it is claimed to be lower.
        higher: the other method, and its replicas.
        read: returns the number of each replica, by seed.
        unit: of a difference.
    """
    return Contrast(
        quantity=quantity,
        lower_name=lower[0],
        higher_name=higher[0],
        lower=read(lower[1]),
        higher=read(higher[1]),
        num_asked=max(len(lower[1]), len(higher[1])),
        runs=run_names([*higher[1], *lower[1]]),
        unit=unit,
    )


class Family:
    """All comparisons that an item plans at a scale, corrected together by Holm's method.

    One that waits for runs counts as not rejected, so that no verdict changes when it arrives: what is significant now
    stays so, and what may become so, when smaller p-values arrive, is not judged before.
    """

    def __init__(self, contrasts: Iterable[Contrast]) -> None:
        self.contrasts = list(contrasts)
        p_values = [contrast.p_value for contrast in self.contrasts]
        self._p_holm = holm(p_values)
        self._p_at_best = holm([0.0 if c.waits else p for c, p in zip(self.contrasts, p_values, strict=True)])

    def p_holm(self, contrast: Contrast) -> float:
        """Return the corrected p-value of a member; NaN where there is no test."""
        return self._p_holm[self.contrasts.index(contrast)]

    def is_open(self, contrast: Contrast) -> bool:
        """Return whether the verdict on an available comparison depends on others that wait for runs."""
        at_best = self._p_at_best[self.contrasts.index(contrast)]
        return not contrast.waits and at_best < SIGNIFICANT <= self.p_holm(contrast)

    def status(self, contrast: Contrast) -> VerdictStatus:
        """Say whether the claim of one comparison holds, as far as the runs can show."""
        p = self.p_holm(contrast)
        if math.isnan(p) or self.is_open(contrast):
            return "not tested"
        if p >= SIGNIFICANT:
            return "inconclusive"
        return "reproduced" if mean(contrast.differences) < 0 else "not reproduced"

    def comparison(self, contrast: Contrast) -> Comparison | str:
        """Return a member as an entry of a table; nothing while a pair is missing."""
        missing = len(contrast.differences) < max(1, contrast.num_asked)
        return "" if missing else contrast.comparison(self.p_holm(contrast))

    def correction(self, contrasts: Sequence[Contrast]) -> str:
        """Return how many comparisons the p-values are corrected for, and whether others are waited for."""
        if len(self.contrasts) == 1 or all(math.isnan(self.p_holm(c)) for c in contrasts):
            return ""
        said = f"Holm's correction for {len(self.contrasts)} comparisons"
        waiting = sum(c.waits for c in self.contrasts)
        is_open = any(map(self.is_open, contrasts))
        return f"{said}, open until the {waiting} missing ones are available" if is_open else said

    def judge(self, claim: str, contrasts: Sequence[Contrast]) -> Verdict:
        """Return whether a claim holds that consists of one or several members, all of which must.

        It did not hold where one of them is significantly the other way round; else it is not tested while a pair of
        any of them is missing.
        """
        parts = [self.status(contrast) for contrast in contrasts]
        status: VerdictStatus = "inconclusive"
        if "not reproduced" in parts:
            status = "not reproduced"
        elif "not tested" in parts or not parts:
            status = "not tested"
        elif all(part == "reproduced" for part in parts):
            status = "reproduced"
        said = [contrast.describe(self.p_holm(contrast)) for contrast in contrasts]
        said += [self.correction(contrasts)] if self.correction(contrasts) else []
        return Verdict(
            claim=claim,
            status=status,
            evidence="; ".join(said) + ".",
            comparisons=[c.comparison(self.p_holm(c)) for c in contrasts if c.differences],
        )


def verdicts_at(scale: Scale, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts of a scale: at that of a smoke test nothing is judged."""
    if scale != "smoke":
        return list(verdicts)
    nothing = "A smoke test judges nothing."
    return [replace(v, status="not tested", evidence=f"{nothing} {v.evidence}".rstrip()) for v in verdicts]


def along_training(name: str, outcomes: Iterable[Outcome], read: Callable[[Metrics], float | None]) -> list[Series]:
    """Return the mean over replicas of a number of each epoch, in %, with its interval; nothing where there is none."""
    columns: dict[float, dict[int, float]] = {}
    for outcome in outcomes:
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


def runs_of(groups: Mapping[Any, Iterable[Outcome]]) -> tuple[str, ...]:
    """Return the runs of several groups that exist, by the names of their directories."""
    return run_names(outcome for outcomes in groups.values() for outcome in outcomes)


def _last(outcome: Outcome, metric: str) -> float | None:
    return outcome.result.metrics.get(metric) if outcome.result is not None else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
