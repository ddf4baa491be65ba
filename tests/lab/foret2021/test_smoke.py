"""`flatmin reproduce all --scale smoke`: every table and figure of the paper, from the command to the page."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch.nn.functional as F

from flatmin.cli import main
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.runs.record import Records, RunRecord
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.findings import Comparison, LineFigure
from flatmin.lab.studies.study import describe, planned_jobs
from flatmin.lab.training.trained_model import load_trained
from flatmin.measures import sam_update_cosine
from invented_runs import cells

TABLES = ("table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion", "noise-and-rho", "rho-0.05")


def test_all_items_run_from_the_command_to_the_page(tmp_path):
    """One test, because its runs would else be made again for every process of pytest that has a part of it."""
    runs, command = tmp_path / "runs", ["--scale", "smoke", "--runs", str(tmp_path / "runs")]
    trains = [*command, "--processes", "2", "--threads", "1"]
    assert main(["reproduce", "label-noise", *trains, "--only", "label-noise/20 %/SGD"]) == 0
    part = describe(ITEMS["label-noise"], "smoke", Records(runs))
    measured = {row[0]: row[1].measured is not None for row in part.tables[0].rows}
    assert (measured["SGD"], measured["SAM"], part.num_missing > 0) == (True, False, True)

    assert main(["reproduce", "all", *trains]) == 0
    known = Records(runs)
    for name, item in ITEMS.items():
        findings = describe(item, "smoke", known)
        _check_findings(findings, item)
        if name in TABLES:
            _check_means(findings, known)
        _check_that_lost_runs_are_tolerated(item, known)
    _check_cosines(runs, known)
    page = (runs / "report-smoke" / "index.html").read_text()
    for item in ITEMS.values():
        assert item.source.replace("&", "&amp;") in page

    # The page written again from what is there has the same bytes; and nothing that is finished is run again.
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert len(before) >= len(known)
    assert main(["report", "all", *command, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "index.html").read_text() == page
    assert main(["reproduce", "table1", "label-noise", "hessian", *command]) == 0
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")} == before


def _check_findings(found, item):
    assert (found.item, found.scale, found.title, found.num_missing) == (item.name, "smoke", item.title, 0)
    assert found.source.partition(";")[0] == item.source.partition(";")[0]
    assert found.tables or found.figures
    # Seconds of training prove nothing.
    assert all(v.status == "not tested" and "smoke test" in v.evidence for v in found.verdicts)
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    assert all(cell.measured is not None and math.isfinite(cell.measured.mean) for cell in cells(found))
    named = {run for c in (*cells(found), *cells(found, Comparison), *found.figures) for run in c.runs}
    assert named <= set(found.runs)
    for figure in found.figures:
        assert figure.runs
        if isinstance(figure, LineFigure):
            for series in figure.series:
                for values in (series.y, series.half_width, series.hover):
                    assert values is None or len(values) == len(series.x) > 0
                assert np.isfinite(series.y).all()
                assert not figure.log_y or min(series.y) > 0
        else:
            assert [s.name for s in figure.surfaces] == ["SGD", "SAM"]
            assert all(np.shape(s.height) == (len(s.coordinates),) * 2 for s in figure.surfaces)


def _check_means(findings, known):
    """Each cell is the mean of what its runs say."""
    for table in findings.tables:
        chosen = "chosen" in table.title
        metric = "train_error" if "training" in table.title else "test_error"
        metric = "valid_error" if chosen or findings.item == "noise-and-rho" else metric
        for cell in cells(replace(findings, tables=[table])):
            mean = sum(100 * known[run].metrics[metric] for run in cell.runs) / len(cell.runs)
            accuracy = findings.item == "label-noise" and not chosen
            assert cell.measured.mean == pytest.approx(100 - mean if accuracy else mean)


def _check_that_lost_runs_are_tolerated(item, known):
    """Of every three replicas one is lost and of one the measures are; then one diverged."""
    jobs = [job for job in planned_jobs(item, "smoke", known).values() if job.seed != TUNING_SEED]
    for rest in range(3):
        torn, diverged = Records(), Records()
        for records in (torn, diverged):
            records |= known
        for job in jobs[rest::3]:
            torn[job.name] = RunRecord(name=job.name, state="missing")
            diverged[job.name] = RunRecord(name=job.name, state="failed", reason="The loss is not finite.")
        for job in jobs[(rest + 1) % 3 :: 3]:
            torn[job.name] = replace(known[job.name], measured={})
        unmeasured = sum(bool(job.measurements) for job in jobs[(rest + 1) % 3 :: 3])
        assert describe(item, "smoke", torn).num_missing == len(jobs[rest::3]) + unmeasured
        found = describe(item, "smoke", diverged)
        assert found.num_missing == 0
        assert sum("failed: " in note for note in found.notes) == len(jobs[rest::3])


def _check_cosines(runs, known):
    """The cosine at an epoch is that of its weights."""
    job = next(iter(planned_jobs(ITEMS["second-order"], "smoke", known).values()))
    measured = known[job.name].measured
    for measurement in job.measurements:
        trained = load_trained(runs / job.name, epoch=measurement.epoch)
        batch = trained.training_batches(job.experiment.data.batch_size)[0]
        expected = sam_update_cosine(trained.network, F.cross_entropy, batch, rho=job.experiment.optim.rho)
        assert measured[measurement.name]["cosine"] == pytest.approx(expected, rel=1e-6)
    assert len({facts["cosine"] for facts in measured.values()}) == len(job.measurements) == 2
