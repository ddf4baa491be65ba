"""What the studies of figures train at each scale."""

from collections.abc import Sequence
from dataclasses import replace

from flatmin.lab.foret2021.scales import LAPTOP, replica_seeds, small_images, smoke
from flatmin.lab.foret2021.settings import DROP_LAST, Training
from flatmin.lab.spec.experiment import Data, Experiment
from flatmin.lab.studies.conditions import best_candidate, tuning_job
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.replicas import RecordingRunner
from flatmin.lab.sweeps.jobs import Job, Measurement

LAPTOP_START = small_images(LAPTOP["fashion-mnist"])
LAPTOP_RHO = 0.2
"""SAM's rho on a laptop, where a figure does not choose it."""
LAPTOP_EPOCHS = LAPTOP_START.epochs
NUM_CURVATURE_REPLICAS = 10
TUNED_RHOS = (0.05, 0.1, 0.2)
"""What landscapes and spectra choose from, on a laptop."""


def sam_rho(scale: Scale, paper: Training) -> float:
    """Return SAM's rho where the figure is not about it."""
    return paper.rho if scale == "paper" else LAPTOP_RHO


def tuned_rho(recorder: RecordingRunner, item: str, scale: Scale, paper: Training, sgd: Experiment) -> float | None:
    """Return SAM's rho: the paper's at its own scale, else the best on validation; None while that is not known."""
    if scale == "paper":
        return paper.rho
    candidates = [replace(sgd, name=f"{item}/SAM", optim=replace(sgd.optim, rho=rho)) for rho in TUNED_RHOS]
    best = best_candidate(candidates, recorder.outcomes([tuning_job(e) for e in candidates], f"{item}: choosing rho"))
    return None if best is None else best.optim.rho


def curvature_seeds(scale: Scale) -> tuple[int, ...]:
    """Return the seeds of landscapes and spectra, which spread more than errors: ten replicas on a laptop."""
    return tuple(range(NUM_CURVATURE_REPLICAS)) if scale == "laptop" else replica_seeds(scale)


def start(scale: Scale, paper: Training, *, rho: float, dataset: str = "cifar10") -> Experiment:
    """Return the experiment that a figure varies, evaluated at its end; without SAM where rho is 0.

    Args:
        scale: laptop and smoke have their own model and data; a laptop's images are small.
        paper: the settings at the paper's scale.
        rho: SAM's.
        dataset: at the paper's scale.
    """
    if scale == "paper":
        return Experiment(
            data=Data(name=dataset, augment="basic", batch_size=paper.batch_size, drop_last=DROP_LAST),
            model=paper.network(),
            optim=paper.optim(rho),
            epochs=paper.epochs,
            evaluate_every=paper.epochs,
        )
    base = LAPTOP_START if scale == "laptop" else replace(smoke("cnn-2"), epochs=2, evaluate_every=2)
    return replace(base, optim=replace(base.optim, rho=rho))


def jobs_for(
    experiment: Experiment, name: str, seeds: Sequence[int], measurements: tuple[Measurement, ...] = ()
) -> list[Job]:
    """Return a job for each seed."""
    named = replace(experiment, name=name)
    return [Job(experiment=named, seed=seed, measurements=measurements) for seed in seeds]
