"""Figure 1, left (Section 1): by how much SAM lowers the error, one point per condition.

    flatmin reproduce error-reduction --scale laptop    # no runs beyond those of Tables 1, 2, 3 and 5

Conditions that fail their gate are not counted. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import scipy

from flatmin.lab.foret2021.claims.figures import FIGURES, error_reductions
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.tables.fine_tuning import fine_tuning_conditions, pretraining
from flatmin.lab.foret2021.tables.from_scratch import svhn_fashion_conditions, table1_conditions
from flatmin.lab.foret2021.tables.imagenet import imagenet_conditions
from flatmin.lab.studies.conditions import Condition, MethodResult, better, conditions_item
from flatmin.lab.studies.contrasts import BySeed, Contrast, Family, mean
from flatmin.lab.studies.findings import Findings, LineFigure, Series, Verdict
from flatmin.lab.studies.replicas import runs_of
from flatmin.lab.studies.statistics import p_text
from flatmin.lab.studies.study import Scale

CLAIMS = FIGURES["error-reduction"]
METRIC = "test_error"
ASSUMES = (
    "The test takes the replicas as independent, not the conditions: these share images, models and seeds. For each "
    "seed the relative reduction is averaged over all conditions, and the means are compared with 0 (t-test). It is "
    "about these conditions, not about others."
)


def conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Tables 1, 2, 3 and 5."""
    found = [*table1_conditions(scale), *imagenet_conditions(scale), *svhn_fashion_conditions(scale)]
    found += fine_tuning_conditions(scale)
    return list({condition.name: condition for condition in found}.values())  # Tables 1 and 5 may share some


def error_reduction(scale: Scale, entries: Sequence[MethodResult]) -> Findings:
    """Figure 1, left: 100 (1 - SAM's mean error / the baseline's), over the conditions of Tables 1, 2, 3 and 5."""
    pairs = compared_methods(entries)
    measured: dict[str, list[tuple[float, str]]] = {}
    for entry, baseline in pairs:
        if baseline is not None:
            reduction = 100 * (1 - mean(entry.values(METRIC).values()) / mean(baseline.values(METRIC).values()))
            measured.setdefault(entry.method.name, []).append((reduction, entry.condition.name))
    claimed = [(value, name) for name, value in error_reductions().items()]
    return findings(
        "error-reduction",
        scale,
        figures=[
            LineFigure(
                title="Error reduction with SAM, by condition",
                x_label="condition, in ascending order",
                y_label="error reduction, % of the baseline's error",
                series=[
                    _points("claimed by the paper", claimed),
                    *(_points(f"measured: {method}", points) for method, points in measured.items()),
                ],
                runs=runs_of(e.replicas for e in entries),
            )
        ],
        verdicts=[_verdict(pairs, measured)],
        notes=[ASSUMES],
    )


def _points(name: str, values: Sequence[tuple[float, str]]) -> Series:
    points = sorted(values)
    return Series(
        name=name,
        x=list(range(len(points))),
        y=[value for value, _ in points],
        hover=[condition for _, condition in points],
        mode="markers",
    )


def compared_methods(entries: Sequence[MethodResult]) -> list[tuple[MethodResult, MethodResult | None]]:
    """Return each method that has SAM with its better baseline; None while a run of either is missing.

    Comparisons that fail the gate of their condition are left out, and so are methods of ours.
    """
    by_name = {(e.condition.name, e.method.name): e for e in entries}
    pairs: list[tuple[MethodResult, MethodResult | None]] = []
    for entry in entries:
        baselines = [by_name[entry.condition.name, name] for group in entry.method.against[:1] for name in group]
        missing = any(e.incomplete_reason for e in (entry, *baselines))
        baseline = None if missing or not baselines else better(baselines, METRIC)
        fair = baseline is None or not (entry.gate_note or baseline.gate_note or baseline.unfit_note)
        if baselines and fair and not entry.method.ours:
            pairs.append((entry, baseline))
    return pairs


def _verdict(
    pairs: Sequence[tuple[MethodResult, MethodResult | None]], measured: Mapping[str, Sequence[tuple[float, str]]]
) -> Verdict:
    """Judge by the mean reduction over all conditions, for each method that has SAM; replicas are the unit."""
    contrasts = []
    for method in dict.fromkeys(entry.method.name for entry, _ in pairs):
        own = [(entry, baseline) for entry, baseline in pairs if entry.method.name == method]
        higher = mean_reductions([(e.values(METRIC), b.values(METRIC)) for e, b in own if b is not None])
        contrasts.append(
            Contrast(
                quantity=f"error reduction over {len(own)} conditions with {method}, % of the baseline's error",
                lower_name="none",
                higher_name="mean over conditions",
                lower=dict.fromkeys(higher, 0.0),
                higher=higher if all(baseline is not None for _, baseline in own) else {},
                num_asked=max(len(entry.replicas.records) for entry, _ in own),
            )
        )
    verdict = Family(contrasts).judge(CLAIMS.statements[0].claim, contrasts)
    counts = {method: sum(value > 0 for value, _ in points) for method, points in measured.items()}
    said = [
        f"{method}: lower in {counts[method]} of {len(points)} conditions (sign test, "
        f"{p_text(float(scipy.stats.binomtest(counts[method], len(points)).pvalue))})"
        for method, points in measured.items()
    ]
    few = any(2 * counts[method] <= len(points) for method, points in measured.items())
    return replace(
        verdict,
        status="inconclusive" if few and verdict.status == "reproduced" else verdict.status,
        evidence=" ".join([verdict.evidence, *([f"The mean error is {'; '.join(said)}."] if said else [])]),
    )


def mean_reductions(errors: Sequence[tuple[BySeed, BySeed]]) -> dict[int, float]:
    """Return the reduction in % of the baseline's error, by seed, in the mean over conditions.

    Example:
        >>> mean_reductions([({0: 5.0}, {0: 10.0}), ({0: 20.0}, {0: 20.0})])
        {0: 25.0}
    """
    seeds = set.intersection(*(set(values) for pair in errors for values in pair)) if errors else set()
    return {s: 100 * mean(1 - sam[s] / base[s] for sam, base in errors if base[s] > 0) for s in sorted(seeds)}


ERROR_REDUCTION = conditions_item(
    "error-reduction", CLAIMS.title, CLAIMS.source, conditions, error_reduction, pretraining
)
