"""Theorem 2 (Appendix A.1): the PAC-Bayesian bound, term by term, of models trained with SGD and with SAM.

    flatmin reproduce bound --scale laptop    # 12 minutes on two cores

The bound holds and is vacuous: 51 to 71 for an error of 0.18. All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import jobs_for, sam_rho, start
from flatmin.lab.foret2021.settings import CIFAR, RHO_GRID
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.studies.conditions import replica_seeds
from flatmin.lab.studies.contrasts import Family, mean
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Series, Table, Verdict, VerdictStatus
from flatmin.lab.studies.replicas import Read, Replicas, measured, metric, replicas_of, runs_of, series_over
from flatmin.lab.studies.statistics import SIGNIFICANT, holm, interval_p_value
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Bound, Noise

DELTA = 0.05
PAPER = CIFAR["WRN-28-10 (200 epochs)", "cifar10"]
BOUND_TERM = "bound: the last two"
TERMS = {
    "training error": "error",
    "training error at the worst weights found in the ball": "sharp_error",
    "the root": "complexity",
    BOUND_TERM: "total",
    "of the root: the weights' term": "weight_term",
    "of the root: confidence": "confidence_term",
    "of the root: union bound": "union_term",
    "norm of the weights": "weight_norm",
    "number of weights": "num_weights",
}
NOISE_SCALES = {"stated": "rho for each weight, as the theorem states it", "proof": "norm about rho, as in its proof"}
NUM_TEST_EXAMPLES: Mapping[Scale, int | None] = {"paper": None, "laptop": 2_000, "smoke": 20}
NO_FALL = 0.001
"""An error that noise lowers by less than this, with 95 % confidence, counts as not lowered."""
RADII: Mapping[Scale, tuple[float, ...]] = {"paper": RHO_GRID, "laptop": RHO_GRID, "smoke": (0.05, 0.2)}


def bound_jobs(scale: Scale, known: Known) -> dict[str, list[Job]]:
    """Return the models with their bounds and what noise does to their errors."""
    measurements = (*bounds_of(scale).values(), noise_of(scale))
    return {
        method: jobs_for(start(scale, PAPER, rho=rho), f"bound/{method}", replica_seeds(scale), measurements)
        for method, rho in (("SGD", 0.0), ("SAM", sam_rho(scale, PAPER)))
    }


def bounds_of(scale: Scale) -> dict[float, Bound]:
    """Return how the bound is measured, by radius."""
    return {radius: Bound(rho=radius, delta=DELTA) for radius in RADII[scale]}


def noise_of(scale: Scale) -> Noise:
    """Return how the condition of the bound is measured."""
    return Noise(rho=sam_rho(scale, PAPER), num_examples=NUM_TEST_EXAMPLES[scale])


def bound(scale: Scale, known: Known) -> Findings:
    """Evaluate the bound on the 0-1 error for SGD and SAM models, over rho, and say whether it is vacuous."""
    rho, measurements, noise = sam_rho(scale, PAPER), bounds_of(scale), noise_of(scale)
    models = replicas_of(bound_jobs(scale, known), known)
    inequality, condition = (statement.claim for statement in CLAIMS["bound"].statements)
    return findings(
        "bound",
        scale,
        tables=[_table(models, measurements[rho], rho), _noise_table(models, noise, rho)],
        figures=[_figure(models, measurements)],
        verdicts=[_verdict(inequality, models, measurements), _noise_verdict(condition, models, noise)],
        hyperparameters=[
            *HYPERPARAMETERS["bound"],
            *hyperparameters("bound-model", scale, [start(scale, PAPER, rho=0.0)], ("rho of SAM", rho)),
        ],
        notes=[
            "The loss is the 0-1 error. The worst weights in the ball are those that one ascent step finds, so this is "
            "an estimate of the bound from below."
        ],
    )


def _table(models: Mapping[str, Replicas], measurement: Bound, rho: float) -> Table:
    reads = {name: measured(measurement, key) for name, key in TERMS.items()}
    reads["test error"] = metric("test_error", 1.0)
    lower = models["SAM"].lower_than(models["SGD"], BOUND_TERM, reads[BOUND_TERM], unit="")
    rows: list[Row] = [
        [
            name,
            *(replicas.cell(read, unit="") for replicas in models.values()),
            Family([lower]).comparison(lower) if name == BOUND_TERM else "",
        ]
        for name, read in reads.items()
    ]
    is_vacuous = measured(measurement, lambda facts: float(facts["vacuous"]))
    vacuous = [replicas.by_seed(is_vacuous).values() for replicas in models.values()]
    rows.append(["vacuous (above 1)", *(f"{sum(own):.0f} of {len(own)}" if own else "" for own in vacuous), ""])
    return Table(
        title=f"The bound on the error at rho = {rho:g}, term by term",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note=f"delta = {DELTA:g}. Errors are fractions: a bound above 1 says nothing.",
    )


def _noise_table(models: Mapping[str, Replicas], noise: Noise, rho: float) -> Table:
    rows: list[Row] = []
    for scale, name in NOISE_SCALES.items():
        rows.append([name, *(m.cell(_of_noise(noise, scale, "rise"), unit="") for m in models.values())])
        widths = [mean(m.by_seed(_of_noise(noise, scale, "half_width")).values()) for m in models.values()]
        rows.append(["mean half-width for one model", *("" if math.isnan(w) else f"{w:.2g}" for w in widths)])
    return Table(
        title=f"The condition: what Gaussian noise adds to the test error, at rho = {rho:g}",
        columns=["noise", "SGD", "SAM"],
        rows=rows,
        note="Errors are fractions. The theorem assumes that noise does not lower the expected error. The intervals "
        "of a row are over models; those of one model are over 20 draws and its test images.",
    )


def _of_noise(noise: Noise, scale: str, key: str) -> Read:
    return measured(noise, lambda facts: float(facts[scale][key]))


def _noise_verdict(claim: str, models: Mapping[str, Replicas], noise: Noise) -> Verdict:
    """Judge that noise does not lower the error: nowhere significantly, and no interval reaches far below 0."""
    records = [record for replicas in models.values() for record in replicas.records]
    if not all(noise.name in record.measured for record in records):
        return Verdict(claim=claim, status="not tested", evidence="Models or their measurements are missing.")
    effects = [record.measured[noise.name][scale] for record in records for scale in NOISE_SCALES]
    p_values = holm([interval_p_value(e["rise"], e["half_width"], e["num_draws"]) for e in effects])
    falls = sum(e["rise"] < 0 and p < SIGNIFICANT for e, p in zip(effects, p_values, strict=True))
    lowest = min(effect["rise"] - effect["half_width"] for effect in effects)
    status: VerdictStatus = "not reproduced" if falls else "reproduced" if lowest >= -NO_FALL else "inconclusive"
    said = (
        f"noise lowers the test error significantly in {falls} of {len(effects)} measurements (each model, two scales "
        f"of noise); with 95 % confidence it lowers it by at most {max(0.0, -lowest):.2g} in any; {NO_FALL:g} counts "
        "as nothing"
    )
    return Verdict(claim=claim, status=status, evidence=f"{said}.")


def _figure(models: Mapping[str, Replicas], measurements: Mapping[float, Bound]) -> LineFigure:
    series = [
        series_over(name, {rho: replicas.by_seed(measured(m, "total")) for rho, m in measurements.items()})
        for name, replicas in models.items()
    ]
    ends = [min(measurements), max(measurements)]
    series.append(Series(name="above this it says nothing", x=ends, y=[1.0, 1.0], mode="lines"))
    return LineFigure(
        title="The bound over the radius of the ball",
        x_label="rho",
        y_label="bound on the error",
        series=series,
        log_x=True,
        log_y=True,
        runs=runs_of(models.values()),
    )


def _verdict(claim: str, models: Mapping[str, Replicas], measurements: Mapping[float, Bound]) -> Verdict:
    """Judge the inequality itself, which a vacuous bound cannot test."""
    error = metric("test_error", 1.0)
    bounds = [
        (float(record.measured[measurement.name]["total"]), test_error)
        for replicas in models.values()
        for record in replicas.records
        for measurement in measurements.values()
        if (test_error := error(record)) is not None and measurement.name in record.measured
    ]
    if not bounds:
        return Verdict(claim=claim, status="not tested", evidence="No model with its bound is available.")
    totals = [total for total, _ in bounds]
    vacuous, violated = sum(total > 1 for total in totals), sum(total < test_error for total, test_error in bounds)
    errors = mean(e for replicas in models.values() for e in replicas.by_seed(error).values())
    said = (
        f"{vacuous} of {len(bounds)} bounds are vacuous, above an error of 1: {min(totals):.3g} to {max(totals):.3g}, "
        f"and the test error is {errors:.3g} in the mean; {violated} are below their model's test error"
    )
    status: VerdictStatus = "reproduced"
    if violated:
        status = "not reproduced"
    elif vacuous == len(bounds):
        status, said = "inconclusive", f"{said}. A bound that exceeds 1 holds of any model and says nothing of this one"
    return Verdict(claim=claim, status=status, evidence=f"{said}.")


BOUND = item("bound", bound_jobs, bound)
