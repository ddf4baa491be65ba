"""Figure 3, left: the spectrum of the Hessian along training with SGD and with SAM (Section 4.2)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.foret2021.claims.figures import CurvatureCell
from flatmin.lab.foret2021.figure_settings import LAPTOP_EPOCHS, findings, jobs_for, start
from flatmin.lab.foret2021.scales import replica_seeds
from flatmin.lab.foret2021.settings import HESSIAN, HESSIAN_AT_EPOCHS
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.contrasts import (
    Contrast,
    comparisons,
    contrast_between,
    judge,
    measured_by_seed,
    metric_by_seed,
    number_cell,
    run_names,
)
from flatmin.lab.studies.findings import Cell, Comparison, Findings, LineFigure, Series, Table, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.sweeps.jobs import Job, Measurement, MeasurementResult, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner
from flatmin.measures.spectrum import SpectralDensity

METHODS = ("SGD", "SAM")
AT_EPOCHS: dict[Scale, tuple[int, ...]] = {
    "paper": HESSIAN_AT_EPOCHS,
    "laptop": (4, LAPTOP_EPOCHS // 2, LAPTOP_EPOCHS),
    "smoke": (1, 2),
}
"""Where the first replica is measured; the last one is the end, where all are."""
LAPTOP_RHO, LAPTOP_BATCH_SIZE = 0.1, 32
"""Without batch norm a network fits its training set only with four times as many steps."""
RATIO = "lambda_1_over_lambda_5"
QUANTITIES = {"lambda_max": "lambda_max", "lambda_max/lambda_5": RATIO}
"""By the claims' name: what the spectra call it."""
NUM_DENSITY_POINTS = 201
DENSITY_FLOOR = 1e-6
"""The density is drawn on a logarithmic scale; below this it is nothing."""


def hessian(scale: Scale, runner: Runner) -> Findings:
    """Compare the curvature that SGD and SAM train into a network without batch norm (Figure 3, left)."""
    recorder = RecordingRunner(runner)
    experiments = hessian_experiments(scale)
    *before, _ = AT_EPOCHS[scale]
    last = _spectrum(scale, None)
    along = {epoch: _spectrum(scale, epoch) for epoch in before}
    jobs: dict[str, list[Job]] = {}
    for method, experiment in experiments.items():
        first, *others = jobs_for(experiment, f"hessian/{method}", replica_seeds(scale), (last,))
        kept = replace(first.experiment, keep_every=math.gcd(*before))  # weights are large: only the first keeps them
        jobs[method] = [replace(first, experiment=kept, measurements=(*along.values(), last)), *others]
    found = recorder.replicas(jobs, "hessian: networks and their spectra")

    contrasts = [
        contrast_between(
            f"{quantity} at the end",
            ("SAM", found["SAM"]),
            ("SGD", found["SGD"]),
            partial(measured_by_seed, measurement=last, read=itemgetter(key)),
            unit="",
        )
        for quantity, key in QUANTITIES.items()
    ]
    spectra = along | {AT_EPOCHS[scale][-1]: last}
    own = own_settings(
        [experiments["SGD"]], ("rho", experiments["SAM"].optim.rho), ("gradient clipping", HESSIAN.clip_norm)
    )
    return findings(
        item="hessian",
        scale=scale,
        title=CLAIMS.title,
        source=CLAIMS.source,
        recorder=recorder,
        tables=[_table(found, last, spectra, contrasts)],
        figures=[*_lambda_figures(found, spectra), *_density_figures(found, spectra)],
        verdicts=[judge(CLAIMS.statements[0].claim, contrasts)],
        hyperparameters=HYPERPARAMETERS["hessian"] if scale == "paper" else own,
        notes=[*CLAIMS.notes, *_not_converged(found)],
    )


def hessian_experiments(scale: Scale) -> dict[str, Experiment]:
    """Return the networks without batch norm, by method."""
    model = Model(name={"paper": HESSIAN.model, "laptop": "wrn-10-2", "smoke": "wrn-10-1"}[scale], norm="none")
    rhos = {"SGD": 0.0, "SAM": HESSIAN.rho if scale == "paper" else LAPTOP_RHO}
    experiments = {method: replace(start(scale, HESSIAN, rho=rho), model=model) for method, rho in rhos.items()}
    if scale == "paper":
        return experiments
    return {
        method: replace(
            e,
            data=replace(e.data, batch_size=min(e.data.batch_size, LAPTOP_BATCH_SIZE)),
            optim=replace(e.optim, clip_norm=HESSIAN.clip_norm),
        )
        for method, e in experiments.items()
    }


def _spectrum(scale: Scale, epoch: int | None) -> Measurement:
    settings: dict[Scale, dict[str, int]] = {
        "paper": {"num_eigenvalues": 5, "steps": 80, "probes": 4, "num_examples": 10_000},
        "laptop": {"num_eigenvalues": 5, "steps": 30, "probes": 1, "num_examples": 200},
        "smoke": {"num_eigenvalues": 5, "steps": 8, "probes": 1, "num_examples": 16},
    }
    return Measurement(kind="spectrum", settings=tuple(settings[scale].items()), epoch=epoch)


def _table(
    found: dict[str, list[Outcome]],
    last: Measurement,
    spectra: dict[int, Measurement],
    contrasts: Sequence[Contrast],
) -> Table:
    rows: list[list[str | Cell | Comparison]] = []
    for contrast, quantity, compared in zip(contrasts, QUANTITIES, comparisons(contrasts), strict=True):
        cells = [
            number_cell(
                contrast.higher if method == "SGD" else contrast.lower,
                found[method],
                unit="",
                claimed=CLAIMS[CurvatureCell(quantity, method.lower())].printed(),
            )
            for method in METHODS
        ]
        rows.append([contrast.quantity, *cells, compared])
    largest = {method: _largest_ratio(outcomes, spectra) for method, outcomes in found.items()}
    rows.append(
        [
            "largest lambda_max/lambda_5 along training (first replica)",
            *(
                number_cell(
                    largest[method],
                    found[method],
                    unit="",
                    claimed=CLAIMS[CurvatureCell("lambda_max/lambda_5", method.lower())].printed(),
                )
                for method in METHODS
            ),
            "",
        ]
    )
    for name, metric, factor, unit in (
        ("training loss of the last epoch", "train_loss", 1.0, ""),
        ("test error", "test_error", 100.0, "%"),
    ):
        cells = [number_cell(metric_by_seed(found[m], metric, factor), found[m], unit=unit) for m in METHODS]
        rows.append([name, *cells, ""])
    return Table(
        title="Curvature at the end of training",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note="Claimed: of one network each, WRN-40-10 on CIFAR-10; 'up to' of the ratio is over its figure's epochs.",
    )


def _largest_ratio(outcomes: Sequence[Outcome], spectra: dict[int, Measurement]) -> dict[int, float]:
    first = outcomes[0]
    ratios = [first.measured[m][RATIO] for m in spectra.values() if m in first.measured]
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    return {first.job.seed: max(known)} if known else {}


def _lambda_figures(found: dict[str, list[Outcome]], spectra: dict[int, Measurement]) -> list[LineFigure]:
    series = []
    for method, outcomes in found.items():
        facts = {epoch: outcomes[0].measured[m] for epoch, m in spectra.items() if m in outcomes[0].measured}
        if facts:
            values = [f["lambda_max"] for f in facts.values()]
            hover = [
                f"epoch {e}: lambda_max/lambda_5 = {f[RATIO]:.3g}" for e, f in facts.items() if f[RATIO] is not None
            ]
            series.append(
                Series(name=method, x=list(facts), y=values, hover=hover if len(hover) == len(facts) else None)
            )
    return [
        LineFigure(
            title="The largest eigenvalue along training, first replica of each",
            x_label="epoch",
            y_label="lambda_max",
            series=series,
            runs=run_names(outcomes[0] for outcomes in found.values()),
        )
    ]


def _density_figures(found: dict[str, list[Outcome]], spectra: dict[int, Measurement]) -> list[LineFigure]:
    """One figure for each epoch, with both methods on one axis."""
    figures = []
    for epoch, measurement in spectra.items():
        facts = {m: o[0].measured[measurement] for m, o in found.items() if measurement in o[0].measured}
        if not facts:
            continue
        nodes = np.concatenate([f["nodes"] for f in facts.values()])
        low, high = float(nodes.min()), float(nodes.max())
        sigma = max(0.01 * (high - low), 1e-9)
        grid = np.linspace(low - 3 * sigma, high + 3 * sigma, NUM_DENSITY_POINTS)
        figures.append(
            LineFigure(
                title=f"Spectrum of the Hessian after epoch {epoch}, first replica of each",
                x_label="eigenvalue",
                y_label="density",
                series=[
                    Series(name=method, x=grid.tolist(), y=_density(f, grid, sigma), mode="lines")
                    for method, f in facts.items()
                ],
                log_y=True,
                note=f"Stochastic Lanczos quadrature, smoothed with a Gaussian of width {sigma:.2g}. Where a curve is "
                f"at {DENSITY_FLOOR:g} there is nothing.",
                runs=run_names(outcomes[0] for outcomes in found.values()),
            )
        )
    return figures


def _density(facts: MeasurementResult, grid: np.ndarray, sigma: float) -> list[float]:
    density = SpectralDensity(np.asarray(facts["nodes"]), np.asarray(facts["weights"])).density(grid, sigma)
    return [max(float(value), DENSITY_FLOOR) for value in density]


def _not_converged(found: dict[str, list[Outcome]]) -> list[str]:
    spectra = [facts for outcomes in found.values() for o in outcomes for facts in o.measured.values()]
    bad = sum(not facts.get("converged", True) for facts in spectra)
    return [f"In {bad} of {len(spectra)} spectra the largest eigenvalues had not converged."] if bad else []
