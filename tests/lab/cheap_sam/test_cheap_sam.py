"""The study of SAM's gain over its cost, on invented runs: what is asked for, who keeps the gain, the front."""

import pytest
from scipy import stats

from flatmin.lab.cheap_sam.arms import LOOKS, conditions, cost_in_passes
from flatmin.lab.cheap_sam.study import CHEAP_SAM, results_of, share_of_gain
from flatmin.lab.errors import SpecError
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.rho_rule import RHO_RULE
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.cost import cost
from flatmin.lab.studies.study import describe, planned_jobs
from invented_runs import invented_findings, invented_runs, only

NOISY, CIFAR = "Fashion-MNIST, 40 % noisy labels", "CIFAR-10, clean labels"
EARLY = "SGD, stopped early (clean validation)"
JITTER = (0.0, 0.4, -0.3, 0.2, -0.1, 0.3, -0.2, 0.1, -0.4, 0.25)
ERRORS = {"SGD": 40.0, "SAM": 30.0, "SAM, m = 16": 28.0, "SAM on 1/8": 29.0, "ascent on 1/4": 31.0}
ERRORS |= {"SAM, half the epochs": 34.0, "SGD, m = 16": 39.0}
ERRORS |= {"SGD, stopped early (noisy validation)": 36.0}
STOP = {"SGD, stopped early (clean validation)": 50, "SGD, stopped early (noisy validation)": 60}


def method_of(job):
    return job.experiment.name.removesuffix(" (choosing)").split("labels/")[-1]


def metrics(job, unfit=False, best=0.5, gain=None):
    """Give every run an error by its method, and one factor the best validation error."""
    method, optim = method_of(job), job.experiment.optim
    error = ERRORS.get(method, 35.0)
    if gain is not None and method == "SAM":  # and its replicas differ by more
        error -= gain + 3 * JITTER[job.seed % 10]
    if job.seed != TUNING_SEED:
        error += JITTER[job.seed] + 0.05 * JITTER[(job.seed + sum(map(ord, method))) % 10]
    last = {"test_error": error / 100, "train_error": 0.2 if unfit else 0.0}
    if method in STOP:
        at = {10: (0.5, 0.5), STOP[method]: (0.2, error / 100), 200: (0.4, 0.42)}
        return [{"epoch": e, "valid_error": v, "test_error": t, "train_error": 0.3} for e, (v, t) in at.items()]
    return last | {"valid_error": 0.2 if optim.rho_number == best else 0.3}


@pytest.fixture(scope="module")
def known():
    return invented_runs(CHEAP_SAM, "laptop", metrics)


@pytest.fixture(scope="module")
def found(known):
    return describe(CHEAP_SAM, "laptop", known)


def table_of(found, name):
    return next({row[0]: row for row in table.rows} for table in found.tables if table.title == name)


def test_all_but_three_arms_are_runs_of_tables_1_4_5_and_of_the_study_of_the_rule():
    shared = {}
    for item in (*(ITEMS[name] for name in ("table1", "label-noise", "svhn-fashion")), RHO_RULE):
        shared |= planned_jobs(item, "laptop")
    own = {name: job for name, job in planned_jobs(CHEAP_SAM, "laptop").items() if name not in shared}
    arms = {"SAM, half the epochs": 10 * 200_000, "ascent on 1/4": 10 * 250_000, "SAM on 1/8": 10 * 112_500}
    assert {method_of(job) for job in own.values()} == set(arms)
    assert cost(own.values()) == sum(arms.values()) <= 6_000_000
    assert {job.experiment.model.name for job in own.values() if method_of(job) == "SAM on 1/8"} == {"mlp-2-256"}


def test_an_arm_costs_what_its_name_says(known):
    by_name = {}
    for entries in results_of("laptop", known):
        for entry in entries:
            trained = cost_in_passes(entry.chosen, entry.condition.start.epochs)
            by_name.setdefault(entry.method.name, set()).add(trained)
    expected = {**{name: {1.0} for name in LOOKS}, "SAM on 1/8": {1.125}, "ascent on 1/4": {1.25}}
    for name in ("SAM", "SAM, m = 16", "SGD, twice the epochs", "SGD, m = 16, twice the epochs"):
        expected[name] = {2.0}
    assert by_name == expected


def test_sgd_that_stops_early_costs_the_epochs_up_to_the_best_one_and_has_its_error(found):
    rows = table_of(found, NOISY)
    assert (rows[EARLY][1], rows["SGD, stopped early (noisy validation)"][1]) == ("0.25", "0.3")
    assert rows[EARLY][3].measured.mean == pytest.approx(35.0, abs=0.3)  # not the last epoch's 42
    assert rows[EARLY][4].measured.mean == pytest.approx(30.0)
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: {EARLY}"))
    assert verdict.claim.endswith("at 0.25 passes.")
    assert verdict.status == "not kept"


def test_an_arm_keeps_the_gain_if_it_is_below_nine_tenths_of_it(found):
    status = {v.claim: v.status for v in found.verdicts if v.claim.startswith(NOISY)}
    by_arm = {claim.removeprefix(f"{NOISY}: ").partition(" keeps")[0]: s for claim, s in status.items()}
    assert by_arm["SAM on 1/8"] == "kept"
    assert by_arm["ascent on 1/4"] == "inconclusive"  # at the limit
    assert by_arm["SAM, half the epochs"] == by_arm["SGD, m = 16"] == "not kept"
    assert not by_arm.keys() & {"SAM", "SGD", "SAM, m = 16", "SGD, twice the epochs"}


def test_the_gain_is_that_of_sam_with_m_where_sam_with_one_eps_is_not_trained(found):
    clean = next(v for v in found.verdicts if v.claim.startswith("Fashion-MNIST, clean labels: SAM on 1/8"))
    assert "of the gain of SAM, m = 16, at 1.125 passes" in clean.claim
    (comparison,) = clean.comparisons
    assert comparison.difference.mean == pytest.approx(29.0 - (40.0 - 0.9 * 12.0), abs=0.2)


def test_the_test_is_one_sided_paired_and_corrected_over_all_arms(found):
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: SAM on 1/8"))
    (comparison,) = verdict.comparisons
    assert comparison.p_value == pytest.approx(stats.ttest_1samp(comparison.values, 0.0, alternative="less").pvalue)
    assert comparison.difference.mean == pytest.approx(29.0 - 31.0, abs=0.2)
    assert comparison.p_holm > comparison.p_value
    assert "Holm's correction for 10 comparisons" in verdict.evidence
    assert len(found.planned) == 10


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"unfit": True}, "SGD ends with a training error of 20.0 %"),
        ({"best": 2.0**-6}, "SAM's rho is at the edge of its grid"),
        ({"gain": -9.9}, "the gain of SAM, 0.2 ± 1.0 points, may be nothing"),
    ],
)
def test_what_fails_the_gate_is_not_tested_at_this_scale(how, reason):
    def of_job(job):
        found = metrics(job, **how)
        if "best" in how and isinstance(found, dict):  # the smaller the better: the grid cannot grow enough
            found["valid_error"] = 0.1 + 0.01 * job.experiment.optim.rho_number
        return found

    found = invented_findings(CHEAP_SAM, "laptop", of_job)
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: SAM on 1/8"))
    assert verdict.status == "not tested at this scale"
    assert reason in verdict.evidence


def test_nothing_is_judged_while_a_replica_is_missing_and_there_is_no_front():
    lost = only(lambda job: (method_of(job), job.seed) != ("ascent on 1/4", 3), metrics)
    found = invented_findings(CHEAP_SAM, "laptop", lost)
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: ascent on 1/4"))
    assert verdict.status == "not tested"
    assert found.num_missing > 0
    assert not any(figure.title.endswith(NOISY) for figure in found.figures)
    assert NOISY not in {row[0] for row in found.tables[0].rows}


def test_the_front_joins_what_nothing_beats(found):
    figure = found.figures[0]
    front = next(series for series in figure.series if series.name == "Pareto front")
    assert list(front.hover) == [EARLY, "SAM, half the epochs", "SAM on 1/8", "SAM, m = 16"]
    assert list(front.x) == [0.25, 1.0, 1.125, 2.0]


def test_which_to_use_is_the_front_of_every_condition(found):
    table, *others = found.tables
    assert table.title.startswith("Which to use")
    assert [other.title for other in others] == [condition.name for condition in conditions("laptop")]
    cifar = [(row[1], row[2], row[3].measured.mean, row[4]) for row in table.rows if row[0] == CIFAR]
    assert cifar == [
        ("1", "SGD, m = 16", pytest.approx(39.0, abs=0.2), "opt.rho = 0; opt.step_batch(loss_fn, batch, m=16)"),
        ("1.125", "SAM on 1/8", pytest.approx(29.0, abs=0.2), "opt.step_batch(loss_fn, batch, part=1 / 8)"),
        ("2", "SAM, m = 16", pytest.approx(28.0, abs=0.2), "opt.step_batch(loss_fn, batch, m=16)"),
    ]
    assert all(row[3].runs for row in table.rows)


def test_the_share_of_the_gain():
    assert share_of_gain({"SGD": 40.0, "SAM": 30.0, "x": 35.0}, "x") == "50 %"
    assert share_of_gain({"SGD": 40.0, "SAM, m = 16": 30.0, "x": 42.0}, "x", "SAM, m = 16") == "-20 %"


def test_there_is_no_share_of_a_gain_that_is_not_known_well(found):
    assert all(row[5] for name, row in table_of(found, NOISY).items() if name not in ("SGD", "SAM"))

    def no_gain(job):
        values = metrics(job)
        error = 0.35 + 0.01 * JITTER[(3 * job.seed + (method_of(job) == "SAM")) % 10]
        return values if job.seed == TUNING_SEED or isinstance(values, list) else values | {"test_error": error}

    found = invented_findings(CHEAP_SAM, "laptop", no_gain)
    assert {row[5] for row in table_of(found, NOISY).values()} == {""}
    assert "too wide" in next(table.note for table in found.tables if table.title == NOISY)


def test_the_page_says_why_the_earlier_runs_are_not_evidence():
    found = describe(CHEAP_SAM, "laptop", Records())
    assert any("a script that is in no commit, 378 had uncommitted changes" in note for note in found.notes)
    assert found.tables == []


def test_there_is_no_papers_scale():
    with pytest.raises(SpecError, match="use --scale laptop"):
        conditions("paper")
