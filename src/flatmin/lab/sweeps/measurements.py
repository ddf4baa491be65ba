"""Measures of a run's model: one dataclass each, with the settings and how to measure.

Its fields are what sweeps ask for, the flags of ``flatmin measure``, and the name of the file in RUN/measures, which
sweeps and the command share.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F

from flatmin.lab.errors import SpecError
from flatmin.lab.runs.directory import is_finished
from flatmin.lab.runs.json_files import storing, write_json
from flatmin.lab.runs.record import MeasurementResult, read_measurement
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

Measured = tuple[MeasurementResult, Callable[[], "Figure"] | None]
"""The facts, and how to plot them, if at all."""
Range = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is, to follow "must be"."""
COUNT: Range = (lambda count: count >= 1, "at least 1")
SEVERAL: Range = (lambda count: count >= 2, "at least 2")
COMMON: dict[str, Range] = {"epoch": (lambda epoch: epoch >= 0, "at least 0"), "num_examples": COUNT}
RADIUS: Range = (lambda rho: 0 <= rho < math.inf, "finite and not negative")
POSITIVE: Range = (lambda value: 0 < value < math.inf, "positive and finite")
ODD: Range = (lambda points: points >= 3 and points % 2 == 1, "odd, and at least 3")
PROBABILITY: Range = (lambda delta: 0 < delta < 1, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Something to measure of a trained model; a subclass says which values its own settings may have."""

    kind: ClassVar[str]
    ranges: ClassVar[dict[str, Range]]

    epoch: int | None = None
    """Measure the weights after this epoch, which the run saved (--keep-every); the final ones if None."""
    num_examples: int | None = None
    """Measure on this many training examples, the first ones; on all if None."""

    def __init_subclass__(cls, kind: str, **ranges: Range) -> None:
        super().__init_subclass__()
        cls.kind, cls.ranges = kind, COMMON | ranges

    def __post_init__(self) -> None:
        for name, (holds, allowed) in self.ranges.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise SpecError(f"--{name.replace('_', '-')} must be {allowed}; got {value}.")

    @functools.cached_property
    def name(self) -> str:
        """The name of its file, without the suffix: what it is, in brief, and a hash of the settings."""
        key = json.dumps([self.kind, asdict(self)], sort_keys=True)
        where = "" if self.epoch is None else f"-epoch{self.epoch}"
        return f"{self.kind}{where}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure; ``target`` is the path of the files, without a suffix."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Sharpness(Measurement, kind="sharpness", rho=RADIUS, m=COUNT, steps=COUNT):
    """m-sharpness: how far the loss rises within rho, on subsets of m examples (Section 4.1)."""

    rho: float = 0.05
    """Radius of the ball."""
    m: int | None = None
    """Examples in a subset; all if None."""
    steps: int = 1
    """Ascent steps."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure m-sharpness on training examples."""
        data = trained.batches(trained.dataset.train, self.num_examples)
        result = m_sharpness(trained.network, F.cross_entropy, data, rho=self.rho, m=self.m, steps=self.steps)
        return {
            "m_sharpness": result.mean,
            "standard_error": result.standard_error,
            "loss": result.value,
            "rho": result.rho,
            "m": result.m,
            "steps": self.steps,
            "num_examples": int(result.sizes.sum()),
        }, result.plot


def eigenvalues(operator: HessianOperator, num: int) -> dict[str, Any]:
    """Return the largest eigenvalues and what the paper reports of them."""
    top = top_eigenvalues(operator, num)
    return {
        "lambda_max": float(top.values[0]),
        "eigenvalues": top.values.tolist(),
        "residuals": top.residuals.tolist(),
        "converged": bool(top.converged),
        "lambda_1_over_lambda_5": top.ratio(1, 5) if num >= 5 else None,
    }


@dataclass(frozen=True, kw_only=True)
class Spectrum(Measurement, kind="spectrum", num_eigenvalues=COUNT, steps=COUNT, probes=COUNT):
    """The Hessian's largest eigenvalues and spectral density (Section 4.2)."""

    num_eigenvalues: int = 5
    """How many of the largest eigenvalues."""
    steps: int = 80
    """Lanczos steps of the density."""
    probes: int = 4
    """Random starts of the density."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure the Hessian of the training loss."""
        data = trained.batches(trained.dataset.train, self.num_examples)
        operator = HessianOperator(trained.network, F.cross_entropy, data)
        top = eigenvalues(operator, self.num_eigenvalues)
        density = spectral_density(operator, steps=self.steps, probes=self.probes)
        return {
            **top,
            "nodes": density.nodes.tolist(),
            "weights": density.weights.tolist(),
            "num_examples": sum(len(labels) for _, labels in data),
        }, density.plot


@dataclass(frozen=True, kw_only=True)
class Landscape(Measurement, kind="landscape", span=POSITIVE, points=ODD):
    """The loss on a plane of random, filter-normalized directions (Figure 1)."""

    span: float = 1.0
    """How far the plane goes, in units of the directions."""
    points: int = 51
    """Points along each side; odd."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure the loss on the plane; a killed grid resumes."""
        data, cache = trained.batches(trained.dataset.train, self.num_examples), target.with_suffix(".cache")
        result = loss_landscape(trained.network, F.cross_entropy, data, span=self.span, points=self.points, cache=cache)
        result.save_html(target.with_suffix(".html"))
        center = float(result.loss[self.points // 2, self.points // 2])
        return {
            "loss_at_centre": center,
            "highest_loss": float(result.loss.max()),
            "mean_rise": float((result.loss - center).sum() / (self.points**2 - 1)),
            "span": self.span,
            "points": self.points,
            "num_examples": sum(len(labels) for _, labels in data),
            **{name: getattr(result, name).tolist() for name in ("coordinates", "loss", "accuracy")},
        }, result.plot


@dataclass(frozen=True, kw_only=True)
class Bound(Measurement, kind="bound", rho=POSITIVE, delta=PROBABILITY, num_examples=SEVERAL):
    """The PAC-Bayes bound on the error, term by term (Appendix A)."""

    rho: float = 0.05
    """Radius of the ball."""
    delta: float = 0.05
    """The probability with which the bound may fail."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Estimate the bound on the 0-1 error."""
        data = trained.batches(trained.dataset.train, self.num_examples)
        result = pac_bayes_bound(trained.network, F.cross_entropy, data, rho=self.rho, delta=self.delta, metric="error")
        terms = ("complexity", "weight_term", "confidence_term", "union_term")
        sizes = ("weight_norm", "num_weights", "num_examples")
        return {
            "total": result.total,
            "vacuous": bool(result.vacuous),
            "error": result.loss,
            "sharp_error": result.sharp_loss,
            **{name: getattr(result, name) for name in (*terms, *sizes)},
            "rho": self.rho,
            "delta": self.delta,
        }, result.plot


@dataclass(frozen=True, kw_only=True)
class Noise(Measurement, kind="noise", rho=RADIUS, num_draws=COUNT):
    """By how much Gaussian noise on the weights raises the test error, the condition of the bound (Appendix A)."""

    rho: float = 0.05
    """At two scales: this for each weight, as the theorem states it, and its proof's, whose norm is about rho."""
    num_draws: int = 20
    """Draws of the noise."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure the test error with noise."""
        data = trained.batches(trained.dataset.test, self.num_examples)
        num_weights = sum(p.numel() for p in trained.network.parameters())
        proof = proof_sigma(self.rho, n=len(trained.dataset.train.labels), k=num_weights)
        effects = {
            name: asdict(noise_effect(trained.network, data, sigma=sigma, num_draws=self.num_draws))
            for name, sigma in (("stated", self.rho), ("proof", proof))
        }
        return {"rho": self.rho, **effects}, None


@dataclass(frozen=True, kw_only=True)
class Cosine(Measurement, kind="cosine", rho=RADIUS):
    """The cosine of SAM's first- and second-order updates on one training batch (Appendix C.4).

    The model is in evaluation mode, as for all measures: batch norm normalizes with its running statistics.
    """

    num_examples: int | None = 128
    """The size of the batch."""
    rho: float | None = None
    """Radius; the run's own if None."""
    weight_decay: float = 0.0
    """Adds the L2 term to the loss, as training with ``optim.decay=loss`` does."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure the cosine."""
        size = self.num_examples or len(trained.dataset.train.labels)
        batch = trained.batches(trained.dataset.train, size, batch_size=size)[0]
        rho = trained.rho if self.rho is None else self.rho
        cosine = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=rho, weight_decay=self.weight_decay)
        return {"cosine": cosine, "rho": rho, "num_examples": len(batch[1]), "weight_decay": self.weight_decay}, None


@dataclass(frozen=True, kw_only=True)
class Rho(Measurement, kind="rho", m=COUNT):
    """The radius that `suggest_rho` suggests, and the rise of the loss over rho; augmented and noisy as in training."""

    m: int | None = None
    """Examples that share a perturbation; as many as in the run if None."""

    def measure(self, trained: TrainedModel, target: Path) -> Measured:
        """Measure the suggestion and the rise."""
        found, curve = measured_rise(trained, self.m, self.num_examples)
        return {
            "rho": found.rho,
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "per_batch": list(found.per_batch),
            "spread": found.spread,
            "rhos": list(curve.rhos),
            "rises": list(curve.rises),
            "first_order": list(curve.first_order),
            "message": " ".join(filter(None, [found.message, curve.message])),
        }, curve.plot


def measure_run(
    run: Path, measurements: Sequence[Measurement], data_root: Path | None = None, *, draw: bool = True
) -> dict[str, MeasurementResult]:
    """Measure a run's model, unless that was done before; facts and plots go into RUN/measures.

    The dataset is read once for all measurements, and the weights of each epoch once. The run need not be finished;
    the files then also carry the step in their names. Sweeps do not ``draw``, which takes longer than some measures:
    what they measured is measured again for its plot, and the facts stay.
    """
    found: dict[str, MeasurementResult] = {}
    missing = []
    for m in measurements:
        file = run / "measures" / f"{m.name}.json"
        is_known = file.exists() and (is_finished(run) or m.epoch is not None)
        if is_known:
            found[m.name] = read_measurement(file)
        if not is_known or (draw and not file.with_suffix(".svg").exists()):
            missing.append(m)
    trained: TrainedModel | None = None
    for epoch in dict.fromkeys(m.epoch for m in missing):
        trained = trained.at_epoch(epoch) if trained else load_trained(run, data_root=data_root, epoch=epoch)
        at = {"epoch": trained.epoch, "step": trained.step}
        for m in (m for m in missing if m.epoch == epoch):
            name = m.name if is_finished(run) or epoch is not None else f"{m.name}-step{at['step']}"
            target = run / "measures" / name
            facts, plot = m.measure(trained, target)
            with storing(target.parent, "Free some disk space, and measure again."):
                target.parent.mkdir(parents=True, exist_ok=True)
                if draw and plot is not None:
                    plot().savefig(target.with_suffix(".svg"))
            if name not in found:
                # Read back, for the same facts as whoever asks next.
                write_json(target.with_suffix(".json"), at | facts)
                found[name] = read_measurement(target.with_suffix(".json"))
    return found
