"""Figure 3, left (Section 4.2): the spectrum of the Hessian along training with SGD and with SAM.

    flatmin reproduce hessian --scale laptop    # 25 minutes on two cores

SAM's curvature is lower along training, and higher at its end, where the loss of SGD's models is almost 0.
All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flatmin.lab.foret2021.claims.figures import HESSIAN as CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import LAPTOP_EPOCHS, curvature_seeds, jobs_for, start, tuned_rho
from flatmin.lab.foret2021.settings import HESSIAN, HESSIAN_AT_EPOCHS
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.contrasts import BySeed, Contrast, Family, mean
from flatmin.lab.studies.findings import Comparison, Findings, LineFigure, Row, Table
from flatmin.lab.studies.replicas import (
    Read,
    Replicas,
    density_figures,
    measured,
    metric,
    replicas_of,
    runs_of,
    series_over,
)
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Spectrum

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


def hessian_jobs(scale: Scale, known: Known) -> dict[str, list[Job]]:
    """Return the runs that choose rho, and the models with their spectra."""
    sgd = hessian_experiment(scale)
    rho, choosing = tuned_rho(known, "hessian", scale, HESSIAN, sgd)
    *before, _ = AT_EPOCHS[scale]
    jobs: dict[str, list[Job]] = {"choosing": choosing, "SGD": [], "SAM": []}
    for method, radius in (("SGD", 0.0), ("SAM", rho)):
        if radius is not None:
            kept = replace(sgd, keep_every=math.gcd(*before), optim=replace(sgd.optim, rho=radius))
            spectra = tuple(spectra_of(scale).values())
            jobs[method] = jobs_for(kept, f"hessian/{method}", curvature_seeds(scale), spectra)
    return jobs


def hessian(scale: Scale, known: Known) -> Findings:
    """Compare the curvature that SGD and SAM train into a model without batch norm (Figure 3, left)."""
    sgd = hessian_experiment(scale)
    rho, _ = tuned_rho(known, "hessian", scale, HESSIAN, sgd)
    spectra = spectra_of(scale)
    *before, end = spectra
    along, last = {epoch: spectra[epoch] for epoch in before}, spectra[end]
    models = replicas_of(hessian_jobs(scale, known), known)
    del models["choosing"]

    def lower(what: str, read: Read) -> Contrast:
        return models["SAM"].lower_than(models["SGD"], what, read, unit="")

    at_end = [lower(f"{name} at the end", measured(last, key)) for name, key in QUANTITIES.items()]
    epochs = " and ".join(map(str, before))
    before_end = [
        lower(f"log10 of {name}, mean of epochs {epochs}", mean_log(list(along.values()), key))
        for name, key in QUANTITIES.items()
    ]
    family = Family([*at_end, *before_end])
    claim = CLAIMS.statements[0].claim
    names = {spectrum.name for spectrum in spectra.values()}
    known_facts = (record.measured.items() for m in models.values() for record in m.records)
    facts = [spectrum for items in known_facts for name, spectrum in items if name in names]
    bad = sum(not spectrum.get("converged", True) for spectrum in facts)
    densities = (
        density_figures(models.values(), m, f"Spectrum of the Hessian after epoch {epoch}, first replica of each")
        for epoch, m in spectra.items()
    )
    return findings(
        "hessian",
        scale,
        tables=[_table(models, spectra, family, at_end, before_end)],
        figures=[*_lambda_figures(models, spectra), *(figure for figures in densities for figure in figures)],
        verdicts=[family.judge(claim, at_end), family.judge(f"Before the end of training, too: {claim}", before_end)],
        hyperparameters=hyperparameters(
            "hessian",
            scale,
            [sgd],
            ("rho, chosen on validation", rho or "not chosen yet"),
            ("gradient clipping", HESSIAN.optim.clip_norm),
        ),
        notes=[f"In {bad} of {len(facts)} spectra the largest eigenvalues had not converged."] if bad else [],
    )


def hessian_experiment(scale: Scale) -> Experiment:
    """Return the model without batch norm that is trained with SGD."""
    model = Model(name={"paper": HESSIAN.model.name, "laptop": "wrn-10-2", "smoke": "wrn-10-1"}[scale], norm="none")
    sgd = replace(start(scale, HESSIAN, rho=0.0), model=model)
    if scale == "paper":
        return sgd
    return replace(
        sgd,
        data=replace(sgd.data, batch_size=min(sgd.data.batch_size, LAPTOP_BATCH_SIZE)),
        optim=replace(sgd.optim, clip_norm=HESSIAN.optim.clip_norm),
    )


def mean_log(measurements: Sequence[Spectrum], key: str) -> Read:
    """Return how to read the mean over several spectra of the logarithm (base 10) of a number.

    Curvature changes by orders of magnitude along training: one epoch cannot dominate a mean of logarithms.
    """

    def read(record: RunRecord) -> float | None:
        values = [record.measured[m.name][key] for m in measurements if m.name in record.measured]
        if len(values) < len(measurements) or any(value is None or value <= 0 for value in values):
            return None
        return mean(math.log10(value) for value in values)

    return read


def spectra_of(scale: Scale) -> dict[int, Spectrum]:
    """Return how the Hessian is measured, by epoch; the last one is the end of training."""
    settings: dict[Scale, Spectrum] = {
        "paper": Spectrum(steps=80, probes=4, num_examples=10_000),
        "laptop": Spectrum(steps=30, probes=1, num_examples=200),
        "smoke": Spectrum(steps=8, probes=1, num_examples=16),
    }
    *before, end = AT_EPOCHS[scale]
    return {epoch: replace(settings[scale], epoch=epoch) for epoch in before} | {end: settings[scale]}


def _table(
    models: Mapping[str, Replicas],
    spectra: Mapping[int, Spectrum],
    family: Family,
    at_end: Sequence[Contrast],
    before_end: Sequence[Contrast],
) -> Table:
    def largest_ratio(record: RunRecord) -> float | None:
        ratios = [record.measured[m.name][RATIO] for m in spectra.values() if m.name in record.measured]
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
        ["training loss of the last epoch", *(m.cell(metric("train_loss", 1.0), unit="") for m in models.values()), ""],
        ["test error", *(m.cell("test_error") for m in models.values()), ""],
    ]
    return Table(
        title="Curvature at the end of training and before",
        columns=["", "SGD", "SAM", "SAM - SGD"],
        rows=rows,
        note="Claimed: of one model each, WRN-40-10 on CIFAR-10; 'up to' of the ratio is over its figure's epochs.",
    )


def _lambda_figures(models: Mapping[str, Replicas], spectra: Mapping[int, Spectrum]) -> list[LineFigure]:
    return [
        LineFigure(
            title=f"{name} along training",
            x_label="epoch",
            y_label=name,
            series=[
                series_over(m.name, {epoch: m.by_seed(measured(s, key)) for epoch, s in spectra.items()})
                for m in models.values()
                if m.records
            ],
            log_y=True,
            runs=runs_of(models.values()),
        )
        for name, key in QUANTITIES.items()
    ]


SPECTRA = item("hessian", hessian_jobs, hessian)
