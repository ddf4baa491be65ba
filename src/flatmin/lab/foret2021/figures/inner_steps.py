"""Figure 7 and Table 11 (Appendix C.6): several steps of the inner maximization.

    flatmin reproduce inner-steps --scale laptop    # 12 minutes on two cores

Five steps find twice the sharpness of one at the end of training, and change the error by 0.3 points.
All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flatmin.lab.foret2021.claims.appendix import ASCENT_STEPS as CLAIMS
from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import jobs_for, sam_rho, start
from flatmin.lab.foret2021.settings import ASCENT_NUM_RUNS, ASCENT_STEPS, ASCENT_STEPS_GRID
from flatmin.lab.runs.directory import Metrics
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.conditions import replica_seeds
from flatmin.lab.studies.contrasts import Contrast, Family, mean, refuted
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Table, Verdict, VerdictStatus
from flatmin.lab.studies.replicas import Replicas, replicas_of, runs_of
from flatmin.lab.studies.statistics import SIGNIFICANT, mean_and_interval
from flatmin.lab.studies.study import SCALES, Known, Scale
from flatmin.lab.sweeps.jobs import Job

NUM_RUNS: Mapping[Scale, int] = {**{scale: len(replica_seeds(scale)) for scale in SCALES}, "paper": ASCENT_NUM_RUNS}
DATASETS: Mapping[Scale, tuple[str, ...]] = {
    "paper": tuple(ASCENT_STEPS),
    "laptop": ("fashion-mnist",),
    "smoke": ("digits",),
}
EQUIVALENCE = 0.5
"""An error is "not strongly affected" if it changes by less than this share of SAM's gain, with 95 % confidence."""
EQUIVALENCE_WITHOUT_SGD = 0.1
"""... or of itself, at the paper's scale, which has no runs without SAM here."""
NEARLY = 0.8
"""One step "finds nearly as much" as several if it finds at least this share of it."""
FEW, MANY = min(ASCENT_STEPS_GRID), max(ASCENT_STEPS_GRID)

ByDatasetAndSteps = Mapping[tuple[str, int], Replicas]
Gains = tuple[dict[int, float], dict[int, float], float]


def inner_steps_jobs(scale: Scale, known: Known) -> dict[tuple[str, int], list[Job]]:
    """Return the replicas for each dataset and number of ascent steps; 0 steps is training without SAM."""
    curves, seeds = ("train_error", "perturbed_error"), range(NUM_RUNS[scale])
    jobs = {}
    for d in DATASETS[scale]:
        if scale != "paper":
            one = _experiment(scale, d, FEW)
            jobs[d, 0] = jobs_for(replace(one, optim=replace(one.optim, rho=0.0)), f"inner-steps/{d}, SGD", seeds)
        for n in ASCENT_STEPS_GRID:
            jobs[d, n] = jobs_for(_experiment(scale, d, n), f"inner-steps/{d}, {n} steps", seeds, curves=curves)
    return jobs


def inner_steps(scale: Scale, known: Known) -> Findings:
    """Train with 1, 2, 3 and 5 ascent steps; show test error and estimated sharpness, at the end and along training.

    The estimated sharpness is the error rate of a batch at w + eps minus the rate at w, both as they were trained.
    """
    datasets, num_runs = DATASETS[scale], NUM_RUNS[scale]
    found = replicas_of(inner_steps_jobs(scale, known), known)
    replicas = {(d, steps): replace(group, name=_steps(steps)) for (d, steps), group in found.items()}
    experiment = _experiment(scale, datasets[0], FEW)
    along = FIGURES["ascent-along-training"]
    return findings(
        "inner-steps",
        scale,
        source=f"{CLAIMS.source}; {along.source}",
        tables=[_table(replicas, datasets, num_runs)],
        figures=[_figure(replicas, dataset) for dataset in datasets],
        verdicts=_verdicts(replicas, scale),
        hyperparameters=hyperparameters(
            "inner-steps", scale, [experiment], ("rho", experiment.optim.rho), ("replicas", num_runs)
        ),
        notes=along.notes,
    )


def _experiment(scale: Scale, dataset: str, steps: int) -> Experiment:
    paper = ASCENT_STEPS[dataset if scale == "paper" else "cifar10"]
    experiment = start(scale, paper, rho=sam_rho(scale, paper))
    return replace(experiment, optim=replace(experiment.optim, ascent_steps=steps))


def sharpness_of(line: Metrics) -> float | None:
    """Return max L(w + eps) - L(w) of an epoch, with L the error rate on the batch."""
    perturbed, plain = line.get("perturbed_error"), line.get("train_error")
    return None if perturbed is None or plain is None else perturbed - plain


def _sharpness(record: RunRecord) -> float | None:
    value = sharpness_of(record.metrics)
    return None if value is None else 100 * value


def _table(replicas: ByDatasetAndSteps, datasets: Sequence[str], num_runs: int) -> Table:
    rows: list[Row] = []
    for steps in ASCENT_STEPS_GRID:
        row: Row = [str(steps)]
        for dataset in datasets:
            # Where the data is not the paper's, CIFAR-10's numbers are shown: the other set with ten classes.
            claimed_of = dataset if dataset in ASCENT_STEPS else "cifar10"
            for metric, read in (("test_error", "test_error"), ("sharpness", _sharpness)):
                values = list(replicas[dataset, steps].by_seed(read).values())
                note = f"standard deviation {np.std(values, ddof=1):.2g}" if len(values) > 1 else None
                claimed = CLAIMS[steps, claimed_of, metric].printed
                row.append(replicas[dataset, steps].cell(read, claimed=claimed, note=note))
        rows.append(row)
    columns = [f"{dataset}, {what}" for dataset in datasets for what in ("test error", "estimated sharpness")]
    return Table(
        title="Test error and estimated sharpness at the end of training",
        columns=["ascent steps", *columns],
        rows=rows,
        note=f"Claimed: mean ± standard deviation of {ASCENT_NUM_RUNS} runs on CIFAR. Measured: mean ± half the width "
        f"of the 95 % confidence interval, and the standard deviation, of {num_runs} runs.",
    )


def _figure(replicas: ByDatasetAndSteps, dataset: str) -> LineFigure:
    groups = [replicas[dataset, steps] for steps in ASCENT_STEPS_GRID]
    return LineFigure(
        title=f"Estimated sharpness along training, {dataset}",
        x_label="epoch",
        y_label="error rate at w + eps minus at w, points",
        series=[series for group in groups for series in group.along_training(group.name, sharpness_of)],
        runs=runs_of(groups),
    )


def _verdicts(replicas: ByDatasetAndSteps, scale: Scale) -> list[Verdict]:
    unaffected, several_better, more_found = (statement.claim for statement in CLAIMS.statements)
    ten_classes, *more_classes = datasets = DATASETS[scale]

    def better_than_one(dataset: str) -> list[Contrast]:
        few, several = replicas[dataset, FEW], [replicas[dataset, n] for n in ASCENT_STEPS_GRID if n > FEW]
        return [group.lower_than(few, f"test error, {dataset}, %", "test_error") for group in several]

    equal = better_than_one(ten_classes)
    better = [contrast for dataset in more_classes for contrast in better_than_one(dataset)]
    ends = [
        replicas[d, FEW].lower_than(replicas[d, MANY], f"estimated sharpness at the end, {d}, points", _sharpness)
        for d in datasets
    ]
    gains = {dataset: _gains(replicas[dataset, FEW], replicas[dataset, MANY]) for dataset in datasets}
    along = [c for dataset, gain in gains.items() for c in _along_contrasts(dataset, gain, NUM_RUNS[scale])]
    family = Family([*equal, *better, *ends, *along])
    not_trained = f"{ten_classes} has ten classes; CIFAR-100 is not trained at this scale."
    return [
        _unaffected(unaffected, [*equal, *better], family, _margins(replicas, datasets)),
        family.judge(several_better, better)
        if better
        else Verdict(claim=several_better, status="not tested", evidence=not_trained),
        family.judge(more_found, ends),
        _along_verdict(family.judge(FIGURES["ascent-along-training"].statements[0].claim, along), gains),
    ]


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number > 1)}" if number else "SGD"


def _along_contrasts(dataset: str, gains: Gains, num_asked: int) -> list[Contrast]:
    """Return the claims that near convergence, in the last tenth, many steps find more than one, and than before."""
    first, last, _ = gains
    return [
        Contrast(
            quantity=f"what {_steps(MANY)} find more than {_steps(FEW)}, {dataset}, points of error",
            lower_name=name,
            higher_name="last tenth",
            lower=lower,
            higher=last,
            num_asked=num_asked,
        )
        for name, lower in (("first half of training", first), ("nothing", dict.fromkeys(last, 0.0)))
    ]


def _along_verdict(verdict: Verdict, gains: Mapping[str, Gains]) -> Verdict:
    """Return the verdict that one step finds less near convergence: before, it must find `NEARLY` as much."""
    far = [f"{100 * share:.0f} % ({dataset})" for dataset, (_, _, share) in gains.items() if share < NEARLY]
    said = f"In the first half one step finds less than {100 * NEARLY:.0f} % of what {MANY} find: {', '.join(far)}."
    return refuted(verdict, said) if far else verdict


def _gains(few: Replicas, many: Replicas) -> Gains:
    """Return what many steps find more than one in the first half of training and in its last tenth, by seed.

    And, in the first half, how much of what many find one step finds (NaN without runs).
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    sums = np.zeros(2)
    for pair in zip(few.records, many.records, strict=True):
        histories = [record.history if record.state == "finished" else () for record in pair]
        curves = [[100 * value for value in map(sharpness_of, lines) if value is not None] for lines in histories]
        length = min(map(len, curves))
        if length:
            one, several = (np.asarray(curve[:length]) for curve in curves)
            half, tenth = max(1, length // 2), max(1, length // 10)
            seed = pair[0].seed or 0
            first[seed] = float((several - one)[:half].mean())
            last[seed] = float((several - one)[-tenth:].mean())
            sums += one[:half].mean(), several[:half].mean()
    return first, last, float(sums[0] / sums[1]) if sums[1] > 0 else math.nan


def _margins(replicas: ByDatasetAndSteps, datasets: Sequence[str]) -> dict[str, float]:
    """Return by how many points the error of each dataset may change without being strongly affected."""
    margins = {}
    for dataset in datasets:
        with_sam = mean(replicas[dataset, FEW].by_seed("test_error").values())
        sgd = replicas.get((dataset, 0))
        gain = None if sgd is None else mean(sgd.by_seed("test_error").values()) - with_sam
        margins[dataset] = EQUIVALENCE_WITHOUT_SGD * with_sam if gain is None else EQUIVALENCE * max(gain, 0.0)
    return margins


def _unaffected(claim: str, contrasts: Sequence[Contrast], family: Family, margins: Mapping[str, float]) -> Verdict:
    """Judge that the number of steps does not strongly affect the test error, on all datasets."""
    verdict = family.judge(claim, contrasts)
    if any(math.isnan(family.p_holm(contrast)) for contrast in contrasts) or any(map(math.isnan, margins.values())):
        return replace(verdict, status="not tested")
    widest, beyond = dict.fromkeys(margins, 0.0), False
    for contrast in contrasts:
        dataset = next(d for d in margins if f", {d}," in contrast.quantity)
        change = mean_and_interval(contrast.differences)
        widest[dataset] = max(widest[dataset], abs(change.mean) + change.half_width)
        is_significant = family.p_holm(contrast) < SIGNIFICANT
        beyond = beyond or (is_significant and abs(change.mean) - change.half_width > margins[dataset])
    status: VerdictStatus = "inconclusive"
    if all(widest[dataset] <= margin for dataset, margin in margins.items()):
        status = "reproduced"
    elif beyond:
        status = "not reproduced"
    elif any(family.is_open(contrast) for contrast in contrasts):
        status = "not tested"
    said = [
        f"With 95 % confidence the error on {dataset} changes by less than {widest[dataset]:.2g} points; more than "
        f"{margin:.2g} would be a strong effect."
        for dataset, margin in margins.items()
    ]
    return replace(verdict, status=status, evidence=" ".join([verdict.evidence, *said]))


INNER_STEPS = item("inner-steps", inner_steps_jobs, inner_steps)
