"""A study is two pure functions over records of runs: what to run next, and what the runs show.

The loop that runs what is missing is the same for all of them (`run_study`), and so is what a page says of missing and
failed runs (`describe`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from flatmin.lab.runs.record import PlannedRecords, Records, RunRecord
from flatmin.lab.studies.findings import Findings
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.sweep import unite

Scale = Literal["paper", "laptop", "smoke"]
"""paper: its own settings, on its own data; laptop: small models and real data, on two cores; smoke: seconds."""
SCALES: tuple[Scale, ...] = get_args(Scale)
Known = Records
"""What is known of runs, by their names."""
Groups = Mapping[Any, Sequence[Job]]
"""Jobs by what a study calls them: the replicas of a method, say."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of a publication to reproduce, or a study of our own."""

    name: str
    """What ``flatmin reproduce`` calls it."""
    title: str
    source: str
    """Where it is, for example "Table 1, Section 3.1"."""
    jobs: Callable[[Scale, Known], Groups]
    """Returns all runs that it needs as far as known runs tell; more follow when a setting is chosen."""
    findings: Callable[[Scale, Known], Findings]
    """Returns what the known runs show."""


def planned_jobs(item: Item, scale: Scale, known: Known | None = None) -> dict[str, Job]:
    """Return all jobs of a study by the names of their runs.

    Where a choice is still open, the first candidate stands for the chosen one: as many runs follow from any.
    """
    groups = item.jobs(scale, PlannedRecords(Records() if known is None else known))
    return unite(job for jobs in groups.values() for job in jobs)


def missing_jobs(jobs: Iterable[Job], known: Known, only: Sequence[str] = ()) -> list[Job]:
    """Return the jobs that are not complete, of those that have one of the texts of ``only`` in their labels."""
    return [job for job in jobs if is_meant(job, only) and not job.is_complete(known[job.name])]


def is_meant(job: Job, only: Sequence[str]) -> bool:
    """Return whether a job's label has one of the texts; every job is meant if there are none."""
    return not only or any(text in job.label for text in only)


def run_study(
    item: Item,
    scale: Scale,
    known: Known,
    sweep: Callable[[Sequence[Job], str], Mapping[str, RunRecord]],
    only: Sequence[str] = (),
) -> int:
    """Run what a study needs until nothing is missing, and add it to what is known; return how many jobs were run."""
    done: set[str] = set()
    while True:
        asked = unite(job for jobs in item.jobs(scale, known).values() for job in jobs).values()
        todo = [job for job in missing_jobs(asked, known, only) if job.name not in done]
        if not todo:
            return len(done)
        known |= sweep(todo, item.name)
        done |= {job.name for job in todo}


def describe(item: Item, scale: Scale, known: Known) -> Findings:
    """Return what a study found, with its runs and those that are missing or failed; a smoke test judges nothing."""
    jobs = planned_jobs(item, scale, known)
    records = {name: known[name] for name in jobs}
    failed = [record for record in records.values() if record.state == "failed"]
    findings = item.findings(scale, known)
    verdicts = findings.verdicts
    if scale == "smoke":
        nothing = "A smoke test judges nothing."
        verdicts = [replace(v, status="not tested", evidence=f"{nothing} {v.evidence}".rstrip()) for v in verdicts]
    return replace(
        findings,
        verdicts=verdicts,
        notes=[*findings.notes, *(f"{record.name} failed: {record.reason}" for record in failed)],
        runs=[name for name, record in records.items() if record.state != "missing"],
        num_missing=len(missing_jobs(jobs.values(), known)),
    )
