"""``flatmin demo``: SGD and SAM on 500 embedded digits, clean and with 40 % wrong labels, in minutes on two cores.

Network, learning rate and rho come from a validation sweep (``experiments/choose_demo_settings.py``) whose result is
stored in ``settings.json``; the test set had no part in it.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flatmin.lab.runs.directory import Result
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.statistics import SIGNIFICANT, Interval, mean_and_interval, paired_p_value
from flatmin.lab.training.engine import train

SEEDS = (0, 1, 2)
NOISE_RATES = (0.0, 0.4)
METHODS = ("SGD", "SGD, twice the epochs", "SAM")
TRAIN_SIZE, VALIDATION, BATCH_SIZE, EPOCHS = 500, 0.5, 64, 30


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One trained and measured network of the demonstration."""

    noise: float
    method: str
    result: Result
    m_sharpness: float
    lambda_max: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a method under a condition, over all seeds."""

    noise: float
    method: str
    test_error: Interval
    train_error: Interval
    m_sharpness: Interval
    lambda_max: Interval
    runs: list[DemoRun]


def demo_experiment(
    *, network: str, lr: float, rho: float, noise: float, epochs: int = EPOCHS, seed: int = 0
) -> Experiment:
    """Return an experiment of the demonstration or of the sweep that chose its settings.

    The subset, the validation split and the label noise belong to the seed, so that the seeds are independent replicas.
    """
    return Experiment(
        name="demo",
        data=Data(train_size=TRAIN_SIZE, validation=VALIDATION, batch_size=BATCH_SIZE, label_noise=noise, seed=seed),
        model=Model(name=network),
        optim=Optim(lr=lr, rho=rho),
        epochs=epochs,
        precision="float32",
    )


def demo_settings() -> dict[str, Any]:
    """Return what the sweep chose, and all it measured."""
    settings: dict[str, Any] = json.loads(files("flatmin.lab.demo").joinpath("settings.json").read_text())
    return settings


def demo_experiments(seed: int) -> dict[tuple[float, str], Experiment]:
    """Return the six experiments of a seed, by noise rate and method."""
    chosen = demo_settings()["chosen"]
    found = {}
    for noise in NOISE_RATES:
        common = {"network": chosen["network"], "lr": chosen["lr"], "noise": noise, "seed": seed}
        sgd = demo_experiment(rho=0.0, **common)
        found[noise, "SGD"] = sgd
        found[noise, "SGD, twice the epochs"] = replace(sgd, epochs=2 * EPOCHS)
        found[noise, "SAM"] = demo_experiment(rho=chosen["rho"][str(noise)], **common)
    return found


def run_one(noise: float, method: str, experiment: Experiment, seed: int, runs: Path) -> DemoRun:
    """Train one network and measure it on its training set: m-sharpness with m = 1 batch, and lambda_max."""
    from flatmin.lab.training.trained_model import load_trained
    from flatmin.measures import HessianOperator, m_sharpness, top_eigenvalues

    torch.set_num_threads(1)
    result = train(experiment, seed=seed, runs=runs)
    cache = result.directory / "demo_measures.json"
    if not cache.exists():
        trained = load_trained(result.directory)
        data = trained.training_batches()
        sharpness = m_sharpness(trained.network, F.cross_entropy, data, rho=0.05, m=BATCH_SIZE).mean
        top = top_eigenvalues(HessianOperator(trained.network, F.cross_entropy, data), 1, tol=1e-2)
        cache.write_text(json.dumps({"m_sharpness": sharpness, "lambda_max": float(top.values[0])}))
    measured = json.loads(cache.read_text())
    return DemoRun(noise=noise, method=method, result=result, **measured)


def summarize(runs: Iterable[DemoRun]) -> list[Row]:
    """Return a row for each noise rate and method."""
    rows = []
    runs = list(runs)
    for noise in NOISE_RATES:
        for method in METHODS:
            group = sorted((r for r in runs if (r.noise, r.method) == (noise, method)), key=lambda r: r.result.seed)
            rows.append(
                Row(
                    noise=noise,
                    method=method,
                    test_error=mean_and_interval([100 * float(r.result.metrics["test_error"] or 0) for r in group]),
                    train_error=mean_and_interval([100 * float(r.result.metrics["train_error"] or 0) for r in group]),
                    m_sharpness=mean_and_interval([r.m_sharpness for r in group]),
                    lambda_max=mean_and_interval([r.lambda_max for r in group]),
                    runs=group,
                )
            )
    return rows


def best_baseline(rows: list[Row], noise: float) -> Row:
    """Return the better of the two baselines, by mean test error, as the paper reports it (Section 3.1)."""
    return min((r for r in rows if r.noise == noise and r.method != "SAM"), key=lambda row: row.test_error.mean)


def verdict(rows: list[Row], noise: float) -> str:
    """Say in one sentence what SAM did under a condition, and no more than the seeds can show."""
    sgd, sam = best_baseline(rows, noise), next(r for r in rows if (r.noise, r.method) == (noise, "SAM"))

    def errors(row: Row) -> list[float]:
        return [float(r.result.metrics["test_error"] or 0) for r in row.runs]

    p_value = paired_p_value(errors(sgd), errors(sam))
    condition = f"With {noise:.0%} wrong labels" if noise else "With clean labels"
    change = f"{sgd.test_error.mean:.1f} % ({sgd.method}) and {sam.test_error.mean:.1f} % (SAM)"
    if math.isnan(p_value):
        return f"{condition} the test errors are {change}: the same difference for all seeds, which no test can judge."
    if p_value >= SIGNIFICANT:
        return (
            f"{condition} the test errors are {change}: no difference that {len(SEEDS)} seeds can show "
            f"(paired t-test, p = {p_value:.2f})."
        )
    direction = "lower" if sam.test_error.mean < sgd.test_error.mean else "higher"
    evidence = f"paired t-test over {len(SEEDS)} seeds, p = {p_value:.3f}"
    return f"{condition} SAM's test error is {direction}: {change} ({evidence})."
