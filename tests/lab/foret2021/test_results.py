"""The evidence in results/: every number of its page, and of the docs' tables, comes from the runs beside it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from flatmin.lab.report import write_report
from flatmin.lab.report.runs import read_run
from flatmin.lab.studies.findings import Cell

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def collecting():
    spec = importlib.util.spec_from_file_location("collect_results", ROOT / "experiments" / "collect_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_runs_say(collecting, tmp_path):
    runs = collecting.RESULTS / "runs"
    write_report(collecting.findings(runs), runs=runs, out=tmp_path, title=collecting.TITLE)
    assert (tmp_path / "report.md").read_text() == (collecting.RESULTS / "report.md").read_text()


def test_the_tables_of_the_docs_are_what_the_runs_say(collecting):
    text = collecting.DOCS.read_text()
    for name, block in collecting.blocks(collecting.RESULTS / "runs").items():
        assert collecting.with_block(text, name, block) == text, f"run experiments/collect_results.py: {name} differ"


def test_a_cell_is_the_mean_of_five_runs_that_are_there(collecting):
    runs = collecting.RESULTS / "runs"
    tables = {found.item: found.tables[0] for found in collecting.findings(runs) if found.tables}
    cells = {
        item: [c for row in tables[item].rows for c in row if isinstance(c, Cell) and c.measured and not c.note]
        for item in ("table1", "label-noise")
    }
    # SGD (also twice as long, or by m), SAM (also by m); with noise also Mixup, and bootstraps.
    assert len(cells["table1"]) >= 5
    assert len(cells["label-noise"]) >= 10
    for cell in (*cells["table1"], *cells["label-noise"]):
        metrics = [json.loads((runs / run / "result.json").read_text())["metrics"] for run in cell.runs]
        errors = [100 * line["test_error"] for line in metrics]
        assert len(errors) == 5
        mean = sum(errors) / 5
        assert cell.measured.mean == pytest.approx(mean) or cell.measured.mean == pytest.approx(100 - mean)


def test_no_run_tells_of_the_machine_it_ran_on_more_than_it_should(collecting):
    files = list(collecting.RESULTS.rglob("*.json"))
    assert files
    for file in files:
        assert not re.search(r'"/[a-z]+/', file.read_text()), file


@pytest.mark.parametrize("study", ["foret2021-laptop", "cheap-sam-laptop", "demo"])
def test_every_stored_run_can_be_read(study):
    runs = Path(__file__).parents[3] / "results" / study / "runs"
    states = {path.name: read_run(path.name, runs).state for path in runs.iterdir()}
    assert states
    assert {name: state for name, state in states.items() if state not in ("finished", "failed")} == {}
