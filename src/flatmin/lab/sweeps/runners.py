"""Where studies get their runs from: a sweep that runs what is missing, or a directory that is only read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flatmin.lab.runs.directory import Metrics, Result
from flatmin.lab.sweeps.jobs import Job, Outcome, read_outcome


class Runner(Protocol):
    """Where studies get their runs from: a sweep that runs what is missing, or a directory that is only read."""

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Return the outcome of each job, in the same order.

        Args:
            jobs: what is needed; a job may occur several times.
            what: one line to show, for example "choosing rho".
        """
        ...


class ReadOnlyRunner:
    """A directory of runs that is only read: what was not run is missing from the outcomes."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Return what the directory knows of each job."""
        return [read_outcome(job, self.runs) for job in jobs]


class FilteredRunner:
    """A runner that runs only some of the jobs it is asked for; what is known of the others is read."""

    def __init__(self, runner: Runner, archive: ReadOnlyRunner, only: Sequence[str]) -> None:
        self.runner, self.archive, self.only = runner, archive, only
        self.num_meant = 0
        """How many of the jobs that it was asked for are meant."""

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Run the jobs that have one of the texts in NAME/seedN, and return what is known of all."""
        wanted = [job for job in jobs if is_meant(label(job), self.only)]
        self.num_meant += len(wanted)
        if wanted:
            self.runner.outcomes(wanted, what)
        return self.archive.outcomes(jobs, what)


class DryRunner:
    """A runner that runs nothing and remembers what it was asked for.

    Runs that choose settings seem to end alike, so that studies go on to ask for all they need.
    """

    def __init__(self, known: Runner | None = None) -> None:
        self.known = known
        """Where runs are looked up first, so that choices that were made are those of the plan; nowhere if None."""
        self.jobs: dict[str, Job] = {}
        self.missing: dict[str, Job] = {}
        self.labels: dict[str, None] = {}
        """What people call the jobs, in order; several may be one run."""

    def outcomes(self, jobs: Sequence[Job], what: str) -> list[Outcome]:
        """Note the jobs; none of them is run."""
        known = self.known.outcomes(jobs, what) if self.known is not None else [Outcome(job=job) for job in jobs]
        self.jobs |= {job.name: job for job in jobs}
        self.missing |= {outcome.job.name: outcome.job for outcome in known if not outcome.complete}
        self.labels |= dict.fromkeys(map(label, jobs))
        return [outcome if outcome.complete else self._pretended(outcome.job) for outcome in known]

    def _pretended(self, job: Job) -> Outcome:
        if job.experiment.data.validation == 0:
            return Outcome(job=job)
        lines: list[Metrics] = [{"epoch": job.experiment.epochs, "valid_error": 0.5}]
        return Outcome(
            job=job,
            result=Result(
                experiment=job.experiment, seed=job.seed, directory=Path(job.name), history=lines, time_seconds=0.0
            ),
        )


def label(job: Job) -> str:
    """Return what people call a job: the name of its experiment, and the seed."""
    return f"{job.experiment.name}/seed{job.seed}"


def is_meant(name: str, only: Sequence[str]) -> bool:
    """Return whether a name has one of the texts; every name is meant if there are none."""
    return not only or any(text in name for text in only)
