"""The protocol on invented runs: what is chosen, what counts, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flatmin.lab.foret2021.item_findings import table_findings, table_item
from flatmin.lab.foret2021.tables.error_reduction import compared_methods
from flatmin.lab.foret2021.tables.from_scratch import table1_conditions
from flatmin.lab.runs.record import Records, RunRecord
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import SEEDS, TUNING_SEED, Condition, condition_results
from flatmin.lab.studies.findings import Cell, Comparison
from flatmin.lab.studies.methods import Method, baselines, no_tuning, sam_and_small_m, with_rates, with_rho
from flatmin.lab.studies.printed import Claimed
from flatmin.lab.studies.study import describe, run_study
from invented_runs import cells, invented, invented_findings, invented_runs

START = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), optim=Optim(), epochs=4)
SGD, LONGER = baselines(with_rates((0.1, 0.2), (1e-4, 1e-3)))
SAM = Method(
    name="SAM", candidates=with_rho((0.05, 0.1, 0.2)), after="SGD", against=(("SGD", "SGD, twice the epochs"),)
)
ONE_SGD = Method(name="SGD", candidates=no_tuning)
ONE_SAM = replace(SAM, candidates=with_rho((0.1,)), against=(("SGD",),))
UNTUNED = (*baselines(no_tuning), replace(SAM, candidates=with_rho((0.1,))))
SAM_ERRORS, SGD_ERRORS = (0.20, 0.21, 0.19, 0.22, 0.20), (0.25, 0.24, 0.26, 0.24, 0.27)


def condition(*methods, labels=("net",), column="data", claimed=None):
    return Condition(labels=labels, column=column, start=START, methods=methods, claimed=claimed or {})


def item_of(conditions, **shape):
    return table_item("table1", lambda _: conditions, shape=lambda _: {"label_columns": ("model",), **shape})


def found(ending, conditions, scale="laptop", **shape):
    return invented_findings(item_of(conditions, **shape), scale, ending)


def results(ending, *methods):
    """Return what came of each method, and the records of all runs."""
    conditions = [condition(*methods)]
    known = invented_runs(item_of(conditions), "laptop", ending)
    return condition_results(conditions, known, "table1"), known


def errors(valid, test):
    return {"valid_error": valid, "test_error": test}


def by_validation(job):
    """Best: lr 0.2 with decay 1e-3 (each alone is not), then rho 0.1."""
    optim = job.experiment.optim
    base = {(0.1, 1e-4): 0.20, (0.1, 1e-3): 0.25, (0.2, 1e-4): 0.26, (0.2, 1e-3): 0.15}[optim.lr, optim.weight_decay]
    valid = base - {0.0: 0, 0.05: 0.01, 0.1: 0.03, 0.2: 0.02}[optim.rho]
    return errors(valid, 1 - valid + 1e-3 * job.seed)  # whoever chooses by the test error chooses wrongly


def clear_difference(job):
    by_seed = SAM_ERRORS if job.experiment.optim.rho else SGD_ERRORS
    return errors(0.1, by_seed[job.seed] if job.seed != TUNING_SEED else 0.5)


def test_settings_are_chosen_on_a_tenth_held_out_the_baseline_first_then_rho_and_replicas_train_on_all():
    conditions, rounds, known = [condition(SGD, LONGER, SAM)], [], Records()

    def sweep(jobs, what):
        rounds.append(jobs)
        return invented(by_validation)(jobs, what)

    run_study(item_of(conditions), "laptop", known, sweep)
    sgd, longer, sam = condition_results(conditions, known, "table1")
    assert (sgd.chosen.optim.lr, sgd.chosen.optim.weight_decay) == (0.2, 1e-3)
    assert sam.chosen.optim == replace(sgd.chosen.optim, rho=0.1)
    choosing = [[job for job in jobs if job.experiment.name.endswith(" (choosing)")] for jobs in rounds]
    assert [(len(jobs), len(chosen)) for jobs, chosen in zip(rounds, choosing, strict=True)] == [
        (4, 4),
        (13, 3),
        (5, 0),
    ]
    assert {(job.experiment.data.validation, job.seed) for jobs in choosing for job in jobs} == {(0.1, TUNING_SEED)}
    replicas = [record for entry in (sgd, longer, sam) for record in entry.replicas.records]
    assert len({r.name for r in replicas}) == 15
    assert {(r.experiment.data.validation, r.seed) for r in replicas} == {(0.0, seed) for seed in range(5)}
    assert TUNING_SEED not in SEEDS


@pytest.mark.parametrize(("longer_error", "counts"), [(0.3, "SGD, twice the epochs"), (0.5, "SGD")])
def test_sam_is_compared_with_the_better_mean_of_both_baselines_and_only_they_double(longer_error, counts):
    def ending(job):
        sam = 0.1 if job.experiment.optim.rho else 0.0
        error = longer_error if job.experiment.epochs == 8 else 0.4
        return errors(0.1, error - sam - 0.001 * job.seed**2 * (1 + sam))

    assert cells(found(ending, [condition(*UNTUNED)]), Comparison)[0].name == f"SAM - {counts}"
    entries, known = results(ending, *UNTUNED)
    epochs = {(bool(r.experiment.optim.rho), r.experiment.epochs) for r in known.values()}
    assert epochs == {(False, 4), (False, 8), (True, 4)}
    # Of SAM alone, and not while a run is missing.
    reductions = {entry.method.name: baseline.method.name for entry, baseline in compared_methods(entries)}
    assert reductions == {"SAM": counts}


def test_a_longer_run_of_an_experiment_that_is_evaluated_at_its_end_is_too():
    (longer,) = LONGER.candidates(replace(START, evaluate_every=4))
    assert (longer.epochs, longer.evaluate_every) == (8, 8)


@pytest.mark.parametrize(
    ("ending", "rho", "num_missing"),
    [
        ("diverged", 0.2, 0),
        # The candidate, and replicas of whatever will be chosen.
        (None, None, 1 + 5),
        (RunRecord(name="killed", state="failed", is_final=False), None, 1 + 5),
    ],
)
def test_a_run_that_diverged_is_never_chosen_and_a_missing_or_killed_one_leaves_the_choice_open(
    ending, rho, num_missing
):
    """rho = 0.1 would be the best."""

    def metrics(job):
        if job.experiment.optim.rho != 0.1:
            return by_validation(job)
        return replace(ending, name=job.name) if isinstance(ending, RunRecord) else ending

    entries, known = results(metrics, SGD, LONGER, SAM)
    assert (entries[2].chosen and entries[2].chosen.optim.rho) == rho
    assert len(entries[2].replicas.records) == (5 if rho else 0)
    assert describe(item_of([condition(SGD, LONGER, SAM)]), "laptop", known).num_missing == num_missing


@pytest.mark.parametrize(
    ("how", "note"), [(None, "4 of 5 replicas of {} are available"), ("x", "1 of 5 replicas of {} failed")]
)
@pytest.mark.parametrize("lost", ["SAM", "SGD", "SGD, twice the epochs"])
def test_nothing_is_judged_while_a_replica_of_either_side_is_missing_or_failed(lost, how, note):
    def ending(job):
        name = job.experiment.name.rpartition("/")[2]
        return how if name == lost and job.seed == 3 else clear_difference(job)

    findings = found(ending, [condition(*UNTUNED)])
    (verdict,) = findings.verdicts
    assert (verdict.status, lost in verdict.evidence) == ("not tested", True)
    assert not cells(findings, Comparison)
    assert [baseline for _, baseline in compared_methods(results(ending, *UNTUNED)[0])] == [None]
    (cell,) = [c for c in cells(findings) if c.note and len(c.values) == 4][:1]
    assert cell.note == note.format(lost)
    by_seed = SAM_ERRORS if lost == "SAM" else SGD_ERRORS
    assert cell.values == pytest.approx([100 * by_seed[seed] for seed in (0, 1, 2, 4)])
    assert [name[-5:] for name in cell.runs] == ["seed0", "seed1", "seed2", "seed4"]


def test_small_m_is_also_compared_with_sgd_that_is_normalized_alike_and_no_reduction_counts_the_control():
    def ending(job):
        optim = job.experiment.optim
        return errors(0.1, (0.2 if optim.rho else 0.22 if optim.m else 0.25) + 0.001 * job.seed * (1 + optim.rho))

    methods = (*baselines(no_tuning), *sam_and_small_m((0.1,), 10))
    entries, _ = results(ending, *methods)
    assert {e.method.name: (e.chosen.optim.rho, e.chosen.optim.m) for e in entries} == {
        "SGD": (0.0, None),
        "SGD, twice the epochs": (0.0, None),
        "SGD, m = 10": (0.0, 10),
        "SAM": (0.1, None),
        "SAM, m = 10": (0.1, 10),
    }
    names = [c.name for c in cells(found(ending, [condition(*methods)]), Comparison)]
    assert names == ["SAM - SGD", "SAM, m = 10 - SGD", "SAM, m = 10 - SGD, m = 10"]
    assert {e.method.name: baseline.method.name for e, baseline in compared_methods(entries)} == {
        "SAM": "SGD",
        "SAM, m = 10": "SGD",
    }


def test_a_method_may_start_from_what_another_one_chose():
    def bootstrapped(base):
        return [replace(base, data=replace(base.data, bootstrap=True))]

    after = Method(name="Bootstrap + SAM", candidates=bootstrapped, after="SAM")
    (_, _, sam, last), _ = results(by_validation, SGD, LONGER, SAM, after)
    assert last.chosen.optim.rho == 0.1
    assert last.chosen.first_stage().run_hash() == sam.chosen.run_hash()


def test_cells_hold_the_mean_its_interval_the_values_and_the_runs():
    claimed = {("SAM", "test_error"): Claimed.read("2.7 ± 0.1")}
    table = found(clear_difference, [condition(ONE_SGD, ONE_SAM, claimed=claimed)]).tables[0]
    assert list(table.columns) == ["model", "data: SGD", "data: SAM"]
    cell = table.rows[0][2]
    values = 100 * np.array(SAM_ERRORS)
    assert cell.claimed == "2.7 ± 0.1"
    assert cell.measured.mean == pytest.approx(values.mean())
    expected = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values))
    assert cell.measured.mean + cell.measured.half_width == pytest.approx(expected[1])
    assert cell.values == pytest.approx(values)
    assert [name[-5:] for name in cell.runs] == [f"seed{seed}" for seed in range(5)]


def test_comparisons_are_paired_by_seed_and_corrected_within_the_table():
    conditions = [condition(ONE_SGD, ONE_SAM), condition(ONE_SGD, ONE_SAM, labels=("other",))]
    findings = found(clear_difference, conditions)
    comparison = cells(findings, Comparison)[0]
    expected = stats.ttest_rel(SAM_ERRORS, SGD_ERRORS).pvalue
    assert (comparison.p_value, comparison.p_holm) == pytest.approx((expected, 2 * expected))
    differences = 100 * np.subtract(SAM_ERRORS, SGD_ERRORS)
    assert comparison.values == pytest.approx(differences)
    assert comparison.difference.mean == pytest.approx(differences.mean())
    assert comparison.difference.half_width == pytest.approx(stats.t.ppf(0.975, 4) * stats.sem(differences))
    assert [v.status for v in findings.verdicts] == ["reproduced", "reproduced"]
    assert findings.verdicts[0].comparisons == [comparison]


def test_each_metric_has_its_own_claims_and_its_own_better_baseline():
    """Twice the epochs are worse in the first guess and better in the first five."""

    def ending(job):
        if job.experiment.optim.rho:
            return {"test_error": 0.1, "test_top5_error": 0.01, "train_error": 0.0}
        longer = job.experiment.epochs == 8
        return {"test_error": 0.3 if longer else 0.2, "test_top5_error": 0.04 if longer else 0.05, "train_error": 0.0}

    claimed = {("SAM", "test_error"): Claimed.read("20.9"), ("SAM", "test_top5_error"): Claimed.read("5.3")}
    findings = found(ending, [condition(*UNTUNED, claimed=claimed)], metrics=("test_error", "test_top5_error"))
    top1, first, top5, second, training = findings.tables
    assert [t.rows[0][-1].claimed for t in (top1, top5, training)] == ["20.9", "5.3", None]
    assert [t.rows[0][-1].name for t in (first, second)] == ["SAM - SGD", "SAM - SGD, twice the epochs"]
    assert [t.rows[0][-1].difference.mean for t in (first, second)] == pytest.approx([-10.0, -3.0])


def test_a_smoke_test_judges_nothing_and_one_replica_compares_nothing():
    conditions = [condition(ONE_SGD, ONE_SAM)]
    assert [v.status for v in found(clear_difference, conditions, scale="smoke").verdicts] == ["not tested"]
    known = invented_runs(item_of(conditions), "laptop", clear_difference)
    entries = condition_results(conditions, known, "table1", seeds=(0,))
    one = table_findings("table1", "laptop", entries, label_columns=("model",))
    assert not one.verdicts
    assert not cells(one, Comparison)


def test_accuracies_are_shown_where_the_paper_shows_them_and_literature_is_only_cited():
    cited = {"Others (2019)": {"data": Cell(claimed="94.0"), "not run": Cell(claimed="90.0")}}
    layout = {"layout": "methods in rows", "accuracy": True, "literature": cited}
    metrics = ("test_error", "test_loss")

    def ending(job):
        return clear_difference(job) | {"test_loss": 1.0, "train_error": 0.0}

    table, *others = found(ending, [condition(ONE_SGD, ONE_SAM)], metrics=metrics, **layout).tables
    assert [row[0] for row in table.rows] == ["Others (2019)", "SGD", "SAM"]
    losses, training = (next(t for t in others if name in t.title) for name in ("test loss", "training"))
    for other in (losses, training):
        assert [row[0] for row in other.rows] == ["SGD", "SAM"]  # who is cited says nothing of these
    assert table.rows[2][1].measured.mean == pytest.approx(100 - 100 * np.mean(SAM_ERRORS))
    assert table.rows[0][1:] == [Cell(claimed="94.0")]


def test_the_validation_errors_that_chose_are_shown():
    findings = found(by_validation, [condition(SGD, LONGER, SAM)])
    table = next(t for t in findings.tables if "chosen" in t.title)
    chosen = [row for row in table.rows if row[-1] == "chosen"]
    assert [row[2] for row in chosen] == ["lr 0.2, decay 0.001", "lr 0.2, decay 0.001, rho 0.1"]
    assert [row[4].values for row in chosen] == [pytest.approx((15.0,)), pytest.approx((12.0,))]
    assert len({run for row in table.rows for run in row[4].runs if run.endswith(f"seed{TUNING_SEED}")}) == 7
    assert [h.value for h in findings.hyperparameters if h.source == "validation"] == [row[2] for row in chosen]


def test_table_1_on_a_laptop_has_all_arms_once_and_sam_with_the_papers_share_of_a_batch_everywhere():
    first, *others = table1_conditions("laptop")
    sgd, control = ("SGD", "SGD, twice the epochs"), ("SGD, m = 16", "SGD, m = 16, twice the epochs")
    assert {m.name: m.against for m in first.methods} == {
        **dict.fromkeys((*sgd, *control), ()),
        "SAM": (sgd,),
        "SAM, m = 16": (control,),
        "SAM on 1/8": (sgd,),
    }
    for condition in (first, *others):
        assert {name for name, _ in condition.claimed} == {"SGD", "SAM, m = 16"}
        assert (condition.start.epochs, condition.start.data.batch_size) == (200, 8 * 16)
        assert [m.name for m in condition.methods if m.ours] == ["SAM on 1/8"]
    assert [[m.name for m in c.methods] for c in others] == [[*sgd, "SAM, m = 16", "SAM on 1/8"]] * 2
