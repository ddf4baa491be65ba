"""The study behind ``flatmin demo``: SGD and SAM on 500 embedded digits, with clean and with 40 % noisy labels.

Model, learning rate and rho were tuned on validation data by ``experiments/choose_demo_settings.py``, whose result is
``settings.json``; the test set was not used. It takes two minutes on two cores.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import at_best_epoch
from flatmin.lab.studies.contrasts import Contrast, Family, mean
from flatmin.lab.studies.findings import Cell, Findings, Hyperparameter, LineFigure, Row, Table, Verdict
from flatmin.lab.studies.replicas import Replicas, density_figures, landscape_figures, measured, replicas_of, runs_of
from flatmin.lab.studies.statistics import SIGNIFICANT, Interval, p_text
from flatmin.lab.studies.study import Item, Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Landscape, Sharpness, Spectrum

SEEDS = (0, 1, 2, 3, 4)
NOISE_RATES = (0.0, 0.4)
TRAIN_SIZE, VALIDATION, BATCH_SIZE, EPOCHS = 500, 0.5, 64, 30
PART = 1 / 8
METHODS: dict[str, Callable[[Experiment, str], Experiment]] = {
    "SGD": lambda sgd, _: sgd,
    "SGD, twice the epochs": lambda sgd, _: replace(sgd, epochs=2 * sgd.epochs),
    "SAM": lambda sgd, rho: replace(sgd, optim=replace(sgd.optim, rho=rho)),
    "SAM on 1/8": lambda sgd, rho: replace(sgd, optim=replace(sgd.optim, rho=rho, part=PART)),
}
"""What each method makes of SGD's experiment and the tuned rho, a factor of what `flatmin.suggest_rho` says. Methods
without SAM are baselines. The factor is tuned for SAM; for a part the suggestion is measured on parts."""
BASELINES = ("SGD", "SGD, twice the epochs")
EARLY = "SGD, stopped early"
"""SGD at the epoch with the lowest validation error: with noisy labels, most of what SAM gains over SGD."""
CURVES = ("valid_error", "test_error", "train_error")
SHARPNESS = Sharpness(rho=0.05, m=BATCH_SIZE)
CURVATURE = Spectrum(num_eigenvalues=1, steps=2, probes=1)
SPECTRUM = Spectrum(num_eigenvalues=1, steps=40, probes=2)
LANDSCAPE = Landscape(span=1.0, points=15)
TITLE, SOURCE = "SGD and SAM, with clean and with noisy labels", "flatmin demo"
ABOUT = (
    "A small model trained with SGD, with SGD for twice as many epochs (SAM computes two gradients per step), with "
    "SAM, and with SAM on an eighth of each batch (1.125 gradients per step); with clean labels, and with 40 % of the "
    "training labels replaced by another class. SGD stopped early is SGD at the epoch with the lowest validation "
    "error. Five seeds each; validation and test digits are others, with clean labels."
)
NOTES = (
    "m-sharpness: how far the training loss rises within rho = 0.05 on subsets of 64 examples. lambda_max: the largest "
    "eigenvalue of the Hessian of the training loss. Both are measured at the final weights, on the training set with "
    "the labels that were trained on.",
    "A model that has fitted all its labels, noisy ones included, also has a flat neighborhood: check its training "
    "error.",
    "Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository "
    "(CC BY 4.0).",
)
ByMethod = Mapping[str, Replicas]


def demo_experiment(*, network: str, lr: float, rho: float | str, noise: float, seed: int = 0) -> Experiment:
    """Return an experiment of the demo or of the sweep that tuned its settings.

    The subset, the validation split and the label noise depend on the seed: the seeds are independent replicas.
    """
    return Experiment(
        name="demo",
        data=Data(train_size=TRAIN_SIZE, validation=VALIDATION, batch_size=BATCH_SIZE, label_noise=noise, seed=seed),
        model=Model(name=network),
        optim=Optim(lr=lr, rho=rho),
        epochs=EPOCHS,
        precision="float32",
    )


def demo_settings() -> dict[str, Any]:
    """Return what the sweep chose, and all it measured."""
    settings: dict[str, Any] = json.loads(files("flatmin.lab.demo").joinpath("settings.json").read_text())
    return settings


def demo_experiments(seed: int) -> dict[tuple[float, str], Experiment]:
    """Return the experiments of a seed, by noise rate and method."""
    chosen = demo_settings()["chosen"]
    experiments = {}
    for noise in NOISE_RATES:
        sgd = demo_experiment(network=chosen["network"], lr=chosen["lr"], rho=0.0, noise=noise, seed=seed)
        for method, change in METHODS.items():
            label = f"{method}, {_labels(noise)}, seed {seed}"
            experiments[noise, method] = replace(change(sgd, chosen["rho"][str(noise)]), name=label)
    return experiments


def demo_jobs(scale: Scale, known: Known) -> dict[tuple[float, str], list[Job]]:
    """Return the models of all seeds, by noise rate and method; there is one scale."""
    jobs: dict[tuple[float, str], list[Job]] = {}
    for seed in SEEDS:
        for key, experiment in demo_experiments(seed).items():
            drawn = seed == SEEDS[0] and experiment.epochs == EPOCHS
            measurements = (SHARPNESS, CURVATURE, *((SPECTRUM, LANDSCAPE) if drawn else ()))
            job = Job(experiment=experiment, seed=seed, measurements=measurements, curves=CURVES)
            jobs.setdefault(key, []).append(job)
    return jobs


def demo(scale: Scale, known: Known) -> Findings:
    """Return what the models show."""
    asked = replicas_of(demo_jobs(scale, known), known)
    models = {noise: {m: replace(asked[noise, m], name=m) for m in METHODS} for noise in NOISE_RATES}
    settings = demo_settings()
    chosen = settings["chosen"]
    tuned = {"model": chosen["network"], "learning rate": chosen["lr"]}
    tuned |= {f"rho, {_labels(float(noise))}": rho for noise, rho in chosen["rho"].items()}
    contrasts = [(noise, contrast) for noise in NOISE_RATES for contrast in _contrasts(models[noise], noise)]
    family = Family([contrast for _, contrast in contrasts])
    judged = [verdict(noise, contrast, family) for noise, contrast in contrasts]
    first = next((number for number, v in enumerate(judged) if v.status == "reproduced"), -1)
    noise = contrasts[first][0]
    early = mean(_early(models[noise]).values())
    return Findings(
        item="demo",
        scale="",
        title=TITLE,
        source=SOURCE,
        about_scale=ABOUT,
        headline=f"{judged[first].evidence} SGD stopped at its best epoch has {early:.1f} %.",
        tables=[_results(models), _tuning(settings)],
        figures=[figure for noise in reversed(NOISE_RATES) for figure in _figures(models[noise], noise)],
        verdicts=judged,
        hyperparameters=[Hyperparameter(name=name, value=v, source="validation") for name, v in tuned.items()],
        notes=NOTES,
    )


def verdict(noise: float, contrast: Contrast, family: Family) -> Verdict:
    """Say in one sentence what SAM did to the test error, and no more than the seeds can show."""
    sam, sgd = contrast.lower_name, contrast.higher_name
    claim = f"With {_labels(noise)}, {sam} has a lower test error than {sgd}."
    judged, p_value = family.judge(claim, [contrast]), family.p_holm(contrast)
    if len(contrast.differences) < contrast.num_asked:
        return judged
    change = f"{mean(contrast.higher.values()):.1f} % ({sgd}) and {mean(contrast.lower.values()):.1f} % ({sam})"
    correction = f", {text}" if (text := family.correction([contrast])) else ""
    test = f"paired t-test over {len(contrast.differences)} seeds{correction}, {p_text(p_value)}"
    if judged.status == "not tested":
        said = f"the test errors are {change}: the same difference for all seeds, so no test is possible."
    elif p_value >= SIGNIFICANT:
        said = f"the test errors are {change}: no significant difference ({test})."
    else:
        direction = "lower" if judged.status == "reproduced" else "higher"
        said = f"the test error of {sam} is {direction}: {change} ({test})."
    return replace(judged, evidence=f"With {_labels(noise)}, {said}")


def _labels(noise: float) -> str:
    return f"{noise:.0%} noisy labels".replace("%", " %") if noise else "clean labels"


def _contrasts(models: ByMethod, noise: float) -> list[Contrast]:
    """Compare every method that has SAM with the better baseline (Section 3.1); with noisy labels, with EARLY too."""
    baselines = [models[method] for method in BASELINES]
    known = [m for m in baselines if m.by_seed("test_error")] or baselines
    best = min(known, key=lambda m: mean(m.by_seed("test_error").values()))
    found = [m.lower_than(best, "test error", "test_error") for m in models.values() if m not in baselines]
    sgd = replace(models["SGD"], name=EARLY)
    stopped = [m.lower_than(sgd, "test error", "test_error") for m in models.values() if m not in baselines and noise]
    return found + [replace(contrast, higher=_early(models)) for contrast in stopped]


def _early(models: ByMethod, name: str = "test_error") -> dict[int, float]:
    return models["SGD"].by_seed(at_best_epoch(name, 100.0))


def _results(models: Mapping[float, ByMethod]) -> Table:
    rows: list[Row] = []
    for noise, by_method in models.items():
        for method, replicas in by_method.items():
            of_losses = (measured(SHARPNESS, "m_sharpness"), measured(CURVATURE, "lambda_max"))
            errors = [replicas.cell(name) for name in ("test_error", "train_error")]
            rows.append([f"{noise:.0%}", method, *errors, *(replicas.cell(read, unit="") for read in of_losses)])
            if method == "SGD":
                early = [replicas.cell_of(_early(by_method, name), unit="%") for name in ("test_error", "train_error")]
                rows.append([f"{noise:.0%}", EARLY, *early, "", ""])
    columns = ("noisy labels", "method", "test error", "train error", "m-sharpness", "lambda_max")
    return Table(title=f"Mean over {len(SEEDS)} seeds with 95 % confidence intervals", columns=columns, rows=rows)


def _tuning(settings: dict[str, Any]) -> Table:
    rows: list[Row] = [
        [
            f"{line['noise']:.0%}",
            line["network"],
            f"{line['lr']:g}",
            line["rho"] or "0",
            Cell(measured=Interval(**line["valid_error"])),
        ]
        for line in settings["sweep"]
    ]
    return Table(
        title="How model, learning rate and rho were chosen",
        columns=("noisy labels", "model", "learning rate", "rho", "validation error"),
        folded=True,
        rows=rows,
        note="On held-out validation digits, with other seeds; the test set was not used. First model and learning "
        "rate for SGD, then rho for SAM, for each noise rate, in units of what flatmin.suggest_rho says at the start.",
    )


def _figures(models: ByMethod, noise: float) -> list[Any]:
    labels = _labels(noise)
    series = [
        replace(curve, half_width=None)
        for method, replicas in models.items()
        for curve in replicas.along_training(method, lambda line: line.get("test_error"))
    ]
    curves = LineFigure(
        title=f"Test error over training, {labels}",
        x_label="epoch",
        y_label="test error, %",
        series=series,
        note=f"Mean over {len(SEEDS)} seeds.",
        runs=runs_of(models.values()),
    )
    return [
        *landscape_figures(models.values(), LANDSCAPE, f"Training loss around the weights, {labels}, seed {SEEDS[0]}"),
        curves,
        *density_figures(models.values(), SPECTRUM, f"Spectrum of the Hessian, {labels}, seed {SEEDS[0]}"),
    ]


DEMO = Item(name="demo", title=TITLE, source=SOURCE, jobs=demo_jobs, findings=demo)
