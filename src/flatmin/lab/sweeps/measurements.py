"""Measures of a run's model, written to its directory: what ``flatmin measure`` does, and sweeps.

Every measure is given a target, the path of its files without their suffixes: facts become its JSON file, and plots
are next to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F

from flatmin.lab.errors import SpecError
from flatmin.lab.runs.json_files import storing, write_json
from flatmin.lab.sweeps.jobs import Measurement, MeasurementResult
from flatmin.lab.training.auto_rho import measured_rise
from flatmin.lab.training.trained_model import TrainedModel, load_trained
from flatmin.measures import (
    HessianOperator,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    sam_update_cosine,
    spectral_density,
    top_eigenvalues,
)
from flatmin.measures.weight_noise import noise_effect, proof_sigma

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_sharpness(
    trained: TrainedModel, target: Path, *, rho: float, m: int | None, steps: int, num_examples: int | None
) -> MeasurementResult:
    """Measure m-sharpness on training examples (Section 4.1)."""
    data = trained.training_batches(num_examples)
    result = m_sharpness(trained.network, F.cross_entropy, data, rho=rho, m=m, steps=steps)
    facts = {
        "m_sharpness": result.mean,
        "standard_error": result.standard_error,
        "loss": result.value,
        "rho": result.rho,
        "m": result.m,
        "steps": steps,
        "num_examples": int(result.sizes.sum()),
    }
    return _written(target, _weights(trained) | facts, result.plot)


def measure_spectrum(
    trained: TrainedModel, target: Path, *, num_eigenvalues: int, steps: int, probes: int, num_examples: int | None
) -> MeasurementResult:
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
    return _written(target, _weights(trained) | facts, density.plot)


def measure_landscape(
    trained: TrainedModel, target: Path, *, span: float, points: int, num_examples: int | None
) -> MeasurementResult:
    """Measure the loss on a plane through the weights (Figure 1); a killed grid resumes."""
    data = trained.training_batches(num_examples)
    result = loss_landscape(
        trained.network,
        F.cross_entropy,
        data,
        span=span,
        points=points,
        cache=target.with_suffix(".cache"),
    )
    result.save_html(target.with_suffix(".html"))
    center = float(result.loss[points // 2, points // 2])
    facts = {
        "loss_at_centre": center,
        "highest_loss": float(result.loss.max()),
        "mean_rise": float((result.loss - center).sum() / (points**2 - 1)),
        "span": span,
        "points": points,
        "num_examples": sum(len(labels) for _, labels in data),
        "coordinates": result.coordinates.tolist(),
        "loss": result.loss.tolist(),
        "accuracy": result.accuracy.tolist(),
    }
    return _written(target, _weights(trained) | facts, result.plot)


def measure_bound(
    trained: TrainedModel, target: Path, *, rho: float, delta: float, num_examples: int | None
) -> MeasurementResult:
    """Estimate the PAC-Bayes bound on the 0-1 error, term by term (Appendix A)."""
    data = trained.training_batches(num_examples)
    result = pac_bayes_bound(trained.network, F.cross_entropy, data, rho=rho, delta=delta, metric="error")
    facts = {
        "total": result.total,
        "vacuous": bool(result.vacuous),
        "error": result.loss,
        "sharp_error": result.sharp_loss,
        "complexity": result.complexity,
        "weight_term": result.weight_term,
        "confidence_term": result.confidence_term,
        "union_term": result.union_term,
        "weight_norm": result.weight_norm,
        "num_weights": result.num_weights,
        "num_examples": result.num_examples,
        "rho": rho,
        "delta": delta,
    }
    return _written(target, _weights(trained) | facts, result.plot)


def measure_noise(
    trained: TrainedModel, target: Path, *, rho: float, num_draws: int, num_examples: int | None
) -> MeasurementResult:
    """Measure by how much Gaussian noise on the weights raises the test error, the condition of the bound (Appendix A).

    At two scales: rho for each weight, as the theorem states it, and that of its proof, whose norm is about rho.
    """
    data = trained.test_batches(num_examples)
    num_weights = sum(p.numel() for p in trained.network.parameters())
    scales = {"stated": rho, "proof": proof_sigma(rho, n=len(trained.dataset.train.labels), k=num_weights)}
    facts: MeasurementResult = {"rho": rho}
    for name, sigma in scales.items():
        facts[name] = asdict(noise_effect(trained.network, data, sigma=sigma, num_draws=num_draws))
    return _written(target, _weights(trained) | facts)


def measure_cosine(
    trained: TrainedModel, target: Path, *, rho: float | None, num_examples: int, weight_decay: float = 0.0
) -> MeasurementResult:
    """Measure the cosine of SAM's first- and second-order updates on one training batch (Appendix C.4).

    The model is in evaluation mode, as for all measures: batch norm normalizes with its running statistics.
    ``weight_decay`` adds the L2 term to the loss, as training with ``optim.decay=loss`` does.
    """
    batch = trained.training_batches(num_examples, batch_size=num_examples)[0]
    radius = trained.rho if rho is None else rho
    cosine = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=radius, weight_decay=weight_decay)
    facts = {"cosine": cosine, "rho": radius, "num_examples": len(batch[1]), "weight_decay": weight_decay}
    return _written(target, _weights(trained) | facts)


def measure_rho(trained: TrainedModel, target: Path, *, m: int | None, num_examples: int | None) -> MeasurementResult:
    """Measure the radius that the run's loss suggests, and the rise of the loss over rho.

    Unlike the other measures, as in training: with augmentation, random layers and batch statistics.
    """
    found, curve = measured_rise(trained, m, num_examples)
    facts = {
        "rho": found.rho,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
        "per_batch": list(found.per_batch),
        "spread": found.spread,
        "rhos": list(curve.rhos),
        "rises": list(curve.rises),
        "first_order": list(curve.first_order),
        "message": " ".join(filter(None, [found.message, curve.message])),
    }
    return _written(target, _weights(trained) | facts, curve.plot)


# What each kind of measurement calls, and the settings it has where nothing else is said.
MEASURES: dict[str, tuple[Callable[..., MeasurementResult], MeasurementResult]] = {
    "sharpness": (measure_sharpness, {"rho": 0.05, "m": None, "steps": 1, "num_examples": None}),
    "spectrum": (measure_spectrum, {"num_eigenvalues": 5, "steps": 80, "probes": 4, "num_examples": None}),
    "landscape": (measure_landscape, {"span": 1.0, "points": 51, "num_examples": None}),
    "bound": (measure_bound, {"rho": 0.05, "delta": 0.05, "num_examples": None}),
    "noise": (measure_noise, {"rho": 0.05, "num_draws": 20, "num_examples": None}),
    "rho": (measure_rho, {"m": None, "num_examples": None}),
    "cosine": (measure_cosine, {"rho": None, "num_examples": 128, "weight_decay": 0.0}),
}


def measurement_settings(measurement: Measurement) -> MeasurementResult:
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
            f"{', '.join(sorted(unknown))} is not a setting of the measure {measurement.kind}. Allowed: "
            f"{', '.join(defaults)}."
        )
    return defaults | given


def measure_run(run: Path, measurements: Sequence[Measurement], data_root: Path | None = None) -> None:
    """Measure a run's model; facts and plots go into RUN/measures, under each measurement's own name.

    The dataset is read once for all of them, and the weights of each epoch once.

    Raises:
        SpecError: there is no such measure, or it has no such setting.
        RunError: there is no run, it has no whole checkpoint, or it has not kept the weights of that epoch.
        DataError: the dataset is missing or corrupt.
        StorageError: what was found cannot be written.
    """
    trained: TrainedModel | None = None
    for epoch in dict.fromkeys(measurement.epoch for measurement in measurements):
        trained = load_trained(run, data_root=data_root, epoch=epoch) if trained is None else trained.at_epoch(epoch)
        for measurement in measurements:
            if measurement.epoch == epoch:
                target = run / "measures" / measurement.file_name().removesuffix(".json")
                MEASURES[measurement.kind][0](trained, target, **measurement_settings(measurement))


def _weights(trained: TrainedModel) -> MeasurementResult:
    return {"epoch": trained.origin.epoch, "step": trained.origin.step}


def _written(target: Path, facts: MeasurementResult, plot: Callable[[], "Figure"] | None = None) -> MeasurementResult:
    with storing(target.parent, "Free some disk space, and measure again."):
        target.parent.mkdir(parents=True, exist_ok=True)
        if plot is not None:
            plot().savefig(target.with_suffix(".svg"))
    write_json(target.with_suffix(".json"), facts)  # last: if it exists, so do the plots
    return facts
