"""experiments/recompute_report.py: an independent computation of every number on the pages of results/."""

import ast
import dataclasses
import json
import random
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import recompute.zoo
import recompute_report
from recompute.runs import Study
from rich.console import Console

from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.commands.collect import Collect
from flatmin.lab.foret2021.figures import prediction
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.rho_rule import RHO_RULE
from flatmin.lab.runs.record import Records, write_records
from flatmin.lab.studies.registered_plan import plan_of, read_plan, register
from flatmin.lab.studies.study import planned_jobs, run_study
from flatmin.lab.sweeps.spectrum_at_loss import SpectrumAtLoss, first_below
from flatmin.lab.sweeps.sweep import unite
from invented_runs import invented
from report_cases import without_pictures

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAPER, CHEAP, DEMO, RULE = "foret2021-laptop", "cheap-sam-laptop", "demo", "rho-rule-laptop"
BEFORE = {"commit": 40 * "a", "date": "2026-01-01T00:00:00+00:00"}
NUMBER = r"(\d+(?:\.\d+)?)"


@cache
def study(name):
    return Study(RESULTS / name)


def with_another_number(page, pattern):
    """Return the page with the number that a pattern finds changed by two in its last digit."""
    last = re.search(pattern, page).end(1) - 1
    digit = int(page[last])
    return page[:last] + str(digit + 2 if digit < 8 else digit - 2) + page[last + 1 :]


@pytest.mark.parametrize(("name", "least"), [(PAPER, 4000), (CHEAP, 900), (DEMO, 1200), (RULE, 350)])
def test_it_agrees_with_every_number_of_a_page(name, least):
    tally = recompute_report.check(RESULTS / name, study(name))
    assert tally.wrong == []
    assert sum(tally.checked.values()) >= least
    assert {why for why, _, _ in tally.not_checked} == {"text"}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (PAPER, rf"items at scale laptop, from {NUMBER} finished"),
        (PAPER, rf"finished runs \({NUMBER} h"),
        (PAPER, rf"\*\*{NUMBER} inconclusive\*\*"),
        (PAPER, rf"baseline in {NUMBER} of the \d+ comparisons"),
        (PAPER, rf"lowers the test error by {NUMBER} ± "),
        (PAPER, rf"lowers the test error by .* at {NUMBER} passes"),
        (PAPER, rf"\| \*\*reproduced\*\* \| .{NUMBER} ± "),
        (PAPER, rf"\| \*\*reproduced\*\* \| .[\d.]+ ± {NUMBER}"),
        (PAPER, rf"\| \*\*reproduced\*\* \|[^(]*\(.{NUMBER} %\)"),
        (PAPER, rf"points \(.\d+ %\) \| {NUMBER} \|"),
        (PAPER, rf"points \(.\d+ %\) \| \d+ \| p = {NUMBER} \|"),
        (PAPER, rf"\| p = [\d.]+ \| {NUMBER} min"),
        (PAPER, rf"- \*\*reproduced\*\*: .* -{NUMBER} ± [\d.]+ points over"),
        (PAPER, rf"± [\d.]+ points over {NUMBER} pairs"),
        (PAPER, rf"points over \d+ pairs, p = {NUMBER} \(Holm"),
        (PAPER, rf"\(Holm's correction for {NUMBER} comparisons\)"),
        (PAPER, rf"ends with a training error of {NUMBER} %"),
        (PAPER, rf"\(SGD\); difference .{NUMBER} ± "),
        (PAPER, rf"; {NUMBER} from fashion-mnist-wrn-10-2-sgd"),
        (PAPER, rf"\| {NUMBER} ± [\d.]+ \(n = 5\)"),
        (PAPER, rf"\| [\d.]+ ± {NUMBER} \(n = 5\)"),
        (PAPER, rf"\(n = {NUMBER}\)"),
        (PAPER, rf"\(SAM - SGD, 5 pairs; p = {NUMBER}, Holm"),
        (PAPER, rf"\(SAM - SGD, 5 pairs; p = [\d.]+, Holm p = {NUMBER}\)"),
        (PAPER, rf"difference, p, Holm's p: .{NUMBER}, "),
        (PAPER, rf"\| {NUMBER} \(n = 1\) \| chosen"),
        (PAPER, rf"\(sign test, p = {NUMBER}\)"),
        (PAPER, rf"; standard deviation {NUMBER}\)"),
        (PAPER, rf"less than {NUMBER} points; more than"),
        (PAPER, rf"bounds are vacuous, above an error of 1: {NUMBER}"),
        (PAPER, rf"pairs show a difference of {NUMBER} points"),
        (PAPER, rf"\| first order training \| \d+ \| {NUMBER} ±"),
        (PAPER, rf"\| learning rate \| {NUMBER} \| ours"),
        (PAPER, rf"-seed0 \| 0 \| \d+ \| [\d.]+ \| \N{{EN DASH}} \| {NUMBER} \|"),
        (CHEAP, rf"\| {NUMBER} % \| [\d.]+ ± [\d.]+ points \(n = 5\)"),
        (CHEAP, rf"\(n = 5\) \| \d+ % \| {NUMBER} ± "),
        (CHEAP, rf"\*\*inconclusive\*\*: .* p = {NUMBER}; Holm"),
        (CHEAP, rf"\| SAM on 1/8 \| {NUMBER} \| [\d.]+x \| \d"),
        (CHEAP, rf"\| SAM on 1/8 \| 1.125 \| {NUMBER}x \| "),
        (CHEAP, rf"\| Pareto front \| 1.125 \| {NUMBER} \|"),
        (CHEAP, rf"of the gain of SAM, m = 16, at {NUMBER} passes\. test"),
        (RULE, rf"\| {NUMBER} ± [\d.]+ \(n = 5\) \| 1 \|"),
        (RULE, rf"\(n = 5\) \| {NUMBER} \| 35"),
        (RULE, rf"{NUMBER} of 7 conditions are complete"),
        (RULE, rf"and {NUMBER} of them pass their gate"),
        (RULE, rf"\(n = 5\) \| {NUMBER} % \|"),
        (RULE, rf"digits \| 0.5 \| {NUMBER} \|"),
        (DEMO, rf"paired t-test over 5 seeds, Holm's correction for 6 comparisons, p = {NUMBER}\)"),
        (DEMO, rf"the test errors are {NUMBER} %"),
        (DEMO, rf"smoothed with a Gaussian of width {NUMBER}\."),
    ],
)
def test_one_number_that_is_changed_is_found(name, pattern, tmp_path):
    """One of each kind."""
    page = (RESULTS / name / "report.md").read_text()
    (tmp_path / "report.md").write_text(with_another_number(page, pattern))
    assert recompute_report.check(tmp_path, study(name)).wrong != []


def test_a_verdict_and_a_choice_that_are_changed_are_found(tmp_path):
    page = (RESULTS / PAPER / "report.md").read_text()
    for old, new in (
        ("- **reproduced**", "- **inconclusive**"),
        ("| chosen |", "|  |"),
    ):
        (tmp_path / "report.md").write_text(page.replace(old, new, 1))
        assert recompute_report.check(tmp_path, study(PAPER)).wrong != [], old
    (tmp_path / "report.md").write_text(page.replace("(n = 5", "(n = 5; rho at the edge of its grid"))
    found = [line for line in recompute_report.check(tmp_path, study(PAPER)).wrong if line.endswith("(choice)")]
    assert any("SAM, m = 16" in line for line in found)


def test_a_run_that_is_left_out_is_found(tmp_path):
    """All means and intervals agree with the runs that the page links: but one is stored that it does not link."""
    for file in (RESULTS / DEMO).glob("*.json"):
        shutil.copy(file, tmp_path)
    shutil.copy(RESULTS / DEMO / "report.md", tmp_path)
    lines = (RESULTS / DEMO / "runs.jsonl").read_text().splitlines()
    more = json.loads(lines[0]) | {"name": "digits-cnn-16-sam0.0707107-0aaafb827d-seed9", "seed": 9}
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines, json.dumps(more)]))
    assert any("seed9" in line for line in recompute_report.check(tmp_path).wrong)


def collect(directory):
    """Write the page of a directory's runs."""
    with without_pictures():
        Collect(directory, directory, allow_unknown_code=True).run(Console(quiet=True))


def recomputed(directory, items, known, study_file):
    """Write a page with registered plans of items whose runs are known, and return what was checked of it."""
    jobs = unite(job for item in items for job in planned_jobs(item, "laptop", known).values())
    write_records(
        directory,
        [known[name] for name in jobs if known[name].is_complete],
        {name: job.curves for name, job in jobs.items()},
    )
    others = {*read_plan(directory)[0], "error-reduction", "imagenet"}  # the last two have no plan
    register(directory, {i.name: plan_of(i, "laptop") for i in items if i.name not in others}, [])
    names = [item.name for item in items]
    plans = dict.fromkeys(read_plan(directory)[0], BEFORE)
    about = json.loads(study_file.read_text()) | {"items": names, "plans": plans}
    (directory / "study.json").write_text(json.dumps(about))
    collect(directory)
    return recompute_report.check(directory)


@pytest.mark.parametrize("gain", [0.06, -0.02])
@pytest.mark.parametrize(("item", "study_name"), [(CHEAP_SAM, CHEAP), (RHO_RULE, RULE)], ids=lambda x: str(x)[:9])
def test_it_agrees_with_our_own_studies_when_all_their_runs_have_come(item, study_name, gain, tmp_path):
    """With a gain and without one, in conditions that pass their gates and in one that does not."""
    sessions = next(iter(Records(RESULTS / study_name).values())).sessions

    def metrics(job):
        e, rng = job.experiment, random.Random(job.name)
        rho = e.optim.rho_number if e.optim.uses_sam else 0.0
        error = 0.45 + rng.gauss(0, 0.006) - (gain - 0.01 * abs(rho - 0.5)) * (rho > 0) * (0.9 + 0.1 * e.optim.part)
        train = 0.05 * (e.data.augment == "none" and e.data.name == "cifar10")
        found = {"epoch": e.epochs, "train_loss": 0.01, "train_error": train, "test_error": error, "rho": 0.1 * rho}
        found |= {"test_loss": 4 * error, "test_ece": error / 2, "valid_error": error if e.data.validation else None}
        stop = 10 * rng.randint(3, 9)
        early = [found | {"epoch": 10, "valid_error": 0.8}, found | {"epoch": stop, "valid_error": 0.1}]
        return [*early, found] if e.evaluate_every == 10 else found

    def sweep(jobs, what):
        records = invented(metrics)(jobs, what)
        return {n: dataclasses.replace(r, sessions=sessions) for n, r in records.items()}

    known = Records()
    run_study(item, "laptop", known, sweep)
    tally = recomputed(tmp_path, [item], known, RESULTS / study_name / "study.json")
    assert tally.wrong == []
    assert {why for why, _, _ in tally.not_checked} == {"text"}
    assert tally.checked["verdict"] >= 2


@pytest.mark.parametrize("most_runs", [None, 40])
def test_it_agrees_with_a_page_whose_missing_runs_have_come(most_runs, tmp_path):
    """Tables with invented runs: all of them, with grids that grow, or some; and what sums them up."""
    names = ("error-reduction", "table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion", "rho-0.05")
    names += ("fine-tuning-rho-0.05",)
    items = [ITEMS[name] for name in names]
    known = Records(RESULTS / PAPER)
    sessions = next(iter(known.values())).sessions
    made = []

    def metrics(job):
        made.append(job)
        if most_runs is not None and len(made) > most_runs:
            return None
        e, rng = job.experiment, random.Random(job.name)
        rho = e.optim.rho_number if e.optim.uses_sam else 0.0
        error = 0.45 - 0.02 * (e.epochs > 200) + rng.gauss(0, 0.006)
        error -= (0.04 - 0.005 * abs(rho - 2.5)) * (rho > 0)  # the grid grows to where rho is best
        error += 10 * abs(e.optim.lr - 0.01) * (e.optim.lr < 0.05)  # and, of fine-tuning, the learning rate
        found = {"train_loss": 0.01, "train_error": 0.05 * (e.data.augment == "cutout"), "test_error": error}
        found |= {"test_loss": 4 * error + rng.gauss(0, 0.01), "test_ece": error / 2}
        found |= {"valid_error": error} if e.data.validation else {}
        best = found | {"epoch": 10 * rng.randint(3, 9), "valid_error": 0.1, "test_error": error - 0.03}
        return [best, found | {"epoch": e.epochs}] if e.evaluate_every == 10 else found

    def sweep(jobs, what):
        records = invented(metrics)(jobs, what)
        return {n: dataclasses.replace(r, sessions=sessions) if r.experiment else r for n, r in records.items()}

    for item in items:
        run_study(item, "laptop", known, sweep)
    shutil.copy(RESULTS / PAPER / "plan.json", tmp_path)
    tally = recomputed(tmp_path, items, known, RESULTS / PAPER / "study.json")
    assert tally.wrong == []
    assert {why for why, _, _ in tally.not_checked} == {"text"}
    assert tally.checked["gate"] > 0
    assert tally.checked["runs"] > 250


CURVATURE = ("hessian", "noise-and-rho")


def curvature(case):
    """Return metrics and measurements of invented runs of the Hessian and of Table 8, by what is the case with them."""

    def metrics(job):
        if case == "some" and job.seed > 1:
            return None
        e, rng = job.experiment, random.Random(job.name)
        unfit = 0.06 if case == "unfit" and not e.optim.uses_sam else 0.0
        error = 0.45 - 0.02 * e.optim.uses_sam - 0.05 * (e.optim.rho == 0.2) + rng.gauss(0, 0.006)
        found = {"train_loss": 0.01, "train_error": unfit, "test_error": error, "valid_error": error}
        return found | ({"rho": rng.uniform(0.1, 0.2)} if e.optim.rho == "auto" else {})

    def facts(job, measurement):
        rng = random.Random(job.name)
        values = sorted(
            (rng.uniform(1, 2) * (1 if job.experiment.optim.uses_sam else 5) for _ in range(5)), reverse=True
        )
        values = {"lambda_max": values[0], "eigenvalues": values, "lambda_1_over_lambda_5": values[0] / values[4]}
        values |= {"converged": case != "some"}
        if not isinstance(measurement, SpectrumAtLoss):
            return values | {
                "nodes": [0.0, values["lambda_max"]],
                "weights": [0.9, 0.1],
                "epoch": job.experiment.epochs,
            }
        ends = case == "never" and job.seed == 3 and job.experiment.optim.uses_sam
        losses = [1.0, 0.2, 0.4, 0.05 + rng.uniform(0, 0.01)] + [0.02] * (not ends)  # rises in between
        found = first_below(enumerate(losses, start=1), measurement.limits)
        at = {f"{x:g}": None if a is None else {"epoch": a[0], "loss": a[1], **values} for x, a in found.items()}
        return {"losses": losses, "keep_every": 1, "at_loss": at, "epoch": job.experiment.epochs}

    return metrics, facts


def curvature_page(case, folder, *, registered=True):
    """Write what `flatmin collect` makes of invented runs of two items; with plans if they are registered."""
    sessions = next(iter(Records(RESULTS / PAPER).values())).sessions
    known = Records()
    for name in CURVATURE:
        run_study(ITEMS[name], "laptop", known, invented(*curvature(case)))
    runs = [dataclasses.replace(r, sessions=sessions) for r in known.values() if r.is_complete]
    write_records(folder, runs, {})
    (folder / "study.json").write_text(json.dumps({"items": CURVATURE, "scale": "laptop", "title": "Invented"}))
    if registered:
        register(folder, {name: plan_of(ITEMS[name], "laptop") for name in CURVATURE}, [])
    collect(folder)
    return (folder / "report.md").read_text()


@pytest.mark.parametrize("case", ["all", "never", "unfit", "some"])
@pytest.mark.parametrize("registered", [True, False])
def test_it_agrees_with_curvature_at_equal_loss_and_table_8(case, registered, tmp_path):
    """All runs exist; one never reaches a loss; a baseline does not fit; some are missing."""
    page = curvature_page(case, tmp_path, registered=registered)
    tally = recompute_report.check(tmp_path)
    assert tally.wrong == []
    assert {why for why, _, _ in tally.not_checked} <= {"text"}
    statuses = re.findall(r"^- \*\*([^*]+)\*\*: ", page, flags=re.MULTILINE)
    assert len(statuses) == 10
    expected = {"all": 0, "never": 1, "unfit": 7, "some": 0}[case]  # the end, and three levels twice
    assert statuses.count("not tested at this scale") == expected
    assert (tally.checked["gate"] > 0) == (case in ("never", "unfit"))


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("all", rf"\| none \| 0.3 \| {NUMBER} ± "),
        ("all", rf"\| none \| 0.03 \| [\d.]+ ± [\d.]+ \(n = 10\) \| {NUMBER} ± "),
        ("all", rf"0\.1, epoch, SGD: {NUMBER} from"),
        ("all", r"0\.1, loss, SAM: ([\d.]+) from"),
        ("all", rf"0\.1, lambda.?_max/lambda.?_5, SAM: {NUMBER} from"),
        ("all", rf"log10 of lambda.?_max at a training loss of 0\.1, without augmentation: {NUMBER} "),
        ("all", rf"\| none \| rho \|[^±]* {NUMBER} ± "),
        ("all", rf"\| SAM \| 0\.1 \| {NUMBER} ±"),
        ("all", rf"validation error, 40 % noise, %: {NUMBER} \(rho = 0\.1\)"),
        ("all", rf"\| factor of the suggested rho \| {NUMBER} \|"),
        ("never", rf"the loss of {NUMBER} of 10 runs of SAM never"),
        ("never", rf"training loss of 0\.1, without augmentation: .* Holm's correction for {NUMBER} comparisons"),
        ("unfit", rf"without SAM the training error ends at {NUMBER} %"),
        ("unfit", rf"SGD ends with a training error of {NUMBER} %"),
        ("some", rf"{NUMBER} of 10 pairs are available"),
        ("some", rf"In {NUMBER} of \d+ spectra"),
        ("some", rf"In \d+ of {NUMBER} spectra"),
    ],
)
def test_one_number_of_curvature_or_table_8_that_is_changed_is_found(case, pattern, curvature_of, tmp_path):
    page, runs = curvature_of(case)
    (tmp_path / "report.md").write_text(with_another_number(page, pattern))
    assert recompute_report.check(tmp_path, runs).wrong != []


@pytest.fixture(scope="module")
def curvature_of(tmp_path_factory):
    """Return the page and the runs of a case; each is written once."""

    @cache
    def made(case):
        folder = tmp_path_factory.mktemp(case)
        return curvature_page(case, folder), Study(folder)

    return made


def test_an_epoch_that_is_not_the_first_below_a_loss_is_found(tmp_path):
    curvature_page("all", tmp_path)
    runs = (tmp_path / "runs.jsonl").read_text()
    assert "0.2,0.4" in runs
    (tmp_path / "runs.jsonl").write_text(runs.replace("0.2,0.4", "0.4,0.2"))
    assert any("epoch" in line for line in recompute_report.check(tmp_path).wrong)


def make_page(items, metrics, facts, tmp_path, monkeypatch, registered=True):
    """Write the page of items whose runs are invented, and return what the script says of it."""
    monkeypatch.setattr(prediction, "NUM_RESAMPLES", 60)
    monkeypatch.setattr(recompute.zoo, "NUM_RESAMPLES", 60)
    recompute.zoo.prediction.cache_clear()
    known, sessions = Records(), next(iter(Records(RESULTS / PAPER).values())).sessions

    def sweep(jobs, what):
        records = invented(metrics, facts)(jobs, what)
        return {n: dataclasses.replace(r, sessions=sessions) if r.experiment else r for n, r in records.items()}

    for item in items:
        run_study(item, "laptop", known, sweep)
    write_records(tmp_path, [r for r in known.values() if r.is_complete], {})
    about = {"items": [item.name for item in items], "scale": "laptop", "title": "invented"}
    about |= {"plans": {item.name: BEFORE for item in items}} if registered else {}
    (tmp_path / "study.json").write_text(json.dumps(about))
    if registered:
        register(tmp_path, {item.name: plan_of(item, "laptop") for item in items}, [])
    collect(tmp_path)
    return recompute_report.check(tmp_path)


def by_m(job):
    """SAM gains more with smaller m; with m = 64 SGD does not fit."""
    e, rng = job.experiment, random.Random(job.name)
    m, rho = e.optim.m or 128, e.optim.rho_number if e.optim.uses_sam else 0.0
    error = (
        0.18 + rng.gauss(0, 0.002) - ({4: 0.03, 16: 0.02, 64: 0.01, 128: 0.01}[m] - 0.01 * abs(rho - 0.5)) * (rho > 0)
    )
    found = {"train_error": 0.05 * (m == 64), "train_loss": 0.01, "test_error": error}
    found |= {"test_loss": 4 * error + rng.gauss(0, 0.01), "test_ece": error / 2 + rng.gauss(0, 0.01)}
    return found | ({"valid_error": error} if e.data.validation else {})


def of_zoo(job):
    """Most models stop in the band."""
    rng = random.Random(job.name)
    loss = rng.uniform(0.045, 0.0551)
    found = {"train_error": 0.02, "fit_error": rng.choice([0.0, 0.002]), "fit_loss": loss, "train_loss": 0.06}
    return found | {"lr": 0.1 * job.experiment.optim.lr, "test_error": rng.uniform(0.18, 0.24)}


def sharpness(job, measurement):
    rng, error = random.Random(f"{job.name} {measurement.m}"), of_zoo(job)["test_error"]
    m = 500 if measurement.m is None else measurement.m
    return {"m_sharpness": error + rng.gauss(0, 0.002 * m**0.5), "m": m, "rho": measurement.rho}


@pytest.mark.parametrize(("registered", "share"), [(True, 1.0), (True, 0.5), (True, 0.0), (False, 1.0), (False, 0.0)])
def test_it_agrees_with_the_pages_of_both_items_on_m(registered, share, tmp_path, monkeypatch):
    """With a registered plan and without, with all runs, some and (as before the plan) none."""

    def metrics(job):
        if random.Random(f"there {job.name}").random() >= share:
            return None
        return (of_zoo if job.measurements else by_m)(job)

    items = [ITEMS["svhn-fashion"]] * (share == 0) + [ITEMS["m-and-rho"], ITEMS["predictive"]]
    some = metrics if share else lambda job: by_m(job) if "svhn" in job.experiment.name else None
    tally = make_page(items, some, sharpness, tmp_path, monkeypatch, registered)
    assert tally.wrong == []
    assert {why for why, _, _ in tally.not_checked} == {"text"}
    if share == 1:
        assert tally.checked["score"] > 15
        assert tally.checked["gate"] > 0


@pytest.mark.parametrize(
    "pattern",
    [
        rf"SAM's change of the test error: -{NUMBER} \(m = 4\)",
        rf"\(m = 4\) vs\. -[\d.]+ \(m = 128\); difference -{NUMBER} ± ",
        rf"SGD, m = 64 ends with a training error of {NUMBER} %",
        rf"\| .{NUMBER} ± [\d.]+ \(n = 5\) \| .*\(m = 4 - m = 128, 5 pairs",
        rf"\(m = 4 - m = 128, 5 pairs; p . [\d.]+, Holm p . {NUMBER}\)",
        rf"score {NUMBER} for m = 1",
        rf"{NUMBER} settings, p",
        rf"the training loss scores {NUMBER}",
        rf"measure scores [\d.]+ to {NUMBER}, adjusted",
        rf"training losses are between [\d.]+ and {NUMBER}\.",
        rf"\| training loss \| {NUMBER} \|",
        rf"\| 16 \| [\d.]+ \| {NUMBER} \|",
        rf"\| 16 \| [\d.]+ \| [\d.]+ \| \N{{MINUS SIGN}}?-?{NUMBER} \|",
        rf"\| m-sharpness, adjusted \| 64 \| {NUMBER} \|",
        rf"{NUMBER} settings of 96 count",
        rf"models {NUMBER} did not stop in the band",
        rf"\| rho of the measure, m = 64 \| {NUMBER} \|",
    ],
)
def test_one_number_of_the_items_on_m_that_is_changed_is_found(pattern, changed_pages):
    page, check = changed_pages
    assert check(with_another_number(page, pattern)).wrong != []


@pytest.fixture(scope="module")
def changed_pages(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    items = [ITEMS["m-and-rho"], ITEMS["predictive"]]
    with pytest.MonkeyPatch.context() as patch:
        made = make_page(items, lambda job: (of_zoo if job.measurements else by_m)(job), sharpness, directory, patch)
        assert made.wrong == []
        loaded = Study(directory)

        def check(page):
            (directory / "report.md").write_text(page)
            return recompute_report.check(directory, loaded)

        yield (directory / "report.md").read_text(), check


def test_it_imports_nothing_of_flatmin():
    files = [ROOT / "experiments" / "recompute_report.py", *(ROOT / "experiments" / "recompute").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            allowed = ("recompute", "numpy", "scipy", *["ast", "copy", "collections", "dataclasses", "datetime"])
            allowed += ("functools", "itertools", "json", "math", "pathlib", "re", "statistics", "sys")
            assert all(name.partition(".")[0] in allowed for name in names), (file, names)


def test_the_command_line_says_what_was_checked_and_ends_with_1_if_a_page_is_wrong(tmp_path, capsys):
    shutil.copytree(RESULTS / DEMO, tmp_path / DEMO)
    assert recompute_report.main([str(tmp_path / DEMO)]) == 0
    assert re.search(r"demo: [\d,]+ numbers checked .* 0 disagree", capsys.readouterr().out)
    page = tmp_path / DEMO / "report.md"
    page.write_text(page.read_text().replace("40 finished runs", "41 finished runs"))
    assert recompute_report.main([str(tmp_path / DEMO)]) == 1
    assert "head: the page says 41, the runs say 40" in capsys.readouterr().out
