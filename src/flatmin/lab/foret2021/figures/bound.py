"""Theorem 2: the PAC-Bayesian bound, term by term, of networks trained with SGD and with SAM (Appendix A.1)."""

from collections.abc import Mapping
from functools import partial
from operator import itemgetter

from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import findings, jobs_for, sam_rho, start
from flatmin.lab.foret2021.scales import replica_seeds
from flatmin.lab.foret2021.settings import CIFAR, RHO_GRID
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import (
    comparisons,
    contrast_between,
    mean,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    run_names,
    series_interval,
)
from flatmin.lab.studies.findings import (
    Cell,
    Comparison,
    Findings,
    LineFigure,
    Series,
    Table,
    Verdict,
    VerdictStatus,
    own_settings,
)
from flatmin.lab.studies.item import Scale
from flatmin.lab.sweeps.jobs import Measurement, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

METHODS = ("SGD", "SAM")
DELTA = 0.05
PAPER = CIFAR["WRN-28-10 (200 epochs)", "cifar10"]
TERMS = {
    "training error": "error",
    "training error at the worst weights found in the ball": "sharp_error",
    "the root": "complexity",
    "bound: the last two": "total",
    "of the root: the weights' term": "weight_term",
    "of the root: confidence": "confidence_term",
    "of the root: union bound": "union_term",
    "norm of the weights": "weight_norm",
    "number of weights": "num_weights",
}
RADII: Mapping[Scale, tuple[float, ...]] = {"paper": RHO_GRID, "laptop": RHO_GRID, "smoke": (0.05, 0.2)}


def bound(scale: Scale, runner: Runner) -> Findings:
    """Evaluate the bound on the 0-1 error for SGD and SAM networks, over rho, and say whether it is vacuous."""
    recorder, claims = RecordingRunner(runner), FIGURES["bound"]
    experiments = bound_experiments(scale)
    own_rho = experiments["SAM"].optim.rho
    measurements = {rho: _measurement(rho) for rho in RADII[scale]}
    jobs = {
        method: jobs_for(experiment, f"bound/{method}", replica_seeds(scale), tuple(measurements.values()))
        for method, experiment in experiments.items()
    }
    found = recorder.replicas(jobs, "bound: networks and their bounds")
    return findings(
        item="bound",
        scale=scale,
        title=claims.title,
        source=claims.source,
        recorder=recorder,
        tables=[_table(found, measurements[own_rho], own_rho)],
        figures=[_figure(found, measurements)],
        verdicts=[_verdict(claims.statements[0].claim, found, measurements)],
        hyperparameters=[
            *HYPERPARAMETERS["bound"],
            *([] if scale == "paper" else own_settings([experiments["SGD"]], ("rho of SAM", own_rho))),
        ],
        notes=[
            *claims.notes,
            "The loss is the 0-1 error. The worst weights in the ball are those that one ascent step finds, so this is "
            "an estimate of the bound from below.",
        ],
    )


def bound_experiments(scale: Scale) -> dict[str, Experiment]:
    """Return the networks whose bound is evaluated, by method."""
    rhos = dict(zip(METHODS, (0.0, sam_rho(scale, PAPER)), strict=True))
    return {method: start(scale, PAPER, rho=rho) for method, rho in rhos.items()}


def _measurement(rho: float) -> Measurement:
    return Measurement(kind="bound", settings=(("rho", rho), ("delta", DELTA)))


def _table(found: Mapping[str, list[Outcome]], measurement: Measurement, rho: float) -> Table:
    rows: list[list[str | Cell | Comparison]] = []
    for name, key in TERMS.items():
        values = {m: measured_by_seed(found[m], measurement, itemgetter(key)) for m in METHODS}
        read = partial(measured_by_seed, measurement=measurement, read=itemgetter(key))
        lower = contrast_between(name, ("SAM", found["SAM"]), ("SGD", found["SGD"]), read, unit="")
        compared = comparisons([lower]) if key == "total" else [""]
        rows.append([name, *(number_cell(values[m], found[m], unit="") for m in METHODS), *compared])
    errors = [number_cell(metric_by_seed(found[m], "test_error", 1.0), found[m], unit="") for m in METHODS]
    rows.append(["test error", *errors, ""])
    vacuous = [_vacuous(found[m], measurement) for m in METHODS]
    rows.append(["vacuous (above 1)", *vacuous, ""])
    return Table(
        title=f"The bound on the error at rho = {rho:g}, term by term",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note=f"delta = {DELTA:g}. Errors are fractions: a bound above 1 says nothing.",
    )


def _vacuous(outcomes: list[Outcome], measurement: Measurement) -> str:
    known = [bool(o.measured[measurement]["vacuous"]) for o in outcomes if measurement in o.measured]
    return f"{sum(known)} of {len(known)}" if known else ""


def _figure(found: Mapping[str, list[Outcome]], measurements: Mapping[float, Measurement]) -> LineFigure:
    series = []
    for method in METHODS:
        totals = {rho: measured_by_seed(found[method], m, itemgetter("total")) for rho, m in measurements.items()}
        known = {rho: list(values.values()) for rho, values in totals.items() if values}
        y, half_width = series_interval(list(known.values()))
        series.append(Series(name=method, x=list(known), y=y, half_width=half_width))
    ends = [min(measurements), max(measurements)]
    series.append(Series(name="above this it says nothing", x=ends, y=[1.0, 1.0], mode="lines"))
    return LineFigure(
        title="The bound over the radius of the ball",
        x_label="rho",
        y_label="bound on the error",
        series=series,
        log_x=True,
        log_y=True,
        runs=run_names(outcome for outcomes in found.values() for outcome in outcomes),
    )


def _verdict(claim: str, found: Mapping[str, list[Outcome]], measurements: Mapping[float, Measurement]) -> Verdict:
    """Judge the inequality itself, which a vacuous bound cannot test."""
    checked, violated, vacuous, totals = 0, 0, 0, []
    for outcome in (o for outcomes in found.values() for o in outcomes):
        error = outcome.result.metrics.get("test_error") if outcome.result is not None else None
        for measurement in measurements.values():
            if error is not None and measurement in outcome.measured:
                total = float(outcome.measured[measurement]["total"])
                totals.append(total)
                checked += 1
                violated += total < error
                vacuous += total > 1
    if not checked:
        return Verdict(claim=claim, status="not tested", evidence="No network with its bound is there.")
    errors = mean(e for outcomes in found.values() for e in metric_by_seed(outcomes, "test_error", 1.0).values())
    said = (
        f"{vacuous} of {checked} bounds are vacuous, above an error of 1: {min(totals):.3g} to {max(totals):.3g}, "
        f"and the test error is {errors:.3g} in the mean; {violated} are below their network's test error"
    )
    status: VerdictStatus = "reproduced"
    if violated:
        status = "not reproduced"
    elif vacuous == checked:
        status, said = "not tested", f"{said}. A bound that exceeds 1 holds of any network and says nothing of this one"
    return Verdict(claim=claim, status=status, evidence=f"{said}.")
