"""How methods are compared, fixed beforehand (Section 3.1).

A condition has one model, one dataset, and several methods. Each method has candidates (learning rates and decays for
the baseline, values of rho for SAM), one of which is chosen by its error on a validation split; then independent
replicas are trained on the whole training set. A baseline may also train for twice as many epochs, and the better mean
of the two counts, since a SAM step costs two gradients.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import Contrast, mean
from flatmin.lab.studies.findings import Cell, Findings
from flatmin.lab.studies.methods import VALIDATION, Method
from flatmin.lab.studies.printed import Claimed
from flatmin.lab.studies.replicas import Read, Replicas, metric
from flatmin.lab.studies.study import Groups, Item, Known, Scale
from flatmin.lab.sweeps.jobs import Job

NUM_REPLICAS = 5
SEEDS, SMOKE_SEEDS = tuple(range(NUM_REPLICAS)), (0, 1)
MAX_EXTENSIONS = 3
"""How often a grid may grow."""
TUNED = ("rho", "lr", "weight_decay")
"""What must lie inside of its grid."""
CURVES = ("valid_error", "test_error", "test_loss", "test_ece", "train_error")
"""What is kept of every evaluated epoch where the best one counts."""
TUNING_SEED = 1000
"""Of the runs that choose: none of the replicas' seeds."""


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
        """Its display name."""
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
    base: "MethodResult | None" = None
    """What came of the method whose settings it takes over."""

    def values(self, name: str) -> dict[int, float]:
        """Return a metric by seed, in the unit of `unit_of`."""
        factor = 100.0 if unit_of(name) == "%" else 1.0
        return self.replicas.by_seed(at_best_epoch(name, factor) if self.method.stops_early else metric(name, factor))

    def cell(self, name: str, *, accuracy: bool = False) -> Cell:
        """Return a metric, or 100 % minus it, with the paper's number and a note on missing runs or rho's edge."""
        values = {seed: 100 - value if accuracy else value for seed, value in self.values(name).items()}
        claimed = self.condition.claimed.get((self.method.name, name))
        return self.replicas.cell_of(
            values,
            unit=unit_of(name),
            claimed=None if claimed is None else claimed.printed,
            note=self.incomplete_reason or self.edge_note if values else None,
        )

    def lower_than(self, other: "MethodResult", quantity: str, name: str) -> Contrast:
        """Return the claim that a metric, the ``quantity``, is lower here than for another method."""
        contrast = self.replicas.lower_than(other.replicas, quantity, name, unit_of(name))
        return replace(contrast, lower=self.values(name), higher=other.values(name))

    @property
    def gate_note(self) -> str | None:
        """Why it is not a fair test of the method; None if it is, or if there is no gate."""
        if self.condition.most_train_error is None or self.chosen is None:
            return None
        at_edge = edges(self.chosen, [e for e, _ in self.tried])
        names = {"rho": "rho", "lr": "learning rate", "weight_decay": "weight decay"}
        if at_edge:
            return f"{self.method.name}'s {names[at_edge[0][0]]} is at the edge of its grid"
        return None if self.base is None else self.base.gate_note

    @property
    def unfit_note(self) -> str | None:
        """A note that a baseline does not fit its training set; None if it does, or if there is no gate."""
        most = self.condition.most_train_error
        mixes = self.chosen is not None and self.chosen.data.mixup > 0  # its training error is one on mixed images
        return None if most is None or mixes or self.method.stops_early else self.replicas.unfit_note(most)

    @property
    def edge_note(self) -> str | None:
        """A note that the best rho may lie outside of its grid; None if it does not seem to."""
        rho = None if self.chosen is None else self.chosen.optim.rho_number
        return edge_note(rho, [e.optim.rho_number for e, _ in self.tried])

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


def unit_of(metric_name: str) -> str:
    """Return the unit in which a metric is shown: losses have none."""
    return "" if metric_name.endswith("loss") else "%"


def replica_seeds(scale: Scale) -> tuple[int, ...]:
    """Return the seeds of independent replicas."""
    return SMOKE_SEEDS if scale == "smoke" else SEEDS


def conditions_item(
    name: str,
    title: str,
    source: str,
    conditions: Callable[[Scale], Sequence[Condition]],
    findings: Callable[[Scale, list[MethodResult]], Findings],
    first: Callable[[Scale], Groups] = lambda _: {},
) -> Item:
    """Return the study of some conditions, given what their results show, and the runs that come first."""

    def jobs(scale: Scale, known: Known) -> Groups:
        return {**first(scale), **condition_jobs(conditions(scale), known, name, replica_seeds(scale))}

    def found(scale: Scale, known: Known) -> Findings:
        return findings(scale, condition_results(conditions(scale), known, name, replica_seeds(scale)))

    return Item(name=name, title=title, source=source, jobs=jobs, findings=found)


def by_condition(results: Iterable[MethodResult]) -> list[list[MethodResult]]:
    """Return the results of each condition."""
    return [list(own) for _, own in groupby(results, key=lambda result: result.condition.name)]


def condition_results(
    conditions: Sequence[Condition], known: Known, item: str, seeds: Sequence[int] = SEEDS
) -> list[MethodResult]:
    """Return what is known of each method in each condition."""
    results: list[MethodResult] = []
    for condition in conditions:
        own: dict[str, MethodResult] = {}
        for method in condition.methods:  # each comes later than the one it is a variant of
            base = None if method.after is None else own[method.after]
            start = condition.start if base is None else base.chosen
            name = "/".join((item, *condition.labels, condition.column, method.name))
            options = [] if start is None else [replace(e, name=name) for e in method.candidates(start)]
            best, tried = options[0] if options else None, []
            num_rounds = 1 + MAX_EXTENSIONS * method.extends if len(options) > 1 else 0
            for _ in range(num_rounds):
                tried = [(e, tuning_job(e, condition.tuning_epochs).record(known)) for e in options]
                best = best_candidate(options, [record for _, record in tried])
                if best is None or any(record.state == "planned" for _, record in tried):
                    break
                options += beyond(best, options) if method.extends else []
            jobs = [] if best is None else [Job(experiment=best, seed=seed) for seed in seeds]
            replicas = Replicas(method.name, [job.record(known) for job in jobs])
            own[method.name] = MethodResult(
                condition=condition,
                method=method,
                chosen=best,
                tried=tried,
                replicas=replicas,
                base=base,
            )
        results += own.values()
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
    """Return the one with the lower mean of a metric; one without any number comes last."""
    means = [mean(entry.values(name).values()) for entry in entries]
    return min(zip(means, entries, strict=True), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])[1]


def at_best_epoch(name: str, factor: float) -> Read:
    """Return how to read a metric of the epoch with the lowest validation error, the first of several."""

    def read(record: RunRecord) -> float | None:
        lines = [line for line in record.history if line.get("valid_error") is not None]
        value = min(lines, key=lambda line: line["valid_error"] or 0.0).get(name) if lines else None
        return None if value is None else factor * value

    return read


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
