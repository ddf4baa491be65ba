"""The evidence in results/: every number of its pages, and of the docs' tables, comes from the runs beside them."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from flatmin.lab.commands.collect import Collect
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.study import describe

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("study", ["foret2021-laptop", "cheap-sam-laptop", "rho-rule-laptop", "demo"])
def test_collected_again_every_file_has_the_same_bytes(study, tmp_path):
    """The runs themselves, the page and every figure; and there are no others."""
    for file in ("runs.jsonl", "environments.json", "study.json", "plan.json"):
        if (RESULTS / study / file).exists():
            shutil.copy(RESULTS / study / file, tmp_path)
    Collect(tmp_path, tmp_path, allow_unknown_code=True).run(Console(quiet=True))

    def files(directory):
        return {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}

    made, stored = files(tmp_path), files(RESULTS / study)
    assert sorted(made) == sorted(stored)
    assert [name for name in made if made[name].read_bytes() != stored[name].read_bytes()] == []


def test_the_tables_of_the_docs_are_what_the_runs_say():
    spec = importlib.util.spec_from_file_location("make_evidence_tables", ROOT / "docs" / "make_evidence_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for file, text in module.updated_pages().items():
        assert (ROOT / "docs" / file).read_text() == text, f"run docs/make_evidence_tables.py: {file} differs"


def test_a_cell_is_the_mean_of_five_runs_that_are_there():
    known = Records(RESULTS / "foret2021-laptop")
    for item, least in (("imagenet", 6), ("svhn-fashion", 2)):
        found = describe(ITEMS[item], "laptop", known).tables[0]
        complete = [c for row in found.rows for c in row if getattr(c, "measured", None) and not c.note]
        assert len(complete) >= least
        for cell in complete:
            errors = [100 * known[run].metrics["test_error"] for run in cell.runs]
            assert len(errors) == 5
            mean = sum(errors) / 5
            assert cell.measured.mean == pytest.approx(mean)


def test_no_run_tells_of_the_machine_it_ran_on_more_than_it_should():
    files = [*RESULTS.rglob("*.json"), *RESULTS.rglob("*.jsonl")]
    assert len(files) >= 10
    for file in files:
        assert not re.search(r'"/[a-z]+/', file.read_text()), file
