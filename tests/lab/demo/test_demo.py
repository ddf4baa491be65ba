"""The demo: settings from the sweep, a page that stands alone, sentences that claim no more than is shown."""

import dataclasses
import io
import math
import re

import pytest
from markupsafe import escape
from rich.console import Console

from flatmin.lab.commands.demo import Demo, print_results
from flatmin.lab.demo import study
from flatmin.lab.demo.study import DEMO, EARLY, METHODS, NOISE_RATES, demo_experiments, demo_settings, verdict
from flatmin.lab.report import write_report
from flatmin.lab.runs.record import Records
from flatmin.lab.spec.experiment import Model
from flatmin.lab.studies.contrasts import Contrast, Family
from flatmin.lab.studies.findings import Cell, LineFigure, SurfaceFigure
from flatmin.lab.studies.study import describe, run_study
from flatmin.lab.sweeps.measurements import Landscape, Spectrum
from invented_runs import in_process


def shrink(patch):
    """Leave two seeds, an epoch, 100 images and a small network."""
    whole = study.demo_experiment

    def small(**settings):
        experiment = whole(**settings)
        data = dataclasses.replace(experiment.data, train_size=100)
        return dataclasses.replace(experiment, data=data, epochs=1, model=Model(name="cnn-4"))

    patch.setattr(study, "demo_experiment", small)
    patch.setattr(study, "SEEDS", (0, 1))
    patch.setattr(study, "EPOCHS", 1)
    patch.setattr(study, "SPECTRUM", Spectrum(num_eigenvalues=1, steps=5))
    patch.setattr(study, "LANDSCAPE", Landscape(points=3))


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
        perturbed = [line for line in sweep if line["rho"] != 0 and line["noise"] == noise]
        best = min(perturbed, key=lambda line: line["valid_error"]["mean"])
        assert chosen["rho"][str(noise)] == best["rho"]
    assert not set(settings["seeds"]) & set(study.SEEDS)


def test_the_baseline_may_train_twice_as_long_and_all_else_is_equal():
    for noise in NOISE_RATES:
        experiments = {key: dataclasses.replace(e, name="") for key, e in demo_experiments(0).items()}
        sgd, double, sam = (experiments[noise, method] for method in ("SGD", "SGD, twice the epochs", "SAM"))
        assert double == dataclasses.replace(sgd, epochs=2 * sgd.epochs)
        assert dataclasses.replace(sam, optim=dataclasses.replace(sam.optim, rho=0.0)) == sgd
        assert sam.optim.rho_factor is not None  # of what suggest_rho says
        assert experiments[noise, "SAM on 1/8"].optim.rho == sam.optim.rho
        assert sgd.data.label_noise == noise


def test_runs_have_the_names_that_they_always_had():
    assert demo_experiments(0)[0.4, "SGD"].run_name(0) == "digits-cnn-16-sgd-c2f29fe9f4-seed0"


def test_a_small_demo_from_runs_to_the_page(tmp_path, monkeypatch):
    """One test, because its runs would else be made again for every process of pytest that has a part of it."""
    shrink(monkeypatch)
    runs, known = tmp_path / "runs", Records()
    num_models = 2 * len(NOISE_RATES) * len(METHODS)
    assert run_study(DEMO, "laptop", known, in_process(runs)) == num_models
    found = describe(DEMO, "laptop", known)
    assert (found.num_missing, len(found.runs)) == (0, num_models)
    _check_table(found, known)
    _check_figures(found)
    _check_page(write_report([found], known=known, out=tmp_path, title="").read_text(), found)
    output = io.StringIO()
    print_results(found, Console(file=output, width=400))
    for row in found.tables[0].rows:
        assert all(str(c.measured) in output.getvalue() for c in row if isinstance(c, Cell) and c.unit == "%")
    assert all(verdict.evidence in output.getvalue() for verdict in found.verdicts)
    narrow = io.StringIO()
    print_results(found, Console(file=narrow, width=80))
    table = narrow.getvalue().partition("With clean labels")[0].splitlines()
    assert max(map(len, table)) <= 80
    methods = [row[1] for row in found.tables[0].rows]
    assert [line.split("  ")[0].strip() for line in table if "±" in line] == methods  # words are whole

    # With all runs there, the command starts no process.
    Demo(runs=runs).run(Console(file=output, width=400))
    assert (runs / "index.html").exists()
    assert str(runs / "index.html") in output.getvalue().replace("\n", "")
    assert describe(DEMO, "laptop", Records(runs)) == found

    # Another method is one entry, and nothing is trained twice.
    weak = {"SAM, small rho": lambda sgd, rho: dataclasses.replace(sgd, optim=dataclasses.replace(sgd.optim, rho=0.01))}
    monkeypatch.setattr(study, "METHODS", METHODS | weak)
    assert run_study(DEMO, "laptop", known, in_process(runs)) == 2 * len(NOISE_RATES)
    more = describe(DEMO, "laptop", known)
    assert len(more.verdicts) == len(found.verdicts) + 3  # with noisy labels it is also compared with early stopping
    assert [surface.name for surface in more.figures[0].surfaces] == ["SGD", "SAM", "SAM on 1/8", "SAM, small rho"]


def _check_table(found, known):
    """The table has the numbers of the runs."""
    rows = found.tables[0].rows
    methods = ["SGD", EARLY, *list(METHODS)[1:]]
    assert [row[:2] for row in rows] == [[f"{noise:.0%}", method] for noise in NOISE_RATES for method in methods]
    reads = (
        lambda record: 100 * record.metrics["test_error"],
        lambda record: 100 * record.metrics["train_error"],
        lambda record: record.measured[study.SHARPNESS.name]["m_sharpness"],
        lambda record: record.measured[study.CURVATURE.name]["lambda_max"],
    )
    for row in rows:
        if row[1] == EARLY:
            lines = [min(known[run].history, key=lambda line: line["valid_error"]) for run in row[2].runs]
            assert row[2].values == pytest.approx([100 * line["test_error"] for line in lines])
            assert row[3].values == pytest.approx([100 * line["train_error"] for line in lines])
            assert row[4:] == ["", ""]
            continue
        for cell, read in zip(row[2:], reads, strict=True):
            assert len(cell.runs) == 2
            assert cell.values == pytest.approx([read(known[run]) for run in cell.runs])


def _check_figures(found):
    """Curves of all methods; spectra and landscapes of those with as many epochs."""
    assert [type(figure) for figure in found.figures] == [SurfaceFigure, LineFigure, LineFigure] * len(NOISE_RATES)
    for landscapes, curves, spectra in (found.figures[:3], found.figures[3:]):
        assert [series.name for series in curves.series] == list(METHODS)
        assert [len(series.x) for series in curves.series] == [1, 2, 1, 1]
        assert [series.name for series in spectra.series] == ["SGD", "SAM", "SAM on 1/8"]
        assert [surface.name for surface in landscapes.surfaces] == ["SGD", "SAM", "SAM on 1/8"]


def _check_page(page, found):
    """It stands alone and shows verdicts, table and figures."""
    assert page.count("<svg") == 6 + 1
    # First the result and the pictures, then the table, then the claims with their tests.
    order = [page.index(text) for text in (escape(found.headline), "<svg", found.tables[0].title, "All claims")]
    assert order == sorted(order)
    assert not re.search(r"(src|href)=\"(?![#])", page)
    assert all(text in page for text in ("What was run.", "validation error", "Alpaydin"))
    assert all(verdict.claim in page for verdict in found.verdicts)
    assert "scale" not in page.partition("<main>")[0].partition("<body>")[2]


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
    contrast = Contrast(**names, lower=numbers[0], higher=numbers[1], num_asked=2)
    judged = verdict(0.4, contrast, Family([contrast]))
    assert said in judged.evidence
    assert judged.status == status
    assert judged.claim == "With 40 % noisy labels, SAM has a lower test error than SGD."


def test_p_values_are_corrected_for_all_comparisons_of_the_demo():
    names = {"quantity": "test error", "lower_name": "SAM", "higher_name": "SGD", "num_asked": 3}
    clear = Contrast(**names, lower={0: 10.0, 1: 11.0, 2: 12.5}, higher={0: 20.0, 1: 22.0, 2: 21.0})
    family = Family([clear, *(Contrast(**names, lower={0: 1.0, 1: s, 2: 3.0}, higher={0: 2.0, 1: 1.0, 2: 3.5 - s})
                              for s in (1.0, 2.0, 3.0))])  # fmt: skip
    judged = verdict(0.4, clear, family)
    assert family.p_holm(clear) == pytest.approx(4 * clear.p_value)
    assert f"Holm's correction for 4 comparisons, p = {4 * clear.p_value:.3f}" in judged.evidence
