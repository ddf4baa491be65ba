"""What the findings of all items have in common: what differs at a scale, what was cut, what could be shown."""

from collections.abc import Callable, Sequence
from typing import Any

from flatmin.lab.foret2021.claims.figures import said_in_text
from flatmin.lab.foret2021.figure_settings import NUM_CURVATURE_REPLICAS
from flatmin.lab.foret2021.scales import CUTS, PAPER_SUMMARY, SMOKE_SUMMARY, laptop_summary, replica_seeds
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.studies.condition_tables import condition_findings
from flatmin.lab.studies.conditions import NUM_REPLICAS, Condition, MethodResult, run_conditions
from flatmin.lab.studies.contrasts import Contrast, verdicts_at
from flatmin.lab.studies.findings import Findings, Verdict
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.statistics import detectable_effect
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

ERROR_SPREAD = (0.8, "points of test error", NUM_REPLICAS, "Table 1 on Fashion-MNIST")
SPREADS: dict[str, tuple[float, str, int, str]] = {
    **dict.fromkeys(("table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion"), ERROR_SPREAD),
    **dict.fromkeys(("rho-0.05", "fine-tuning-rho-0.05", "m-and-rho", "p-norm"), ERROR_SPREAD),
    **dict.fromkeys(("second-order", "inner-steps"), ERROR_SPREAD),
    "landscape": (1.2, "in the mean rise of the loss", NUM_CURVATURE_REPLICAS, "five pairs of Figure 1"),
    "hessian": (0.26, "in lambda_max at the end", NUM_CURVATURE_REPLICAS, "five pairs of Figure 3"),
}
"""Standard deviation of the differences between pairs, its unit, the number of pairs on a laptop, and where the spread
was seen: before the other runs began."""


def power_note(item: str, scale: Scale) -> list[str]:
    """Return how large an effect an item's replicas can show, as it was known before they were run."""
    if scale != "laptop" or item not in SPREADS:
        return []
    spread, unit, num_pairs, seen_in = SPREADS[item]
    effect = detectable_effect(spread, num_pairs)
    return [
        f"Power, computed before the runs: {num_pairs} pairs show a difference of {effect:.2g} {unit} with a "
        f"probability of 80 % (paired t-test, two-sided, 5 %, before Holm's correction) if the differences have a "
        f"standard deviation of {spread:g}, as in {seen_in}. A smaller difference is likely to stay inconclusive."
    ]


def about_scale(item: str, scale: Scale) -> str:
    """Return what differs from the paper's experiment."""
    return {"paper": PAPER_SUMMARY, "laptop": laptop_summary(item), "smoke": SMOKE_SUMMARY}[scale]


def cuts(item: str, scale: Scale) -> tuple[str, ...]:
    """Return what an item leaves out at a scale."""
    return CUTS.get(item, ()) if scale == "laptop" else ()


def findings(
    *,
    item: str,
    scale: Scale,
    claims: Claims[Any],
    recorder: RecordingRunner,
    verdicts: Sequence[Verdict],
    notes: Sequence[str] = (),
    about: str | None = None,
    **shown: Any,
) -> Findings:
    """Return findings with the runs that a recorder has noted; at the scale of a smoke test nothing is judged.

    Args:
        item: its name.
        scale: at which it was run.
        claims: the paper's, with its title and place.
        recorder: what was run.
        verdicts: on the claims.
        notes: in addition to those of the paper's claims.
        about: what differs from the paper's experiment, if not what differs for most items.
        shown: tables, figures, hyperparameters and other fields.
    """
    return Findings(
        **{"title": claims.title, "source": claims.source, **shown},
        item=item,
        scale=scale,
        about_scale=about or about_scale(item, scale),
        verdicts=verdicts_at(scale, verdicts),
        notes=[*claims.notes, *notes, *power_note(item, scale), *said_in_text(item), *recorder.notes],
        cut=cuts(item, scale),
        runs=recorder.runs,
        num_missing=recorder.num_missing,
    )


def table_findings(
    item: str,
    scale: Scale,
    runner: Runner,
    conditions: Sequence[Condition],
    claims: Claims[Any],
    settings: str,
    further: Callable[[Sequence[MethodResult]], Sequence[tuple[str, Sequence[Contrast]]]] = lambda _: (),
    **shape: Any,
) -> Findings:
    """Run the conditions of a table and return what they show.

    Args:
        item: its name.
        scale: at which it is run.
        runner: where the runs come from.
        conditions: of the table.
        claims: the paper's numbers.
        settings: the name of the paper's hyperparameters.
        further: returns claims on several conditions, with the comparisons that each consists of.
        shape: other arguments of `condition_findings`.
    """
    entries, needed = run_conditions(conditions, runner, item, replica_seeds(scale))
    return condition_findings(
        entries,
        needed,
        item=item,
        scale=scale,
        claims=claims,
        about_scale=about_scale(item, scale),
        hyperparameters=HYPERPARAMETERS[settings] if scale == "paper" else (),
        notes=[*power_note(item, scale), *said_in_text(item)],
        cut=cuts(item, scale),
        further=further(entries),
        **shape,
    )
