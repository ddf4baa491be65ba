"""The tables and plots of Figure 3, left: curvature where the training loss falls below a value, and at the end."""

import math
from collections.abc import Iterable, Mapping, Sequence

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.runs.record import MeasurementResult, RunRecord
from flatmin.lab.spec.experiment import Augment
from flatmin.lab.studies.contrasts import Contrast, Family
from flatmin.lab.studies.findings import LineFigure, Row, Table
from flatmin.lab.studies.replicas import Read, Replicas, measured, metric, runs_of, series_over
from flatmin.lab.sweeps.measurements import Spectrum
from flatmin.lab.sweeps.spectrum_at_loss import SpectrumAtLoss

RATIO = "lambda_1_over_lambda_5"
QUANTITIES = {"lambda_max": "lambda_max", "lambda_max/lambda_5": RATIO}
"""By the claims' name: what the measurements call it."""
WORDS: dict[Augment, str] = {"none": "without augmentation", "basic": "basic augmentation"}
METHODS = ("SGD", "SAM")
Models = Mapping[str, Replicas]
"""By method."""


def at_limit(at_loss: SpectrumAtLoss, limit: float, name: str) -> Read:
    """Return how to read a number of where the training loss first falls below a limit; None where it never does."""

    def number(facts: MeasurementResult) -> float | None:
        at = facts["at_loss"][f"{limit:g}"]
        return None if at is None else at[name]

    return measured(at_loss, number)


def curvature_table(
    models: Models, augment: Augment, limits: Mapping[float, Contrast], family: Family, at_loss: SpectrumAtLoss
) -> Table:
    """Return lambda_max at each limit of the training loss, and what is compared: its logarithm."""
    return Table(
        title="lambda_max where the training loss first falls below a value",
        columns=["augmentation", "training loss", *METHODS, "log10, SAM - SGD"],
        rows=[
            [*_row_at(models, augment, limit, ["lambda_max"], at_loss), family.comparison(contrast)]
            for limit, contrast in limits.items()
        ],
        note="Of the Hessian of the loss on the training images, not augmented. A run that never falls below a value "
        "has no number there, and then nothing is tested.",
    )


def where_table(models: Models, augment: Augment, at_loss: SpectrumAtLoss) -> Table:
    """Return the epoch and the loss at which the curvature is measured, and the ratio of eigenvalues."""
    numbers = {"epoch": "epoch", "loss": "loss", "lambda_max/lambda_5": RATIO}
    return Table(
        title="Where that is",
        columns=["augmentation", "training loss", *(f"{name}, {m}" for name in numbers for m in METHODS)],
        rows=[_row_at(models, augment, limit, numbers.values(), at_loss) for limit in at_loss.limits],
        note="Described, not tested. The learning rate follows the epoch, so the methods differ in it.",
    )


def _row_at(models: Models, augment: Augment, limit: float, keys: Iterable[str], at_loss: SpectrumAtLoss) -> Row:
    cells = [models[m].cell(at_limit(at_loss, limit, key), unit="") for key in keys for m in METHODS]
    return [augment, f"{limit:g}", *cells]


def end_table(
    models: Models,
    augment: Augment,
    at_end: Sequence[Contrast],
    family: Family,
    at_loss: SpectrumAtLoss,
    spectra: Sequence[Spectrum],
) -> Table:
    """Return the curvature at the end of training, what is compared, and the paper's numbers."""
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
    for name, unit, read in readings:
        papers = {m: CLAIMS[claimed[name], m.lower()].printed if name in claimed else None for m in METHODS}
        cells = [models[m].cell(read, unit=unit, claimed=printed) for m, printed in papers.items()]
        rows.append([augment, name, *cells, compared.get(name, "")])
    if models["SAM"].by_seed(metric("rho")):
        rows.append([augment, "rho", "", models["SAM"].cell(metric("rho", 1.0), unit=""), ""])
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


def over_loss(models: Models, words: str, at_loss: SpectrumAtLoss) -> list[LineFigure]:
    """Return lambda_max and the ratio over the training loss; nothing before a run is finished."""
    figures = []
    for name, key in QUANTITIES.items() if runs_of(models.values()) else ():
        series = [
            series_over(group.name, {x: group.by_seed(at_limit(at_loss, x, key)) for x in at_loss.limits})
            for group in models.values()
        ]
        figures.append(
            LineFigure(
                title=f"{name} over the training loss, {words}",
                x_label="training loss",
                y_label=name,
                series=[one for one in series if one.x],
                log_x=True,
                log_y=True,
                runs=runs_of(models.values()),
            )
        )
    return figures
