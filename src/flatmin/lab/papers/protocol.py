"""How methods are compared, fixed beforehand (Section 3.1).

A contest has one network, one dataset, and several methods. Each method has candidates (learning rates and decays for
the baseline, values of rho for SAM), one of which is chosen by its error on a validation split; then independent
replicas are trained on the whole training set. A baseline may also train for twice as many epochs, and the better mean
of the two counts, since a SAM step costs two gradients.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from flatmin.lab.jobs import Job, Laboratory, Outcome
from flatmin.lab.papers.claimed import Claimed
from flatmin.lab.papers.settings import BASELINE_EPOCHS_FACTOR, NUM_REPLICAS, VALIDATION
from flatmin.lab.spec import Experiment

SEEDS = tuple(range(NUM_REPLICAS))
CHOOSING_SEED = 1000
"""Of the runs that choose: none of the replicas' seeds."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    candidates: Callable[[Experiment], Sequence[Experiment]]
    """What to choose from, given the choice of the method ``after`` (or the contest's start)."""
    after: str | None = None
    """Which method's choice the candidates are variants of; None: of the contest's start."""
    doubles: bool = False
    """Whether it may train for twice as many epochs."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Methods on one dataset with one network."""

    labels: tuple[str, ...]
    """The row of the table: for example the model and the augmentation."""
    column: str
    """The column of the table: for example the dataset."""
    start: Experiment
    methods: tuple[Method, ...]
    claimed: dict[tuple[str, str], Claimed]
    """What the paper says, by method and metric."""

    @property
    def name(self) -> str:
        """What people call it."""
        return ", ".join((*self.labels, self.column))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What came of a method in a contest."""

    contest: Contest
    method: Method
    chosen: Experiment | None
    """None: nothing was chosen yet."""
    tried: tuple[tuple[Experiment, float | None], ...]
    """The candidates and their validation errors (None: not run, inf: diverged); empty where there was no choice."""
    replicas: tuple[Outcome, ...]
    doubled: tuple[Outcome, ...]

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric of the better number of epochs, in %, by seed."""
        standard, doubled = percentages(self.replicas, metric), percentages(self.doubled, metric)
        if not doubled or not standard:
            return standard or doubled
        return doubled if mean(doubled.values()) < mean(standard.values()) else standard

    def counted(self, metric: str) -> tuple[Outcome, ...]:
        """Return the runs that `values` come from."""
        took_double = self.doubled and self.values(metric) == percentages(self.doubled, metric)
        return self.doubled if took_double else self.replicas

    @property
    def note(self) -> str | None:
        """What a reader of the number has to know."""
        parts = []
        if self.doubled and self.counted("test_error") is self.doubled:
            parts.append("twice the epochs")
        diverged = sum(outcome.problem is not None for outcome in self.counted("test_error"))
        if diverged:
            parts.append(f"{diverged} of {len(self.replicas)} came to nothing")
        return ", ".join(parts) or None


def percentages(outcomes: Iterable[Outcome], metric: str) -> dict[int, float]:
    """Return a metric of the last epoch, in %, by seed, of the runs that are finished."""
    found = {}
    for outcome in outcomes:
        value = outcome.result.metrics.get(metric) if outcome.result is not None else None
        if value is not None:
            found[outcome.job.seed] = 100 * value
    return found


def hold_contests(
    contests: Sequence[Contest], lab: Laboratory, item: str, seeds: Sequence[int] = SEEDS
) -> tuple[list[Entry], list[Outcome]]:
    """Choose, train and return what came of each method in each contest, and all runs that were needed."""
    needed: list[Outcome] = []
    chosen: dict[tuple[str, str], Experiment] = {}
    tried: dict[tuple[str, str], tuple[tuple[Experiment, float | None], ...]] = {}
    waiting = [(contest, method) for contest in contests for method in contest.methods]
    while ready := [(c, m) for c, m in waiting if m.after is None or (c.name, m.after) in chosen]:
        waiting = [pair for pair in waiting if pair not in ready]
        options = {}
        for contest, method in ready:
            origin = contest.start if method.after is None else chosen[contest.name, method.after]
            name = "/".join((item, *contest.labels, contest.column, method.name))
            options[contest.name, method.name] = [replace(e, name=name) for e in method.candidates(origin)]
        jobs = {key: [_choosing_job(e) for e in found] for key, found in options.items() if len(found) > 1}
        outcomes = lab.outcomes([job for found in jobs.values() for job in found], f"{item}: choosing settings")
        needed += outcomes
        by_name = {outcome.job.name: outcome for outcome in outcomes}
        for key, experiments in options.items():
            if key not in jobs:
                chosen[key] = experiments[0]
                continue
            errors = [_validation_error(by_name[job.name]) for job in jobs[key]]
            tried[key] = tuple(zip(experiments, errors, strict=True))
            best = min((e for e in errors if e is not None and math.isfinite(e)), default=None)
            if best is not None and None not in errors:  # a choice from half of the candidates would not be one
                chosen[key] = experiments[errors.index(best)]
    jobs_of: dict[tuple[str, str], tuple[list[Job], list[Job]]] = {}
    for contest in contests:
        for method in contest.methods:
            experiment = chosen.get((contest.name, method.name))
            if experiment is not None:
                longer = replace(experiment, epochs=BASELINE_EPOCHS_FACTOR * experiment.epochs)
                jobs_of[contest.name, method.name] = (
                    [Job(experiment=experiment, seed=seed) for seed in seeds],
                    [Job(experiment=_evaluated_once(longer), seed=seed) for seed in seeds] if method.doubles else [],
                )
    asked = [job for pair in jobs_of.values() for jobs in pair for job in jobs]
    found = dict(zip([job.name for job in asked], lab.outcomes(asked, f"{item}: replicas"), strict=True))
    needed += found.values()
    entries = []
    for contest in contests:
        for method in contest.methods:
            key = (contest.name, method.name)
            standard, doubled = jobs_of.get(key, ([], []))
            entries.append(
                Entry(
                    contest=contest,
                    method=method,
                    chosen=chosen.get(key),
                    tried=tried.get(key, ()),
                    replicas=tuple(found[job.name] for job in standard),
                    doubled=tuple(found[job.name] for job in doubled),
                )
            )
    return entries, needed


def with_rho(rhos: Sequence[float], m: int | None = None) -> Callable[[Experiment], list[Experiment]]:
    """Return a method's candidates: SAM with each rho, in the setting of the baseline."""
    return lambda base: [replace(base, optim=replace(base.optim, rho=rho, m=m)) for rho in rhos]


def with_rates(lrs: Sequence[float], decays: Sequence[float]) -> Callable[[Experiment], list[Experiment]]:
    """Return the baseline's candidates: each learning rate with each weight decay."""
    return lambda base: [
        replace(base, optim=replace(base.optim, lr=lr, weight_decay=decay)) for lr in lrs for decay in decays
    ]


def as_it_is(base: Experiment) -> list[Experiment]:
    """Return the one candidate of a method that has nothing to choose."""
    return [base]


def _evaluated_once(experiment: Experiment) -> Experiment:
    # An experiment that is evaluated only at its end still is, when it is longer.
    return replace(experiment, evaluate_every=max(experiment.evaluate_every, 1) * BASELINE_EPOCHS_FACTOR)


def _choosing_job(experiment: Experiment) -> Job:
    held_out = replace(experiment.data, validation=VALIDATION)
    return Job(experiment=replace(experiment, name=f"{experiment.name} (choosing)", data=held_out), seed=CHOOSING_SEED)


def _validation_error(outcome: Outcome) -> float | None:
    if outcome.problem is not None:
        return math.inf
    return percentages([outcome], "valid_error").get(outcome.job.seed)
