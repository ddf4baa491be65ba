"""Figures 4 and 5 (Appendix C.4): the second-order terms of SAM's gradient.

    flatmin reproduce second-order --scale laptop    # 20 minutes on two cores

Not judged yet. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter, methodcaller

from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import (
    LAPTOP_EPOCHS,
    jobs_for,
    sam_rho,
    start,
)
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.scales import replica_seeds
from flatmin.lab.foret2021.settings import SECOND_ORDER
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import (
    Contrast,
    Family,
    along_training,
    contrast_between,
    mean,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    runs_of,
    series_over,
)
from flatmin.lab.studies.findings import Findings, LineFigure, Table, Verdict, VerdictStatus, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.sweeps.jobs import Measurement, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

ORDERS = ("first order", "second order")
CLOSE_TO_ONE = 0.9
"""What "close to 1" is taken to mean, of a cosine in a space of so many dimensions."""
LOOK_EVERY: Mapping[Scale, int] = {"paper": 10, "laptop": LAPTOP_EPOCHS // 10, "smoke": 1}
"""The epochs between two looks at the trajectory."""


def second_order(scale: Scale, runner: Runner) -> Findings:
    """Train with and without the second-order terms, and compare the updates along both trajectories (Appendix C.4)."""
    recorder, claims = RecordingRunner(runner), FIGURES["second-order"]
    experiments = second_order_experiments(scale)
    epochs = range(LOOK_EVERY[scale], experiments[ORDERS[0]].epochs + 1, LOOK_EVERY[scale])
    looks = {epoch: _cosine(experiments[ORDERS[0]], epoch) for epoch in epochs}
    jobs = {
        order: jobs_for(experiment, f"second-order/{order}", replica_seeds(scale), tuple(looks.values()))
        for order, experiment in experiments.items()
    }
    found = recorder.replicas(jobs, "second-order: replicas with and without the second-order terms")
    cosines = {
        order: {epoch: measured_by_seed(outcomes, m, itemgetter("cosine")) for epoch, m in looks.items()}
        for order, outcomes in found.items()
    }
    test = contrast_between(
        "test error, %",
        (ORDERS[0], found[ORDERS[0]]),
        (ORDERS[1], found[ORDERS[1]]),
        partial(metric_by_seed, metric="test_error"),
    )
    falls = _falling_cosines(cosines, len(replica_seeds(scale)))
    family = Family([*falls, test])
    rows = [
        [
            order,
            number_cell(metric_by_seed(outcomes, "perturbed_error"), outcomes),
            number_cell(metric_by_seed(outcomes, "test_error"), outcomes),
            number_cell(_half_means(cosines[order]), outcomes, unit=""),
            number_cell(cosines[order][epochs[-1]], outcomes, unit=""),
            family.comparison(test) if order == ORDERS[0] else "",
        ]
        for order, outcomes in found.items()
    ]
    columns = ["training", "train error at w + eps", "test error", "cosine, first half", "cosine, last epoch"]
    rho = experiments[ORDERS[0]].optim.rho
    return findings(
        item="second-order",
        scale=scale,
        claims=claims,
        recorder=recorder,
        tables=[Table(title=claims.title, columns=[*columns, "first - second"], rows=rows)],
        figures=[_error_figure(found), _cosine_figure(found, cosines)],
        verdicts=[
            _cosine_verdict(family.judge(claims.statements[0].claim, falls), cosines),
            family.judge(claims.statements[1].claim, [test]),
        ],
        hyperparameters=HYPERPARAMETERS["second-order"]
        if scale == "paper"
        else own_settings([experiments[ORDERS[0]]], ("rho", rho)),
        notes=[
            "The cosine is of the two updates on one fixed training batch, at the same weights; batch norm has its "
            "running statistics. The L2 term takes part where training has it in the loss, as at the paper's scale.",
        ],
    )


def second_order_experiments(scale: Scale) -> dict[str, Experiment]:
    """Return training without and with the second-order terms; both share one eps for the whole batch."""
    base = start(scale, SECOND_ORDER, rho=sam_rho(scale, SECOND_ORDER))
    base = replace(base, evaluate_every=LOOK_EVERY[scale], keep_every=LOOK_EVERY[scale])
    return {order: replace(base, optim=replace(base.optim, second_order=order == ORDERS[1])) for order in ORDERS}


def _cosine(experiment: Experiment, epoch: int) -> Measurement:
    optim = experiment.optim
    settings: tuple[tuple[str, float], ...] = (("rho", optim.rho), ("num_examples", experiment.data.batch_size))
    if optim.decay == "loss":  # then both updates have the L2 term, and so has their cosine
        settings += (("weight_decay", optim.weight_decay),)
    return Measurement(kind="cosine", settings=settings, epoch=epoch)


def _half_means(cosines: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return each replica's mean cosine over the first half of training."""
    first = [values for epoch, values in cosines.items() if epoch <= max(cosines) / 2]
    seeds = set.intersection(*(set(values) for values in first)) if first else set()
    return {seed: mean(values[seed] for values in first) for seed in sorted(seeds)}


def _falling_cosines(cosines: Mapping[str, Mapping[int, Mapping[int, float]]], num_replicas: int) -> list[Contrast]:
    """Return the claim that the cosine is lower at the end than in the first half, for each way to train."""
    return [
        Contrast(
            quantity=f"cosine, {order} training",
            lower_name="last epoch",
            higher_name="first half",
            lower=looks[max(looks)],
            higher=_half_means(looks),
            num_asked=num_replicas,
            unit="",
        )
        for order, looks in cosines.items()
    ]


def _cosine_verdict(verdict: Verdict, cosines: Mapping[str, Mapping[int, Mapping[int, float]]]) -> Verdict:
    """Return the verdict that the cosine falls from close to 1: it must also be close to 1 in the first half."""
    halves = {order: mean(_half_means(looks).values()) for order, looks in cosines.items()}
    far = [order for order, value in halves.items() if value < CLOSE_TO_ONE]
    if far and verdict.status != "not tested":
        said = (
            f"{verdict.evidence} In the first half it is not close to 1 (taken as {CLOSE_TO_ONE:g}): {', '.join(far)}."
        )
        status: VerdictStatus = "not reproduced"
        return replace(verdict, status=status, evidence=said)
    return verdict


def _error_figure(found: Mapping[str, Sequence[Outcome]]) -> LineFigure:
    return LineFigure(
        title="Training error at w + eps, and test error, along training",
        x_label="epoch",
        y_label="error, %",
        series=[
            series
            for order, outcomes in found.items()
            for metric, name in (("perturbed_error", "train, at w + eps"), ("test_error", "test"))
            for series in along_training(f"{name}, {order}", outcomes, methodcaller("get", metric))
        ],
        runs=runs_of(found),
    )


def _cosine_figure(
    found: Mapping[str, Sequence[Outcome]], cosines: Mapping[str, Mapping[int, Mapping[int, float]]]
) -> LineFigure:
    return LineFigure(
        title="Cosine between first- and second-order updates",
        x_label="epoch",
        y_label="cosine",
        series=[series_over(f"{order} training", looks) for order, looks in cosines.items()],
        runs=runs_of(found),
    )
