"""The demonstration: settings from the sweep, a page that stands alone, sentences that claim no more than is shown."""

import dataclasses
import re

import pytest

from flatmin.lab.demo import page as demo_page
from flatmin.lab.demo import study as demo
from flatmin.lab.demo.page import write_page
from flatmin.lab.demo.study import NOISE_RATES, DemoRun, demo_experiments, demo_settings, run_one, summarize, verdict
from flatmin.lab.spec.experiment import Model


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All conditions with two seeds, shrunk to an epoch."""
    runs = tmp_path_factory.mktemp("demo")
    found = []
    for seed in (0, 1):
        for (noise, method), experiment in demo_experiments(seed).items():
            epochs = experiment.epochs // demo.EPOCHS
            shrunk = dataclasses.replace(experiment, epochs=epochs, model=Model(name="cnn-4"))
            found.append(run_one(noise, method, shrunk, seed, runs))
    return summarize(found)


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
    assert not set(settings["seeds"]) & set(demo.SEEDS)


def test_the_baseline_may_train_twice_as_long_and_all_else_is_equal():
    for noise in NOISE_RATES:
        experiments = demo_experiments(0)
        sgd, double, sam = (experiments[noise, method] for method in demo.METHODS)
        assert double == dataclasses.replace(sgd, epochs=2 * sgd.epochs)
        assert dataclasses.replace(sam, optim=dataclasses.replace(sam.optim, rho=0.0)) == sgd
        assert sam.optim.rho > 0
        assert sgd.data.label_noise == noise


def test_the_page_stands_alone_and_shows_table_curves_spectra_and_landscapes(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_page, "LANDSCAPE_POINTS", 3)
    monkeypatch.setattr(demo_page, "LANCZOS_STEPS", 5)
    page = write_page(tmp_path / "demo" / "index.html", rows, ["SAM's <verdict>"], demo_settings()).read_text()
    assert page.count("<img") == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "SAM&#x27;s &lt;verdict&gt;" in page
    for row in rows:
        assert str(row.test_error) in page
    assert "validation error" in page
    assert "Alpaydin" in page


def fake_rows(rows, sgd, sam):
    """The rows with other test errors (of two seeds), for clean labels."""

    def with_errors(row, errors):
        runs = [
            dataclasses.replace(run, result=dataclasses.replace(run.result, history=[{"test_error": error}]))
            for run, error in zip(row.runs, errors, strict=True)
        ]
        interval = demo.mean_and_interval([100 * e for e in errors])
        return dataclasses.replace(row, runs=runs, test_error=interval)

    return [with_errors(row, sam if row.method == "SAM" else sgd) for row in rows if row.noise == 0.0]


def test_the_verdict_says_only_what_the_seeds_show(rows):
    same = verdict(fake_rows(rows, [0.10, 0.12], [0.11, 0.105]), 0.0)
    assert "no difference" in same
    better = verdict(fake_rows(rows, [0.20, 0.301], [0.10, 0.20]), 0.0)
    assert "is lower" in better
    worse = verdict(fake_rows(rows, [0.10, 0.20], [0.20, 0.301]), 0.0)
    assert "is higher" in worse


def test_runs_are_grouped_by_condition_and_repeated_at_once(rows):
    assert [(row.noise, row.method) for row in rows] == [(n, m) for n in NOISE_RATES for m in demo.METHODS]
    assert all(len(row.runs) == 2 and isinstance(row.runs[0], DemoRun) for row in rows)
    first = rows[0].runs[0]
    experiment = first.result.experiment
    again = run_one(first.noise, first.method, experiment, first.result.seed, first.result.directory.parent)
    assert again == first
