"""Figure 3, left (Section 4.2): the spectrum of the Hessian along training with SGD and with SAM.

    flatmin reproduce hessian --scale laptop    # 25 minutes on two cores

SAM's curvature is lower along training, and higher at its end, where the loss of SGD's models is almost 0.
All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters
from flatmin.lab.foret2021.scales import LAPTOP_EPOCHS, curvature_seeds, jobs_for, start, tuned_rho
from flatmin.lab.foret2021.settings import HESSIAN, HESSIAN_AT_EPOCHS
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.contrasts import BySeed, Contrast, Family, mean
from flatmin.lab.studies.findings import Comparison, Findings, LineFigure, Row, Table
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.measured_figures import density_figures
from flatmin.lab.studies.replicas import Read, RecordingRunner, Replicas, measured, metric, runs_of, series_over
from flatmin.lab.sweeps.jobs import Job, Measurement, Outcome
from flatmin.lab.sweeps.runners import Runner

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
    models = recorder.replicas(jobs, "hessian: models and their spectra")

    def lower(what: str, read: Read) -> Contrast:
        return models["SAM"].lower_than(models["SGD"], what, read, unit="")

    at_end = [lower(f"{name} at the end", measured(last, key)) for name, key in QUANTITIES.items()]
    epochs = " and ".join(map(str, before))
    before_end = [
        lower(f"log10 of {name}, mean of epochs {epochs}", mean_log(list(along.values()), key))
        for name, key in QUANTITIES.items()
    ]
    family = Family([*at_end, *before_end])
    spectra = along | {AT_EPOCHS[scale][-1]: last}
    claim = CLAIMS.statements[0].claim
    facts = [facts for m in models.values() for outcome in m.outcomes for facts in outcome.measured.values()]
    bad = sum(not spectrum.get("converged", True) for spectrum in facts)
    densities = (
        density_figures(models.values(), m, f"Spectrum of the Hessian after epoch {epoch}, first replica of each")
        for epoch, m in spectra.items()
    )
    return findings(
        "hessian",
        scale,
        recorder,
        tables=[_table(models, spectra, family, at_end, before_end)],
        figures=[*_lambda_figures(models, spectra), *(figure for figures in densities for figure in figures)],
        verdicts=[
            family.judge(claim, at_end),
            family.judge(f"Before the end of training, too: {claim}", before_end),
        ],
        hyperparameters=hyperparameters(
            "hessian",
            scale,
            [sgd],
            ("rho, chosen on validation", rho or "not chosen yet"),
            ("gradient clipping", HESSIAN.clip_norm),
        ),
        notes=[f"In {bad} of {len(facts)} spectra the largest eigenvalues had not converged."] if bad else [],
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


def mean_log(measurements: Sequence[Measurement], key: str) -> Read:
    """Return how to read the mean over several spectra of the logarithm (base 10) of a number.

    Curvature changes by orders of magnitude along training: a mean of logarithms is not that of one epoch.
    """

    def read(outcome: Outcome) -> float | None:
        values = [outcome.measured[m][key] for m in measurements if m in outcome.measured]
        if len(values) < len(measurements) or any(value is None or value <= 0 for value in values):
            return None
        return mean(math.log10(value) for value in values)

    return read


def _spectrum(scale: Scale, epoch: int | None) -> Measurement:
    settings: dict[Scale, dict[str, int]] = {
        "paper": {"num_eigenvalues": 5, "steps": 80, "probes": 4, "num_examples": 10_000},
        "laptop": {"num_eigenvalues": 5, "steps": 30, "probes": 1, "num_examples": 200},
        "smoke": {"num_eigenvalues": 5, "steps": 8, "probes": 1, "num_examples": 16},
    }
    return Measurement(kind="spectrum", settings=tuple(settings[scale].items()), epoch=epoch)


def _table(
    models: Mapping[str, Replicas],
    spectra: Mapping[int, Measurement],
    family: Family,
    at_end: Sequence[Contrast],
    before_end: Sequence[Contrast],
) -> Table:
    def largest_ratio(outcome: Outcome) -> float | None:
        ratios = [outcome.measured[m][RATIO] for m in spectra.values() if m in outcome.measured]
        return max((r for r in ratios if r is not None and math.isfinite(r)), default=None)

    def row(name: str, values: Sequence[BySeed], compared: Comparison | str, claimed: str = "") -> Row:
        said = [CLAIMS[claimed, m.lower()].printed if claimed else None for m in models]
        triples = zip(models.values(), values, said, strict=True)
        return [name, *(m.cell_of(v, unit="", claimed=text) for m, v, text in triples), compared]

    # Of the ratio the paper says only "up to": that stands next to the largest one along training.
    of_lambda, of_ratio = at_end
    rows: list[Row] = [
        row(of_lambda.quantity, [of_lambda.higher, of_lambda.lower], family.comparison(of_lambda), "lambda_max"),
        row(of_ratio.quantity, [of_ratio.higher, of_ratio.lower], family.comparison(of_ratio)),
        row(
            "largest lambda_max/lambda_5 along training",
            [m.by_seed(largest_ratio) for m in models.values()],
            "",
            "lambda_max/lambda_5",
        ),
        *(row(c.quantity, [c.higher, c.lower], family.comparison(c)) for c in before_end),
        [
            "training loss of the last epoch",
            *(m.cell(metric("train_loss", 1.0), unit="") for m in models.values()),
            "",
        ],
        ["test error", *(m.cell("test_error") for m in models.values()), ""],
    ]
    return Table(
        title="Curvature at the end of training and before",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note="Claimed: of one model each, WRN-40-10 on CIFAR-10; 'up to' of the ratio is over its figure's epochs.",
    )


def _lambda_figures(models: Mapping[str, Replicas], spectra: Mapping[int, Measurement]) -> list[LineFigure]:
    return [
        LineFigure(
            title=f"{name} along training",
            x_label="epoch",
            y_label=name,
            series=[
                series_over(m.name, {epoch: m.by_seed(measured(s, key)) for epoch, s in spectra.items()})
                for m in models.values()
                if m.outcomes
            ],
            log_y=True,
            runs=runs_of(models.values()),
        )
        for name, key in QUANTITIES.items()
    ]
