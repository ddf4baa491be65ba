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
LEAD = "In each condition SAM (the variant with the lowest test error, the paper's before ours) vs. all of its rivals:"
NO_CONTROL = " SGD by such micro-batches, a control for batch norm, was not run."
HOW_SURE = (
    "± is half of a 95 % confidence interval over n pairs of runs with the same seed; p is after Holm's correction. A "
    "step without SAM costs 1 pass."
)


def answer(findings: Sequence[Findings], records: dict[str, RunRecord]) -> dict[str, Any]:
    """Return the verdicts by status, each claim counted once, and the effects in each condition, in words and to plot.

    All effects of one SAM are told, significant or not: the paper's, with the m that has the lowest error. So are the
    verdicts on claims of our own.
    """
    counted = [(one, verdict) for one in findings if one.item not in REPEATED for verdict in one.verdicts]
    papers = [(one, verdict) for one, verdict in counted if not _is_ours(verdict)]
    counts = Counter(verdict.status for _, verdict in papers)
    tests = Counter(verdict.status for _, verdict in papers if _is_of_sam(verdict))
    own = {one.item for one, verdict in counted if verdict.status in KEPT}
    conditions: dict[tuple[str, str], list[Verdict]] = {}
    for one, verdict in counted:
        if _is_of_sam(verdict):
            place = ", ".join(filter(None, (one.place if len(findings) > 1 else "", _condition(verdict))))
            conditions.setdefault((one.item, f"{place}: " if place else ""), []).append(verdict)
    told = [(where, best) for (_, where), of_sam in conditions.items() if (best := _of_the_best(of_sam))]
    sentences = [_sentence(where, verdicts, records) for where, verdicts in told]
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
        "effects": [(w + _methods(v), v) for w, verdicts in told for v in _tests(verdicts)] if is_choice else [],
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


def _of_the_best(of_sam: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on the SAM with the lowest error: one of the paper's, or if there is none one of ours."""
    tests = _tests(of_sam)
    papers = {_method(verdict) for verdict in tests if not _is_ours(verdict)}
    best = min(tests, key=lambda verdict: (_method(verdict) not in papers, _error(verdict)), default=None)
    return [] if best is None else [verdict for verdict in of_sam if _method(verdict) == _method(best)]


def _tests(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.status in TESTS]


def _method(verdict: Verdict) -> str:
    return verdict.comparisons[0].name.partition(" - ")[0]


def _error(verdict: Verdict) -> float:
    """Return the mean error of the method."""
    return verdict.comparisons[0].baseline + verdict.comparisons[0].difference.mean


def _is_ours(verdict: Verdict) -> bool:
    return verdict.claim.endswith(OURS)


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


def _sentence(where: str, verdicts: Sequence[Verdict], records: dict[str, RunRecord]) -> str:
    """Return what a method does to the test error next to each rival, how sure that is, and what its steps cost."""
    method = _method(verdicts[0])
    effects: list[str] = []
    for verdict in _tests(verdicts):
        compared = verdict.comparisons[0]
        size = interval_text(Interval(abs(compared.difference.mean), compared.difference.half_width))
        does, rival = "lowers" if compared.difference.mean < 0 else "raises", compared.name.partition(" - ")[2]
        what = f"it by {size}" if effects else f"the test error by {size} points"
        marks = "; not significant" * (verdict.status == "inconclusive") + "; ours" * _is_ours(verdict)
        effects.append(f"{does} {what} vs. {rival} {_sure(compared, marks)}")
    run = verdicts[0].comparisons[0].runs[-1]  # the method's runs follow the baseline's
    experiment = records[run].experiment
    cost = "" if experiment is None else f", at {passes_per_step(experiment):g} passes per step"
    m = method.partition(", m = ")[2]
    controlled = not m or any(f" - SGD, m = {m}" in verdict.comparisons[0].name for verdict in verdicts)
    return f"{where}{method} {'; '.join(effects)}{cost}.{'' if controlled else NO_CONTROL}"


def _own_sentence(verdict: Verdict) -> str:
    """Return a claim of our own, which names its effect and its cost, and what became of it."""
    said = f"{verdict.status.capitalize()}: {verdict.claim.removesuffix('.')}"
    if verdict.comparisons:
        return f"{said} {_sure(verdict.comparisons[0])}."
    return f"{said}. {verdict.evidence}"


def _sure(compared: Comparison, decided: str = "") -> str:
    return f"(n = {compared.num_pairs}, {p_text(compared.p_holm)}{decided})"
