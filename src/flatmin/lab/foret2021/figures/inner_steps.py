"""Figure 7 and Table 11 (Appendix C.6): several steps of the inner maximization.

    flatmin reproduce inner-steps --scale laptop    # 12 minutes on two cores

Not judged yet. All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from flatmin.lab.foret2021.claims.appendix import ASCENT_STEPS as CLAIMS
from flatmin.lab.foret2021.claims.appendix import AscentCell
from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import jobs_for, sam_rho, start
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.scales import replica_seeds
from flatmin.lab.foret2021.settings import ASCENT_NUM_RUNS, ASCENT_STEPS, ASCENT_STEPS_GRID
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.runs.directory import Metrics
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import (
    BySeed,
    Contrast,
    Family,
    along_training,
    by_seed,
    contrast_between,
    mean,
    metric_by_seed,
    number_cell,
    run_names,
)
from flatmin.lab.studies.findings import (
    Cell,
    Comparison,
    Findings,
    LineFigure,
    Table,
    Verdict,
    VerdictStatus,
    own_settings,
)
from flatmin.lab.studies.item import SCALES, Scale
from flatmin.lab.studies.statistics import SIGNIFICANT, mean_and_interval
from flatmin.lab.sweeps.jobs import Job, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

NUM_RUNS: Mapping[Scale, int] = {**{scale: len(replica_seeds(scale)) for scale in SCALES}, "paper": ASCENT_NUM_RUNS}
DATASETS: Mapping[Scale, tuple[str, ...]] = {
    "paper": tuple(ASCENT_STEPS),
    "laptop": ("fashion-mnist",),
    "smoke": ("digits",),
}
EQUIVALENCE = 0.1
"""An error is "not strongly affected" if it changes by less than this fraction of itself, with 95 % confidence."""
NEARLY = 0.8
"""One step "finds nearly as much" as several if it finds at least this share of it."""
FEW, MANY = min(ASCENT_STEPS_GRID), max(ASCENT_STEPS_GRID)

Found = Mapping[tuple[str, int], Sequence[Outcome]]
Gains = tuple[dict[int, float], dict[int, float], float]


def inner_steps(scale: Scale, runner: Runner) -> Findings:
    """Train with 1, 2, 3 and 5 ascent steps; show test error and estimated sharpness, at the end and along training.

    The estimated sharpness is the error rate of a batch at w + eps minus that at w, both as they were trained.
    """
    recorder = RecordingRunner(runner)
    groups = inner_steps_jobs(scale)
    names = {f"{dataset}, {steps}": (dataset, steps) for dataset, steps in groups}
    asked = recorder.replicas({name: groups[key] for name, key in names.items()}, "inner-steps: replicas")
    found = {names[name]: outcomes for name, outcomes in asked.items()}
    datasets = DATASETS[scale]
    experiment = groups[datasets[0], FEW][0].experiment
    own = own_settings([experiment], ("rho", experiment.optim.rho), ("replicas", NUM_RUNS[scale]))
    return findings(
        item="inner-steps",
        scale=scale,
        claims=CLAIMS,
        source=f"{CLAIMS.source}; {FIGURES['ascent-along-training'].source}",
        recorder=recorder,
        tables=[_table(found, datasets, NUM_RUNS[scale])],
        figures=[_figure(found, dataset) for dataset in datasets],
        verdicts=_verdicts(found, scale),
        hyperparameters=HYPERPARAMETERS["ascent-steps"] if scale == "paper" else own,
        notes=FIGURES["ascent-along-training"].notes,
    )


def inner_steps_jobs(scale: Scale) -> dict[tuple[str, int], list[Job]]:
    """Return the replicas, by dataset and number of ascent steps."""
    seeds = range(NUM_RUNS[scale])
    return {
        (dataset, steps): jobs_for(_experiment(scale, dataset, steps), f"inner-steps/{dataset}, {steps} steps", seeds)
        for dataset in DATASETS[scale]
        for steps in ASCENT_STEPS_GRID
    }


def _experiment(scale: Scale, dataset: str, steps: int) -> Experiment:
    paper = ASCENT_STEPS[dataset if scale == "paper" else "cifar10"]
    experiment = start(scale, paper, rho=sam_rho(scale, paper), dataset=dataset)
    return replace(experiment, optim=replace(experiment.optim, ascent_steps=steps))


def sharpness_of(line: Metrics) -> float | None:
    """Return max L(w + eps) - L(w) of an epoch, with L the error rate on the batch."""
    perturbed, plain = line.get("perturbed_error"), line.get("train_error")
    return None if perturbed is None or plain is None else perturbed - plain


def _sharpness(outcomes: Sequence[Outcome]) -> dict[int, float]:
    def read(outcome: Outcome) -> float | None:
        value = sharpness_of(outcome.result.metrics) if outcome.result is not None else None
        return None if value is None else 100 * value

    return by_seed(outcomes, read)


def _table(found: Found, datasets: Sequence[str], num_runs: int) -> Table:
    rows: list[list[str | Cell | Comparison]] = []
    for steps in ASCENT_STEPS_GRID:
        row: list[str | Cell | Comparison] = [str(steps)]
        for dataset in datasets:
            outcomes = found[dataset, steps]
            # Where the data is not the paper's, CIFAR-10's numbers are shown: the other set with ten classes.
            claimed_of = dataset if dataset in ASCENT_STEPS else "cifar10"
            for metric, values in (
                ("test_error", metric_by_seed(outcomes, "test_error")),
                ("sharpness", _sharpness(outcomes)),
            ):
                claimed = CLAIMS[AscentCell(steps, claimed_of, metric)].printed()
                row.append(number_cell(values, outcomes, claimed=claimed, note=_standard_deviation(values)))
        rows.append(row)
    columns = [f"{dataset}, {what}" for dataset in datasets for what in ("test error", "estimated sharpness")]
    return Table(
        title="Test error and estimated sharpness at the end of training",
        columns=["ascent steps", *columns],
        rows=rows,
        note=f"Claimed: mean ± standard deviation of {ASCENT_NUM_RUNS} runs on CIFAR. Measured: mean ± half the width "
        f"of the 95 % confidence interval, and the standard deviation, of {num_runs} runs.",
    )


def _standard_deviation(values: BySeed) -> str | None:
    return f"standard deviation {np.std(list(values.values()), ddof=1):.2g}" if len(values) > 1 else None


def _figure(found: Found, dataset: str) -> LineFigure:
    chosen = {steps: found[dataset, steps] for steps in ASCENT_STEPS_GRID}
    return LineFigure(
        title=f"Estimated sharpness along training, {dataset}",
        x_label="epoch",
        y_label="error rate at w + eps minus at w, points",
        series=[
            series
            for steps, outcomes in chosen.items()
            for series in along_training(f"{steps} step{'s' * (steps > 1)}", outcomes, sharpness_of)
        ],
        runs=run_names(outcome for outcomes in chosen.values() for outcome in outcomes),
    )


def _verdicts(found: Found, scale: Scale) -> list[Verdict]:
    unaffected, several_better, more_found = (statement.claim for statement in CLAIMS.statements)
    ten_classes, *more_classes = DATASETS[scale]
    equal = [_test_contrast(found, ten_classes, steps) for steps in ASCENT_STEPS_GRID if steps > FEW]
    better = [_test_contrast(found, d, steps) for d in more_classes for steps in ASCENT_STEPS_GRID if steps > FEW]
    ends = [
        contrast_between(
            f"estimated sharpness at the end, {dataset}, points",
            (_steps(FEW), found[dataset, FEW]),
            (_steps(MANY), found[dataset, MANY]),
            _sharpness,
        )
        for dataset in DATASETS[scale]
    ]
    gains = {dataset: _gains(found, dataset) for dataset in DATASETS[scale]}
    along = [
        contrast for dataset, gain in gains.items() for contrast in _along_contrasts(dataset, gain, NUM_RUNS[scale])
    ]
    family = Family([*equal, *better, *ends, *along])
    not_trained = f"{ten_classes} has ten classes; CIFAR-100 is not trained at this scale."
    return [
        _unaffected(unaffected, [*equal, *better], family),
        family.judge(several_better, better)
        if better
        else Verdict(claim=several_better, status="not tested", evidence=not_trained),
        family.judge(more_found, ends),
        _along_verdict(family.judge(FIGURES["ascent-along-training"].statements[0].claim, along), gains),
    ]


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number > 1)}"


def _test_contrast(found: Found, dataset: str, steps: int) -> Contrast:
    return contrast_between(
        f"test error, {dataset}, %",
        (_steps(steps), found[dataset, steps]),
        (_steps(FEW), found[dataset, FEW]),
        partial(metric_by_seed, metric="test_error"),
    )


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
    if far and verdict.status != "not tested":
        said = f"In the first half one step finds less than {100 * NEARLY:.0f} % of what {MANY} find: {', '.join(far)}."
        return replace(verdict, status="not reproduced", evidence=f"{verdict.evidence} {said}")
    return verdict


def _gains(found: Found, dataset: str) -> Gains:
    """Return what many steps find more than one in the first half of training and in its last tenth, by seed.

    And, in the first half, how much of what many find one step finds (NaN without runs).
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    sums = np.zeros(2)
    few, many = ({o.job.seed: o for o in found[dataset, steps]} for steps in (FEW, MANY))
    for seed in sorted(few.keys() & many.keys()):
        curves = [_curve(few[seed]), _curve(many[seed])]
        length = min(map(len, curves))
        if length:
            one, several = (np.asarray(curve[:length]) for curve in curves)
            half, tenth = max(1, length // 2), max(1, length // 10)
            first[seed] = float((several - one)[:half].mean())
            last[seed] = float((several - one)[-tenth:].mean())
            sums += one[:half].mean(), several[:half].mean()
    return first, last, float(sums[0] / sums[1]) if sums[1] > 0 else math.nan


def _curve(outcome: Outcome) -> list[float]:
    lines = outcome.result.history if outcome.result is not None else []
    return [100 * value for value in map(sharpness_of, lines) if value is not None]


def _unaffected(claim: str, contrasts: Sequence[Contrast], family: Family) -> Verdict:
    """Judge that the number of steps does not strongly affect the test error, by one standard on all datasets."""
    verdict = family.judge(claim, contrasts)
    if any(math.isnan(family.p_holm(contrast)) for contrast in contrasts):
        return replace(verdict, status="not tested")
    intervals = [(mean_and_interval(contrast.differences), mean(contrast.higher.values())) for contrast in contrasts]
    widest = max((abs(interval.mean) + interval.half_width) / error for interval, error in intervals)
    status: VerdictStatus = "inconclusive"
    if widest <= EQUIVALENCE:
        status = "reproduced"
    elif any(family.p_holm(contrast) < SIGNIFICANT for contrast in contrasts):
        status = "not reproduced"
    elif any(family.is_open(contrast) for contrast in contrasts):
        status = "not tested"
    said = (
        f"With 95 % confidence the error changes by less than {100 * widest:.2g} % of itself; "
        f"{100 * EQUIVALENCE:.0f} % would be a strong effect."
    )
    return replace(verdict, status=status, evidence=f"{verdict.evidence} {said}")
