"""What a study would run, without running it."""

from dataclasses import replace
from typing import cast

from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.item import Scale, Study
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.runners import DryRunner, Runner


def plan(study: Study, scale: Scale, known: Runner | None = None) -> DryRunner:
    """Return what a study asks for, given the runs that exist.

    Where a choice is still open, the first candidate stands for the chosen one: as many runs follow from any.
    """
    planner = DryRunner(known)
    study(scale, planner)
    return planner


def planned_jobs(study: Study, scale: Scale) -> list[Job]:
    """Return all jobs that a study asks for when there are no runs yet."""
    return list(plan(study, scale).jobs.values())


def with_all_missing(findings: Findings, study: Study, known: Runner) -> Findings:
    """Return findings that count as missing also the runs which follow from choices that are still open.

    A study cannot know these runs before the choice is made, and so does not count them by itself.
    """
    if not findings.num_missing:
        return findings
    planned = plan(study, cast(Scale, findings.scale), known)
    return replace(findings, num_missing=max(findings.num_missing, len(planned.missing)))
