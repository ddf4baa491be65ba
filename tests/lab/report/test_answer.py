"""The first screen of a report: totals without repetition, and an effect of each condition in a sentence."""

import dataclasses

from flatmin.lab.report.answer import KEPT, LEAD, NO_CONTROL, answer
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment, Optim
from flatmin.lab.studies.findings import Comparison, Findings, Verdict
from flatmin.lab.studies.statistics import Interval

RECORDS = {
    "sgd": RunRecord(name="sgd", state="finished", experiment=Experiment()),
    "sam": RunRecord(name="sam", state="finished", experiment=Experiment(optim=Optim(rho=0.1))),
    "part": RunRecord(name="part", state="finished", experiment=Experiment(optim=Optim(rho=0.1, part=1 / 8))),
}


def verdict(status, mean, condition="40 %", method="SAM", run="sam", ours="", rival="SGD", baseline=40.0):
    compared = Comparison(
        name=f"{method} - {rival}",
        difference=Interval(mean, 0.66),
        baseline=baseline,
        quantity="test error",
        p_value=0.0001,
        p_holm=0.0004,
        num_pairs=5,
        runs=("sgd", run),
    )
    claim = f"{condition}: {method} has a lower test error than {rival}.{ours}"
    return Verdict(claim=claim, status=status, evidence="", comparisons=[compared])


def findings(item, *verdicts):
    return Findings(item=item, scale="laptop", title=item, source="Table 4", about_scale="", verdicts=verdicts)


def test_an_effect_is_told_with_its_interval_its_certainty_and_its_cost():
    small = verdict("not reproduced", 1.58, "20 %", "SAM on 1/8", "part")
    noise = findings("label-noise", verdict("reproduced", -13.04), small)
    told = answer([noise, findings("other")], RECORDS)
    assert told["sentences"] == [
        "Table 4, 40 %: SAM lowers the test error by 13.0 ± 0.7 points vs. SGD (n = 5, p < 0.001), "
        "at 2 passes per step.",
        "Table 4, 20 %: SAM on 1/8 raises the test error by 1.6 ± 0.7 points vs. SGD (n = 5, p < 0.001), "
        "at 1.125 passes per step.",
    ]
    assert told["headline"].startswith("SAM has a significantly lower test error than its baseline in 1 of the 2 ")


def test_totals_count_a_claim_of_the_paper_once():
    """Items that repeat comparisons, and claims of our own, are not in them."""
    table = findings("table1", verdict("reproduced", -2.0), verdict("reproduced", -3.0, ours=" (ours)"))
    repeated = [findings(item, verdict("not tested", -1.0)) for item in ("error-reduction", "rho-0.05")]
    told = answer([table, *repeated], RECORDS)
    assert told["tally"] == [("reproduced", 1)]
    assert " in 1 of the 1 comparisons " in told["headline"]
    assert told["sentences"][0].count("; ours)") == 1


def test_an_effect_that_is_not_significant_is_told_as_such_and_what_is_not_a_test_is_not_told():
    told = answer(
        [findings("table1", verdict("inconclusive", -2.0), verdict("not tested at this scale", -9.0))], RECORDS
    )
    assert told["sentences"] == [
        "40 %: SAM lowers the test error by 2.0 ± 0.7 points vs. SGD (n = 5, p < 0.001; not significant), "
        "at 2 passes per step."
    ]
    assert " in 0 of the 1 comparisons " in told["headline"]
    assert told["tally"] == [("inconclusive", 1), ("not tested at this scale", 1)]


def test_of_each_condition_the_papers_best_sam_is_told_with_all_of_its_rivals_in_the_order_of_the_page():
    """m = 16 has the lowest error of the paper's, 20 %; SAM on 1/8, which is ours, has 19 %, and is not told."""
    weak = verdict("reproduced", -30.0, "20 %", baseline=55.0)
    easy = verdict("reproduced", -35.0, "20 %", "SAM, m = 16", baseline=55.0)
    hard = verdict("inconclusive", -1.0, "20 %", "SAM, m = 16", rival="Mixup", baseline=21.0)
    early = verdict(
        "reproduced", -5.0, "20 %", "SAM, m = 16", rival="SGD, stopped early", ours=" (ours)", baseline=25.0
    )
    ours = verdict("reproduced", -36.0, "20 %", "SAM on 1/8", "part", " (ours)", baseline=55.0)
    other = verdict("not reproduced", 0.5, "40 %")
    told = answer([findings("table1", weak, easy, hard, early, ours, other), findings("table2", ours)], RECORDS)
    sure = "(n = 5, p < 0.001"
    assert told["sentences"] == [
        f"Table 4, 20 %: SAM, m = 16 lowers the test error by 35.0 ± 0.7 points vs. SGD {sure}); "
        f"lowers it by 1.0 ± 0.7 vs. Mixup {sure}; not significant); "
        f"lowers it by 5.0 ± 0.7 vs. SGD, stopped early {sure}; ours), at 2 passes per step.{NO_CONTROL}",
        f"Table 4, 40 %: SAM raises the test error by 0.5 ± 0.7 points vs. SGD {sure}), at 2 passes per step.",
        f"Table 4, 20 %: SAM on 1/8 lowers the test error by 36.0 ± 0.7 points vs. SGD {sure}; ours), "
        "at 1.125 passes per step.",
    ]
    assert told["lead"] == LEAD
    assert [(label, compared.comparisons[0].difference.mean) for label, compared in told["effects"]] == [
        ("Table 4, 20 %: SAM, m = 16 vs. SGD", -35.0),
        ("Table 4, 20 %: SAM, m = 16 vs. Mixup", -1.0),
        ("Table 4, 20 %: SAM, m = 16 vs. SGD, stopped early", -5.0),
        ("Table 4, 40 %: SAM vs. SGD", 0.5),
        ("Table 4, 20 %: SAM on 1/8 vs. SGD", -36.0),
    ]


def test_a_control_for_batch_norm_is_said_to_be_missing_unless_it_was_run_whatever_its_gate_says():
    against_sgd = verdict("reproduced", -2.0, method="SAM, m = 16")
    control = verdict("not tested at this scale", 1.0, method="SAM, m = 16", rival="SGD, m = 16, twice the epochs")
    without, with_control = (answer([findings("t", *v)], RECORDS) for v in ([against_sgd], [against_sgd, control]))
    assert without["sentences"][0].endswith(NO_CONTROL)
    assert with_control["sentences"] == [without["sentences"][0].removesuffix(NO_CONTROL)]


def test_claims_of_our_own_are_told_whatever_became_of_them():
    """A count has its evidence in place of n and p; what is not a test is not told."""
    kept, lost = (dataclasses.replace(verdict(text, -1.0), claim=f"{text}.") for text in KEPT)
    count = Verdict(claim="Most do.", status="not kept", evidence="3 of 7 do.")
    waiting = dataclasses.replace(kept, status="not tested at this scale")
    told = answer([findings("cheap-sam", kept, waiting, lost, count)], RECORDS)
    assert told["sentences"] == [
        "Kept: kept (n = 5, p < 0.001).",
        "Not kept: not kept (n = 5, p < 0.001).",
        "Not kept: Most do. 3 of 7 do.",
    ]
    assert (told["lead"], told["effects"]) == ("", [])


def test_without_verdicts_there_is_nothing_to_answer():
    told = answer([findings("runs")], {})
    assert (told["tally"], told["headline"], told["sentences"]) == ([], "", [])
