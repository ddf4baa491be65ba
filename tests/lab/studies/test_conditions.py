"""The protocol on invented runs: what is chosen, what counts, and what is said of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from flatmin.lab.foret2021.item_findings import table_findings
from flatmin.lab.foret2021.tables.error_reduction import compared_methods
from flatmin.lab.foret2021.tables.from_scratch import table1_conditions
from flatmin.lab.runs.directory import Result
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.condition_tables import condition_tables
from flatmin.lab.studies.conditions import (
    SEEDS,
    TUNING_SEED,
    Condition,
    Method,
    baselines,
    by_micro_batches,
    no_tuning,
    run_conditions,
    sam_and_small_m,
    with_rates,
    with_rho,
)
from flatmin.lab.studies.findings import Cell, Comparison
from flatmin.lab.studies.printed import Claimed, Claims
from flatmin.lab.studies.replicas import RecordingRunner
from flatmin.lab.sweeps.jobs import Outcome

START = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), optim=Optim(), epochs=4)
CLAIMS = Claims(source="Table 0", title="Invented", metric="test error, %", cells={})


class Invented:
    """A laboratory in which a function says how each run ends."""

    def __init__(self, ending):
        self.ending, self.asked = ending, []

    def outcomes(self, jobs, what):
        self.asked.append((what, list(jobs)))
        return [self._outcome(job) for job in jobs]

    def _outcome(self, job):
        found = self.ending(job)
        if found is None or isinstance(found, str):
            return Outcome(job=job, failure=found)
        metrics = found if isinstance(found, dict) else dict(zip(("valid_error", "test_error"), found, strict=True))
        result = Result(
            experiment=job.experiment, seed=job.seed, directory=Path(job.name), history=[metrics], time_seconds=1.0
        )
        return Outcome(job=job, result=result)


def condition(*methods, labels=("net",), column="data", claimed=None):
    return Condition(labels=labels, column=column, start=START, methods=methods, claimed=claimed or {})


SGD, LONGER = baselines(with_rates((0.1, 0.2), (1e-4, 1e-3)))
SAM = Method(
    name="SAM", candidates=with_rho((0.05, 0.1, 0.2)), after="SGD", against=(("SGD", "SGD, twice the epochs"),)
)


def by_validation(job):
    """Best: lr 0.2 with decay 1e-3 (each alone is not), then rho 0.1."""
    optim = job.experiment.optim
    base = {(0.1, 1e-4): 0.20, (0.1, 1e-3): 0.25, (0.2, 1e-4): 0.26, (0.2, 1e-3): 0.15}[optim.lr, optim.weight_decay]
    valid = base - {0.0: 0, 0.05: 0.01, 0.1: 0.03, 0.2: 0.02}[optim.rho]
    test = 1 - valid  # whoever chooses by the test error chooses wrongly
    return valid, test + 1e-3 * job.seed


def test_settings_are_chosen_by_validation_error_the_baseline_first_then_rho():
    lab = Invented(by_validation)
    entries = run_conditions([condition(SGD, LONGER, SAM)], lab, "item")
    sgd, _, sam = entries
    assert (sgd.chosen.optim.lr, sgd.chosen.optim.weight_decay) == (0.2, 1e-3)
    assert (sam.chosen.optim.lr, sam.chosen.optim.weight_decay, sam.chosen.optim.rho) == (0.2, 1e-3, 0.1)
    rounds = [(what, len(jobs)) for what, jobs in lab.asked]
    assert rounds == [("item: choosing settings", 4), ("item: choosing settings", 3), ("item: replicas", 15)]


def test_choosing_holds_out_a_tenth_and_replicas_train_on_all_with_other_seeds():
    lab = Invented(by_validation)
    run_conditions([condition(SGD, LONGER, SAM)], lab, "item")
    choosing = [job for what, jobs in lab.asked if "choosing" in what for job in jobs]
    replicas = [job for what, jobs in lab.asked if "replicas" in what for job in jobs]
    assert {job.experiment.data.validation for job in choosing} == {0.1}
    assert {job.seed for job in choosing} == {TUNING_SEED}
    assert {job.experiment.data.validation for job in replicas} == {0.0}
    assert {job.seed for job in replicas} == set(SEEDS) == {0, 1, 2, 3, 4}
    assert len({job.name for job in replicas}) == 15
    assert TUNING_SEED not in SEEDS


@pytest.mark.parametrize(("longer_error", "counts"), [(0.3, "SGD, twice the epochs"), (0.5, "SGD")])
def test_sam_is_compared_with_the_better_mean_of_both_baselines_and_only_they_double(longer_error, counts):
    def ending(job):
        sam = 0.1 if job.experiment.optim.rho else 0.0
        return 0.1, (longer_error if job.experiment.epochs == 8 else 0.4) - sam - 0.001 * job.seed**2 * (1 + sam)

    methods = (*baselines(no_tuning), replace(SAM, candidates=with_rho((0.1,))))
    lab = Invented(ending)
    findings = findings_of(run_conditions([condition(*methods)], lab, "item"))
    assert comparison_of(findings).name == f"SAM - {counts}"
    epochs = {(bool(j.experiment.optim.rho), j.experiment.epochs) for _, jobs in lab.asked for j in jobs}
    assert epochs == {(False, 4), (False, 8), (True, 4)}
    assert len(findings.tables[0].rows[0]) == 4  # the label, and a number for each


def test_a_longer_run_of_an_experiment_that_is_evaluated_at_its_end_is_too():
    start = replace(START, evaluate_every=4)
    lab = Invented(lambda job: (0.1, 0.2))
    run_conditions(
        [Condition(labels=(), column="", start=start, methods=baselines(no_tuning), claimed={})], lab, "item"
    )
    assert {(j.experiment.epochs, j.experiment.evaluate_every) for _, jobs in lab.asked for j in jobs} == {
        (4, 4),
        (8, 8),
    }


def test_a_process_that_was_killed_leaves_the_choice_open():
    class Killed(Invented):
        def _outcome(self, job):
            outcome = super()._outcome(job)
            return (
                replace(outcome, result=None, failure="killed", final=False)
                if job.experiment.optim.rho == 0.2
                else outcome
            )

    recorder = RecordingRunner(Killed(by_validation))
    entries = run_conditions([condition(SGD, LONGER, SAM)], recorder, "item")
    assert entries[2].chosen is None
    assert recorder.num_missing == 1


@pytest.mark.parametrize("lost", ["SAM", "SGD, twice the epochs"])
@pytest.mark.parametrize("how", [None, "diverged"])
def test_nothing_is_judged_while_a_replica_of_either_side_is_missing_or_came_to_nothing(lost, how):
    def ending(job):
        name = job.experiment.name.rpartition("/")[2]
        return how if name == lost and job.seed == 3 else clear_difference(job)

    methods = (*baselines(no_tuning), replace(SAM, candidates=with_rho((0.1,))))
    findings = findings_of(run_conditions([condition(*methods)], Invented(ending), "item"))
    (verdict,) = findings.verdicts
    assert verdict.status == "not tested"
    assert lost in verdict.evidence
    assert not [c for table in findings.tables for row in table.rows for c in row if isinstance(c, Comparison)]


@pytest.mark.parametrize(
    ("how", "note"),
    [(None, "4 of 5 replicas of SAM are available"), ("diverged", "1 of 5 replicas of SAM failed")],
)
def test_a_cell_says_what_is_wanting_and_names_the_runs_of_its_values_alone(how, note):
    def ending(job):
        return how if job.experiment.optim.rho and job.seed == 3 else clear_difference(job)

    cell = found(ending, [condition(ONE_SGD, ONE_SAM)]).tables[0].rows[0][2]
    assert cell.note == note
    assert cell.values == pytest.approx([100 * SAM_ERRORS[seed] for seed in (0, 1, 2, 4)])
    assert [name[-5:] for name in cell.runs] == ["seed0", "seed1", "seed2", "seed4"]


def test_small_m_is_also_compared_with_sgd_that_is_normalized_alike():
    methods = (*baselines(no_tuning), *sam_and_small_m((0.1,), 10))
    findings = findings_of(run_conditions([condition(*methods)], Invented(clear_difference), "item"))
    names = [c.name for table in findings.tables for row in table.rows for c in row if isinstance(c, Comparison)]
    assert [name.partition(",")[0] for name in names[:1]] == ["SAM - SGD"]
    assert "SAM, m = 10 - SGD, m = 10" in names
    assert len(names) == 3


def test_micro_batches_are_those_of_the_methods_that_say_so():
    methods = (*baselines(no_tuning), *sam_and_small_m((0.1,), 10))
    entries = run_conditions([condition(*methods)], Invented(clear_difference), "item")
    assert {e.method.name: (e.chosen.optim.rho, e.chosen.optim.m) for e in entries} == {
        "SGD": (0.0, None),
        "SGD, twice the epochs": (0.0, None),
        "SGD, m = 10": (0.0, 10),
        "SAM": (0.1, None),
        "SAM, m = 10": (0.1, 10),
    }


def test_training_errors_stand_below_the_test_errors():
    findings = findings_of(run_conditions([condition(ONE_SGD, ONE_SAM)], Invented(clear_difference), "item"))
    titles = [table.title for table in findings.tables]
    assert [t for t in titles if "training error" in t]


def test_a_run_that_diverged_is_never_chosen_and_a_missing_one_leaves_the_choice_open():
    def diverges(job):
        return "diverged" if job.experiment.optim.rho == 0.1 else by_validation(job)

    def missing(job):
        return None if job.experiment.optim.rho == 0.05 else by_validation(job)

    assert run_conditions([condition(SGD, LONGER, SAM)], Invented(diverges), "item")[2].chosen.optim.rho == 0.2
    recorder = RecordingRunner(Invented(missing))
    entries = run_conditions([condition(SGD, LONGER, SAM)], recorder, "item")
    assert entries[2].chosen is None
    assert entries[2].replicas.outcomes == ()
    assert recorder.num_missing == 1
    findings = found(missing, [condition(SGD, LONGER, SAM)])
    assert findings.num_missing == 2  # the candidate, and replicas of whatever will be chosen


def test_a_method_may_start_from_what_another_one_chose():
    def bootstrapped(base):
        return [replace(base, data=replace(base.data, bootstrap=True))]

    after = Method(name="Bootstrap + SAM", candidates=bootstrapped, after="SAM")
    entries = run_conditions([condition(SGD, LONGER, SAM, after)], Invented(by_validation), "item")
    assert entries[3].chosen.optim.rho == 0.1
    assert entries[3].chosen.data.bootstrap
    assert entries[3].chosen.first_stage().run_hash() == entries[2].chosen.run_hash()


def found(ending, conditions, scale="laptop", **changes):
    return table_findings("table1", scale, Invented(ending), conditions, **{"label_columns": ("model",), **changes})


def findings_of(entries):
    return SimpleNamespace(**condition_tables(entries, CLAIMS, "laptop", label_columns=("model",)))


SAM_ERRORS, SGD_ERRORS = (0.20, 0.21, 0.19, 0.22, 0.20), (0.25, 0.24, 0.26, 0.24, 0.27)


def clear_difference(job):
    errors = SAM_ERRORS if job.experiment.optim.rho else SGD_ERRORS
    return 0.1, errors[job.seed] if job.seed != TUNING_SEED else 0.5


ONE_SGD = Method(name="SGD", candidates=no_tuning)
ONE_SAM = replace(SAM, candidates=with_rho((0.1,)), against=(("SGD",),))


def test_cells_hold_the_mean_its_interval_the_values_and_the_runs():
    claimed = {("SAM", "test_error"): Claimed.read("2.7 ± 0.1")}
    table = found(clear_difference, [condition(ONE_SGD, ONE_SAM, claimed=claimed)]).tables[0]
    assert list(table.columns) == ["model", "data: SGD", "data: SAM"]
    cell = table.rows[0][2]
    assert isinstance(cell, Cell)
    values = 100 * np.array(SAM_ERRORS)
    assert cell.claimed == "2.7 ± 0.1"
    assert cell.measured.mean == pytest.approx(values.mean())
    expected = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values))
    assert cell.measured.mean + cell.measured.half_width == pytest.approx(expected[1])
    assert cell.values == pytest.approx(values)
    assert len(cell.runs) == 5
    assert all(name.endswith(f"seed{seed}") for seed, name in enumerate(cell.runs))


def comparison_of(findings):
    return next(c for table in findings.tables for row in table.rows for c in row if isinstance(c, Comparison))


def test_comparisons_are_paired_by_seed_and_corrected_within_the_table():
    conditions = [condition(ONE_SGD, ONE_SAM), condition(ONE_SGD, ONE_SAM, labels=("other",))]
    findings = found(clear_difference, conditions)
    comparison = comparison_of(findings)
    expected = stats.ttest_rel(SAM_ERRORS, SGD_ERRORS).pvalue
    assert comparison.p_value == pytest.approx(expected)
    assert comparison.p_holm == pytest.approx(2 * expected)
    differences = 100 * np.subtract(SAM_ERRORS, SGD_ERRORS)
    assert comparison.values == pytest.approx(differences)
    assert comparison.difference.mean == pytest.approx(differences.mean())
    assert comparison.difference.half_width == pytest.approx(stats.t.ppf(0.975, 4) * stats.sem(differences))
    assert [v.status for v in findings.verdicts] == ["reproduced", "reproduced"]
    assert findings.verdicts[0].comparisons == [comparison]


def test_verdicts_go_by_holms_p_over_the_whole_table():
    """Alone 0.03 and 0.04 would be significant; of both Holm makes 0.06: twice the smaller, and no less for the larger.

    With differences of a known spread, t is chosen so that p is a thousandth of the number of examples.
    """
    spread = 0.001 * np.array([-2, -1, 0, 1, 2])

    def ending(job):
        p = job.experiment.data.train_size / 1000
        shift = stats.t.isf(p / 2, 4) * stats.sem(spread)
        return 0.1, 0.2 + (spread[job.seed] - shift if job.experiment.optim.rho else 0.0)

    conditions = [
        replace(condition(ONE_SGD, ONE_SAM, column=str(size)), start=replace(START, data=Data(train_size=size)))
        for size in (40, 30)
    ]
    findings = found(ending, conditions)
    compared = [c for table in findings.tables for row in table.rows for c in row if isinstance(c, Comparison)]
    assert [c.p_value for c in compared] == pytest.approx([0.04, 0.03])
    assert [c.p_holm for c in compared] == pytest.approx([0.06, 0.06])
    assert [v.status for v in findings.verdicts] == ["inconclusive", "inconclusive"]


def test_each_metric_has_its_own_claims_and_its_own_better_baseline():
    """Twice the epochs are worse in the first guess and better in the first five."""

    def ending(job):
        if job.experiment.optim.rho:
            return {"test_error": 0.1, "test_top5_error": 0.01, "train_error": 0.0}
        longer = job.experiment.epochs == 8
        return {"test_error": 0.3 if longer else 0.2, "test_top5_error": 0.04 if longer else 0.05, "train_error": 0.0}

    claimed = {("SAM", "test_error"): Claimed.read("20.9"), ("SAM", "test_top5_error"): Claimed.read("5.3")}
    methods = (*baselines(no_tuning), replace(SAM, candidates=with_rho((0.1,))))
    findings = found(ending, [condition(*methods, claimed=claimed)], metrics=("test_error", "test_top5_error"))
    top1, first, top5, second, training = findings.tables
    assert [t.rows[0][-1].claimed for t in (top1, top5, training)] == ["20.9", "5.3", None]
    assert [t.rows[0][-1].name for t in (first, second)] == ["SAM - SGD", "SAM - SGD, twice the epochs"]
    assert [t.rows[0][-1].difference.mean for t in (first, second)] == pytest.approx([-10.0, -3.0])


def test_a_smoke_test_judges_nothing_and_one_replica_compares_nothing():
    conditions = [condition(ONE_SGD, ONE_SAM)]
    assert [v.status for v in found(clear_difference, conditions, scale="smoke").verdicts] == ["not tested"]
    one = findings_of(run_conditions(conditions, Invented(clear_difference), "item", seeds=(0,)))
    assert not one.verdicts
    assert not [c for table in one.tables for row in table.rows for c in row if isinstance(c, Comparison)]


def test_verdicts_say_held_did_not_hold_or_nothing_shown():
    def swapped(job):
        other = Optim(rho=0.0 if job.experiment.optim.rho else 0.1)
        return clear_difference(replace(job, experiment=replace(job.experiment, optim=other)))

    def noise(job):
        return 0.1, (0.2, 0.3, 0.25, 0.2, 0.3)[job.seed - (1 if job.experiment.optim.rho else 0)]

    assert [v.status for v in found(swapped, [condition(ONE_SGD, ONE_SAM)]).verdicts] == ["not reproduced"]
    assert [v.status for v in found(noise, [condition(ONE_SGD, ONE_SAM)]).verdicts] == ["inconclusive"]


def test_accuracies_are_shown_where_the_paper_shows_them_and_literature_is_only_cited():
    cited = {"Others (2019)": {"data": Cell(claimed="94.0"), "not run": Cell(claimed="90.0")}}
    layout = {"layout": "methods in rows", "accuracy": True, "literature": cited}
    table, _, training = found(clear_difference, [condition(ONE_SGD, ONE_SAM)], **layout).tables
    assert [row[0] for row in table.rows] == ["Others (2019)", "SGD", "SAM"]
    assert [row[0] for row in training.rows] == ["SGD", "SAM"]  # who is cited says nothing of these
    assert table.rows[2][1].measured.mean == pytest.approx(100 - 100 * np.mean(SAM_ERRORS))
    assert table.rows[0][1].measured is None
    assert table.rows[0][1].claimed == "94.0"
    assert len(table.rows[0]) == 2


def test_nothing_run_gives_an_honest_empty_page():
    findings = found(lambda job: None, [condition(SGD, LONGER, SAM)])
    assert findings.num_missing > 0
    assert findings.runs == ()
    assert all(v.status == "not tested" for v in findings.verdicts)
    assert all(c.measured is None for row in findings.tables[0].rows for c in row if isinstance(c, Cell))


def test_the_validation_errors_that_chose_are_shown():
    findings = found(by_validation, [condition(SGD, LONGER, SAM)])
    table = next(t for t in findings.tables if "chosen" in t.title)
    assert len(table.rows) == 7
    chosen = [row for row in table.rows if row[-1] == "chosen"]
    assert [row[2] for row in chosen] == ["lr 0.2, decay 0.001", "lr 0.2, decay 0.001, rho 0.1"]
    assert [row[3].values for row in chosen] == [pytest.approx((15.0,)), pytest.approx((12.0,))]
    assert all(len(row[3].runs) == 1 and row[3].runs[0].endswith(f"seed{TUNING_SEED}") for row in table.rows)
    assert len({row[3].runs for row in table.rows}) == 7
    assert [h.value for h in findings.hyperparameters if h.source == "validation"] == [row[2] for row in chosen]


def test_error_reduction_is_against_the_better_baseline_and_of_sam_alone():
    def ending(job):
        if job.experiment.optim.rho:
            return 0.1, 0.2
        if job.experiment.optim.m == 10:
            return 0.1, 0.22  # the control is no baseline of the paper's
        return 0.1, 0.25 if job.experiment.epochs == 8 else 0.4

    entries = run_conditions([condition(*baselines(no_tuning), *sam_and_small_m((0.1,), 10))], Invented(ending), "item")
    names = {entry.method.name: baseline.method.name for entry, baseline in compared_methods(entries)}
    assert names == {"SAM": "SGD, twice the epochs", "SAM, m = 10": "SGD, twice the epochs"}


@pytest.mark.parametrize("lost", ["SAM", "SGD", "SGD, twice the epochs"])
def test_error_reduction_waits_for_all_replicas_of_both_sides(lost):
    def ending(job):
        name = job.experiment.name.rpartition("/")[2]
        return None if name == lost and job.seed == 3 else clear_difference(job)

    methods = (*baselines(no_tuning), replace(SAM, candidates=with_rho((0.1,))))
    entries = run_conditions([condition(*methods)], Invented(ending), "item")
    assert [baseline for _, baseline in compared_methods(entries)] == [None]


def test_by_micro_batches_every_method_has_that_m():
    methods = by_micro_batches(with_rates((0.1, 0.2), (1e-4, 1e-3)), (0.05, 0.1), 10)
    lab = Invented(by_validation)
    entries = run_conditions([condition(*methods)], lab, "item")
    assert {job.experiment.optim.m for _, jobs in lab.asked for job in jobs} == {10}
    assert {e.method.name: (e.chosen.optim.rho, e.chosen.epochs) for e in entries} == {
        "SGD, m = 10": (0.0, 4),
        "SGD, m = 10, twice the epochs": (0.0, 8),
        "SAM, m = 10": (0.1, 4),
    }
    assert (entries[0].chosen.optim.lr, entries[0].chosen.optim.weight_decay) == (0.2, 1e-3)
    assert [e.method.against for e in entries] == [(), (), (("SGD, m = 10", "SGD, m = 10, twice the epochs"),)]


def test_table_1_on_a_laptop_has_every_m_once_and_else_the_papers_share_of_a_batch():
    first, *others = table1_conditions("laptop")
    assert [m.name for m in first.methods] == [
        *("SGD", "SGD, twice the epochs", "SGD, m = 16", "SAM", "SAM, m = 16"),
    ]
    assert {name for name, _ in first.claimed} == {"SGD", "SAM"}
    for other in others:
        assert [m.name for m in other.methods] == ["SGD, m = 16", "SGD, m = 16, twice the epochs", "SAM, m = 16"]
        assert {name for name, _ in other.claimed} == {"SGD, m = 16", "SAM, m = 16"}
        assert other.start.data.batch_size == 8 * 16
