"""The tables and plots of Figure 3, left: curvature where the training loss falls below a value, and at the end."""

import math
from collections.abc import Mapping, Sequence

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.runs.record import MeasurementResult, RunRecord
from flatmin.lab.spec.experiment import Augment
from flatmin.lab.studies.contrasts import Contrast, Family
from flatmin.lab.studies.findings import LineFigure, Row, Table
from flatmin.lab.studies.replicas import Read, Replicas, density_figures, measured, metric, runs_of, series_over
from flatmin.lab.sweeps.measurements import Spectrum
from flatmin.lab.sweeps.spectrum_at_loss import SpectrumAtLoss

RATIO = "lambda_1_over_lambda_5"
QUANTITIES = {"lambda_max": "lambda_max", "lambda_max/lambda_5": RATIO}
"""By the claims' name: what the measurements call it."""
WORDS: dict[Augment, str] = {"none": "without augmentation", "basic": "basic augmentation"}
METHODS = ("SGD", "SAM")
Key = tuple[Augment, str]
"""Augmentation and method."""
Limits = Mapping[tuple[Augment, float], Contrast]
"""By augmentation and limit of the training loss."""


def at_limit(at_loss: SpectrumAtLoss, limit: float, name: str) -> Read:
    """Return how to read a number of where the training loss first falls below a limit; None where it never does."""

    def number(facts: MeasurementResult) -> float | None:
        at = facts["at_loss"][f"{limit:g}"]
        return None if at is None else at[name]

    return measured(at_loss, number)


def log_at_limit(at_loss: SpectrumAtLoss, limit: float) -> Read:
    """Return how to read the logarithm (base 10) of lambda_max there: a difference is then one of a ratio."""
    read = at_limit(at_loss, limit, "lambda_max")

    def log10(record: RunRecord) -> float | None:
        value = read(record)
        return None if value is None or value <= 0 else math.log10(value)

    return log10


def curvature_table(models: Mapping[Key, Replicas], limits: Limits, family: Family, at_loss: SpectrumAtLoss) -> Table:
    """Return lambda_max at each limit, and what is compared: its logarithm."""
    rows: list[Row] = [
        [
            augment,
            f"{limit:g}",
            *(models[augment, m].cell(at_limit(at_loss, limit, "lambda_max"), unit="") for m in METHODS),
            family.comparison(contrast),
        ]
        for (augment, limit), contrast in limits.items()
    ]
    return Table(
        title="lambda_max where the training loss first falls below a value",
        columns=["augmentation", "training loss", *METHODS, "log10, SAM - SGD"],
        rows=rows,
        note="Of the Hessian of the loss on the training images, not augmented. A run that never falls below a value "
        "has no number there, and then nothing is tested.",
    )


def where_table(models: Mapping[Key, Replicas], limits: Limits, at_loss: SpectrumAtLoss) -> Table:
    """Return the epoch and the loss at which the curvature is measured, and the ratio of eigenvalues."""
    numbers = {"epoch": "epoch", "loss": "loss", "lambda_max/lambda_5": RATIO}
    rows: list[Row] = [
        [
            augment,
            f"{limit:g}",
            *(
                models[augment, m].cell(at_limit(at_loss, limit, key), unit="")
                for key in numbers.values()
                for m in METHODS
            ),
        ]
        for augment, limit in limits
    ]
    return Table(
        title="Where that is",
        columns=["augmentation", "training loss", *(f"{name}, {m}" for name in numbers for m in METHODS)],
        rows=rows,
        note="Described, not tested. The learning rate follows the epoch, so the methods differ in it.",
    )


def end_table(
    models: Mapping[Key, Replicas],
    at_end: Sequence[Contrast],
    family: Family,
    at_loss: SpectrumAtLoss,
    spectra: Sequence[Spectrum],
) -> Table:
    """Return the curvature at the end of training; what is compared, and the paper's numbers, for the first models."""
    augments = list(dict.fromkeys(augment for augment, _ in models))
    last = spectra[-1]
    readings: list[tuple[str, str, Read]] = [
        *((f"{name} at the end", "", measured(last, key)) for name, key in QUANTITIES.items()),
        ("largest lambda_max/lambda_5", "", _largest_ratio(at_loss, spectra)),
        ("training loss of the last epoch", "", metric("train_loss", 1.0)),
        ("training error", "%", metric("train_error")),
        ("test error", "%", metric("test_error")),
    ]
    # Of the ratio the paper says only "up to": that stands next to the largest one.
    claimed = {"lambda_max at the end": "lambda_max", "largest lambda_max/lambda_5": "lambda_max/lambda_5"}
    compared = {name: family.comparison(c) for (name, _, _), c in zip(readings, at_end, strict=False)}
    rows: list[Row] = []
    for augment in augments:
        own = {m: models[augment, m] for m in METHODS}
        is_first = augment == augments[0]
        for name, unit, read in readings:
            said = claimed.get(name) if is_first else None
            papers = [None if said is None else CLAIMS[said, m.lower()].printed for m in METHODS]
            cells = [g.cell(read, unit=unit, claimed=p) for g, p in zip(own.values(), papers, strict=True)]
            rows.append([augment, name, *cells, compared.get(name, "") if is_first else ""])
        if own["SAM"].by_seed(metric("rho")):
            rows.append([augment, "rho", "", own["SAM"].cell(metric("rho", 1.0), unit=""), ""])
    return Table(
        title="At the end of training",
        columns=["augmentation", "", *METHODS, "SAM - SGD"],
        rows=rows,
        note=f"Of the Hessian of the loss on {last.num_examples:,} training images. The largest ratio is over the end "
        "and the losses above. Claimed: of one model each, WRN-40-10 on CIFAR-10.",
    )


def _largest_ratio(at_loss: SpectrumAtLoss, spectra: Sequence[Spectrum]) -> Read:
    reads = [*(at_limit(at_loss, x, RATIO) for x in at_loss.limits), *(measured(m, RATIO) for m in spectra)]

    def largest(record: RunRecord) -> float | None:
        ratios = (read(record) for read in reads)
        return max((ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)), default=None)

    return largest


def over_loss(models: Mapping[Key, Replicas], at_loss: SpectrumAtLoss) -> list[LineFigure]:
    """Return lambda_max and the ratio over the training loss, of the models of one augmentation."""
    own = {key: group for key, group in models.items() if group.runs}
    return [
        LineFigure(
            title=f"{name} over the training loss, {WORDS[augment]}",
            x_label="training loss",
            y_label=name,
            series=[
                series
                for group in own.values()
                for series in [
                    series_over(group.name, {x: group.by_seed(at_limit(at_loss, x, key)) for x in at_loss.limits})
                ]
                if series.x
            ],
            log_x=True,
            log_y=True,
            runs=runs_of(own.values()),
        )
        for name, key in QUANTITIES.items()
        for augment in dict.fromkeys(augment for augment, _ in own)
    ]


def density_along(models: Mapping[Key, Replicas], spectra: Mapping[int, Spectrum]) -> list[LineFigure]:
    """Return the densities of the Hessian's eigenvalues after each epoch, of the models of one augmentation."""
    augment, _ = next(iter(models))
    return [
        figure
        for epoch, spectrum in spectra.items()
        for figure in density_figures(
            models.values(),
            spectrum,
            f"Spectrum of the Hessian after epoch {epoch}, {WORDS[augment]}, first replica of each",
        )
    ]
