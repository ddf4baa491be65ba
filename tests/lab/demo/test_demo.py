"""The demo: settings from the sweep, a page that stands alone, sentences that claim no more than is shown."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import pytest
from flatmin.lab.sweeps.runners import ReadOnlyRunner
from rich.console import Console

from flatmin.lab.commands.demo import Demo, print_results
from flatmin.lab.demo import study
from flatmin.lab.demo.study import METHODS, NOISE_RATES, demo, demo_experiments, demo_settings, verdict
from flatmin.lab.report import write_report
from flatmin.lab.runs.directory import read_result
from flatmin.lab.spec.experiment import Model
from flatmin.lab.studies.contrasts import Contrast
from flatmin.lab.studies.findings import Cell, LineFigure, SurfaceFigure
from flatmin.lab.sweeps.jobs import Measurement
from flatmin.lab.sweeps.run_job import run_job


class InProcess:
    """Runs jobs one after the other; the sweeps' own tests have processes and interruptions."""

    def __init__(self, runs):
        self.runs = runs
        self.num_trained = 0

    def outcomes(self, jobs, what):
        for job in jobs:
            if not (self.runs / job.name / "result.json").exists():
                self.num_trained += 1
            run_job(job, self.runs, None, 600.0)
        return ReadOnlyRunner(self.runs).outcomes(jobs, what)


def shrink(patch):
    """Leave two seeds, an epoch and a small network."""
    whole = study.demo_experiment

    def small(**settings):
        return dataclasses.replace(whole(**settings), epochs=1, model=Model(name="cnn-4"))

    patch.setattr(study, "demo_experiment", small)
    patch.setattr(study, "SEEDS", (0, 1))
    patch.setattr(study, "EPOCHS", 1)
    patch.setattr(study, "SPECTRUM", Measurement(kind="spectrum", settings=(("num_eigenvalues", 1), ("steps", 5))))
    patch.setattr(study, "LANDSCAPE", Measurement(kind="landscape", settings=(("points", 3),)))


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """The runs of a small demo, and its findings."""
    runs = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        return runs, demo(InProcess(runs))


def test_the_settings_are_those_with_the_lowest_validation_error():
    settings = demo_settings()
    chosen, sweep = settings["chosen"], settings["sweep"]
    baselines = [line for line in sweep if line["rho"] == 0]
    totals = {}
    for line in baselines:
        key = (line["network"], line["lr"])
        totals[key] = totals.get(key, 0) + line["valid_error"]["mean"]
    assert min(totals, key=totals.get) == (chosen["network"], chosen["lr"])
    for noise in NOISE_RATES:
        perturbed = [line for line in sweep if line["rho"] > 0 and line["noise"] == noise]
        best = min(perturbed, key=lambda line: line["valid_error"]["mean"])
        assert chosen["rho"][str(noise)] == best["rho"]
    assert not set(settings["seeds"]) & set(study.SEEDS)


def test_the_baseline_may_train_twice_as_long_and_all_else_is_equal():
    for noise in NOISE_RATES:
        experiments = {key: dataclasses.replace(e, name="") for key, e in demo_experiments(0).items()}
        sgd, double, sam = (experiments[noise, method] for method in ("SGD", "SGD, twice the epochs", "SAM"))
        assert double == dataclasses.replace(sgd, epochs=2 * sgd.epochs)
        assert dataclasses.replace(sam, optim=dataclasses.replace(sam.optim, rho=0.0)) == sgd
        assert sam.optim.rho > 0
        assert sgd.data.label_noise == noise


def test_runs_have_the_names_that_they_always_had():
    assert demo_experiments(0)[0.4, "SAM"].run_name(0) == "digits-cnn-16-sam0.2-bf3a5316e5-seed0"


def test_table_has_the_numbers_of_the_runs(small_demo):
    runs, found = small_demo
    assert found.num_missing == 0
    assert len(found.runs) == 2 * len(NOISE_RATES) * len(METHODS)
    rows = found.tables[0].rows
    assert [row[:2] for row in rows] == [[f"{noise:.0%}", method] for noise in NOISE_RATES for method in METHODS]
    for row in rows:
        test, train, sharpness, curvature = row[2:]
        for cell in (test, train, sharpness, curvature):
            assert len(cell.runs) == 2
        results = [read_result(runs / run).metrics for run in test.runs]
        assert test.values == pytest.approx([100 * metrics["test_error"] for metrics in results])
        assert train.values == pytest.approx([100 * metrics["train_error"] for metrics in results])
        for cell, kind, key in ((sharpness, "sharpness", "m_sharpness"), (curvature, "spectrum", "lambda_max")):
            (file,) = (runs / cell.runs[1] / "measures").glob(f"{kind}-*.json")
            assert cell.values[1] == pytest.approx(json.loads(file.read_text())[key])


def test_figures_are_curves_of_all_methods_and_spectra_and_landscapes_of_those_with_as_many_epochs(small_demo):
    _, found = small_demo
    kinds = [type(figure) for figure in found.figures]
    assert kinds == [LineFigure, LineFigure, SurfaceFigure] * len(NOISE_RATES)
    for curves, spectra, landscapes in (found.figures[:3], found.figures[3:]):
        assert [series.name for series in curves.series] == list(METHODS)
        assert [len(series.x) for series in curves.series] == [1, 2, 1, 1]
        assert [series.name for series in spectra.series] == ["SGD", "SAM", "SAM on 1/8"]
        assert [surface.name for surface in landscapes.surfaces] == ["SGD", "SAM", "SAM on 1/8"]


def test_the_page_stands_alone_and_shows_verdicts_table_and_figures(small_demo, tmp_path):
    runs, found = small_demo
    page = write_report([found], runs=runs, out=tmp_path).read_text()
    assert page.count("<svg") == 6 + 1
    assert not re.search(r"(src|href)=\"(?![#])", page)
    assert all(text in page for text in ("What was run.", "validation error", "Alpaydin"))
    assert all(verdict.claim in page for verdict in found.verdicts)
    assert "scale" not in page.partition("<main>")[0].partition("<body>")[2]


def test_the_printed_table_and_sentences_are_those_of_the_page(small_demo):
    _, found = small_demo
    output = io.StringIO()
    print_results(found, Console(file=output, width=200))
    for row in found.tables[0].rows:
        assert all(str(cell.measured) in output.getvalue() for cell in row if isinstance(cell, Cell))
    assert all(verdict.evidence in output.getvalue() for verdict in found.verdicts)


def test_the_command_trains_nothing_twice_and_another_method_is_one_entry(small_demo, tmp_path, monkeypatch):
    runs, found = small_demo
    shrink(monkeypatch)
    again = InProcess(runs)
    assert demo(again) == found
    assert again.num_trained == 0
    weak = {"SAM, small rho": lambda sgd, rho: dataclasses.replace(sgd, optim=dataclasses.replace(sgd.optim, rho=0.01))}
    monkeypatch.setattr(study, "METHODS", METHODS | weak)
    more = demo(again)
    assert again.num_trained == 2 * len(NOISE_RATES)
    assert len(more.verdicts) == len(found.verdicts) + len(NOISE_RATES)
    assert [surface.name for surface in more.figures[2].surfaces] == ["SGD", "SAM", "SAM on 1/8", "SAM, small rho"]


def test_the_command_sweeps_and_writes_the_page(small_demo, monkeypatch):
    """With all runs there, the sweep starts no process."""
    runs, _ = small_demo
    shrink(monkeypatch)
    output = io.StringIO()
    Demo(runs=runs).run(Console(file=output, width=200))
    assert (runs / "index.html").exists()
    assert str(runs / "index.html") in output.getvalue().replace("\n", "")


@pytest.mark.parametrize(
    ("sgd", "sam", "said", "status"),
    [
        ([10.0, 12.0], [11.0, 10.5], "no significant difference (paired t-test over 2 seeds, p = ", "inconclusive"),
        ([20.0, 30.1], [10.0, 20.0], "test error of SAM is lower: 25.1 % (SGD) and 15.0 % (SAM)", "reproduced"),
        ([10.0, 20.0], [20.0, 30.1], "test error of SAM is higher", "not reproduced"),
        ([10.0, 20.0], [11.0, 21.0], "the same difference for all seeds, so no test is possible", "not tested"),
        ([10.0, math.nan], [11.0, 21.0], "1 of 2 pairs", "not tested"),
    ],
)
def test_the_verdict_says_only_what_the_seeds_show(sgd, sam, said, status):
    numbers = [{seed: v for seed, v in enumerate(values) if math.isfinite(v)} for values in (sam, sgd)]
    names = {"quantity": "test error", "lower_name": "SAM", "higher_name": "SGD"}
    judged = verdict(0.4, Contrast(**names, lower=numbers[0], higher=numbers[1], num_asked=2))
    assert said in judged.evidence
    assert judged.status == status
    assert judged.claim == "With 40 % noisy labels, SAM has a lower test error than SGD."


def test_home_page_of_the_docs_has_the_numbers_of_the_stored_runs(monkeypatch, tmp_path):
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "experiments"))
    from collect_demo import DOCS, RESULTS, TITLE, table, with_block

    found = demo(ReadOnlyRunner(RESULTS / "runs"))
    assert found.num_missing == 0
    text = DOCS.read_text()
    assert with_block(text, "demo", table(found)) == text, "run experiments/collect_demo.py"
    write_report([found], runs=RESULTS / "runs", out=tmp_path, title=TITLE)
    assert (tmp_path / "report.md").read_text() == (RESULTS / "report.md").read_text()
