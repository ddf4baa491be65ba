"""What a study would cost: its runs, and how often an image passes forward and backward through a network."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flatmin.lab.jobs import Job, Laboratory, Outcome
from flatmin.lab.papers.item import Scale, Study
from flatmin.lab.papers.settings import FINETUNING_TRAIN_SIZES
from flatmin.lab.run_directory import Metrics, Result
from flatmin.lab.spec import Experiment

TRAIN_SIZES = {**FINETUNING_TRAIN_SIZES, "digits": 1_297, "fashion-mnist": 60_000, "svhn": 73_257}
SVHN_EXTRA = 531_131
SECOND_ORDER_PASSES = 4
"""The two gradients of SAM, and the product with the Hessian, which costs about two more."""


class Planner:
    """A laboratory that runs nothing and remembers what it was asked for.

    Runs that choose settings seem to end alike, so that studies go on to ask for all they need.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Note the jobs; none of them is run."""
        self.jobs |= {job.name: job for job in jobs}
        return [self._outcome(job) for job in jobs]

    def _outcome(self, job: Job) -> Outcome:
        if job.experiment.data.validation == 0:
            return Outcome(job=job)
        lines: list[Metrics] = [{"epoch": job.experiment.epochs, "valid_error": 0.5}]
        return Outcome(
            job=job,
            result=Result(
                experiment=job.experiment, seed=job.seed, directory=Path(job.name), history=lines, time_seconds=0.0
            ),
        )


def planned_jobs(study: Study, scale: Scale) -> list[Job]:
    """Return all jobs that a study asks for when nothing is there yet."""
    planner = Planner()
    lab: Laboratory = planner
    study(scale, lab)
    return list(planner.jobs.values())


def cost(jobs: Iterable[Job]) -> int:
    """Return the passes over images that training takes: epochs times images times passes of a step, over all runs.

    A run that occurs twice counts once; one that stops at a loss counts in full; measuring and testing do not count.

    Example:
        >>> from flatmin.lab.spec import Data, Optim
        >>> sam = Experiment(data=Data(train_size=100), optim=Optim(rho=0.1), epochs=3)
        >>> cost([Job(experiment=sam), Job(experiment=sam, seed=1), Job(experiment=sam, seed=1)])
        1200
    """
    experiments = {}
    for job in jobs:
        experiments[job.name] = job.experiment
        if job.experiment.data.bootstrap:
            first = job.experiment.first_stage()
            experiments[first.run_name(job.seed)] = first
    return sum(e.epochs * num_images(e) * passes_of_a_step(e) for e in experiments.values())


def num_images(experiment: Experiment) -> int:
    """Return how many images an experiment is trained on.

    Raises:
        ValueError: the dataset's size is not known.
    """
    data = experiment.data
    if data.train_size is not None:
        return data.train_size
    if data.name not in TRAIN_SIZES:
        raise ValueError(
            f"The size of {data.name} is not known. Give data.train_size. Known: {', '.join(TRAIN_SIZES)}."
        )
    size = TRAIN_SIZES[data.name] + (SVHN_EXTRA if data.extra else 0)
    return size - round(data.validation * size)


def passes_of_a_step(experiment: Experiment) -> int:
    """Return the forward and backward passes of a step: 1 without SAM, one more than ascent steps with it; m adds none.

    A random direction needs no gradient at w, but batch norm needs a pass there for its statistics.
    """
    optim, model = experiment.optim, experiment.model
    if optim.rho == 0:
        return 1
    if optim.second_order:
        return SECOND_ORDER_PASSES
    if optim.direction == "random":
        return 1 if model.norm == "none" or model.name.startswith("cnn-") else 2
    return optim.ascent_steps + 1
