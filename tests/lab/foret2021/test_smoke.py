"""`flatmin reproduce all --scale smoke`: every table and figure of the paper, from the command to the page."""

import pytest
from flatmin.lab.studies.item import SCALES
from flatmin.lab.studies.plan import planned_jobs
from flatmin.lab.sweeps.runners import ReadOnlyRunner

from flatmin.cli import main
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.runs.directory import read_result
from flatmin.lab.studies.findings import Cell, Comparison

TABLES = ("table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion", "noise-and-rho", "rho-0.05")


def test_every_item_of_the_paper_is_there():
    figures = {"landscape", "hessian", "m-and-rho", "predictive", "second-order", "p-norm", "inner-steps", "bound"}
    assert {*TABLES, "fine-tuning-rho-0.05", "error-reduction"} | figures == set(ITEMS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ITEMS)
def test_every_experiment_of_every_scale_can_be_built_and_is_another_run(name, scale):
    jobs = planned_jobs(ITEMS[name].study, scale)
    assert len(jobs) == len({job.name for job in jobs})
    if (name, scale) != ("predictive", "paper"):  # needs the models of the competition
        assert jobs
        assert all("/" in job.experiment.name for job in jobs)


def test_all_items_run_from_the_command_to_the_page(tmp_path):
    """One test, because its runs would else be made again for every process of pytest that has a part of it."""
    runs, command = tmp_path / "runs", ["--scale", "smoke", "--runs", str(tmp_path / "runs")]
    assert main(["reproduce", "all", *command, "--processes", "2", "--threads", "1"]) == 0
    for name, item in ITEMS.items():
        _check_findings(name, item.study("smoke", ReadOnlyRunner(runs)), runs)
    page = (runs / "report-smoke" / "index.html").read_text()
    for item in ITEMS.values():
        assert item.source.replace("&", "&amp;") in page

    # The page written again from what is there has the same bytes; and nothing that is finished is run again.
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert main(["report", "all", *command, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "index.html").read_text() == page
    assert main(["reproduce", "table1", "label-noise", "hessian", *command]) == 0
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")} == before


def _check_findings(name, findings, runs):
    assert findings.num_missing == 0
    assert findings.tables or findings.figures
    assert {v.status for v in findings.verdicts} <= {"not tested"}  # seconds of training prove nothing
    cells = [c for table in findings.tables for row in table.rows for c in row if isinstance(c, Cell | Comparison)]
    assert {run for c in cells for run in c.runs} <= set(findings.runs)
    for table in findings.tables if name in TABLES else []:
        metric = "train_error" if "training" in table.title else "test_error"
        chosen = "chosen" in table.title
        metric = "valid_error" if chosen or name == "noise-and-rho" else metric
        for cell in (c for row in table.rows for c in row if isinstance(c, Cell)):  # is the mean of what its runs say
            results = [read_result(runs / run).metrics for run in cell.runs]
            mean = sum(100 * result[metric] for result in results) / len(results)
            assert cell.measured.mean == pytest.approx(100 - mean if name == "label-noise" and not chosen else mean)


def test_only_some_of_an_item_can_be_run(tmp_path):
    command = [
        "reproduce",
        "label-noise",
        "--scale",
        "smoke",
        "--runs",
        str(tmp_path),
        "--only",
        "label-noise/20 %/SGD",
    ]
    assert main([*command, "--processes", "1"]) == 0
    findings = ITEMS["label-noise"].study("smoke", ReadOnlyRunner(tmp_path))
    cells = {row[0]: row[1] for row in findings.tables[0].rows}
    assert cells["SGD"].measured is not None
    assert cells["SAM"].measured is None
    assert findings.num_missing > 0


def test_an_item_that_is_none_is_refused_with_the_nearest_name(capsys):
    assert main(["reproduce", "lable-noise"]) == 2
    assert "label-noise" in capsys.readouterr().err
