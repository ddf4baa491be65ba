"""Figure 3, left (Section 4.2): the spectrum of the Hessian along training with SGD and with SAM.

    flatmin reproduce hessian --scale laptop    # 25 minutes on two cores

With five replicas, and rho not tuned, the difference at the end was not significant. Now there are ten.
All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.foret2021.claims.figures import CurvatureCell
from flatmin.lab.foret2021.figure_settings import (
    LAPTOP_EPOCHS,
    curvature_seeds,
    jobs_for,
    start,
    tuned_rho,
)
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.settings import HESSIAN, HESSIAN_AT_EPOCHS
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.contrasts import (
    BySeed,
    Contrast,
    Family,
    by_seed,
    contrast_between,
    mean,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    runs_of,
    series_over,
)
from flatmin.lab.studies.findings import Cell, Comparison, Findings, LineFigure, Table, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.measured_figures import density_figures
from flatmin.lab.sweeps.jobs import Job, Measurement, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

METHODS = ("SGD", "SAM")
AT_EPOCHS: dict[Scale, tuple[int, ...]] = {
    "paper": HESSIAN_AT_EPOCHS,
    "laptop": (4, LAPTOP_EPOCHS // 2, LAPTOP_EPOCHS),
    "smoke": (1, 2),
}
"""Where spectra are measured; the last one is the end of training."""
LAPTOP_BATCH_SIZE = 32
"""Without batch norm a model fits its training set only with four times as many steps."""
RATIO = "lambda_1_over_lambda_5"
QUANTITIES = {"lambda_max": "lambda_max", "lambda_max/lambda_5": RATIO}
"""By the claims' name: what the spectra call it."""


def hessian(scale: Scale, runner: Runner) -> Findings:
    """Compare the curvature that SGD and SAM train into a model without batch norm (Figure 3, left)."""
    recorder = RecordingRunner(runner)
    sgd = hessian_experiment(scale)
    rho = tuned_rho(recorder, "hessian", scale, HESSIAN, sgd)
    *before, _ = AT_EPOCHS[scale]
    last = _spectrum(scale, None)
    along = {epoch: _spectrum(scale, epoch) for epoch in before}
    jobs: dict[str, list[Job]] = {"SGD": [], "SAM": []}
    for method, radius in (("SGD", 0.0), ("SAM", rho)):
        if radius is not None:
            kept = replace(sgd, keep_every=math.gcd(*before), optim=replace(sgd.optim, rho=radius))
            jobs[method] = jobs_for(kept, f"hessian/{method}", curvature_seeds(scale), (*along.values(), last))
    found = recorder.replicas(jobs, "hessian: models and their spectra")

    at_end = [
        contrast_between(
            f"{quantity} at the end",
            ("SAM", found["SAM"]),
            ("SGD", found["SGD"]),
            partial(measured_by_seed, measurement=last, read=itemgetter(key)),
            unit="",
        )
        for quantity, key in QUANTITIES.items()
    ]
    epochs = " and ".join(map(str, before))
    before_end = [
        contrast_between(
            f"log10 of {quantity}, mean of epochs {epochs}",
            ("SAM", found["SAM"]),
            ("SGD", found["SGD"]),
            partial(mean_log, measurements=list(along.values()), key=key),
            unit="",
        )
        for quantity, key in QUANTITIES.items()
    ]
    family = Family([*at_end, *before_end])
    spectra = along | {AT_EPOCHS[scale][-1]: last}
    own = own_settings(
        [sgd], ("rho, chosen on validation", rho or "not chosen yet"), ("gradient clipping", HESSIAN.clip_norm)
    )
    claim = CLAIMS.statements[0].claim
    return findings(
        item="hessian",
        scale=scale,
        claims=CLAIMS,
        recorder=recorder,
        tables=[_table(found, spectra, family, at_end, before_end)],
        figures=[*_lambda_figures(found, spectra), *_density_figures(found, spectra)],
        verdicts=[
            family.judge(claim, at_end),
            family.judge(f"Before the end of training, too: {claim}", before_end),
        ],
        hyperparameters=HYPERPARAMETERS["hessian"] if scale == "paper" else own,
        notes=_not_converged(found),
    )


def hessian_experiment(scale: Scale) -> Experiment:
    """Return the model without batch norm that is trained with SGD."""
    model = Model(name={"paper": HESSIAN.model, "laptop": "wrn-10-2", "smoke": "wrn-10-1"}[scale], norm="none")
    sgd = replace(start(scale, HESSIAN, rho=0.0), model=model)
    if scale == "paper":
        return sgd
    return replace(
        sgd,
        data=replace(sgd.data, batch_size=min(sgd.data.batch_size, LAPTOP_BATCH_SIZE)),
        optim=replace(sgd.optim, clip_norm=HESSIAN.clip_norm),
    )


def mean_log(outcomes: Sequence[Outcome], measurements: Sequence[Measurement], key: str) -> dict[int, float]:
    """Return the mean over several spectra of the logarithm (base 10) of a number, by seed.

    Curvature changes by orders of magnitude along training: a mean of logarithms is not that of one epoch.
    """

    def read(outcome: Outcome) -> float | None:
        values = [outcome.measured[m][key] for m in measurements if m in outcome.measured]
        if len(values) < len(measurements) or any(value is None or value <= 0 for value in values):
            return None
        return mean(math.log10(value) for value in values)

    return by_seed(outcomes, read)


def _spectrum(scale: Scale, epoch: int | None) -> Measurement:
    settings: dict[Scale, dict[str, int]] = {
        "paper": {"num_eigenvalues": 5, "steps": 80, "probes": 4, "num_examples": 10_000},
        "laptop": {"num_eigenvalues": 5, "steps": 30, "probes": 1, "num_examples": 200},
        "smoke": {"num_eigenvalues": 5, "steps": 8, "probes": 1, "num_examples": 16},
    }
    return Measurement(kind="spectrum", settings=tuple(settings[scale].items()), epoch=epoch)


def _table(
    found: dict[str, list[Outcome]],
    spectra: dict[int, Measurement],
    family: Family,
    at_end: Sequence[Contrast],
    before_end: Sequence[Contrast],
) -> Table:
    def claimed(quantity: str) -> dict[str, str]:
        return {method: CLAIMS[CurvatureCell(quantity, method.lower())].printed() for method in METHODS}

    largest = {method: _largest_ratio(outcomes, spectra) for method, outcomes in found.items()}
    lines: list[tuple[str, Mapping[str, BySeed], Mapping[str, str], Comparison | str]] = [
        # Of the ratio the paper says only "up to": that stands next to the largest one along training.
        (
            c.quantity,
            {"SGD": c.higher, "SAM": c.lower},
            claimed(quantity) if quantity == "lambda_max" else {},
            family.comparison(c),
        )
        for c, quantity in zip(at_end, QUANTITIES, strict=True)
    ]
    lines.append(("largest lambda_max/lambda_5 along training", largest, claimed("lambda_max/lambda_5"), ""))
    lines += [(c.quantity, {"SGD": c.higher, "SAM": c.lower}, {}, family.comparison(c)) for c in before_end]
    rows: list[list[str | Cell | Comparison]] = [
        [name, *(number_cell(values[m], found[m], unit="", claimed=said.get(m)) for m in METHODS), compared]
        for name, values, said, compared in lines
    ]
    for name, metric, factor, unit in (
        ("training loss of the last epoch", "train_loss", 1.0, ""),
        ("test error", "test_error", 100.0, "%"),
    ):
        cells = [number_cell(metric_by_seed(found[m], metric, factor), found[m], unit=unit) for m in METHODS]
        rows.append([name, *cells, ""])
    return Table(
        title="Curvature at the end of training and before",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note="Claimed: of one model each, WRN-40-10 on CIFAR-10; 'up to' of the ratio is over its figure's epochs.",
    )


def _largest_ratio(outcomes: Sequence[Outcome], spectra: dict[int, Measurement]) -> dict[int, float]:
    def read(outcome: Outcome) -> float | None:
        ratios = [outcome.measured[m][RATIO] for m in spectra.values() if m in outcome.measured]
        return max((r for r in ratios if r is not None and math.isfinite(r)), default=None)

    return by_seed(outcomes, read)


def _lambda_figures(found: dict[str, list[Outcome]], spectra: dict[int, Measurement]) -> list[LineFigure]:
    return [
        LineFigure(
            title=f"{name} along training",
            x_label="epoch",
            y_label=name,
            series=[
                series_over(method, {e: measured_by_seed(outcomes, m, itemgetter(key)) for e, m in spectra.items()})
                for method, outcomes in found.items()
                if outcomes
            ],
            log_y=True,
            runs=runs_of(found),
        )
        for name, key in QUANTITIES.items()
    ]


def _density_figures(found: dict[str, list[Outcome]], spectra: dict[int, Measurement]) -> list[LineFigure]:
    """One figure for each epoch, with both methods on one axis."""
    figures: list[LineFigure] = []
    for epoch, measurement in spectra.items():
        first = {method: outcomes[0] for method, outcomes in found.items() if outcomes}
        title = f"Spectrum of the Hessian after epoch {epoch}, first replica of each"
        figures += density_figures(first, measurement, title)
    return figures


def _not_converged(found: dict[str, list[Outcome]]) -> list[str]:
    spectra = [facts for outcomes in found.values() for o in outcomes for facts in o.measured.values()]
    bad = sum(not facts.get("converged", True) for facts in spectra)
    return [f"In {bad} of {len(spectra)} spectra the largest eigenvalues had not converged."] if bad else []
