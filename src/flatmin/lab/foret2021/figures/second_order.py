"""Figures 4 and 5 (Appendix C.4): the second-order terms of SAM's gradient.

    flatmin reproduce second-order --scale laptop    # 20 minutes on two cores

The two directions are close throughout, and the test errors do not differ. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import methodcaller

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import LAPTOP_EPOCHS, jobs_for, sam_rho, start
from flatmin.lab.foret2021.settings import SECOND_ORDER
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.conditions import replica_seeds
from flatmin.lab.studies.contrasts import BySeed, Contrast, Family, mean, refuted
from flatmin.lab.studies.findings import Findings, LineFigure, Table, Verdict
from flatmin.lab.studies.replicas import Replicas, measured, replicas_of, runs_of, series_over
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Cosine

ORDERS = ("first order", "second order")
CLOSE_TO_ONE = 0.9
"""What "close to 1" is taken to mean, of a cosine in a space of so many dimensions."""
LOOK_EVERY: Mapping[Scale, int] = {"paper": 10, "laptop": LAPTOP_EPOCHS // 10, "smoke": 1}
"""The epochs between two looks at the trajectory."""


Cosines = Mapping[str, Mapping[int, BySeed]]
"""By the way to train, the epoch and the seed."""


def second_order_jobs(scale: Scale, known: Known) -> dict[str, list[Job]]:
    """Return the replicas with and without the second-order terms."""
    first = first_order_experiment(scale)
    both = (first, replace(first, optim=replace(first.optim, second_order=True)))
    looks, curves = tuple(cosines_of(first).values()), ("perturbed_error", "test_error")
    return {
        order: jobs_for(experiment, f"second-order/{order}", replica_seeds(scale), looks, curves)
        for order, experiment in zip(ORDERS, both, strict=True)
    }


def second_order(scale: Scale, known: Known) -> Findings:
    """Train with and without the second-order terms, and compare the updates along both trajectories (Appendix C.4)."""
    claims, first = CLAIMS["second-order"], first_order_experiment(scale)
    looks = cosines_of(first)
    replicas = replicas_of(second_order_jobs(scale, known), known)
    cosines = {
        order: {epoch: group.by_seed(measured(m, "cosine")) for epoch, m in looks.items()}
        for order, group in replicas.items()
    }
    test = replicas[ORDERS[0]].lower_than(replicas[ORDERS[1]], "test error, %", "test_error")
    falls = _falling_cosines(cosines, len(replica_seeds(scale)))
    family = Family([*falls, test])
    rows = [
        [
            order,
            group.cell("perturbed_error"),
            group.cell("test_error"),
            group.cell_of(_half_means(cosines[order]), unit=""),
            group.cell_of(cosines[order][max(looks)], unit=""),
            family.comparison(test) if order == ORDERS[0] else "",
        ]
        for order, group in replicas.items()
    ]
    columns = ["training", "train error at w + eps", "test error", "cosine, first half", "cosine, last epoch"]
    return findings(
        "second-order",
        scale,
        tables=[Table(title=claims.title, columns=[*columns, "first - second"], rows=rows)],
        figures=_figures(replicas, cosines),
        verdicts=[
            _cosine_verdict(family.judge(claims.statements[0].claim, falls), cosines),
            family.judge(claims.statements[1].claim, [test]),
        ],
        hyperparameters=hyperparameters("second-order", scale, [first], ("rho", first.optim.rho)),
        notes=[
            "The cosine is of the two updates on one fixed training batch, at the same weights; batch norm has its "
            "running statistics. The L2 term takes part where training has it in the loss, as at the paper's scale."
        ],
    )


def first_order_experiment(scale: Scale) -> Experiment:
    """Return SAM without the second-order terms, one eps for the whole batch, looked at along training."""
    first, every = start(scale, SECOND_ORDER, rho=sam_rho(scale, SECOND_ORDER)), LOOK_EVERY[scale]
    return replace(first, evaluate_every=every, keep_every=every)


def cosines_of(experiment: Experiment) -> dict[int, Cosine]:
    """Return how the cosine is measured, by epoch."""
    optim, every = experiment.optim, experiment.evaluate_every
    decay = optim.weight_decay if optim.decay == "loss" else 0.0  # in the loss: both updates have the L2 term
    return {
        epoch: Cosine(rho=optim.rho_number, num_examples=experiment.data.batch_size, weight_decay=decay, epoch=epoch)
        for epoch in range(every, experiment.epochs + 1, every)
    }


def _half_means(cosines: Mapping[int, BySeed]) -> dict[int, float]:
    """Return each replica's mean cosine over the first half of training."""
    first = [values for epoch, values in cosines.items() if epoch <= max(cosines) / 2]
    seeds = set.intersection(*(set(values) for values in first)) if first else set()
    return {seed: mean(values[seed] for values in first) for seed in sorted(seeds)}


def _falling_cosines(cosines: Cosines, num_replicas: int) -> list[Contrast]:
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


def _cosine_verdict(verdict: Verdict, cosines: Cosines) -> Verdict:
    """Return the verdict that the cosine falls from close to 1: it must also be close to 1 in the first half."""
    far = [order for order, looks in cosines.items() if mean(_half_means(looks).values()) < CLOSE_TO_ONE]
    said = f"In the first half it is not close to 1 (taken as {CLOSE_TO_ONE:g}): {', '.join(far)}."
    return refuted(verdict, said) if far else verdict


def _figures(replicas: Mapping[str, Replicas], cosines: Cosines) -> list[LineFigure]:
    runs = runs_of(replicas.values())
    errors = [
        series
        for order, group in replicas.items()
        for metric, name in (("perturbed_error", "train, at w + eps"), ("test_error", "test"))
        for series in group.along_training(f"{name}, {order}", methodcaller("get", metric))
    ]
    looks = [series_over(f"{order} training", looks) for order, looks in cosines.items()]
    figures = (
        ("Training error at w + eps, and test error, along training", "error, %", errors),
        ("Cosine between first- and second-order updates", "cosine", looks),
    )
    return [LineFigure(title=t, x_label="epoch", y_label=y, series=series, runs=runs) for t, y, series in figures]


SECOND_ORDER_TERMS = item("second-order", second_order_jobs, second_order)
