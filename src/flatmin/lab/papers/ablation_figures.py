"""Two ablations: the second-order terms (Appendix C.4) and the norm of the perturbation (Appendix C.5)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter, methodcaller

import torch

from flatmin.lab.data.catalog import dataset_info
from flatmin.lab.findings import Findings, Held, Hyperparameter, LineFigure, Series, Table, Verdict
from flatmin.lab.jobs import Job, Laboratory, Measurement, Outcome
from flatmin.lab.models.build import build_model
from flatmin.lab.papers.claims_figures import FIGURES
from flatmin.lab.papers.evidence import (
    Contrast,
    Notebook,
    along_training,
    comparisons,
    contrast_between,
    judge,
    mean,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    run_names,
    series_interval,
)
from flatmin.lab.papers.figure_settings import (
    LAPTOP_EPOCHS,
    findings,
    jobs_for,
    sam_rho,
    start,
)
from flatmin.lab.papers.hyperparameters import HYPERPARAMETERS
from flatmin.lab.papers.item import Scale
from flatmin.lab.papers.scales import LAPTOP_RHOS, own_settings, replica_seeds
from flatmin.lab.papers.settings import NORMS, RHO_GRID, SECOND_ORDER, VALIDATION, rho_of_sup_norm
from flatmin.lab.papers.sharpness_figures import Curve, baseline_row, contrast_of
from flatmin.lab.spec import Experiment

ORDERS = ("first order", "second order")
CLOSE_TO_ONE = 0.9
"""What "close to 1" is taken to mean, of a cosine in a space of so many dimensions."""
LOOK_EVERY: Mapping[Scale, int] = {"paper": 10, "laptop": LAPTOP_EPOCHS // 10, "smoke": 1}
"""The epochs between two looks at the trajectory."""

NORM_GRIDS: Mapping[Scale, Mapping[str, tuple[float, ...]]] = {
    "paper": {"p = 2": RHO_GRID, "p = inf": RHO_GRID, "random": (*RHO_GRID, 1.0, 2.0, 5.0)},
    "laptop": {"p = 2": LAPTOP_RHOS, "p = inf": LAPTOP_RHOS, "random": (0.2, 0.5, 1.0, 2.0, 5.0)},
    "smoke": {"p = 2": (0.1,), "p = inf": (0.1,), "random": (0.1, 1.0)},
}
"""Euclidean lengths of the perturbation. A random direction rises far less than the gradient: it may go further."""


def second_order(scale: Scale, lab: Laboratory) -> Findings:
    """Train with and without the second-order terms, and compare the updates along both trajectories (Appendix C.4)."""
    notebook, claims = Notebook(lab), FIGURES["second-order"]
    experiments = second_order_experiments(scale)
    epochs = range(LOOK_EVERY[scale], experiments[ORDERS[0]].epochs + 1, LOOK_EVERY[scale])
    looks = {epoch: _cosine(experiments[ORDERS[0]], epoch) for epoch in epochs}
    jobs = {
        order: jobs_for(experiment, f"second-order/{order}", replica_seeds(scale), tuple(looks.values()))
        for order, experiment in experiments.items()
    }
    found = notebook.replicas(jobs, "second-order: replicas with and without the second-order terms")
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
    rows = [
        [
            order,
            number_cell(metric_by_seed(outcomes, "perturbed_error"), outcomes),
            number_cell(metric_by_seed(outcomes, "test_error"), outcomes),
            number_cell(_half_means(cosines[order]), outcomes, unit=""),
            number_cell(cosines[order][epochs[-1]], outcomes, unit=""),
            *(comparisons([test]) if order == ORDERS[0] else [""]),
        ]
        for order, outcomes in found.items()
    ]
    columns = ["training", "train error at w + eps", "test error", "cosine, first half", "cosine, last epoch"]
    rho = experiments[ORDERS[0]].optim.rho
    return findings(
        item="second-order",
        scale=scale,
        title=claims.title,
        source=claims.source,
        notebook=notebook,
        tables=[Table(title=claims.title, columns=[*columns, "first - second"], rows=rows)],
        figures=[_error_figure(found), _cosine_figure(found, cosines)],
        verdicts=[
            _cosine_verdict(claims.statements[0].claim, cosines, len(replica_seeds(scale))),
            judge(claims.statements[1].claim, [test]),
        ],
        hyperparameters=HYPERPARAMETERS["second-order"]
        if scale == "paper"
        else own_settings([experiments[ORDERS[0]]], ("rho", rho)),
        notes=[
            *claims.notes,
            "The cosine is of the two updates on one fixed training batch, at the same weights; batch norm has its "
            "running statistics.",
        ],
    )


def second_order_experiments(scale: Scale) -> dict[str, Experiment]:
    """Return training without and with the second-order terms; both share one eps for the whole batch."""
    base = start(scale, SECOND_ORDER, rho=sam_rho(scale, SECOND_ORDER))
    base = replace(base, evaluate_every=LOOK_EVERY[scale], keep_every=LOOK_EVERY[scale])
    return {order: replace(base, optim=replace(base.optim, second_order=order == ORDERS[1])) for order in ORDERS}


def _cosine(experiment: Experiment, epoch: int) -> Measurement:
    settings = (("rho", experiment.optim.rho), ("num_examples", experiment.data.batch_size))
    return Measurement(kind="cosine", settings=settings, epoch=epoch)


def _half_means(cosines: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return each replica's mean cosine over the first half of training."""
    first = [values for epoch, values in cosines.items() if epoch <= max(cosines) / 2]
    seeds = set.intersection(*(set(values) for values in first)) if first else set()
    return {seed: mean(values[seed] for values in first) for seed in sorted(seeds)}


def _cosine_verdict(claim: str, cosines: Mapping[str, Mapping[int, Mapping[int, float]]], num_replicas: int) -> Verdict:
    contrasts = [
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
    verdict = judge(claim, contrasts)
    halves = {order: mean(_half_means(looks).values()) for order, looks in cosines.items()}
    far = [order for order, value in halves.items() if value < CLOSE_TO_ONE]
    if far and verdict.held != "not tested":
        said = (
            f"{verdict.evidence} In the first half it is not close to 1 (taken as {CLOSE_TO_ONE:g}): {', '.join(far)}."
        )
        held: Held = "did not hold"
        return replace(verdict, held=held, evidence=said)
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
        runs=run_names(outcome for outcomes in found.values() for outcome in outcomes),
    )


def _cosine_figure(
    found: Mapping[str, Sequence[Outcome]], cosines: Mapping[str, Mapping[int, Mapping[int, float]]]
) -> LineFigure:
    series = []
    for order, looks in cosines.items():
        known = {epoch: list(values.values()) for epoch, values in looks.items() if values}
        y, half_width = series_interval(list(known.values()))
        series.append(Series(name=f"{order} training", x=list(known), y=y, half_width=half_width))
    return LineFigure(
        title="Cosine between first- and second-order updates",
        x_label="epoch",
        y_label="cosine",
        series=series,
        runs=run_names(outcome for outcomes in found.values() for outcome in outcomes),
    )


def p_norm(scale: Scale, lab: Laboratory) -> Findings:
    """Perturb along the gradient in the 2-norm and the sup norm, and at random, over rho (Appendix C.5)."""
    notebook, claims = Notebook(lab), FIGURES["norms"]
    found = notebook.replicas(p_norm_jobs(scale), "p-norm: replicas")
    baseline = found.pop("SGD")
    curves = {
        kind: Curve(name=kind, outcomes={rho: found[_norm_name(kind, rho)] for rho in rhos})
        for kind, rhos in NORM_GRIDS[scale].items()
    }
    two, sup, noise = (curves[kind] for kind in ("p = 2", "p = inf", "random"))
    contrasts = [contrast_of(two, noise), contrast_of(sup, noise), contrast_of(two, sup)]
    two_noise, sup_noise, two_sup = comparisons(contrasts)
    beside = {"p = 2": (two_noise, two_sup), "p = inf": (sup_noise, ""), "random": ("", "")}
    rows = [[*curve.row(), *beside[kind]] for kind, curve in curves.items()]
    rows.append([*baseline_row(baseline), "", ""])
    grids = [
        Hyperparameter(name=f"rho grid, {kind}", value=rhos, source="ours", note="Euclidean length; not given")
        for kind, rhos in NORM_GRIDS[scale].items()
    ]
    paper = [h for h in HYPERPARAMETERS["norms"] if not h.name.startswith("rho grid")]
    return findings(
        item="p-norm",
        scale=scale,
        title=claims.title,
        source=claims.source,
        notebook=notebook,
        tables=[
            Table(
                title="Test error at the rho that the validation set chooses for each perturbation",
                columns=[
                    *("perturbation", "rho", "validation error", "test error"),
                    *("compared with random", "compared with p = inf"),
                ],
                rows=rows,
                note="rho is the Euclidean length; for p = inf each weight moves by rho / sqrt(number of weights).",
            )
        ],
        figures=[
            LineFigure(
                title="Test error over the length of the perturbation",
                x_label="Euclidean length of the perturbation",
                y_label="test error, %",
                series=[curve.series() for curve in curves.values()],
                log_x=True,
                runs=run_names(o for outcomes in found.values() for o in outcomes),
            )
        ],
        verdicts=[judge(claims.statements[0].claim, contrasts)],
        hyperparameters=[*(paper if scale == "paper" else own_settings([baseline[0].job.experiment])), *grids],
        notes=[
            *claims.notes,
            f"All runs hold out {VALIDATION:.0%} of the training set, so that rho is chosen without the test set.",
        ],
    )


def p_norm_jobs(scale: Scale) -> dict[str, list[Job]]:
    """Return the replicas of each perturbation and length, and of SGD."""
    seeds = replica_seeds(scale)
    base = start(scale, NORMS, rho=0.0)
    base = replace(base, data=replace(base.data, validation=VALIDATION))
    num_weights = _num_weights(base)
    jobs = {"SGD": jobs_for(base, "p-norm/SGD", seeds)}
    for kind, rhos in NORM_GRIDS[scale].items():
        for rho in rhos:
            optim = start(scale, NORMS, rho=rho_of_sup_norm(rho, num_weights) if kind == "p = inf" else rho).optim
            if kind == "p = inf":
                optim = replace(optim, p=math.inf)
            elif kind == "random":
                optim = replace(optim, direction="random")
            name = _norm_name(kind, rho)
            jobs[name] = jobs_for(replace(base, optim=optim), f"p-norm/{name}", seeds)
    return jobs


def _norm_name(kind: str, rho: float) -> str:
    return f"{kind}, rho={rho:g}"


def _num_weights(experiment: Experiment) -> int:
    info = dataset_info(experiment.data.name)
    with torch.device("meta"):  # shapes alone: the large networks take seconds to fill
        network = build_model(experiment.model, num_classes=info.num_classes, in_channels=info.channels)
    return sum(parameter.numel() for parameter in network.parameters())
