"""Measures of a run's network, written beside the run: what ``flatmin measure`` does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F

from flatmin.lab.fields import SpecError
from flatmin.lab.jobs import Facts, Measurement
from flatmin.lab.trained import Trained, load_trained
from flatmin.measures import (
    HessianOperator,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    sam_update_cosine,
    spectral_density,
    top_eigenvalues,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_sharpness(
    trained: Trained, folder: Path, *, rho: float, m: int | None, steps: int, num_examples: int | None
) -> Facts:
    """Measure m-sharpness on training examples (Section 4.1)."""
    data = trained.training_batches(num_examples)
    found = m_sharpness(trained.network, F.cross_entropy, data, rho=rho, m=m, steps=steps)
    facts = {
        "m_sharpness": found.mean,
        "standard_error": found.standard_error,
        "loss": found.value,
        "rho": found.rho,
        "m": found.m,
        "steps": steps,
        "num_examples": int(found.sizes.sum()),
    }
    return _written(folder, "sharpness", facts, found.plot)


def measure_spectrum(
    trained: Trained, folder: Path, *, num_eigenvalues: int, steps: int, probes: int, num_examples: int | None
) -> Facts:
    """Measure the largest eigenvalues and the density of the Hessian of the training loss (Section 4.2)."""
    data = trained.training_batches(num_examples)
    operator = HessianOperator(trained.network, F.cross_entropy, data)
    top = top_eigenvalues(operator, num_eigenvalues)
    density = spectral_density(operator, steps=steps, probes=probes)
    facts = {
        "lambda_max": float(top.values[0]),
        "eigenvalues": top.values.tolist(),
        "residuals": top.residuals.tolist(),
        "converged": bool(top.converged),
        "lambda_1_over_lambda_5": top.ratio(1, 5) if num_eigenvalues >= 5 else None,
        "nodes": density.nodes.tolist(),
        "weights": density.weights.tolist(),
        "num_examples": sum(len(labels) for _, labels in data),
    }
    return _written(folder, "spectrum", facts, density.plot)


def measure_landscape(trained: Trained, folder: Path, *, span: float, points: int, num_examples: int | None) -> Facts:
    """Measure the loss on a plane through the weights (Figure 1); a killed grid goes on where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    found = loss_landscape(
        trained.network,
        F.cross_entropy,
        trained.training_batches(num_examples),
        span=span,
        points=points,
        cache=folder / "landscape.cache",
    )
    found.save_html(folder / "landscape.html")
    facts = {
        "coordinates": found.coordinates.tolist(),
        "loss": found.loss.tolist(),
        "accuracy": found.accuracy.tolist(),
    }
    return _written(folder, "landscape", facts, found.plot)


def measure_bound(trained: Trained, folder: Path, *, rho: float, delta: float, num_examples: int | None) -> Facts:
    """Estimate the PAC-Bayes bound on the 0-1 error, term by term (Appendix A)."""
    data = trained.training_batches(num_examples)
    found = pac_bayes_bound(trained.network, F.cross_entropy, data, rho=rho, delta=delta, metric="error")
    facts = {
        "total": found.total,
        "vacuous": bool(found.vacuous),
        "error": found.loss,
        "sharp_error": found.sharp_loss,
        "complexity": found.complexity,
        "weight_term": found.weight_term,
        "confidence_term": found.confidence_term,
        "union_term": found.union_term,
        "weight_norm": found.weight_norm,
        "num_weights": found.num_weights,
        "num_examples": found.num_examples,
        "rho": rho,
        "delta": delta,
    }
    return _written(folder, "bound", facts, found.plot)


def measure_cosine(trained: Trained, folder: Path, *, rho: float | None, num_examples: int) -> Facts:
    """Measure the cosine of SAM's first- and second-order updates on one training batch (Appendix C.4).

    The network is in evaluation mode, as for all measures: batch norm normalises with its running statistics.
    """
    batch = trained.training_batches(num_examples, batch_size=num_examples)[0]
    radius = trained.experiment.optim.rho if rho is None else rho
    cosine = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=radius)
    return _written(folder, "cosine", {"cosine": cosine, "rho": radius, "num_examples": len(batch[1])})


# What each kind of measurement calls, and the settings it has where nothing else is said.
MEASURES: dict[str, tuple[Callable[..., Facts], Facts]] = {
    "sharpness": (measure_sharpness, {"rho": 0.05, "m": None, "steps": 1, "num_examples": None}),
    "spectrum": (measure_spectrum, {"num_eigenvalues": 5, "steps": 80, "probes": 4, "num_examples": None}),
    "landscape": (measure_landscape, {"span": 1.0, "points": 51, "num_examples": None}),
    "bound": (measure_bound, {"rho": 0.05, "delta": 0.05, "num_examples": None}),
    "cosine": (measure_cosine, {"rho": None, "num_examples": 128}),
}


def measurement_settings(measurement: Measurement) -> Facts:
    """Return all settings of a measurement, defaults included.

    Raises:
        SpecError: there is no such measure, or it has no such setting.
    """
    if measurement.kind not in MEASURES:
        raise SpecError(f"{measurement.kind!r} cannot be measured. Allowed: {', '.join(MEASURES)}.")
    defaults, given = MEASURES[measurement.kind][1], dict(measurement.settings)
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise SpecError(
            f"{', '.join(sorted(unknown))} is no setting of the measure {measurement.kind}. Allowed: "
            f"{', '.join(defaults)}."
        )
    return defaults | given


def measured_facts(run: Path, measurement: Measurement, data_root: Path | None = None) -> Facts:
    """Measure a run's network; pictures go into a folder of this measurement's own, in RUN/measures.

    Raises:
        SpecError: there is no such measure, or it has no such setting.
        RunError: there is no run, it has no whole checkpoint, or it has not kept the weights of that epoch.
        DataError: the dataset is missing or damaged.
    """
    settings = measurement_settings(measurement)
    folder = run / "measures" / measurement.file_name().removesuffix(".json")
    trained = load_trained(run, data_root=data_root, epoch=measurement.epoch)
    return MEASURES[measurement.kind][0](trained, folder, **settings)


def _written(folder: Path, name: str, facts: Facts, plot: Callable[[], "Figure"] | None = None) -> Facts:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
    if plot is not None:
        plot().savefig(folder / f"{name}.svg")
    return facts
