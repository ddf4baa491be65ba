"""How methods are compared, fixed beforehand (Section 3.1).

A condition has one model, one dataset, and several methods. Each method has candidates (learning rates and decays for
the baseline, values of rho for SAM), one of which is chosen by its error on a validation split; then independent
replicas are trained on the whole training set. A baseline may also train for twice as many epochs, and the better mean
of the two counts, since a SAM step costs two gradients.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.printed import Claimed
from flatmin.lab.studies.replicas import Read, Replicas, metric, replicas_of
from flatmin.lab.studies.study import Known
from flatmin.lab.sweeps.jobs import Job

NUM_REPLICAS = 5
BASELINE_EPOCHS_FACTOR = 2
"""Runs without SAM may take twice as many epochs; the better of the two is reported (Section 3.1)."""
VALIDATION = 0.1
"""Of the training set, held out to choose rho."""
SEEDS = tuple(range(NUM_REPLICAS))
MAX_EXTENSIONS = 3
"""How often a grid may grow."""
TUNED = ("rho", "lr", "weight_decay")
"""What must lie inside of its grid."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""The grid of rho, in units of what `flatmin.suggest_rho` says for the run."""
CURVES = ("valid_error", "test_error", "test_loss", "test_ece", "train_error")
"""What is kept of every evaluated epoch where the best one counts."""
TUNING_SEED = 1000
"""Of the runs that choose: none of the replicas' seeds."""
Candidates = Callable[[Experiment], Sequence[Experiment]]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    candidates: Candidates
    """What to choose from, given the choice of the method ``after`` (or the condition's start)."""
    after: str | None = None
    """Which method's choice the candidates are variants of; None: of the condition's start."""
    against: tuple[tuple[str, ...], ...] = ()
    """The methods that it is compared with; of several in one tuple, the one with the better mean counts."""
    extends: bool = False
    """Whether its grid grows, by a factor of 2, where the best candidate is at its edge (`beyond`)."""
    ours: bool = False
    """Whether it is not in the publication: its comparisons are corrected apart."""
    stops_early: bool = False
    """Whether the epoch with the lowest validation error counts, instead of the last one."""


def double_epochs(method: Method) -> Method:
    """Return a method that trains for twice as many epochs, with the same settings."""

    def doubled(base: Experiment) -> list[Experiment]:
        factor = BASELINE_EPOCHS_FACTOR
        return [replace(base, epochs=factor * base.epochs, evaluate_every=factor * base.evaluate_every)]

    return Method(name=f"{method.name}, twice the epochs", candidates=doubled, after=method.name)


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
    most_train_error: float | None = None
    """The gate: with a baseline whose training error, in %, ends above this, nothing is tested; None: no gate."""

    @property
    def name(self) -> str:
        """What people call it."""
        return ", ".join((*self.labels, self.column))


def edge_note(rho: float | None, tried: Collection[float]) -> str | None:
    """Return a note where the chosen rho is the smallest or the largest of several: the best may lie outside.

    Example:
        >>> edge_note(0.05, [0.05, 0.1, 0.2])
        'rho at the edge of its grid'
    """
    return "rho at the edge of its grid" if len(set(tried)) > 1 and rho in (min(tried), max(tried)) else None


def edges(best: Experiment, tried: Sequence[Experiment]) -> list[tuple[str, float]]:
    """Return the settings of the best candidate that are at the edge of its grid, each with the next value beyond.

    Example:
        >>> from flatmin.lab.spec.experiment import Optim
        >>> tried = [Experiment(optim=Optim(rho=rho)) for rho in (0.1, 0.2, 0.4)]
        >>> edges(tried[0], tried), edges(tried[1], tried)
        ([('rho', 0.05)], [])
    """
    found = []
    for name in TUNED:
        values, at = [_setting(e, name) for e in tried], _setting(best, name)
        # A grid of two values has no inside: it is a choice between two settings.
        if len(set(values)) > 2 and at in (min(values), max(values)):
            found.append((name, at / 2 if at == min(values) else 2 * at))
    return found


def beyond(best: Experiment, tried: Sequence[Experiment]) -> list[Experiment]:
    """Return the candidates to try next: the best one with each setting that is at the edge halved or doubled."""
    more = []
    for name, value in edges(best, tried):
        in_units = name == "rho" and best.optim.rho_factor is not None
        changed: dict[str, Any] = {name: f"{value:.12g}x" if in_units else value}
        more.append(replace(best, optim=replace(best.optim, **changed)))
    return more


def _setting(experiment: Experiment, name: str) -> float:
    value: float = experiment.optim.rho_number if name == "rho" else getattr(experiment.optim, name)
    return value


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What came of a method in a condition."""

    condition: Condition
    method: Method
    chosen: Experiment | None
    """None: nothing was chosen yet."""
    tried: Sequence[tuple[Experiment, RunRecord]]
    """The candidates and what came of the runs that choose among them; empty where there was no choice."""
    replicas: Replicas

    def values(self, name: str) -> dict[int, float]:
        """Return a metric by seed, in % unless it is a loss."""
        factor = 1.0 if name.endswith("loss") else 100.0
        return self.replicas.by_seed(at_best_epoch(name, factor) if self.method.stops_early else metric(name, factor))

    @property
    def gate_note(self) -> str | None:
        """Why it is not a fair test of the method; None if it is, or if there is no gate."""
        if self.condition.most_train_error is None or self.chosen is None:
            return None
        at_edge = edges(self.chosen, [e for e, _ in self.tried])
        names = {"rho": "rho", "lr": "learning rate", "weight_decay": "weight decay"}
        return f"{self.method.name}'s {names[at_edge[0][0]]} is at the edge of its grid" if at_edge else None

    @property
    def unfit_note(self) -> str | None:
        """Says that a baseline does not fit its training set; None if it does, or if there is no gate."""
        most, errors = self.condition.most_train_error, self.values("train_error")
        mixes = self.chosen is not None and self.chosen.data.mixup > 0  # its training error is one on mixed images
        if most is None or mixes or self.method.stops_early or not errors or mean(errors.values()) <= most:
            return None
        error = mean(errors.values())
        return f"{self.method.name} ends with a training error of {error:.1f} %, above {most:g} %"

    @property
    def edge_note(self) -> str | None:
        """Says that the best rho may lie outside of its grid; None if it does not seem to."""
        return (
            None
            if self.chosen is None
            else edge_note(self.chosen.optim.rho_number, [e.optim.rho_number for e, _ in self.tried])
        )

    @property
    def incomplete_reason(self) -> str | None:
        """Why nothing can be concluded from it yet; None if all replicas exist."""
        if self.chosen is None:
            return f"no setting of {self.method.name} is chosen yet"
        records = self.replicas.records
        lost = sum(record.state == "failed" for record in records)
        if lost:
            return f"{lost} of {len(records)} replicas of {self.method.name} failed"
        if len(self.replicas.runs) < len(records):
            return f"{len(self.replicas.runs)} of {len(records)} replicas of {self.method.name} are available"
        return None


def condition_results(
    conditions: Sequence[Condition], known: Known, item: str, seeds: Sequence[int] = SEEDS
) -> list[MethodResult]:
    """Return what is known of each method in each condition."""
    results: list[MethodResult] = []
    for condition in conditions:
        chosen: dict[str | None, Experiment | None] = {None: condition.start}
        for method in condition.methods:  # each comes later than the one it is a variant of
            base, options, tried = chosen[method.after], [], []
            if base is not None:
                name = "/".join((item, *condition.labels, condition.column, method.name))
                options = [replace(e, name=name) for e in method.candidates(base)]
            if len(options) > 1:
                for _ in range(1 + MAX_EXTENSIONS * method.extends):
                    tried = [(e, tuning_job(e, condition.tuning_epochs).record(known)) for e in options]
                    chosen[method.name] = best = best_candidate(options, [record for _, record in tried])
                    if best is None or any(record.state == "planned" for _, record in tried):
                        break
                    options += [] if not method.extends else beyond(best, options)
            else:
                chosen[method.name] = options[0] if options else None
            best = chosen[method.name]
            jobs = [] if best is None else [Job(experiment=best, seed=seed) for seed in seeds]
            replicas = replicas_of({method.name: jobs}, known)[method.name]
            results.append(
                MethodResult(condition=condition, method=method, chosen=best, tried=tried, replicas=replicas)
            )
    return results


def condition_jobs(
    conditions: Sequence[Condition], known: Known, item: str, seeds: Sequence[int] = SEEDS
) -> dict[tuple[str, ...], list[Job]]:
    """Return the runs that choose settings, and the replicas of the settings that are chosen."""
    jobs: dict[tuple[str, ...], list[Job]] = {}
    for result in condition_results(conditions, known, item, seeds):
        name, method, epochs = result.condition.name, result.method.name, result.condition.tuning_epochs
        if result.tried:
            jobs[name, method, "choosing"] = [tuning_job(experiment, epochs) for experiment, _ in result.tried]
        if result.chosen is not None:
            curves = CURVES if result.method.stops_early else ()
            jobs[name, method] = [Job(experiment=result.chosen, seed=seed, curves=curves) for seed in seeds]
    return jobs


def better(entries: Sequence[MethodResult], name: str) -> MethodResult:
    """Return the one with the lower mean of a metric."""
    return min(entries, key=lambda entry: mean(entry.values(name).values()))


def at_best_epoch(name: str, factor: float) -> Read:
    """Return how to read a metric of the epoch with the lowest validation error, the first of several."""

    def read(record: RunRecord) -> float | None:
        lines = [line for line in record.history if line.get("valid_error") is not None]
        value = min(lines, key=lambda line: line["valid_error"] or 0.0).get(name) if lines else None
        return None if value is None else factor * value

    return read


def stopped_early(base: Method, every: int, *, noisy: bool = False) -> Method:
    """Return a baseline of ours that stops where the error on a clean, or noisy, validation set is lowest."""

    def candidates(start: Experiment) -> list[Experiment]:
        data = replace(start.data, validation=VALIDATION, noisy_validation=noisy)
        return [replace(start, data=data, evaluate_every=every)]

    name = f"{base.name}, stopped early ({'noisy' if noisy else 'clean'} validation)"
    return Method(name=name, candidates=candidates, after=base.name, ours=True, stops_early=True)


def with_rho(rhos: Sequence[float | str], m: int | None = None, part: float = 1.0) -> Candidates:
    """Return a method's candidates: SAM with each rho, in the setting of the baseline."""
    return lambda base: [replace(base, optim=replace(base.optim, rho=rho, m=m, part=part)) for rho in rhos]


def with_rates(lrs: Sequence[float], decays: Sequence[float]) -> Candidates:
    """Return the baseline's candidates: each learning rate with each weight decay."""
    return lambda base: [
        replace(base, optim=replace(base.optim, lr=lr, weight_decay=decay)) for lr in lrs for decay in decays
    ]


def no_tuning(base: Experiment) -> list[Experiment]:
    """Return the one candidate of a method that has nothing to choose."""
    return [base]


def with_m(m: int | None) -> Candidates:
    """Return the one candidate of a method that is trained by micro-batches of m; by whole batches if None."""
    return lambda base: [replace(base, optim=replace(base.optim, m=m))]


def baselines(candidates: Candidates) -> tuple[Method, Method]:
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


def tuning_job(experiment: Experiment, epochs: int | None = None) -> Job:
    """Return the run that gives a candidate its validation error; for fewer or more epochs if given."""
    held_out = replace(experiment.data, validation=VALIDATION)
    name = f"{experiment.name} (choosing)"
    experiment = replace(experiment, name=name, data=held_out, epochs=epochs or experiment.epochs)
    return Job(experiment=experiment, seed=TUNING_SEED)


def best_candidate(experiments: Sequence[Experiment], records: Sequence[RunRecord]) -> Experiment | None:
    """Return the candidate with the lowest validation error; None until all of them have been tried.

    While one of them is planned, the first stands for the choice.
    """
    if any(record.state == "planned" for record in records):
        return experiments[0]
    errors = [validation_error(record) for record in records]
    best = min((e for e in errors if e is not None and math.isfinite(e)), default=None)
    return None if best is None or None in errors else experiments[errors.index(best)]


def validation_error(record: RunRecord) -> float | None:
    """Return by what a candidate is chosen, in %: None if it is not known, infinite if training diverged."""
    if record.state == "failed":
        return math.inf if record.is_final else None
    error = record.metrics.get("valid_error")
    return None if error is None or not math.isfinite(error) else 100 * error
