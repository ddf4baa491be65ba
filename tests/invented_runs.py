"""Runs for tests of studies: invented by a function, or trained in this process."""

from flatmin.lab.runs.record import Records, RunRecord, read_record
from flatmin.lab.studies.findings import Cell
from flatmin.lab.studies.study import describe, run_study
from flatmin.lab.sweeps.jobs import run_job


def invented(metrics, facts=lambda job, measurement: {}):
    """Return a sweep in which ``metrics(job)`` is the last epoch, all of them, why it failed, or None: it is missing.

    ``facts(job, measurement)`` is what was measured; None if it was not.
    """

    def record(job):
        found = metrics(job)
        if isinstance(found, RunRecord):
            return found
        if not isinstance(found, dict | list):
            return RunRecord(name=job.name, state="missing" if found is None else "failed", reason=found or "")
        history = found if isinstance(found, list) else [{"epoch": job.experiment.epochs, **found}]
        measured = {m.name: facts(job, m) for m in job.measurements}
        return RunRecord(
            name=job.name,
            state="finished",
            experiment=job.experiment,
            seed=job.seed,
            history=history,
            time_seconds=1.0,
            measured={name: found for name, found in measured.items() if found is not None},
        )

    return lambda jobs, what: {job.name: record(job) for job in jobs}


def invented_runs(item, scale, *how):
    """Return all records of a study whose runs are `invented`."""
    known = Records()
    run_study(item, scale, known, invented(*how))
    return known


def invented_findings(item, scale, *how):
    """Return what a study finds in `invented` runs."""
    return describe(item, scale, invented_runs(item, scale, *how))


def in_process(runs):
    """Return a sweep that trains and measures here, one job after the other."""

    def sweep(jobs, what):
        for job in jobs:
            status = run_job(job, runs, None, 600.0)
            assert status.kind == "done", status
        return {job.name: read_record(job.name, runs) for job in jobs}

    return sweep


def cells(findings, kind=Cell):
    """Return all cells of all tables, or entries of another kind."""
    return [cell for table in findings.tables for row in table.rows for cell in row if isinstance(cell, kind)]


def wobble(seed):
    """Return a replica's own deviation, different for each."""
    return 0.001 * ((7 * seed) % 5 - 2)


def only(keep, metrics):
    """Return the same metrics, of some jobs: the others are missing."""
    return lambda job: metrics(job) if keep(job) else None
