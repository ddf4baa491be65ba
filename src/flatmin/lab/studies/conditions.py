"""How methods are compared, fixed beforehand (Section 3.1).

A condition has one model, one dataset, and several methods. Each method has candidates (learning rates and decays for
the baseline, values of rho for SAM), one of which is chosen by its error on a validation split; then independent
replicas are trained on the whole training set. A baseline may also train for twice as many epochs, and the better mean
of the two counts, since a SAM step costs two gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import metric_by_seed
from flatmin.lab.studies.printed import Claimed
from flatmin.lab.sweeps.jobs import Job, Outcome
from flatmin.lab.sweeps.runners import Runner

NUM_REPLICAS = 5
BASELINE_EPOCHS_FACTOR = 2
"""Runs without SAM may take twice as many epochs; the better of the two is reported (Section 3.1)."""
VALIDATION = 0.1
"""Of the training set, held out to choose rho."""
SEEDS = tuple(range(NUM_REPLICAS))
TUNING_SEED = 1000
"""Of the runs that choose: none of the replicas' seeds."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    candidates: Callable[[Experiment], Sequence[Experiment]]
    """What to choose from, given the choice of the method ``after`` (or the condition's start)."""
    after: str | None = None
    """Which method's choice the candidates are variants of; None: of the condition's start."""
    against: tuple[tuple[str, ...], ...] = ()
    """The methods that it is compared with; of several in one tuple, the one with the better mean counts."""


def double_epochs(method: Method) -> Method:
    """Return a method that trains for twice as many epochs, with the same settings."""
    return Method(name=f"{method.name}, twice the epochs", candidates=_doubled, after=method.name)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Methods on one dataset with one model."""

    labels: tuple[str, ...]
    """The row of the table: for example the model and the augmentation."""
    column: str
    """The column of the table: for example the dataset."""
    start: Experiment
    methods: tuple[Method, ...]
    claimed: dict[tuple[str, str], Claimed]
    """What the paper says, by method and metric."""
    tuning_epochs: int | None = None
    """Epochs of the runs that choose settings, which have fewer examples; as many as the replicas' if None."""

    @property
    def name(self) -> str:
        """What people call it."""
        return ", ".join((*self.labels, self.column))


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What came of a method in a condition."""

    condition: Condition
    method: Method
    chosen: Experiment | None
    """None: nothing was chosen yet."""
    tried: tuple[tuple[Experiment, Outcome], ...]
    """The candidates and what came of the runs that choose among them; empty where there was no choice."""
    replicas: tuple[Outcome, ...]

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric, in %, by seed."""
        return metric_by_seed(self.replicas, metric)

    @property
    def incomplete_reason(self) -> str | None:
        """Why nothing can be concluded from it yet; None if all replicas exist."""
        if self.chosen is None:
            return f"no setting of {self.method.name} is chosen yet"
        lost = sum(outcome.failure is not None for outcome in self.replicas)
        if lost:
            return f"{lost} of {len(self.replicas)} replicas of {self.method.name} failed"
        found = sum(outcome.result is not None for outcome in self.replicas)
        if found < len(self.replicas):
            return f"{found} of {len(self.replicas)} replicas of {self.method.name} are available"
        return None


def run_conditions(
    conditions: Sequence[Condition], runner: Runner, item: str, seeds: Sequence[int] = SEEDS
) -> tuple[list[MethodResult], list[Outcome]]:
    """Choose, train and return what came of each method in each condition, and all runs that were needed."""
    needed: list[Outcome] = []
    chosen: dict[tuple[str, str], Experiment] = {}
    tried: dict[tuple[str, str], tuple[tuple[Experiment, Outcome], ...]] = {}
    waiting = [(condition, method) for condition in conditions for method in condition.methods]
    while ready := [(c, m) for c, m in waiting if m.after is None or (c.name, m.after) in chosen]:
        waiting = [pair for pair in waiting if pair not in ready]
        options = {}
        for condition, method in ready:
            origin = condition.start if method.after is None else chosen[condition.name, method.after]
            name = "/".join((item, *condition.labels, condition.column, method.name))
            options[condition.name, method.name] = [replace(e, name=name) for e in method.candidates(origin)]
        tuning_epochs = {condition.name: condition.tuning_epochs for condition in conditions}
        jobs = {
            key: [tuning_job(e, tuning_epochs[key[0]]) for e in found]
            for key, found in options.items()
            if len(found) > 1
        }
        asked = [job for found in jobs.values() for job in found]
        outcomes = runner.outcomes(asked, f"{item}: choosing settings") if asked else []
        needed += outcomes
        by_name = {outcome.job.name: outcome for outcome in outcomes}
        for key, experiments in options.items():
            if key not in jobs:
                chosen[key] = experiments[0]
                continue
            tried[key] = tuple((e, by_name[job.name]) for e, job in zip(experiments, jobs[key], strict=True))
            best = best_candidate(experiments, [outcome for _, outcome in tried[key]])
            if best is not None:
                chosen[key] = best
    jobs_of = {key: [Job(experiment=experiment, seed=seed) for seed in seeds] for key, experiment in chosen.items()}
    asked = [job for jobs in jobs_of.values() for job in jobs]
    found = dict(zip([job.name for job in asked], runner.outcomes(asked, f"{item}: replicas"), strict=True))
    needed += found.values()
    entries = [
        MethodResult(
            condition=condition,
            method=method,
            chosen=chosen.get((condition.name, method.name)),
            tried=tried.get((condition.name, method.name), ()),
            replicas=tuple(found[job.name] for job in jobs_of.get((condition.name, method.name), ())),
        )
        for condition in conditions
        for method in condition.methods
    ]
    return entries, needed


def better(entries: Sequence[MethodResult], metric: str) -> MethodResult:
    """Return the one with the lower mean."""
    return min(entries, key=lambda entry: mean(entry.values(metric).values()))


def with_rho(rhos: Sequence[float], m: int | None = None) -> Callable[[Experiment], list[Experiment]]:
    """Return a method's candidates: SAM with each rho, in the setting of the baseline."""
    return lambda base: [replace(base, optim=replace(base.optim, rho=rho, m=m)) for rho in rhos]


def with_rates(lrs: Sequence[float], decays: Sequence[float]) -> Callable[[Experiment], list[Experiment]]:
    """Return the baseline's candidates: each learning rate with each weight decay."""
    return lambda base: [
        replace(base, optim=replace(base.optim, lr=lr, weight_decay=decay)) for lr in lrs for decay in decays
    ]


def no_tuning(base: Experiment) -> list[Experiment]:
    """Return the one candidate of a method that has nothing to choose."""
    return [base]


def with_m(m: int) -> Callable[[Experiment], list[Experiment]]:
    """Return the one candidate of a method that is trained by micro-batches."""
    return lambda base: [replace(base, optim=replace(base.optim, m=m))]


def baselines(candidates: Callable[[Experiment], Sequence[Experiment]]) -> tuple[Method, Method]:
    """Return SGD with its choice of settings, and SGD for twice as many epochs."""
    sgd = Method(name="SGD", candidates=candidates)
    return sgd, double_epochs(sgd)


def sam_and_small_m(rhos: Sequence[float], m: int) -> tuple[Method, ...]:
    """Return SAM with one eps for the batch, with one for every m examples, and SGD normalized by m examples.

    The last is a control: with micro-batches batch norm sees fewer examples at once, which is a regularizer by itself.
    """
    sgd = ("SGD", "SGD, twice the epochs")
    control = f"SGD, m = {m}"
    return (
        Method(name=control, candidates=with_m(m), after="SGD"),
        Method(name="SAM", candidates=with_rho(rhos), after="SGD", against=(sgd,)),
        Method(name=f"SAM, m = {m}", candidates=with_rho(rhos, m), after="SGD", against=(sgd, (control,))),
    )


def by_micro_batches(
    candidates: Callable[[Experiment], Sequence[Experiment]], rhos: Sequence[float], m: int
) -> tuple[Method, ...]:
    """Return SGD, SGD for twice as many epochs, and SAM, all by micro-batches of m, as on the paper's accelerators."""
    sgd = Method(name=f"SGD, m = {m}", candidates=lambda base: [e for c in candidates(base) for e in with_m(m)(c)])
    longer = double_epochs(sgd)
    sam = Method(name=f"SAM, m = {m}", candidates=with_rho(rhos, m), after=sgd.name, against=((sgd.name, longer.name),))
    return sgd, longer, sam


def _doubled(base: Experiment) -> list[Experiment]:
    factor = BASELINE_EPOCHS_FACTOR
    return [replace(base, epochs=factor * base.epochs, evaluate_every=factor * base.evaluate_every)]


def tuning_job(experiment: Experiment, epochs: int | None = None) -> Job:
    """Return the run that gives a candidate its validation error; for fewer or more epochs if given."""
    held_out = replace(experiment.data, validation=VALIDATION)
    name = f"{experiment.name} (choosing)"
    experiment = replace(experiment, name=name, data=held_out, epochs=epochs or experiment.epochs)
    return Job(experiment=experiment, seed=TUNING_SEED)


def best_candidate(experiments: Sequence[Experiment], outcomes: Sequence[Outcome]) -> Experiment | None:
    """Return the candidate with the lowest validation error; None until all of them have been tried."""
    errors = [validation_error(outcome) for outcome in outcomes]
    best = min((e for e in errors if e is not None and math.isfinite(e)), default=None)
    return None if best is None or None in errors else experiments[errors.index(best)]


def validation_error(outcome: Outcome) -> float | None:
    """Return by what a candidate is chosen, in %: None if it is not known, infinite if training diverged."""
    if outcome.failure is not None:
        return math.inf if outcome.final else None
    return metric_by_seed([outcome], "valid_error").get(outcome.job.seed)
