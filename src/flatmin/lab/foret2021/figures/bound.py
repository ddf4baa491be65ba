"""Theorem 2 (Appendix A.1): the PAC-Bayesian bound, term by term, of models trained with SGD and with SAM.

    flatmin reproduce bound --scale laptop    # 12 minutes on two cores

Not judged yet. All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter

from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import jobs_for, sam_rho, start
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.scales import replica_seeds
from flatmin.lab.foret2021.settings import CIFAR, RHO_GRID
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import (
    BySeed,
    Family,
    contrast_between,
    mean,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    runs_of,
    series_over,
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
from flatmin.lab.sweeps.jobs import Measurement, MeasurementResult, Outcome
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
NOISE_SCALES = {"stated": "rho for each weight, as the theorem states it", "proof": "norm about rho, as in its proof"}
NUM_TEST_EXAMPLES: Mapping[Scale, int | None] = {"paper": None, "laptop": 2_000, "smoke": 20}
NO_FALL = 0.001
"""An error that noise lowers by less than this, with 95 % confidence, counts as not lowered."""
RADII: Mapping[Scale, tuple[float, ...]] = {"paper": RHO_GRID, "laptop": RHO_GRID, "smoke": (0.05, 0.2)}


def bound(scale: Scale, runner: Runner) -> Findings:
    """Evaluate the bound on the 0-1 error for SGD and SAM models, over rho, and say whether it is vacuous."""
    recorder, claims = RecordingRunner(runner), FIGURES["bound"]
    experiments = bound_experiments(scale)
    sgd, own_rho = experiments["SGD"], experiments["SAM"].optim.rho
    measurements = {rho: _measurement(rho) for rho in RADII[scale]}
    noise = Measurement(kind="noise", settings=(("rho", own_rho), ("num_examples", NUM_TEST_EXAMPLES[scale])))
    measured = (*measurements.values(), noise)
    jobs = {
        method: jobs_for(experiment, f"bound/{method}", replica_seeds(scale), measured)
        for method, experiment in experiments.items()
    }
    found = recorder.replicas(jobs, "bound: models and their bounds")
    return findings(
        item="bound",
        scale=scale,
        claims=claims,
        recorder=recorder,
        tables=[_table(found, measurements[own_rho], own_rho), _noise_table(found, noise, own_rho)],
        figures=[_figure(found, measurements)],
        verdicts=[
            _verdict(claims.statements[0].claim, found, measurements),
            _noise_verdict(claims.statements[1].claim, found, noise),
        ],
        hyperparameters=[
            *HYPERPARAMETERS["bound"],
            *(HYPERPARAMETERS["bound-network"] if scale == "paper" else own_settings([sgd], ("rho of SAM", own_rho))),
        ],
        notes=[
            "The loss is the 0-1 error. The worst weights in the ball are those that one ascent step finds, so this is "
            "an estimate of the bound from below.",
        ],
    )


def bound_experiments(scale: Scale) -> dict[str, Experiment]:
    """Return the models whose bound is evaluated, by method."""
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
        compared = [Family([lower]).comparison(lower)] if key == "total" else [""]
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


def _rises(outcomes: list[Outcome], noise: Measurement, scale: str) -> BySeed:
    """Return by how much noise raises the test error, by seed."""
    return measured_by_seed(outcomes, noise, lambda facts: facts[scale]["rise"])


def _noise_table(found: Mapping[str, list[Outcome]], noise: Measurement, rho: float) -> Table:
    rows: list[list[str | Cell]] = []
    for scale, name in NOISE_SCALES.items():
        rows.append([name, *(number_cell(_rises(found[m], noise, scale), found[m], unit="") for m in METHODS)])
        widths = [mean(measured_by_seed(found[m], noise, _half_width(scale)).values()) for m in METHODS]
        rows.append(["mean half-width for one model", *("" if math.isnan(w) else f"{w:.2g}" for w in widths)])
    return Table(
        title=f"The condition: what Gaussian noise adds to the test error, at rho = {rho:g}",
        columns=["noise", "SGD", "SAM"],
        rows=rows,
        note="Errors are fractions. The theorem assumes that noise does not lower the expected error. The intervals "
        "of a row are over models; those of one model are over 20 draws and its test images.",
    )


def _half_width(scale: str) -> Callable[[MeasurementResult], float]:
    return lambda facts: float(facts[scale]["half_width"])


def _noise_verdict(claim: str, found: Mapping[str, list[Outcome]], noise: Measurement) -> Verdict:
    """Judge that noise does not lower the error: no model's interval lies below 0, and none reaches far below."""
    lowest, falls, total = math.inf, 0, 0
    for outcome in (o for outcomes in found.values() for o in outcomes if noise in o.measured):
        for scale in NOISE_SCALES:
            facts = outcome.measured[noise][scale]
            total += 1
            falls += facts["rise"] + facts["half_width"] < 0
            lowest = min(lowest, facts["rise"] - facts["half_width"])
    if total < len(NOISE_SCALES) * sum(map(len, found.values())):
        return Verdict(claim=claim, status="not tested", evidence="Models or their measurements are missing.")
    status: VerdictStatus = "not reproduced" if falls else "reproduced" if lowest >= -NO_FALL else "inconclusive"
    said = (
        f"noise lowers the test error significantly in {falls} of {total} measurements (each model, two scales of "
        f"noise); with 95 % confidence it lowers it by at most {max(0.0, -lowest):.2g} in any; {NO_FALL:g} counts as "
        "nothing"
    )
    return Verdict(claim=claim, status=status, evidence=f"{said}.")


def _vacuous(outcomes: list[Outcome], measurement: Measurement) -> str:
    known = [bool(o.measured[measurement]["vacuous"]) for o in outcomes if measurement in o.measured]
    return f"{sum(known)} of {len(known)}" if known else ""


def _figure(found: Mapping[str, list[Outcome]], measurements: Mapping[float, Measurement]) -> LineFigure:
    series = [
        series_over(
            method, {rho: measured_by_seed(found[method], m, itemgetter("total")) for rho, m in measurements.items()}
        )
        for method in METHODS
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
        runs=runs_of(found),
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
        return Verdict(claim=claim, status="not tested", evidence="No model with its bound is available.")
    errors = mean(e for outcomes in found.values() for e in metric_by_seed(outcomes, "test_error", 1.0).values())
    said = (
        f"{vacuous} of {checked} bounds are vacuous, above an error of 1: {min(totals):.3g} to {max(totals):.3g}, "
        f"and the test error is {errors:.3g} in the mean; {violated} are below their model's test error"
    )
    status: VerdictStatus = "reproduced"
    if violated:
        status = "not reproduced"
    elif vacuous == checked:
        status, said = "not tested", f"{said}. A bound that exceeds 1 holds of any model and says nothing of this one"
    return Verdict(claim=claim, status=status, evidence=f"{said}.")
