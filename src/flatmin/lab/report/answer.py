"""The first screen of a report: does SAM generalize better here, by how much, at what cost, and how sure is that."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from flatmin.lab.report.tables import interval_text
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import passes_per_step
from flatmin.lab.studies.findings import Comparison, Findings, Verdict, VerdictStatus
from flatmin.lab.studies.statistics import Interval, p_text

REPEATED = ("error-reduction", "rho-0.05")
"""Items that repeat comparisons of other items: their verdicts are not counted in the totals."""
OURS = " (ours)"
LOWER = " has a lower test error than "
TESTS = ("reproduced", "not reproduced", "inconclusive")
KEPT = ("kept", "not kept")
"""What becomes of claims of our own."""
LEAD = "In each condition the SAM with the lowest test error vs. its strongest rival, significant or not:"
HOW_SURE = (
    "± is half of a 95 % confidence interval over n pairs of runs with the same seed; p is after Holm's correction. A "
    "step without SAM costs 1 pass."
)


def answer(findings: Sequence[Findings], records: dict[str, RunRecord]) -> dict[str, Any]:
    """Return the verdicts by status, each claim counted once, and one effect in each condition, in words and to plot.

    It is told whether it is significant or not, and it is the hardest to show: the rival has the lowest error of all
    with which SAM is compared. The verdicts on claims of our own are all told.
    """
    counted = [(one, verdict) for one in findings if one.item not in REPEATED for verdict in one.verdicts]
    papers = [(one, verdict) for one, verdict in counted if not verdict.claim.endswith(OURS)]
    counts = Counter(verdict.status for _, verdict in papers)
    tests = Counter(verdict.status for _, verdict in papers if _is_of_sam(verdict))
    own = {one.item for one, verdict in counted if verdict.status in KEPT}
    hardest: dict[tuple[str, str], tuple[str, Verdict]] = {}
    for one, verdict in counted:
        if verdict.status in TESTS and _is_of_sam(verdict):
            where = one.item, _condition(verdict)
            if where not in hardest or _errors(verdict) < _errors(hardest[where][1]):
                place = ", ".join(filter(None, (one.place if len(findings) > 1 else "", _condition(verdict))))
                hardest[where] = f"{place}: " if place else "", verdict
    sentences = [_sentence(where, verdict, records) for where, verdict in hardest.values()]
    is_choice = len(sentences) > 1
    sentences += [_own_sentence(v) for one, v in counted if one.item in own and v.status in (*KEPT, "inconclusive")]
    repeated = [one.item for one in findings if one.item in REPEATED]
    left_out = f" Not counted, because they repeat other items' comparisons: {', '.join(repeated)}." if repeated else ""
    left_out += _unplanned(papers)
    return {
        "whose": "The paper's claims:" if len(papers) < len(counted) else "",
        "tally": [(status, counts[status]) for status in get_args(VerdictStatus) if counts[status]],
        "headline": _headline(tests),
        "lead": LEAD if is_choice else "",
        "sentences": sentences,
        "effects": [(where + _methods(verdict), verdict) for where, verdict in hardest.values()] if is_choice else [],
        "how_sure": HOW_SURE + left_out,
    }


def _unplanned(papers: Sequence[tuple[Findings, Verdict]]) -> str:
    """Return how many verdicts are of items without a registered plan; nothing if no item or every one has a plan."""
    without = [(one.item, verdict.status) for one, verdict in papers if not one.is_registered]
    if not without or len(without) == len(papers):
        return ""
    counts = Counter(status for _, status in without)
    said = ", ".join(f"{counts[status]} {status}" for status in get_args(VerdictStatus) if counts[status])
    return f" Of the counted claims, these are of items without a registered plan: {said} ({', '.join(dict(without))})."


def _condition(verdict: Verdict) -> str:
    """Return what a claim says before it names its method."""
    method, _, _ = verdict.comparisons[0].name.partition(" - ")
    return verdict.claim.partition(f"{method}{LOWER}")[0].rstrip(":, ")


def _errors(verdict: Verdict) -> tuple[float, float]:
    """Return the mean errors of the method and of its baseline."""
    compared = verdict.comparisons[0]
    return compared.baseline + compared.difference.mean, compared.baseline


def _is_of_sam(verdict: Verdict) -> bool:
    """Return whether a verdict is on one comparison of SAM's test error with a baseline's."""
    return LOWER in verdict.claim and len(verdict.comparisons) == 1 and verdict.comparisons[0].name.startswith("SAM")


def _headline(tests: Counter[VerdictStatus]) -> str:
    lower, higher, open_ones = (tests[s] for s in ("reproduced", "not reproduced", "inconclusive"))
    total = lower + higher + open_ones
    if not total:
        return ""
    return (
        f"SAM has a significantly lower test error than its baseline in {lower} of the {total} comparisons that are "
        f"tests at this scale, a higher one in {higher}, and no significant difference in {open_ones}."
    )


def _methods(verdict: Verdict) -> str:
    return verdict.comparisons[0].name.replace(" - ", " vs. ", 1)


def _sentence(where: str, verdict: Verdict, records: dict[str, RunRecord]) -> str:
    """Return what a method does to the test error, what its steps cost, and how sure that is."""
    compared = verdict.comparisons[0]
    method, baseline = compared.name.split(" - ", 1)
    difference = Interval(abs(compared.difference.mean), compared.difference.half_width)
    does = "lowers" if compared.difference.mean < 0 else "raises"
    decided = "; not significant" if verdict.status == "inconclusive" else ""
    said = f"{where}{method} {does} the test error by {interval_text(difference)} points vs. {baseline}"
    experiment = records[compared.runs[-1]].experiment  # the method's runs follow the baseline's
    cost = "" if experiment is None else f", at {passes_per_step(experiment):g} passes per step"
    return f"{said} {_sure(compared, decided)}{cost}{OURS if verdict.claim.endswith(OURS) else ''}."


def _own_sentence(verdict: Verdict) -> str:
    """Return a claim of our own, which names its effect and its cost, and what became of it."""
    said = f"{verdict.status.capitalize()}: {verdict.claim.removesuffix('.')}"
    if verdict.comparisons:
        return f"{said} {_sure(verdict.comparisons[0])}."
    return f"{said}. {verdict.evidence}"


def _sure(compared: Comparison, decided: str = "") -> str:
    return f"(n = {compared.num_pairs}, {p_text(compared.p_holm)}{decided})"
