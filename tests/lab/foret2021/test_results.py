"""The evidence in results/: every number of its pages, and of the docs' tables, comes from the runs beside them."""

import importlib.util
import re
from pathlib import Path

import pytest

from flatmin.lab.commands.report import described, items_named, read_study
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.report import write_report
from flatmin.lab.runs.record import Records, write_records
from flatmin.lab.studies.study import describe

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("study", ["foret2021-laptop", "cheap-sam-laptop", "demo"])
def test_the_page_and_every_figure_are_what_the_runs_say_and_the_runs_are_as_collect_writes_them(study, tmp_path):
    results = RESULTS / study
    known, (items, scale, title) = Records(results), read_study(results)
    curves = {name: tuple(record.history[0])[1:] for name, record in known.items() if len(record.history) > 1}
    write_records(tmp_path, list(known.values()), curves)
    found = described(items_named(items), scale, known, results)
    write_report(found, known=known, out=tmp_path, title=title, html=False)
    kept = {"study.json", "plan.json"}
    made, stored = (
        {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}
        for at in (tmp_path, results)
    )
    assert sorted(made) == sorted(stored.keys() - kept)
    assert [name for name in made if made[name] != stored[name]] == []


def test_the_tables_of_the_docs_are_what_the_runs_say():
    spec = importlib.util.spec_from_file_location("make_evidence_tables", ROOT / "docs" / "make_evidence_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for file, text in module.updated_pages().items():
        assert (ROOT / "docs" / file).read_text() == text, f"run docs/make_evidence_tables.py: {file} differs"


def test_a_cell_is_the_mean_of_five_runs_that_are_there():
    known = Records(RESULTS / "foret2021-laptop")
    # SGD and SAM for three numbers of epochs; with noise also Mixup, and bootstraps.
    for item, least in (("imagenet", 6), ("label-noise", 10)):
        found = describe(ITEMS[item], "laptop", known).tables[0]
        complete = [c for row in found.rows for c in row if getattr(c, "measured", None) and not c.note]
        assert len(complete) >= least
        for cell in complete:
            errors = [100 * known[run].metrics["test_error"] for run in cell.runs]
            assert len(errors) == 5
            mean = sum(errors) / 5
            assert cell.measured.mean == pytest.approx(100 - mean if item == "label-noise" else mean)


def test_no_run_tells_of_the_machine_it_ran_on_more_than_it_should():
    files = [*RESULTS.rglob("*.json"), *RESULTS.rglob("*.jsonl")]
    assert len(files) >= 9
    for file in files:
        assert not re.search(r'"/[a-z]+/', file.read_text()), file
